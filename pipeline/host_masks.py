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

# Functions that read the values of a mask: the host copy answers them.
_READS = {Tensor.__bool__, Tensor.__int__, Tensor.item, Tensor.tolist}
# Functions whose result such a read may follow: computed on the host copy too.
_REPEATED_ON_HOST = {
    *(Tensor.to, Tensor.bool, Tensor.long, Tensor.view, Tensor.reshape, Tensor.expand, Tensor.unsqueeze, pad),
    *(Tensor.__getitem__, Tensor.narrow, Tensor.__eq__, Tensor.eq, Tensor.__invert__),
    *(Tensor.sum, Tensor.all, torch.all, Tensor.any, torch.any),
}


class TensorWithHostCopy(Tensor):
    """A tensor on the device with a copy of its values on the host; see [Note: questions about masks]."""

    _host: Tensor
    _copied_version: int

    @classmethod
    def of(cls, tensor: Tensor, host: Tensor) -> Tensor:
        """Return the tensor with its host copy; unchanged if in-place changes could not be detected."""
        if tensor.is_inference():
            return tensor
        copied = tensor.as_subclass(cls)
        copied._host, copied._copied_version = host, tensor._version
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function on the device, and on the host too if a branch on the result may follow.

        A read of the values is answered by the host copy. Other functions return plain tensors.
        """
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            uses_host = func in _READS or func in _REPEATED_ON_HOST
            if torch.compiler.is_compiling() or not (uses_host and _have_host_copies(args, kwargs)):
                return func(*args, **kwargs)
            if func in _READS:
                return func(args[0]._host)
            result = func(*args, **kwargs)
            if func is Tensor.to:
                host = args[0]._host.to(result.dtype)
            else:
                host = func(*tree_map_only(cls, _host, args), **tree_map_only(cls, _host, kwargs))
            return cls.of(result, host)


def _host(tensor: TensorWithHostCopy) -> Tensor:
    return tensor._host


def _have_host_copies(args: Any, kwargs: Any) -> bool:
    """Return True if all tensors among the arguments have a host copy."""
    return all(
        isinstance(leaf, TensorWithHostCopy) and leaf._version == leaf._copied_version
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor)
    )


def with_host_copies(device_batch: Any, batch: Any, model: nn.Module) -> Any:
    """Attach host copies to the masks of a batch, as far as the model's attention allows it.

    See [Note: questions about masks].

    Args:
        device_batch: the batch on the device.
        batch: the same batch as the dataloader gave it, of which masks on the host are the copies.
        model: the model that will get the batch.

    Returns:
        The batch on the device; other values than masks, and batches that are no dict, are unchanged.
    """
    if not isinstance(device_batch, dict) or is_compiled(model):
        return device_batch
    masks = [name for name in device_batch if _is_host_mask(name, batch[name])]
    if not masks:
        return device_batch
    transformers_models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    kernels = [attention_name(transformers_model.config) for transformers_model in transformers_models]
    if any(map(compiles_masks, kernels)):
        return device_batch
    keeps_masks_from_layers = all(kernel == "eager" or kernel.startswith("sdpa") for kernel in kernels)
    copied = {
        name: TensorWithHostCopy.of(device_batch[name], batch[name])
        for name in masks
        if keeps_masks_from_layers or bool(batch[name].all())
    }
    return {**device_batch, **copied}


def compiles_masks(kernel: str) -> bool:
    """Return True if this attention, by transformers' name, compiles its mask functions: FlexAttention."""
    return kernel.startswith("flex")


def is_compiled(model: nn.Module) -> bool:
    """Return True if torch.compile has compiled the model or is tracing it: it does not branch on values then."""
    return torch.compiler.is_compiling() or model._compiled_call_impl is not None


def mask_of_all(ids: Tensor) -> Tensor:
    """Return a mask (B, S) that hides none of these tokens."""
    host = torch.ones(ids.shape, dtype=torch.long)
    mask = torch.ones(ids.shape, dtype=torch.long, device=ids.device)
    # A fake tensor, as torch.compile's and FakeTensorMode's, has no values to keep.
    return TensorWithHostCopy.of(mask, host) if type(host) is Tensor else mask


def _is_host_mask(name: Any, host: Any) -> bool:
    """Return True if an argument is a mask with values on the host; fake tensors have none."""
    is_mask = isinstance(name, str) and name.endswith("mask") and type(host) is Tensor and host.dim() == 2
    return is_mask and host.device.type == "cpu"
