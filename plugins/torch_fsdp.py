"""TorchFSDPPlugin: torch's own fully_shard (FSDP2, ZeRO-3) behind the Booster."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn import Parameter
from torch.optim import Optimizer, Rprop

from ..checkpoint.local_tensors import Adapter
from ..cluster.errors import raise_errors
from ..cluster.hooks import has_foreign_hooks
from ..cluster.layout import divisors
from ..cluster.mesh import ParallelMesh, shard_mesh
from ..cluster.options import option, option_errors, option_like
from ..pipeline.stage import with_known_cache_name
from ..shardformer.equal_ranks import require_equal_models
from ..shardformer.recompute import recomputable_layers
from ..shardformer.refusals import is_partial, mark_parallelized, refuse_partial_state
from ..zero.combined import members_of
from ..zero.inner_optimizer import PARTIAL_STATE
from ..zero.kinds import require_elementwise
from ..zero.precision import DTYPES, POSITIVE, PRECISION, ScaleOptions, precision_or_default, routers_of
from .base import init_from_options
from .colossalai import FSDP
from .optimizer_errors import optimizer_errors
from .scaled_optimizer import ScaledOptimizer
from .torch_ddp import TorchModel, TorchPlugin


@dataclass(frozen=True)
class FSDPConfig:
    """Options of TorchFSDPPlugin.

    Args:
        precision: "fp32", "bf16" or "fp16", the precision in which layers compute; fp16 scales the loss by torch's
            GradScaler. None is fp32 on a CPU, bf16 on a GPU that computes in it, else fp16.
        shard_size: the number of neighbouring ranks over which a model is sharded; groups of this size are replicas
            (hybrid sharding). It divides the world size; None is all ranks.
        cpu_offload: keep shards of parameters, gradients and states on the CPU, where the optimizer updates them.
        reshard_after_forward: free a layer after its forward and gather it again for backward. None frees layers and
            keeps the rest of the model, which backward needs first; False keeps all, True frees all.
        initial_scale: the loss scale of fp16 in the first step.
    """

    precision: str | None = option(None, PRECISION)
    shard_size: int | None = None
    cpu_offload: bool | None = False
    reshard_after_forward: bool | None = None
    _: KW_ONLY
    initial_scale: float = option(2.0**16, POSITIVE)
    growth_factor: float = option_like(ScaleOptions, "growth_factor")
    backoff_factor: float = option_like(ScaleOptions, "backoff_factor")
    growth_interval: int = option_like(ScaleOptions, "growth_interval")


class TorchFSDPPlugin(TorchPlugin):
    """Data parallelism with parameters, gradients and optimizer states sharded (ZeRO-3), by torch's fully_shard.

    The parameters of a transformer layer are all-gathered when it computes and freed afterwards; those of the rest of
    the model stay gathered during the step. Weights are stored, updated and saved in float32. No pipeline: call
    `model(**batch)`. In a backward a parameter must get its gradient on all ranks or on none.

    Its arguments are the options of `FSDPConfig`, documented there and by `help(TorchFSDPPlugin.__init__)`. Further
    arguments of ColossalAI's plugin are accepted if they change nothing (see `colossalai.FSDP`).

    Raises:
        RuntimeError: no process group was started.
        ValueError: arguments are invalid or do not fit together; all errors at once, on every rank, before any
            communication.
    """

    @init_from_options(FSDPConfig, FSDP)
    def __init__(self, config: FSDPConfig, errors: list[str]) -> None:
        self._settings = vars(config)
        self._precision = precision_or_default(
            config.precision
        )  # an unknown one, too: `option_errors` reports it
        raise_errors(
            [
                *errors,
                *option_errors(config),
                *_shard_size_errors(config.shard_size, dist.get_world_size()),
            ]
        )
        self.has_default_precision = config.precision is None
        self.mesh = ParallelMesh()
        self.shard_mesh = shard_mesh(self.mesh, config.shard_size or self.mesh.world_size)
        is_16_bit = self._precision != "fp32"
        offloaded = CPUOffloadPolicy(pin_memory=self.mesh.device.type != "cpu")
        # Keyword arguments of fully_shard: with 16 bits, gradients are still reduced in float32.
        self._policy: dict[str, Any] = {
            "mesh": self.shard_mesh,
            "reshard_after_forward": config.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=DTYPES[self._precision] if is_16_bit else None,
                reduce_dtype=torch.float32 if is_16_bit else None,
            ),
            "offload_policy": offloaded if config.cpu_offload else OffloadPolicy(),
        }
        self._make_scaler = partial(
            torch.amp.GradScaler,
            self.mesh.device.type,
            init_scale=config.initial_scale,
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
            enabled=self._precision == "fp16",
        )

    def _errors(self, model: nn.Module, optimizer: Optimizer | None) -> list[str]:
        """List reasons why this model and optimizer cannot be sharded.

        Steps copies of an optimizer of an unknown class on small matrices, to see if it is element-wise.
        """
        errors = optimizer_errors(model, optimizer)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 0:
                errors.append(f"{name} is a scalar, which has no rows to shard: give it the shape (1,)")
            if has_foreign_hooks(parameter):
                errors.append(f"{name} has hooks, which would be lost: register hooks on modules instead")
        if optimizer is None or isinstance(optimizer, ScaledOptimizer):
            return errors  # a ScaledOptimizer is boosted already, which `optimizer_errors` reports
        if optimizer.state:
            return [
                *errors,
                f"{type(optimizer).__name__} already has state for {len(optimizer.state)} parameters, which "
                "would be lost: boost a new optimizer before its first step, of a class that creates its "
                "states in step()",
            ]
        try:
            # DTensor would accept some optimizers that are not, and Muon's results would silently be wrong.
            require_elementwise(optimizer)
        except ValueError as error:
            errors.append(str(error))
        if any(isinstance(member, Rprop) for member in members_of(optimizer)):
            errors.append(
                "Rprop assigns to entries of a sharded tensor, which torch's DTensor refuses: use another optimizer, "
                "HybridParallelPlugin or TorchDDPPlugin"
            )
        return errors

    def _compare_models(self, model: nn.Module) -> None:
        require_equal_models(model)

    def _wrap_model(self, model: nn.Module, adapters: Sequence[Adapter]) -> "TorchFSDPModel":
        return TorchFSDPModel(model, self.mesh, self._policy, adapters)

    def _wrap_optimizer(
        self, optimizer: Optimizer, boosted: TorchModel, names: Mapping[Parameter, str]
    ) -> "FSDPOptimizer":
        assert isinstance(boosted, TorchFSDPModel)
        return FSDPOptimizer(optimizer, self._make_scaler(), boosted, names)


def _shard_size_errors(shard_size: Any, world_size: int) -> list[str]:
    """List the error of a number of ranks per shard group; empty if it is allowed, or no integer (`option_errors`)."""
    allowed = [size for size in divisors(world_size) if size > 1 or world_size == 1]
    if type(shard_size) is not int or shard_size in allowed:
        return []
    return [
        f"shard_size={shard_size!r} must be a divisor above 1 of the world size {world_size}: use one of "
        f"{allowed}, None for all ranks, or TorchDDPPlugin"
    ]


class TorchFSDPModel(TorchModel):
    """A model with sharded parameters; `unwrap()` returns the model itself.

    fully_shard shards the layers and then the rest of the model. It replaces every parameter by a DTensor: this
    rank's rows in float32. The constructor is collective over the world.

    Args:
        module: the model, changed in place. Parameters of 16 bits become float32 master weights.
        mesh: all ranks.
        policy: the keyword arguments of fully_shard.
        adapters: its LoRA adapters, for saving.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        policy: Mapping[str, Any],
        adapters: Sequence[Adapter],
    ) -> None:
        super().__init__(module, mesh, adapters)
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.itemsize < torch.float32.itemsize:
                parameter.data = parameter.data.float()
        formats = policy["mp_policy"]
        for router in routers_of(module, formats.param_dtype or torch.float32):
            # It casts its weights itself: in a group of their own, since a group has gradients of one format.
            fully_shard(router, **{**policy, "mp_policy": replace(formats, param_dtype=router.dtype)})
        self._syncs = True  # False in a no_sync block
        layers = separable_layers(module)
        for layer in layers:
            fully_shard(layer, **policy)
        # Resharded layers are gathered in every forward; without resharding, a rank can run a forward alone.
        always_gathers = bool(layers) and policy["reshard_after_forward"] is not False
        shards = policy["mesh"]
        self._ranks = (
            dist.get_process_group_ranks(shards.get_group(shards.ndim - 1)) if always_gathers else ()
        )
        # A tuple is not registered as a submodule, so every parameter has one name.
        self.root = (fully_shard(module, **policy),)
        refuse_partial_state(module)
        mark_parallelized(module)

    def ranks_of_call(self) -> Sequence[int]:
        """Return the ranks of the shard group if layers are gathered in every forward, else none."""
        return self._ranks

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs; each layer is gathered when it computes. Collective over the shard group."""
        with self.random.call(self.module):
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the transformers model's `generate`. Collective: layers are gathered in every forward.

        Ranks whose texts end early continue until all ranks are done, which costs a reduction per token.
        """
        module: Any = self.module
        return module.generate(*args, **{"synced_gpus": True, **with_known_cache_name(module, kwargs)})

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients on every rank until a backward outside the block."""
        syncs, self._syncs = self._syncs, False  # blocks may be nested
        self.root[0].set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._syncs = syncs
            self.root[0].set_requires_gradient_sync(syncs)

    def free_unsharded_parameters(self) -> None:
        """Free gathered parameters, also after a forward without a backward; keep this rank's shards."""
        for module in self._sharded_modules():
            module.reshard()

    def unreduced_gradients(self) -> list[Tensor]:
        """Return the unsharded gradients that `no_sync` blocks accumulated on this rank."""
        gradients = []
        for fsdp_param, unsharded in self._unsharded_parameters():
            gradients.append(unsharded.grad)
            # Before torch 2.15 this was another tensor.
            if fsdp_param.unsharded_accumulated_grad is not unsharded.grad:
                gradients.append(fsdp_param.unsharded_accumulated_grad)
        return [gradient for gradient in gradients if gradient is not None]

    def drop_unreduced_gradients(self) -> None:
        """Drop the gradients that `no_sync` blocks accumulated."""
        for fsdp_param, unsharded in self._unsharded_parameters():
            unsharded.grad = None
            if fsdp_param.unsharded_accumulated_grad is not None:  # before torch 2.15 it was another tensor
                fsdp_param.unsharded_accumulated_grad = None

    def _sharded_modules(self) -> Iterator[FSDPModule]:
        yield from (module for module in self.module.modules() if isinstance(module, FSDPModule))

    def _unsharded_parameters(self) -> Iterator[tuple[Any, Parameter]]:
        """Yield torch's FSDPParam of every parameter that is gathered or was, and its unsharded parameter.

        Uses private API of torch.
        """
        for module in self._sharded_modules():
            state: Any = module._get_fsdp_state()
            # Before torch 2.13 a module had at most one group.
            groups: Sequence[FSDPParamGroup | None] = (
                state._fsdp_param_groups
                if hasattr(state, "_fsdp_param_groups")
                else [state._fsdp_param_group]
            )
            for group in groups:
                for fsdp_param in group.fsdp_params if group is not None else ():
                    if hasattr(fsdp_param, "_unsharded_param"):
                        yield fsdp_param, fsdp_param._unsharded_param


def separable_layers(model: nn.Module) -> list[nn.Module]:
    """Return the transformer layers that can be sharded and gathered one by one, inner layers before outer ones.

    These have parameters, which no module outside of the layer uses.
    """
    uses_in_model = _count_uses(model)
    layers = []
    for layer in reversed(recomputable_layers(model)):
        uses = _count_uses(layer)
        is_exclusive = all(uses_in_model[parameter] == count for parameter, count in uses.items())
        if uses and is_exclusive and layer is not model:
            layers.append(layer)
    return layers


def _count_uses(module: nn.Module) -> Counter[Parameter]:
    """Return for each parameter the number of submodules that have it; a module under two names counts twice."""
    return Counter(
        parameter
        for _, submodule in module.named_modules(remove_duplicate=False)
        for parameter in submodule._parameters.values()
        if parameter is not None
    )


class FSDPOptimizer(ScaledOptimizer):
    """The user's optimizer with loss scaling, its parameter groups changed to the sharded parameters.

    Groups keep their order and all their settings. With DTensors all ranks of a shard group find an overflow on any
    of them, and replicas have equal gradients: all ranks skip the same steps.

    Args:
        optimizer: the user's optimizer of the plain model's parameters, without states.
        scaler: the loss scale, disabled if the precision needs none.
        model: the sharded model.
        names: the plain model's parameters with their names.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: "torch.amp.GradScaler",
        model: TorchFSDPModel,
        names: Mapping[Parameter, str],
    ) -> None:
        shards = dict(model.module.named_parameters())
        super().__init__(optimizer, scaler, {shard: name for name, shard in shards.items()})
        self.model = model
        for group in optimizer.param_groups:
            group["params"] = [shards[names[parameter]] for parameter in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shards, or skip on all ranks if a scaled gradient overflowed; see `ScaledOptimizer`.

        Raises:
            RuntimeError: gradients of a `no_sync` block were never reduced.
        """

        # After the user's backward, which may be in the closure, and before the step looks at gradients.
        def closure_then_reshard() -> Any:
            loss = None if closure is None else closure()
            self._require_reduced("step()")
            self.model.free_unsharded_parameters()
            return loss

        return super().step(closure_then_reshard)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, if this rank has all of it.

        Raises:
            RuntimeError: this rank has only a shard; names `booster.save_optimizer`.
        """
        if any(is_partial(parameter) for parameter in self._parameters()):
            raise RuntimeError(PARTIAL_STATE)
        return super().state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, including those that `no_sync` blocks accumulated."""
        self.model.drop_unreduced_gradients()
        super().zero_grad(set_to_none)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the unscaled gradients to a norm over all shards; see `ScaledOptimizer`. Collective."""
        self._require_reduced("clip_grad_by_norm()")
        return super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip every entry of the unscaled gradients; see `ScaledOptimizer`. Called on every rank."""
        self._require_reduced("clip_grad_by_value()")
        super().clip_grad_by_value(clip_value)

    def _has_gradients(self) -> bool:
        return super()._has_gradients() or bool(self.model.unreduced_gradients())

    def _norms(self) -> Tensor:
        """Return the norms of all gradients, then one of those together that `no_sync` accumulated, kept elsewhere."""
        reduced = super()._norms()
        # With offloading, reduced gradients are on the CPU and these are not.
        norms = (self._norm(gradient).to(reduced.device) for gradient in self.model.unreduced_gradients())
        unreduced = torch.stack([reduced.new_zeros(()), *norms])
        return torch.cat([reduced, unreduced.norm().unsqueeze(0)])

    @staticmethod
    def _norm(gradient: Tensor) -> Tensor:
        return gradient.detach().float().norm()

    def _require_reduced(self, call: str) -> None:
        """Raise RuntimeError if gradients of `no_sync` blocks were not reduced by a later backward."""
        if self.model.unreduced_gradients():
            raise RuntimeError(
                f"{call} without a backward outside of booster.no_sync, which reduces gradients: leave the "
                "last microbatch of a step out of no_sync, or drop them by zero_grad()"
            )
