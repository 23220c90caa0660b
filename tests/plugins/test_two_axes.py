"""Parameters sharded over two axes at once are reduced, counted, updated, gathered, saved and loaded like others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from echelon.checkpoint.checkpoints import Checkpoints
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.placement import PartialGrad, Placement, Replicated, Shard, place
from echelon.plugins.state import local_module, trained_shards
from echelon.verify.parity import gather_full
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter
from echelon.zero.precision import PrecisionConfig

from ..pool import Pool

SHAPES = {
    "experts": (5, 6, 3),
    "one dim": (24,),
    "keys": (7, 4),
    "norm": (3,),
    "plain": (4, 3),
    "summed": (9,),
    "equal": (10,),
}
TWO = {"dp": 4, "wp": 2, "tp": 2}
HALF = {"dp": 2, "wp": 2, "tp": 2}


def placements(name: str, mesh: ParallelMesh) -> tuple[Placement, ...]:
    """Return the placements of a parameter, outermost first."""
    wp, tp = mesh.size("wp"), mesh.size("tp")
    return {
        "experts": (
            Shard(size=wp, dim=0, blocks=(5,), padded=(-(-5 // wp) * wp,), axis="wp"),
            Shard(size=tp, dim=1, blocks=(4, 2), padded=(4, 4)),
        ),
        "one dim": (
            Shard(size=wp, dim=0, blocks=(15, 9), padded=(16, 16), axis="wp"),
            Shard(size=tp, dim=0, blocks=(32 // wp,)),
        ),
        "keys": (Shard(size=tp, dim=1, blocks=(4,), replicas=tp),),
        "norm": (PartialGrad(size=tp),),
        "plain": (Replicated(size=tp),),
        "summed": (PartialGrad(size=wp, axis="wp"), Replicated(size=tp)),
        "equal": (Replicated(size=wp, axis="wp"), PartialGrad(size=tp)),
    }[name]


def drawn(name: str, seed: int) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(97 * seed + len(name)))


def placed(name: str, values: Tensor, mesh: ParallelMesh) -> Parameter:
    parameter = Parameter(values)
    for placement in placements(name, mesh):
        place(parameter, placement, mesh.rank(placement.axis))
    return parameter


def weights(seed: int) -> dict[str, Tensor]:
    return {name: drawn(name, seed) for name in SHAPES}


def gradients(step: int, replicas: range) -> dict[str, Tensor]:
    """Return the mean gradients of some ranks of the data axis."""
    return {name: sum(drawn(name, 10 * step + rank) for rank in replicas) / len(replicas) for name in SHAPES}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def expected(steps: int, data: int) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Yield the weights and the norm of one process after every step."""
    parameters = {name: Parameter(values) for name, values in weights(0).items()}
    optimizer = sgd(parameters.values())
    for step in range(1, 1 + steps):
        for name, gradient in gradients(step, range(data)).items():
            parameters[name].grad = gradient
        norm = torch.cat(
            [parameter.grad.flatten() for parameter in parameters.values() if parameter.grad is not None]
        ).norm()
        optimizer.step()
        yield {name: parameter.detach().clone() for name, parameter in parameters.items()}, norm.item()


class Run:
    """Placed parameters and their optimizer on a mesh of these sizes."""

    def __init__(self, sizes: dict[str, int], seed: int, stage: int) -> None:
        # The layout refuses wp with tp, since layers with gathered weights do; placements do not.
        with mock.patch("echelon.cluster.layout.layout_errors", return_value=[]):
            self.mesh = ParallelMesh(**sizes)
        self.model = nn.Module()
        for name, values in weights(seed).items():
            self.model.register_parameter(name, placed(name, values, self.mesh))
        self.named = dict(self.model.named_parameters())
        self.optimizer = ShardedOptimizer(
            sgd(self.model.parameters()),
            [ManagedParameter.of(name, parameter, mesh=self.mesh) for name, parameter in self.named.items()],
            mesh=self.mesh,
            stage=stage,
            precision=PrecisionConfig(precision="fp32"),
            bucket_size=40,
        )
        self.checkpoints = Checkpoints(self.mesh)

    def step(self, step: int) -> float | None:
        """Take a step on the gradients that backward leaves on this rank: means over wp, summands of partial ones."""
        data, tp, wp = (self.mesh.rank("data"), self.mesh.size("tp"), self.mesh.size("wp"))
        replica_gradients = gradients(step, range(data, data + 1))
        over_wp = gradients(step, range(data // wp * wp, data // wp * wp + wp))
        loss = torch.zeros(())
        for name, parameter in self.named.items():
            full_gradient = (
                over_wp[name] if name in ("experts", "one dim", "equal") else replica_gradients[name]
            )
            parts = {"keys": tp, "norm": tp, "equal": tp, "summed": wp}.get(name, 1)
            gradient = placed(name, full_gradient, self.mesh).detach() / parts
            loss = loss + (parameter * gradient).sum()
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.optimizer.get_grad_norm()

    def parts(self) -> dict[str, Any]:
        return {
            "model": local_module(self.model, self.mesh),
            "optimizer": trained_shards(self.optimizer, self.mesh),
        }

    def require(self, full_weights: dict[str, Tensor]) -> None:
        gathered = gather_full(self.named, self.named, self.mesh)
        for name, values in gathered.items():
            torch.testing.assert_close(
                values, full_weights[name], msg=lambda text, name=name: f"{name}: {text}"
            )


def train(folder: Path, sizes: list[dict[str, int]], stage: int) -> list[list[int]]:
    """Train under the first layout, save, and go on under every other one."""
    first, *others = sizes
    (after_1, norm_1), (after_2, norm_2) = expected(2, first["dp"])
    run = Run(first, 0, stage)
    assert run.step(1) == pytest.approx(norm_1)
    run.require(after_1)
    run.checkpoints.save_step(folder, 1, **run.parts())
    for number, layout in enumerate(others):
        other = Run(layout, 5 + number, stage)
        other.checkpoints.load_step(folder, **other.parts())
        other.require(after_1)
        other.checkpoints.save_step(folder / str(number), 1, **other.parts())
        if layout["dp"] == first["dp"]:  # otherwise the means are of other gradients
            assert other.step(2) == pytest.approx(norm_2)
            other.require(after_2)
    # Back from the last layout.
    again = Run(first, 9, stage)
    again.checkpoints.load_step(folder / str(len(others) - 1), **again.parts())
    assert again.step(2) == pytest.approx(norm_2)
    again.require(after_2)
    return [[bucket.partition.group.size(), bucket.partition.num_slices] for bucket in run.optimizer.buckets]


def test_two_axes_train_and_resume_under_another_layout(pool: Pool, tmp_path: Path) -> None:
    for partitions in pool.run(4, train, tmp_path, [HALF, {"dp": 2, "tp": 2}, {"dp": 4}], 2):
        assert sorted({tuple(partition) for partition in partitions}) == [(1, 1), (2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_two_axes_train_and_resume_under_other_layouts(pool: Pool, tmp_path: Path, stage: int) -> None:
    others = [{"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 2, "wp": 2, "tp": 4}]
    for partitions in pool.run(8, train, tmp_path, [TWO, *others], stage):
        assert sorted({tuple(partition) for partition in partitions}) == [(2, 2), (4, 4)]
