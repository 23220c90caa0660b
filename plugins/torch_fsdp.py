"""TorchFSDPPlugin: torch's own fully_shard (FSDP2, ZeRO-3) behind the Booster."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..checkpoint.local import Adapter, LocalModel
from ..cluster.errors import raise_errors
from ..cluster.failures import meet_all_ranks, naming_failures
from ..cluster.hooks import has_foreign_hooks
from ..cluster.mesh import ParallelMesh, divisors, shard_mesh
from ..cluster.random import ForwardRandom
from ..lazy import materialize
from ..shardformer.equal_ranks import require_equal_models
from ..shardformer.fused import switch_errors
from ..shardformer.layers.batch_norm import own_batch_norms
from ..shardformer.recompute import recomputable_layers
from ..shardformer.refusals import is_partial, mark_taken, refuse_partial_state
from ..zero.elementwise import require_elementwise
from ..zero.groups import PARTIAL_STATE
from ..zero.precision import DTYPES, is_finite_number, precision_faults
from .base import Boosted, BoostedModule, model_errors, optimizer_errors, own_arguments, require_process_group
from .colossalai import FSDP, unavailable_errors
from .lora import unwrapped
from .scaled_optimizer import ScaledOptimizer
from .state import local_module
from .torch_ddp import TorchPlugin, require_boosted


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Options of a TorchFSDPPlugin; see there."""

    precision: str = "fp32"
    shard_size: int | None = None
    cpu_offload: bool = False
    reshard_after_forward: bool | None = None
    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    unavailable: Mapping[str, Any] = field(default_factory=dict)

    def errors(self, world_size: int) -> list[str]:
        """List all errors in a world of this size, each with what would work."""
        found = precision_faults(
            precision=self.precision,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
        )
        if not (is_finite_number(self.initial_scale) and self.initial_scale > 0):
            found.append(f"initial_scale={self.initial_scale!r}: it must be above 0 and finite")
        found += [
            f"{name}={value} is not available: torch's GradScaler, which scales the loss here, has none. Leave it out, "
            "or use HybridParallelPlugin or LowLevelZeroPlugin"
            for name, value in self.unavailable.items()
            if value is not None
        ]
        if self.shard_size is not None:
            found += _shard_size_errors(self.shard_size, world_size)
        found += switch_errors({"cpu_offload": self.cpu_offload})
        if not (self.reshard_after_forward is None or isinstance(self.reshard_after_forward, bool)):
            found.append(f"reshard_after_forward={self.reshard_after_forward!r} must be True, False or None")
        return found

    def scaler(self, device: torch.device) -> "torch.amp.GradScaler":
        """A loss scale, turned off where the precision needs none."""
        return torch.amp.GradScaler(
            device.type,
            init_scale=self.initial_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            enabled=self.precision == "fp16",
        )

    def policy(self, mesh: DeviceMesh) -> dict[str, Any]:
        """The keyword arguments of fully_shard: 16-bit computation, gradients reduced in float32."""
        is_16_bit = self.precision != "fp32"
        pin_memory = mesh.device_type != "cpu"
        return {
            "mesh": mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=DTYPES[self.precision] if is_16_bit else None,
                reduce_dtype=torch.float32 if is_16_bit else None,
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=pin_memory)
            if self.cpu_offload
            else OffloadPolicy(),
        }


class TorchFSDPPlugin(TorchPlugin):
    """Data parallelism with parameters, gradients and optimizer states sharded (ZeRO-3), by torch's fully_shard.

    Every transformer layer is gathered when it computes and freed afterwards; the rest of the model is gathered for
    the whole step. Weights are kept, updated and saved in float32. No pipeline: call `model(**batch)`. In a backward
    a parameter has to get its gradient on all ranks or on none.

    Args:
        precision: "fp32", "bf16" or "fp16": in what layers compute; fp16 scales the loss by torch's GradScaler. None is
            fp32 on a CPU, bf16 on a GPU that computes in it, else fp16.
        shard_size: ranks over which a model is sharded, neighbours; the groups of so many hold replicas (hybrid
            sharding). It divides the world size; None is the whole world.
        cpu_offload: keep pieces of parameters, gradients and states on the CPU, where the optimizer then steps.
        reshard_after_forward: free a layer after its forward and gather it again for backward. None frees layers
            and keeps the rest of the model, which backward needs at once; False keeps all, True frees all.
        initial_scale, growth_factor, backoff_factor, growth_interval: the loss scale of fp16, as in the other plugins;
            it shrinks at every overflow.
        hysteresis, min_scale, max_scale: refused, since torch's GradScaler has none.
        others: further arguments of ColossalAI's, taken where they ask for nothing (see `colossalai.FSDP`).

    Raises:
        RuntimeError: no process group was started.
        ValueError: what is asked for does not fit; all errors at once, on every rank, before any communication.
    """

    def __init__(
        self,
        precision: str | None = None,
        shard_size: int | None = None,
        cpu_offload: bool | None = False,
        reshard_after_forward: bool | None = None,
        *,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        **others: Any,
    ) -> None:
        arguments = own_arguments(locals())
        unavailable = unavailable_errors(type(self), FSDP, others)
        require_process_group()
        self.has_default_precision = precision is None
        missing = {name: arguments.pop(name) for name in ("hysteresis", "min_scale", "max_scale")}
        arguments["cpu_offload"] = False if cpu_offload is None else cpu_offload
        self.config = FSDPConfig(**arguments, unavailable=missing)
        raise_errors([*unavailable, *self.config.errors(dist.get_world_size())])
        self.mesh = ParallelMesh()
        self.shard_mesh = shard_mesh(self.mesh, shard_size or self.mesh.world_size)

    @property
    def precision(self) -> str:
        """The precision in which layers compute."""
        return self.config.precision

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        """Shard the model in place, re-point and wrap the optimizer; the others are returned as they are.

        Collective over the world; every rank gives an equal model. One that was built lazily is materialized whole
        before it is sharded. See `Booster.boost`.
        """
        raise_errors(model_errors(model))
        model, adapters = unwrapped(model)
        raise_errors(boost_errors(model, optimizer))
        with naming_failures("boost"):
            meet_all_ranks()
            require_equal_models(model)
            names = {parameter: name for name, parameter in model.named_parameters()}
            materialize(model)
            statistics = own_batch_norms(model, self.mesh.group("data"))
            policy = self.config.policy(self.shard_mesh)
            boosted = TorchFSDPModel(model, policy, ForwardRandom(self.mesh), adapters)
        scaler = self.config.scaler(self.mesh.device)
        wrapped = None if optimizer is None else FSDPOptimizer(optimizer, scaler, boosted, names)
        if wrapped is not None:
            wrapped.group = self.mesh.new_group_of_all()
            wrapped.after_step = statistics.average
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Accumulate whole gradients on each rank; the first backward after the block averages and shards them.

        They take the memory of one gradient of every parameter on every rank.
        """
        if optimizer is not None:
            require_boosted(optimizer, "booster.no_sync")
        return self._accumulating(_boosted(model, "no_sync").no_sync())

    def local_model(self, model: nn.Module) -> LocalModel:
        """This rank's rows of a boosted model, in float32."""
        boosted = _boosted(model, "saving and loading")
        boosted.free_whole_parameters()
        return local_module(boosted.module, boosted.adapters)


def boost_errors(model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """List reasons why this model and optimizer cannot be sharded."""
    if any(isinstance(each, DTensor) for each in model.parameters()):
        return ["the model is already boosted: give booster.boost the plain transformers model, once"]
    if isinstance(optimizer, ScaledOptimizer):
        return ["the optimizer is already boosted: give booster.boost the plain torch optimizer"]
    found = optimizer_errors(model, optimizer)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            found.append(f"{name} is a scalar, which has no rows to shard: give it the shape (1,)")
        if has_foreign_hooks(parameter):
            found.append(f"{name} has hooks, which would be lost: register hooks on modules instead")
    return found + ([] if optimizer is None else _optimizer_kind_errors(optimizer))


def _optimizer_kind_errors(optimizer: Optimizer) -> list[str]:
    """List reasons why its states cannot be sharded: they exist already, or need whole parameters."""
    if optimizer.state:
        return [
            f"{type(optimizer).__name__} already has state for {len(optimizer.state)} parameters, which would be lost: "
            "boost a new optimizer, before its first step, of a kind that makes its states in step()"
        ]
    try:
        # Of the others torch's DTensor takes some, and Muon then departs from one process without a word.
        require_elementwise(optimizer)
    except ValueError as error:
        return [str(error)]
    return []


def _shard_size_errors(shard_size: Any, world_size: int) -> list[str]:
    if isinstance(shard_size, bool) or not isinstance(shard_size, int):
        return [f"shard_size={shard_size!r} must be a whole number, or None for all ranks"]
    allowed = [size for size in divisors(world_size) if size > 1 or world_size == 1]
    if shard_size in allowed:
        return []
    if shard_size == 1:
        return [f"shard_size=1 shards nothing: use one of {allowed}, or TorchDDPPlugin"]
    return [f"shard_size={shard_size} does not divide the world size {world_size}: use one of {allowed}"]


def _boosted(model: nn.Module, call: str) -> "TorchFSDPModel":
    if not isinstance(model, TorchFSDPModel):
        raise ValueError(f"{call} takes the model that booster.boost returned")
    return model


class TorchFSDPModel(BoostedModule):
    """A model whose parameters are sharded; `unwrap()` is the model itself.

    Its layers and then the rest are sharded by fully_shard, which replaces every parameter by a DTensor: this
    rank's rows of it in float32. Building it is collective over the world.

    Args:
        module: the model, changed in place. Parameters of 16 bits become float32 masters.
        policy: the keyword arguments of fully_shard.
        random: of the forwards in training.
        adapters: what is saved of it as LoRA.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: Mapping[str, Any],
        random: ForwardRandom,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        super().__init__(adapters)
        self._random = random
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.itemsize < torch.float32.itemsize:
                parameter.data = parameter.data.float()
        layers = separable_layers(module)
        for layer in layers:
            fully_shard(layer, **policy)
        # Layers that are freed are gathered in every forward; what stays gathered may be used alone.
        always_gathers = bool(layers) and policy["reshard_after_forward"] is not False
        mesh = policy["mesh"]
        self._ranks = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)) if always_gathers else ()
        self.root = (fully_shard(module, **policy),)  # a tuple is not registered: one name per parameter
        refuse_partial_state(module)
        self.module = module
        mark_taken(module)

    def ranks_of_call(self) -> Sequence[int]:
        """The ranks of a shard group, where layers are gathered in every forward."""
        return self._ranks

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs; each layer is gathered when it computes. Every rank of a shard group calls."""
        with self._random.call(self._random.draw(self.module)):
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The `generate` of the transformers model, whose layers are gathered in every forward. Every rank calls.

        Ranks whose texts end early go on computing until all have ended, which costs a reduction for each token.
        """
        module: Any = self.module
        return module.generate(*args, **{"synced_gpus": True, **kwargs})

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up whole on every rank until a backward outside of the block."""
        self.root[0].set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.root[0].set_requires_gradient_sync(True)

    def free_whole_parameters(self) -> None:
        """Keep this rank's pieces alone, also after a forward without a backward."""
        for module in self._sharded_modules():
            module.reshard()

    def has_unreduced_gradients(self) -> bool:
        """Return True where gradients of a `no_sync` block wait on this rank."""
        return bool(self.unreduced_gradients())

    def unreduced_gradients(self) -> list[Tensor]:
        """Gradients of a `no_sync` block that wait on this rank, whole."""
        found = (
            each
            for record, whole in self._whole_parameters()
            for each in (record.unsharded_accumulated_grad, whole.grad)
        )
        return [each for each in found if each is not None]

    def drop_unreduced_gradients(self) -> None:
        """Forget what a `no_sync` block added up."""
        for record, whole in self._whole_parameters():
            record.unsharded_accumulated_grad = None
            whole.grad = None

    def _sharded_modules(self) -> Iterator[FSDPModule]:
        yield from (module for module in self.module.modules() if isinstance(module, FSDPModule))

    def _whole_parameters(self) -> Iterator[tuple[Any, Parameter]]:
        """Each parameter that was whole before, behind fully_shard's own record of it. Private to torch."""
        for module in self._sharded_modules():
            groups: list[FSDPParamGroup] = module._get_fsdp_state()._fsdp_param_groups
            for record in (each for group in groups for each in group.fsdp_params):
                if hasattr(record, "_unsharded_param"):
                    yield record, record._unsharded_param


def separable_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer layers that can be gathered one by one: no parameter of theirs is used outside. Inner first."""
    uses = _uses(model)
    found = []
    for layer in reversed(recomputable_layers(model)):
        own = _uses(layer)
        if own and layer is not model and all(uses[parameter] == count for parameter, count in own.items()):
            found.append(layer)
    return found


def _uses(module: nn.Module) -> Counter[Parameter]:
    """The number of places below the module that hold each parameter; a module in two places counts twice."""
    return Counter(
        parameter
        for _, part in module.named_modules(remove_duplicate=False)
        for parameter in part._parameters.values()
        if parameter is not None
    )


class FSDPOptimizer(ScaledOptimizer):
    """The user's optimizer behind a loss scale, its groups re-pointed at the sharded parameters.

    Groups keep their order and all their settings. With DTensors an overflow on any rank of a shard group is
    found by all of them, and replicas have equal gradients: all ranks skip the same steps.

    Args:
        optimizer: the user's, on the parameters of the plain model, without states.
        scaler: the loss scale, turned off where the precision needs none.
        model: the model, sharded.
        names: the name of each parameter that the plain model had.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: "torch.amp.GradScaler",
        model: TorchFSDPModel,
        names: Mapping[Parameter, str],
    ) -> None:
        pieces = dict(model.module.named_parameters())
        super().__init__(optimizer, scaler, {piece: name for name, piece in pieces.items()})
        self.model = model
        for group in optimizer.param_groups:
            group["params"] = [pieces[names[parameter]] for parameter in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's pieces, or skip on all ranks where a scaled gradient overflowed; see `ScaledOptimizer`.

        Raises:
            RuntimeError: gradients of a `no_sync` block were never reduced.
        """

        def prepare() -> Any:
            loss = None if closure is None else closure()
            self._require_reduced("step()")
            self.model.free_whole_parameters()
            return loss

        return super().step(prepare)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, where this rank has all of it.

        Raises:
            RuntimeError: this rank has a part; names `booster.save_optimizer`.
        """
        if any(is_partial(each) for each in self._parameters()):
            raise RuntimeError(PARTIAL_STATE)
        return super().state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those that a `no_sync` block added up too."""
        self.model.drop_unreduced_gradients()
        super().zero_grad(set_to_none)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the true gradients to a norm over all pieces; see `ScaledOptimizer`. Every rank calls."""
        self._require_reduced("clip_grad_by_norm()")
        return super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip every entry of the true gradients; see `ScaledOptimizer`. Every rank calls."""
        self._require_reduced("clip_grad_by_value()")
        super().clip_grad_by_value(clip_value)

    def _has_gradients(self) -> bool:
        return super()._has_gradients() or self.model.has_unreduced_gradients()

    def _norms(self) -> Tensor:
        """Of each gradient, and one of all that a `no_sync` block added up, which torch keeps elsewhere."""
        reduced = super()._norms()
        unreduced = torch.stack([reduced.new_zeros(()), *map(self._norm, self.model.unreduced_gradients())])
        return torch.cat([reduced, unreduced.norm().unsqueeze(0)])

    @staticmethod
    def _norm(gradient: Tensor) -> Tensor:
        return gradient.detach().float().norm()

    def _require_reduced(self, call: str) -> None:
        if self.model.has_unreduced_gradients():
            raise RuntimeError(
                f"{call} after booster.no_sync alone: its gradients are reduced by a backward outside of the block. "
                "Leave the last microbatch of a step out of no_sync, or drop them by zero_grad()"
            )
