"""Masks of a batch with a copy of their values on the host, so that branches on them do not wait for the device.

[Note: questions about masks] transformers branches on the values of every mask (does it hide anything?) and of
positions (are texts packed?), once or twice in each forward. The values came from the host a moment before, but on CUDA
each such read waits until all launched work has run. So these masks keep a copy of their values on the host. The
computations of transformers that lead to the branch are repeated on the host, and the host copy answers it.
If a call has no mask, models compute positions themselves and branch on those. Such a call gets a mask that hides
nothing, with a host copy; this means the same as no mask, and is what tokenizers return.

Every other result that is computed from such a mask is a plain tensor. There is no host copy of masks that were on a
device already, that are not values of a mapping, or that were changed in place; then transformers reads the device as
usual. torch.compile does not accept these tensors, so FlexAttention, whose mask functions are compiled, gets none.
Attention kernels other than eager and torch's own may pass the mask to the layers: they get one only if it hides
nothing, because transformers then drops it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from ..cluster.transformers_api import attention_name

_ANSWERED = {Tensor.__bool__, Tensor.__int__, Tensor.item, Tensor.tolist}  # questions
_LEADING = {  # to one
    *(Tensor.to, Tensor.bool, Tensor.long, Tensor.view, Tensor.reshape, Tensor.expand, Tensor.unsqueeze, pad),
    *(Tensor.__getitem__, Tensor.narrow, Tensor.__eq__, Tensor.eq, Tensor.__invert__),
    *(Tensor.sum, Tensor.all, torch.all, Tensor.any, torch.any),
}


class KnownTensor(Tensor):
    """A tensor on the device with a copy of its values on the host; see [Note: questions about masks]."""

    _host: Tensor
    _known_version: int

    @classmethod
    def of(cls, tensor: Tensor, host: Tensor) -> Tensor:
        """Return the tensor with its host copy; unchanged if in-place changes could not be detected."""
        if tensor.is_inference():
            return tensor
        known = tensor.as_subclass(cls)
        known._host, known._known_version = host, tensor._version
        return known

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the device, and on the host too if a branch on the result may follow."""
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
    """Return True if all tensors among the arguments have a host copy."""
    return all(
        isinstance(leaf, KnownTensor) and leaf._version == leaf._known_version
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor)
    )


def with_known_masks(moved: Any, batch: Any, model: nn.Module) -> Any:
    """Return the batch on the device with host copies of its masks.

    Args:
        moved: the batch on the device.
        batch: the batch from the dataloader.
        model: the model that will get the batch.
    """
    if not isinstance(moved, dict) or is_compiled(model):
        return moved
    masks = [name for name in moved if _is_known(name, batch[name])]
    if not masks:
        return moved
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    kernels = [attention_name(part.config) for part in parts]
    if any(map(compiles_masks, kernels)):
        return moved
    takes_all = all(kernel == "eager" or kernel.startswith("sdpa") for kernel in kernels)
    known = {
        name: KnownTensor.of(moved[name], batch[name])
        for name in masks
        if takes_all or bool(batch[name].all())
    }
    return {**moved, **known}


def compiles_masks(kernel: str) -> bool:
    """Return True if this attention, by transformers' name, compiles its mask functions: FlexAttention."""
    return kernel.startswith("flex")


def is_compiled(model: nn.Module) -> bool:
    """Return True if torch.compile has compiled the model or is tracing it: it does not branch on values then."""
    return torch.compiler.is_compiling() or model._compiled_call_impl is not None


def mask_of_all(ids: Tensor) -> Tensor:
    """Return a mask (B, S) that hides none of these tokens."""
    host = torch.ones(ids.shape, dtype=torch.long)
    moved = torch.ones(ids.shape, dtype=torch.long, device=ids.device)
    return KnownTensor.of(moved, host) if type(host) is Tensor else moved


def _is_known(name: Any, host: Any) -> bool:
    """Return True if an argument is a mask with values on the host; fake tensors have none."""
    is_mask = isinstance(name, str) and name.endswith("mask") and type(host) is Tensor and host.dim() == 2
    return is_mask and host.device.type == "cpu"
