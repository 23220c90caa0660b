"""Placed parameters of odd shapes, and optimizers that need full parameters, for the tests of owned updates."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.placement import PartialGrad, Placement, Replicated, Shard, place
from echelon.plugins.state import local_module, trained_shards
from echelon.verify.parity import gather_full
from echelon.zero.combined import CombinedOptimizer
from echelon.zero.muon import Muon
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter
from echelon.zero.precision import PrecisionConfig

from .helpers import assert_same_bits

# Names of matrices begin with "m": Muon takes them alone.
SHAPES = {
    "m_qkv": (18, 7),
    "m_out": (7, 6),
    "m_padded": (5, 9),
    "m_keys": (4, 7),
    "m_router": (3, 7),
    "m_plain": (11, 5),
    "stack": (5, 6, 3),
    "norm": (13,),
    "scalar": (),
}


class ByParameter(Optimizer):
    """An optimizer whose update of a parameter is a method."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(ByParameter):
    """LAMB (arXiv:1904.00962) with bias correction: the trust ratio is that of a full parameter."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-6, "weight_decay": 0.01})

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[weight], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        state["step"] += 1
        mean = state["exp_avg"].lerp_(gradient, 1 - first) / (1 - first ** state["step"])
        square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        square = square / (1 - second ** state["step"])
        update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * weight
        norm, length = weight.norm(), update.norm()
        ratio = torch.where((norm > 0) & (length > 0), norm / length, 1.0)
        weight.sub_(update * ratio * group["lr"])


class Soap(ByParameter):
    """SOAP (arXiv:2409.11321, algorithm 3): Adam in the eigenbasis of Shampoo, whose states are of other shapes."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8})

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update a matrix, or a stack of them as one; a vector has no eigenbasis."""
        state, (first, second) = self.state[weight], group["betas"]
        matrix = gradient.flatten(1) if gradient.dim() > 1 else gradient.reshape(1, -1)
        if not state:
            state.update(exp_avg=torch.zeros_like(matrix), exp_avg_sq=torch.zeros_like(matrix))
        row = column = None
        if gradient.dim() > 1:
            row = _basis(state, "row", matrix @ matrix.T, second)
            column = _basis(state, "column", matrix.T @ matrix, second)
        mean = _rotated(state["exp_avg"].lerp_(matrix, 1 - first), row, column)
        rotated = _rotated(matrix, row, column)
        square = state["exp_avg_sq"].mul_(second).addcmul_(rotated, rotated, value=1 - second)
        update = mean / (square.sqrt() + group["eps"])
        if row is not None and column is not None:
            update = row @ update @ column.T
        weight.sub_(update.reshape(weight.shape), alpha=group["lr"])


def _basis(state: dict[str, Tensor], side: str, product: Tensor, decay: float) -> Tensor:
    """Return the basis of one side, after a step of the power iteration."""
    if side not in state:
        state[side] = torch.zeros_like(product)
    average, before = state[side].lerp_(product, 1 - decay), state.get(f"{side}_basis")
    turned = torch.linalg.eigh(average)[1] if before is None else average @ before
    # Contiguous, as it is after a resume: products with columns first in memory may differ in the last bit.
    state[f"{side}_basis"] = torch.linalg.qr(turned)[0].contiguous()
    return state[f"{side}_basis"]


def _rotated(matrix: Tensor, row: Tensor | None, column: Tensor | None) -> Tensor:
    return matrix if row is None or column is None else row.T @ matrix @ column


def muon(named: dict[str, Parameter]) -> Optimizer:
    matrices = [parameter for name, parameter in named.items() if name.startswith("m_")]
    rest = [parameter for name, parameter in named.items() if not name.startswith("m_")]
    return CombinedOptimizer(
        [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, fused=False)]
    )


def muon_of_stacks(named: dict[str, Parameter]) -> Optimizer:
    groups = [
        {"params": [named["m_qkv"]], "blocks": (6, 8, 4)},
        {"params": [named["m_out"]], "blocks": (2, 4), "transposed": True},
        {"params": [named["stack"], named["m_padded"], named["m_plain"]]},
    ]
    others = [named[name] for name in ("m_keys", "m_router", "norm", "scalar")]
    return CombinedOptimizer([Muon(groups, lr=0.02), Lamb(others)])


OPTIMIZERS: dict[str, Callable[[dict[str, Parameter]], Optimizer]] = {
    "muon": muon,
    "muon of stacks": muon_of_stacks,
    "adafactor": lambda named: torch.optim.Adafactor(list(named.values()), lr=0.02),
    "lamb": lambda named: Lamb(list(named.values())),
    "soap": lambda named: Soap(list(named.values())),
}


def placements(name: str, mesh: ParallelMesh) -> tuple[Placement, ...]:
    """Return the placements of a parameter, outermost first."""
    ep, tp = mesh.size("ep"), mesh.size("tp")
    placed: dict[str, tuple[Placement, ...]] = {
        "m_qkv": (Shard(size=tp, dim=0, blocks=(6, 8, 4)),),
        "m_out": (Shard(size=tp, dim=1, blocks=(6,)),),
        "m_padded": (Shard(size=tp, dim=0, blocks=(5,), padded=(-(-5 // tp) * tp,)),),
        "m_keys": (Shard(size=tp, dim=0, blocks=(4,), replicas=tp),),
        "m_router": (PartialGrad(size=tp),),
        "stack": (
            Shard(size=ep, dim=0, blocks=(5,), padded=(-(-5 // ep) * ep,), axis="ep"),
            Shard(size=tp, dim=1, blocks=(4, 2)),
        ),
    }
    return placed.get(name, (Replicated(size=tp),))


def drawn(name: str, seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Tensor:
    """Return entries that are multiples of 2^-8: their sums over a few ranks are exact in any order."""
    generator = torch.Generator().manual_seed(97 * seed + sum(map(ord, name)))
    return (torch.randn(shapes[name], generator=generator) * 2**8).round() / 2**8


def gradient_of_rank(name: str, step: int, mesh: ParallelMesh) -> Tensor:
    """Return the full gradient to which this rank's backward leads: a summand of one that is partial over tp."""
    data, ep = mesh.rank("data"), mesh.size("ep") if name == "stack" else 1
    # Over ep backward leaves the sum of the gradients of its ranks.
    summands = (drawn(name, 10 * step + rank) for rank in range(data // ep * ep, data // ep * ep + ep))
    return sum(summands) / (mesh.size("tp") if name in ("m_keys", "m_router") else 1)


class Family(NamedTuple):
    """Parameters by name: shapes, placements, and gradients of a rank."""

    shapes: dict[str, tuple[int, ...]]
    placements: Callable[[str, ParallelMesh], tuple[Placement, ...]]
    gradient_of_rank: Callable[[str, int, ParallelMesh], Tensor]


OWNED = Family(SHAPES, placements, gradient_of_rank)


def reference(make: Callable[..., Optimizer], data: int, steps: Iterable[int]) -> dict[str, Tensor]:
    """Return the weights of one process after these steps."""
    named = {name: Parameter(drawn(name, 0)) for name in SHAPES}
    optimizer = make(named)
    for step in steps:
        for name, parameter in named.items():
            parameter.grad = sum(drawn(name, 10 * step + rank) for rank in range(data)) / data
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in named.items()}


class Run:
    """Placed parameters and their sharded optimizer on a mesh."""

    def __init__(
        self,
        sizes: dict[str, int],
        stage: int,
        make: Callable[..., Optimizer],
        *,
        family: Family = OWNED,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.family, self.mesh = family, ParallelMesh(**sizes)
        self.model = nn.Module()
        self.named = {name: Parameter(drawn(name, seed, family.shapes)) for name in family.shapes}
        optimizer = make(self.named)  # before boost parameters are full
        for name, parameter in self.named.items():
            self.model.register_parameter(name, self._placed(name, parameter))
        self.optimizer = ShardedOptimizer(
            optimizer,
            [ManagedParameter.of(name, parameter, mesh=self.mesh) for name, parameter in self.named.items()],
            mesh=self.mesh,
            stage=stage,
            precision=PrecisionConfig(precision=options.pop("precision", "fp32")),
            bucket_size=options.pop("bucket_size", 100),
            **options,
        )

    def step(self, step: int) -> None:
        """Step with the gradients that a backward leaves on this rank."""
        loss = torch.zeros(())
        for name, parameter in self.named.items():
            gradient = Parameter(self.family.gradient_of_rank(name, step, self.mesh))
            loss = loss + (parameter * self._placed(name, gradient).detach()).float().sum()
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _placed(self, name: str, parameter: Parameter) -> Parameter:
        for placement in self.family.placements(name, self.mesh):
            place(parameter, placement, self.mesh.rank(placement.axis))
        return parameter

    def parts(self) -> dict[str, Any]:
        """Return the parts of a checkpoint."""
        return {
            "model": local_module(self.model, self.mesh),
            "optimizer": trained_shards(self.optimizer, self.mesh),
        }

    def require(self, full_weights: dict[str, Tensor], compare: Any = assert_same_bits) -> None:
        if weights := gather_full(self.named, self.named, self.mesh):  # on the first rank
            compare(weights, full_weights)
