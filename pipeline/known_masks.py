"""Masks of a batch whose numbers the host has too, so that asking about them waits for no device.

[Note: questions about masks] transformers asks of every mask whether it hides anything, and of positions whether texts
are packed, and goes another way by the answer: once or twice in each forward, of numbers that came from the host a
moment before. On CUDA each question waits until all that was launched has run. So these masks keep their numbers on the
host. What transformers computes on the way to its question is computed there too, and there it is answered.
Where a call has no mask, models make positions by themselves and ask about those. It then gets a mask that hides
nothing, of which the host knows; which is what a call without one means, and what tokenizers return.

Anything else that is computed from such a mask is a plain tensor. Not known are masks that were on a device already,
that stand in no mapping, or that were changed in place; then transformers asks as ever. torch.compile takes no such
tensor, so FlexAttention, whose mask functions are compiled, gets none. Attentions besides eager and torch's own may
hand the mask to the layers: they get one only where it hides nothing, and is dropped before.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

_ANSWERED = {Tensor.__bool__, Tensor.__int__, Tensor.item, Tensor.tolist}  # questions
_LEADING = {  # to one
    *(Tensor.to, Tensor.bool, Tensor.long, Tensor.view, Tensor.reshape, Tensor.expand, Tensor.unsqueeze, pad),
    *(Tensor.__getitem__, Tensor.narrow, Tensor.__eq__, Tensor.eq, Tensor.__invert__),
    *(Tensor.sum, Tensor.all, torch.all, Tensor.any, torch.any),
}


class KnownTensor(Tensor):
    """A tensor on the device whose numbers the host has too; see [Note: questions about masks]."""

    _host: Tensor
    _known_version: int

    @classmethod
    def of(cls, tensor: Tensor, host: Tensor) -> Tensor:
        """The tensor with what the host knows of it; by itself where in-place changes would go unseen."""
        if tensor.is_inference():
            return tensor
        made = tensor.as_subclass(cls)
        made._host, made._known_version = host, tensor._version
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it on the device, and on the host where a question may follow."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            is_of_interest = func in _ANSWERED or func in _LEADING
            if torch.compiler.is_compiling() or not (is_of_interest and _are_known(args, kwargs)):
                return func(*args, **kwargs)
            if func in _ANSWERED:
                return func(args[0]._host)
            result = func(*args, **kwargs)
            if func is Tensor.to:
                host = args[0]._host.to(result.dtype)
            else:
                host = func(*tree_map_only(cls, _host, args), **tree_map_only(cls, _host, kwargs))
            return cls.of(result, host)


def _host(tensor: KnownTensor) -> Tensor:
    return tensor._host


def _are_known(args: Any, kwargs: Any) -> bool:
    """Return True if the host has the numbers of all tensors among the arguments."""
    return all(
        isinstance(each, KnownTensor) and each._version == each._known_version
        for each in tree_leaves((args, kwargs))
        if isinstance(each, Tensor)
    )


def with_known_masks(moved: Any, batch: Any, model: nn.Module) -> Any:
    """A batch on the device, its masks with what the host knows of them.

    Args:
        moved: the batch on the device.
        batch: as the dataloader gave it.
        model: gets the batch.
    """
    if not isinstance(moved, dict) or is_compiled(model):
        return moved
    masks = [name for name in moved if _is_known(name, batch[name])]
    kernels = (
        [each.config._attn_implementation for each in model.modules() if isinstance(each, PreTrainedModel)]
        if masks
        else []
    )
    if any(map(compiles_masks, kernels)):
        return moved
    takes_all = all(each == "eager" or each.startswith("sdpa") for each in kernels)
    known = {
        name: KnownTensor.of(moved[name], batch[name])
        for name in masks
        if takes_all or bool(batch[name].all())
    }
    return {**moved, **known}


def compiles_masks(kernel: str) -> bool:
    """Return True for an attention, by transformers' name, whose mask functions are compiled: FlexAttention."""
    return kernel.startswith("flex")


def is_compiled(model: nn.Module) -> bool:
    """Return True for a model that torch.compile has compiled or is tracing: nothing in it asks about numbers."""
    return torch.compiler.is_compiling() or model._compiled_call_impl is not None


def mask_of_all(ids: Tensor) -> Tensor:
    """A mask (B, S) that hides none of these tokens."""
    host = torch.ones(ids.shape, dtype=torch.long)
    moved = torch.ones(ids.shape, dtype=torch.long, device=ids.device)
    return KnownTensor.of(moved, host) if type(host) is Tensor else moved


def _is_known(name: Any, host: Any) -> bool:
    """Return True if an argument is a mask whose numbers the host has; it has none of fake tensors."""
    is_mask = isinstance(name, str) and name.endswith("mask") and type(host) is Tensor and host.dim() == 2
    return is_mask and host.device.type == "cpu"
