"""Base of all parallel layers, each built from a native module and replacing it under the same name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from ...cluster.placement import Shard, shard_on
from ...lazy.tensor import LazyTensor

# Attributes with the hooks of a module; accelerate additionally sets `forward` on the instance.
HOOKS_LOST = "has hooks or a replaced forward, which would be lost: register them after the model is sharded"
AROUND_FORWARD = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# The hook that transformers puts on embeddings under recomputation: it makes their output require a gradient.
_REQUIRES_GRADIENT = tuple(
    constant
    for constant in PreTrainedModel.enable_input_require_grads.__code__.co_consts
    if isinstance(constant, CodeType)
)


class ParallelModule(nn.Module):
    """A module with this rank's shard of a native module's parameters.

    A subclass keeps the native module's Parameter objects, so an optimizer's references stay valid. Only their data are
    sharded, by `cluster.placement.place`.
    """

    @classmethod
    def from_native_module(
        cls, module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any
    ) -> nn.Module:
        """Build the parallel module that replaces a native one; arguments as of the class. No communication."""
        return cls(module, process_group, **kwargs)


def change_inputs(module: nn.Module, change: Callable[[nn.Module, dict[str, Any]], None]) -> None:
    """Register a forward pre-hook that changes the inputs of a module's calls.

    Args:
        module: the module.
        change: gets the module and a dict of its inputs by name, in the order of the forward's signature unless its
            first tensor comes first already, and replaces values in it.
    """
    names = list(inspect.signature(module.forward).parameters)

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook: let `change` edit all arguments by name."""
        inputs = dict(zip(names, args, strict=False)) | kwargs
        if next(iter(inputs), None) != names[0] or not isinstance(inputs[names[0]], Tensor):
            inputs = {name: inputs[name] for name in names if name in inputs} | inputs
        change(module, inputs)
        positional = [inputs.pop(name) for name in names[: len(args)]]
        return (*positional, *args[len(names) :]), inputs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def name_of_first_tensor(inputs: Mapping[str, Any], *, besides: str | None = None) -> str:
    """Return the name of the first tensor among inputs, except for the name `besides`."""
    for name, value in inputs.items():
        if isinstance(value, Tensor) and name != besides:
            return name
    raise ValueError(f"none of the inputs {list(inputs)} is a tensor")


def shard_of(
    tensor: Tensor,
    dim: int,
    group: dist.ProcessGroup,
    *,
    split_sizes: Sequence[int] | None = None,
    padded_sizes: Sequence[int] | None = None,
    **cut: Any,
) -> Shard:
    """Return the placement of a tensor that is sharded along `dim` over a group.

    Args:
        tensor: the tensor; a tied one may be sharded already.
        dim: the sharded dimension.
        group: the tensor axis.
        split_sizes: lengths of the fused blocks along `dim`, each sharded separately; None is a single block.
        padded_sizes: their lengths after padding with zeros; None is no padding.
        cut: `replicas` and `stretches`, see `Shard`.
    """
    placement = shard_on(tensor, "tp")
    length = tensor.shape[dim] if placement is None or placement.dim != dim else sum(placement.blocks)
    blocks = (length,) if split_sizes is None else tuple(split_sizes)
    padded = None if padded_sizes is None else tuple(padded_sizes)
    return Shard(size=group.size(), dim=dim, blocks=blocks, padded=padded, **cut)


def is_of_peft(module: nn.Module) -> bool:
    """Return True for an instance of peft's classes or of their subclasses."""
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)


def native_errors(module: nn.Module, *kinds: type[nn.Module]) -> list[str]:
    """Return the reasons why a parallel layer cannot replace this module; empty if it can.

    A parallel layer takes over only weight and bias. Additional behaviour of a subclass (an adapter, a quantized
    layer), a hook or a special tensor would be silently lost. Embeddings take over transformers' own hook, too, see
    `take_hooks`.

    Args:
        module: the module to replace.
        kinds: the classes that the parallel layer supports; not their subclasses.
    """
    if is_of_peft(module):
        return [
            f"is {type(module).__module__}.{type(module).__qualname__} of peft and not a plain "
            f"{kinds[0].__name__}: leave it out of target_modules and modules_to_save, or use tp_size=1"
        ]
    if type(module) not in kinds:
        if isinstance(module, ParallelModule):
            return [
                "is sharded already, perhaps as a module of another layer too: shard a plain model, and give each "
                "layer modules of its own, or use tp_size=1"
            ]
        supported = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        return [
            f"is a {type(module).__module__}.{type(module).__qualname__}, not a plain {supported}, and its "
            "additional behaviour would be lost: shard the plain model, or write a policy that supports this "
            "class"
        ]
    errors = []
    hooks = [hook for name in AROUND_FORWARD for hook in getattr(module, name).values()]
    kept_hooks = _gradient_hooks(module) if isinstance(module, nn.Embedding) else []
    if "forward" in vars(module) or len(hooks) > len(kept_hooks):
        errors.append(HOOKS_LOST)
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) not in (Parameter, LazyTensor) or not parameter.is_floating_point():
            errors.append(
                f"has a {name} of {type(parameter).__name__} in {parameter.dtype}, which cannot be sharded: "
                "quantize or distribute the model after it is sharded, or not at all"
            )
    return errors


def _gradient_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks by which transformers makes a module's output require a gradient."""
    return [
        hook
        for hook in module._forward_hooks.values()
        if getattr(hook, "__code__", None) in _REQUIRES_GRADIENT
    ]


def take_hooks(parallel: nn.Module, native: nn.Embedding) -> None:
    """Give a parallel embedding the hooks of the native one, which are transformers' own (`native_errors`).

    The dictionary is shared, so that `model.disable_input_require_grads()` removes them.
    """
    parallel._forward_hooks = native._forward_hooks


def require_native(module: nn.Module, *kinds: type[nn.Module]) -> None:
    """Raise TypeError if `native_errors` returns any."""
    require_none(module, native_errors(module, *kinds))


def require_none(module: nn.Module, errors: list[str]) -> None:
    """Raise TypeError if there are errors of a native module."""
    if errors:
        raise TypeError(f"this {type(module).__name__} {'; it '.join(errors)}")


def require_all(is_valid: Tensor, message: Callable[[], str]) -> None:
    """Raise ValueError with this message unless all entries are True; on an accelerator without waiting for it.

    There it is a device-side assertion, as in torch's own look-ups.
    """
    if is_valid.device.type == "cpu":
        if not bool(is_valid.all()):
            raise ValueError(message())
    elif not is_valid.is_meta:
        torch._assert_async(is_valid.all())  # looking at the result here would wait for the device
