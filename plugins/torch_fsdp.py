"""TorchFSDPPlugin: torch's own fully_shard (FSDP2, ZeRO-3) behind the Booster."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..checkpoint.held_model import HeldModel
from ..cluster.faults import meet_all_ranks, naming_failures
from ..cluster.hooks import has_foreign_hooks
from ..cluster.launch import default_device
from ..cluster.mesh import ParallelMesh, divisors
from ..cluster.random import ForwardRandom
from ..cluster.shard_mesh import shard_mesh
from ..lazy import materialize
from ..shardformer.equal_ranks import require_equal_models
from ..shardformer.layer.batch_norm import RunningStatistics, own_batch_norms
from ..shardformer.switches import switch_faults
from ..zero.elementwise import require_elementwise
from ..zero.precision import DTYPES, default_precision, is_finite_number, precision_faults
from .base import Boosted, require_process_group
from .colossalai import FSDP, unavailable_faults
from .fsdp_module import TorchFSDPModel
from .fsdp_optimizer import FSDPOptimizer
from .hybrid_config import told
from .lora import unwrapped
from .optimizer_faults import model_faults, optimizer_faults
from .scaled_optimizer import ScaledOptimizer
from .torch_plugin import TorchPlugin, require_boosted
from .torch_saved import held_module


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """What a TorchFSDPPlugin is asked for; see there."""

    precision: str = "fp32"
    shard_size: int | None = None
    cpu_offload: bool = False
    reshard_after_forward: bool | None = None
    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    unavailable: Mapping[str, Any] = field(default_factory=dict)

    def faults(self, world_size: int) -> list[str]:
        """All that is wrong with it in a world of this size, each with what would work."""
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
            found += _shard_size_faults(self.shard_size, world_size)
        found += switch_faults({"cpu_offload": self.cpu_offload})
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
    """Data parallelism with parameters, gradients and optimizer states shared out (ZeRO-3), by torch's fully_shard.

    Every transformer layer is gathered when it computes and freed afterwards; the rest of the model is gathered for
    the whole step. Weights are kept, updated and saved in float32. No pipeline: call `model(**batch)`. In a backward
    a parameter has to get its gradient on all ranks or on none.

    Args:
        precision: "fp32", "bf16" or "fp16": in what layers compute; fp16 scales the loss by torch's GradScaler. None is
            fp32 on a CPU, bf16 on a GPU that computes in it, else fp16.
        shard_size: ranks over which a model is shared out, neighbours; the groups of so many hold replicas (hybrid
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
        ValueError: what is asked for does not fit; all faults at once, on every rank, before any communication.
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
        unavailable = unavailable_faults(type(self), FSDP, others)
        require_process_group()
        self.has_default_precision = precision is None
        self.config = FSDPConfig(
            precision=default_precision(default_device()) if precision is None else precision,
            shard_size=shard_size,
            cpu_offload=False if cpu_offload is None else cpu_offload,
            reshard_after_forward=reshard_after_forward,
            initial_scale=initial_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            unavailable={"hysteresis": hysteresis, "min_scale": min_scale, "max_scale": max_scale},
        )
        if faults := [*unavailable, *self.config.faults(dist.get_world_size())]:
            raise ValueError(told(faults))
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
        """Share out the model in place, re-point and wrap the optimizer; the others are returned as they are.

        Collective over the world; every rank gives an equal model. One that was built lazily is made real whole before
        it is shared out. See `Booster.boost`.
        """
        if faults := model_faults(model):
            raise ValueError(told(faults))
        model, adapters = unwrapped(model)
        if faults := boost_faults(model, optimizer):
            raise ValueError(told(faults))
        with naming_failures("boost"):
            meet_all_ranks()
            require_equal_models(model)
            names = {parameter: name for name, parameter in model.named_parameters()}
            materialize(model)
            own_batch_norms(model, self.mesh.group("data"))
            policy = self.config.policy(self.shard_mesh)
            boosted = TorchFSDPModel(model, policy, ForwardRandom(self.mesh), adapters)
        scaler = self.config.scaler(self.mesh.device)
        wrapped = None if optimizer is None else FSDPOptimizer(optimizer, scaler, boosted, names)
        if wrapped is not None:
            wrapped.group = self.mesh.new_group_of_all()
            wrapped.after_step = RunningStatistics(boosted.module, self.mesh.group("data")).average
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Accumulate whole gradients on each rank; the first backward after the block averages and shares them out.

        They take the memory of one gradient of every parameter on every rank.
        """
        if optimizer is not None:
            require_boosted(optimizer, "booster.no_sync")
        return self._accumulating(_boosted(model, "no_sync").no_sync())

    def held_model(self, model: nn.Module) -> HeldModel:
        """This rank's rows of a boosted model, in float32."""
        boosted = _boosted(model, "saving and loading")
        boosted.free_whole_parameters()
        return held_module(boosted.module, boosted.adapters)


def boost_faults(model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """Why this model and optimizer cannot be shared out; empty when they can."""
    if any(isinstance(each, DTensor) for each in model.parameters()):
        return ["the model is already boosted: give booster.boost the plain transformers model, once"]
    if isinstance(optimizer, ScaledOptimizer):
        return ["the optimizer is already boosted: give booster.boost the plain torch optimizer"]
    found = optimizer_faults(model, optimizer)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            found.append(f"{name} is a scalar, which has no rows to share out: give it the shape (1,)")
        if has_foreign_hooks(parameter):
            found.append(f"{name} has hooks, which would be lost: register hooks on modules instead")
    return found + ([] if optimizer is None else _optimizer_kind_faults(optimizer))


def _optimizer_kind_faults(optimizer: Optimizer) -> list[str]:
    """Why its states cannot be shared out: they are there already, or need whole parameters."""
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


def _shard_size_faults(shard_size: Any, world_size: int) -> list[str]:
    if isinstance(shard_size, bool) or not isinstance(shard_size, int):
        return [f"shard_size={shard_size!r} must be a whole number, or None for all ranks"]
    allowed = [size for size in divisors(world_size) if size > 1 or world_size == 1]
    if shard_size in allowed:
        return []
    if shard_size == 1:
        return [f"shard_size=1 shares out nothing: use one of {allowed}, or TorchDDPPlugin"]
    return [f"shard_size={shard_size} does not divide the world size {world_size}: use one of {allowed}"]


def _boosted(model: nn.Module, call: str) -> TorchFSDPModel:
    if not isinstance(model, TorchFSDPModel):
        raise ValueError(f"{call} takes the model that booster.boost returned")
    return model
