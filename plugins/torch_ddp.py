"""Data parallelism by torch's own wrappers: the base class, and TorchDDPPlugin with DistributedDataParallel."""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..checkpoint.local_tensors import Adapter, LocalModel
from ..checkpoint.optimizer_state import Trained
from ..cluster.device import is_cuda
from ..cluster.errors import raise_errors
from ..cluster.failures import naming_failures
from ..cluster.forward_random import ForwardRandom
from ..cluster.gathering import checked_together, require_equal
from ..cluster.mesh import ParallelMesh
from ..cluster.options import Check, option, option_errors
from ..lazy import materialize
from ..pipeline.stage import with_known_cache_name
from ..shardformer.layers.batch_norm import RunningStatistics, convert_batch_norms
from ..shardformer.refusals import mark_parallelized, unfit_model_errors
from ..zero.precision import DTYPES, default_precision
from .adapters import unwrapped
from .base import BoostedModule, Plugin, init_from_options, require_boosted
from .colossalai import DDP
from .scaled_optimizer import ScaledOptimizer
from .state import local_module, trained_parameters


class TorchModel(BoostedModule):
    """A model in one of torch's wrappers.

    Args:
        module: the model itself.
        mesh: all ranks.
        adapters: its LoRA adapters, for saving.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh, adapters: Sequence[Adapter]) -> None:
        super().__init__(adapters)
        self.module = module
        self.random = ForwardRandom(mesh)

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on each rank without reducing them, until a backward outside of the block."""

    def free_unsharded_parameters(self) -> None:
        """Free gathered parameters; keep this rank's shards."""

    def exclude_buffers(self, names: Collection[str]) -> None:
        """Exclude these buffers from synchronization between ranks."""


class TorchPlugin(Plugin):
    """Data parallelism over all ranks, by torch's own wrappers. No pipeline: call `model(**batch)`."""

    _precision: str
    _settings: Mapping[str, Any]  # the options by name, which must be equal on all ranks
    _accumulates = False  # True inside no_sync, where ranks may run different numbers of backwards

    @property
    def precision(self) -> str:
        """The precision in which layers compute."""
        return self._precision

    def _wrap(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Wrap the model by torch's class and the optimizer by ScaledOptimizer. Collective over the world.

        Raises:
            ValueError: model or optimizer cannot be wrapped, or options or models differ between ranks; on every rank.
        """
        model, adapters = checked_together("boost", lambda: self._checked_model(model, optimizer))
        names = {parameter: name for name, parameter in model.named_parameters()}
        with naming_failures("boost"):
            settings = {**self._settings, self.precision_option: self._precision}
            require_equal(settings, what="the plugin")
            kind = None if optimizer is None else type(optimizer).__name__
            require_equal({"optimizer": kind}, what="booster.boost")
            self._compare_models(model)
            materialize(model)
            data = self.mesh.group("data")
            convert_batch_norms(model, data)
            running_statistics = RunningStatistics(model, data)
            boosted = self._wrap_model(model, adapters)
        if optimizer is None:
            return boosted, None
        scaled = self._wrap_optimizer(optimizer, boosted, names)
        scaled.group = self.mesh.new_group_of_all()
        scaled.after_step = running_statistics.average
        boosted.exclude_buffers(running_statistics.names)  # they are averaged instead
        return boosted, scaled

    def _checked_model(
        self, model: nn.Module, optimizer: Optimizer | None
    ) -> tuple[nn.Module, Sequence[Adapter]]:
        """Check that model and optimizer can be wrapped; return the model without peft's wrapper, and its adapters.

        No communication.

        Raises:
            ValueError: they cannot; all errors at once.
        """
        raise_errors(unfit_model_errors(model))
        model, adapters = unwrapped(model)
        raise_errors(self._errors(model, optimizer))
        return model, adapters

    def _errors(self, model: nn.Module, optimizer: Optimizer | None) -> list[str]:
        """List reasons why this model and optimizer cannot be wrapped."""
        return []

    def _compare_models(self, model: nn.Module) -> None:
        """Raise ValueError for models that differ between ranks, where torch would not notice. Collective."""

    @abstractmethod
    def _wrap_model(self, model: nn.Module, adapters: Sequence[Adapter]) -> "TorchModel":
        """Wrap the model. Collective over the world."""

    @abstractmethod
    def _wrap_optimizer(
        self, optimizer: Optimizer, boosted: "TorchModel", names: Mapping[Parameter, str]
    ) -> ScaledOptimizer:
        """Wrap the optimizer with loss scaling."""

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Accumulate gradients on each rank in this context; the first backward after it averages them over the ranks.

        Until then, every rank needs memory for the gradients of all full parameters.

        Raises:
            ValueError: model or optimizer are not the ones that `booster.boost` returned.
        """
        if optimizer is not None:
            require_boosted(optimizer, ScaledOptimizer, "booster.no_sync")
        return self._accumulating(self._boosted(model, "booster.no_sync").no_sync())

    def local_model(self, model: nn.Module) -> LocalModel:
        """Return this rank's shard of a boosted model, in the format that the optimizer updates."""
        boosted = self._boosted(model, "this call")
        boosted.free_unsharded_parameters()
        return local_module(boosted.module, self.mesh, boosted.adapters, boosted.random)

    def _boosted(self, model: nn.Module, call: str) -> "TorchModel":
        if not isinstance(model, TorchModel):
            raise ValueError(f"{call} takes the model that booster.boost returned")
        return model

    def trained(self, optimizer: Optimizer) -> Trained:
        """Return the tensors that a boosted optimizer updates on this rank."""
        scaled = require_boosted(optimizer, ScaledOptimizer, "saving and loading")
        extra = {"scaler": scaled.scaler_state(), "skipped_steps": scaled.skipped_steps}
        return trained_parameters(
            scaled.optim, scaled.names, self.mesh, extra=extra, install=scaled.install_state
        )

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Compute gradients, averaged over the ranks during backward.

        Raises:
            ValueError: the optimizer is not the one that `booster.boost` returned.
        """
        scaled = require_boosted(optimizer, ScaledOptimizer, "booster.backward")
        with naming_failures("backward", () if self._accumulates else None):
            scaled.backward(loss)

    @contextmanager
    def _accumulating(self, no_sync: AbstractContextManager[None]) -> Iterator[None]:
        """Enter torch's `no_sync` context with `_accumulates` set to True, and restore it at the end."""
        previous, self._accumulates = self._accumulates, True
        try:
            with no_sync:
                yield
        finally:
            self._accumulates = previous


@dataclass(frozen=True)
class DDPConfig:
    """Options of TorchDDPPlugin: arguments of torch's DistributedDataParallel.

    Args:
        broadcast_buffers: copy the buffers of the first rank in every forward.
        bucket_cap_mb: MiB of a bucket of gradients.
        find_unused_parameters: search parameters that get no gradient.
        check_reduction: deprecated by torch.
        gradient_as_bucket_view: gradients are views of the buckets.
        static_graph: the same parameters get gradients in every iteration.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: float = option(25, Check(lambda size: size > 0, "must be a number of MiB above 0"))
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


class TorchDDPPlugin(TorchPlugin):
    """Plain data parallelism by torch's DistributedDataParallel. No pipeline: call `model(**batch)`.

    The precision is set by `Booster(mixed_precision=...)`.

    Its arguments are the options of `DDPConfig`, torch's own. Further arguments of ColossalAI's plugin are accepted if
    they change nothing (see `colossalai.DDP`).

    Raises:
        RuntimeError: no process group was started.
        ValueError: an argument is invalid, or one of ColossalAI's is not available; all errors at once.
    """

    precision_option = "mixed_precision"

    @init_from_options(DDPConfig, DDP)
    def __init__(self, config: DDPConfig, errors: list[str]) -> None:
        raise_errors([*errors, *option_errors(config)])
        # torch warns of some deprecated arguments even if they are given with their default values.
        self._ddp_kwargs = {
            option.name: value
            for option in fields(config)
            if (value := getattr(config, option.name)) != option.default
        }
        self._settings = vars(config)
        self.mesh = ParallelMesh()
        self.has_default_precision = True  # until `set_mixed_precision`
        self._precision: Literal["fp32", "bf16", "fp16"] = default_precision(self.mesh.device)

    def set_mixed_precision(self, precision: Literal["fp32", "bf16", "fp16"]) -> None:
        """Compute in 16 bits by torch's autocast, or in float32 without; fp16 scales the loss.

        Raises:
            ValueError: another precision.
        """
        if precision not in tuple(DTYPES):  # a list has no hash
            raise ValueError(
                f"mixed_precision={precision!r} is unknown: use one of {', '.join(DTYPES)}, or None for the device's "
                "default"
            )
        self.has_default_precision = False
        self._precision = precision

    def _wrap_model(self, model: nn.Module, adapters: Sequence[Adapter]) -> "TorchModel":
        return TorchDDPModel(
            model.to(self.mesh.device), self.mesh, self._precision, self._ddp_kwargs, adapters
        )

    def _wrap_optimizer(
        self, optimizer: Optimizer, boosted: "TorchModel", names: Mapping[Parameter, str]
    ) -> ScaledOptimizer:
        scaler = torch.amp.GradScaler(self.mesh.device.type, enabled=self._precision == "fp16")
        return ScaledOptimizer(optimizer, scaler, names)


class TorchDDPModel(TorchModel):
    """A model under DistributedDataParallel and autocast; `unwrap()` is the model itself.

    The constructor is collective over the world.

    Args:
        module: the model, on the device.
        mesh: all ranks.
        precision: "fp32", or the format of autocast: "bf16" or "fp16".
        ddp_kwargs: further arguments of DistributedDataParallel.
        adapters: its LoRA adapters, for saving.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        precision: str,
        ddp_kwargs: dict[str, Any],
        adapters: Sequence[Adapter],
    ) -> None:
        super().__init__(module, mesh, adapters)
        has_trainable = any(parameter.requires_grad for parameter in module.parameters())
        device_ids = [mesh.device.index] if is_cuda(mesh.device) else None
        ddp = DistributedDataParallel(module, device_ids=device_ids, **ddp_kwargs) if has_trainable else None
        # A tuple is not registered as a submodule, so parameters keep the model's names.
        self._ddp = (ddp,)
        mark_parallelized(module)
        self._autocast = partial(
            torch.autocast, mesh.device.type, DTYPES[precision], enabled=precision != "fp32"
        )

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """torch's wrapper; None if no parameter is trained."""
        return self._ddp[0]

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on each rank without reducing them, until a backward outside of the block."""
        return nullcontext() if self.ddp is None else self.ddp.no_sync()

    def exclude_buffers(self, names: Collection[str]) -> None:
        """Exclude these buffers from the broadcast, by which every forward would overwrite them with rank 0's."""
        if self.ddp is not None:
            self.ddp.parameters_to_ignore |= set(names)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the transformers model's `generate` in the mixed precision; each rank independently."""
        module: Any = self.module
        with self._autocast():
            return module.generate(*args, **with_known_cache_name(module, kwargs))

    def ranks_of_call(self) -> Sequence[int] | None:
        """Return all ranks if buffers are broadcast from the first one, else only this one."""
        return None if self.ddp is not None and self.ddp.will_sync_module_buffers() else ()

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs in the mixed precision. DDP broadcasts buffers from rank 0, if so configured."""
        with self._autocast(), self.random.call(self.module):
            return (self.ddp or self.module)(*args, **kwargs)
