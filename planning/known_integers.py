"""Integers with values in a trace on fake tensors, for models whose forward reads them on the host.

Vision-language models read the sizes of images, and count the tokens at which their features belong. So tokens, sizes
and all that is computed of them alone keep their values, up to `LARGEST` elements. Weights and activations have none.
"""

from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from ..cluster.traffic import tensors_of

LARGEST = 2**20
_aten = torch.ops.aten
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_FILLED = (_aten.full, _aten.zeros, _aten.ones, _aten.empty)


class KnownIntegers(TorchDispatchMode):
    """A context, within that of fake tensors, in which operations on integers with values are computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation if it has only integers with values; otherwise leave it to the outer contexts."""
        kwargs = kwargs or {}
        inputs = [*tensors_of(args), *tensors_of(kwargs.values())]
        is_known = (
            all(map(_is_known, inputs)) and _is_small(inputs)
            if inputs
            else _makes_integers(func, args, kwargs)
        )
        if is_known:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in _INDEXED:  # the number of elements under a mask is known
            args = (args[0], [index for mask in args[1] for index in _as_indices(mask)], *args[2:])
        return func(*args, **kwargs)


def _is_known(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


def _is_small(inputs: list[Tensor]) -> bool:
    """Return True if the inputs, and what they are broadcast to, have few elements."""
    sizes = [tensor.numel() for tensor in inputs]
    with suppress(RuntimeError):  # of operations that do not broadcast
        sizes.append(prod(torch.broadcast_shapes(*(tensor.shape for tensor in inputs))))
    return max(sizes) <= LARGEST


def _makes_integers(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if an operation without inputs makes a few integers."""
    dtype, packet = kwargs.get("dtype"), func._overloadpacket
    if packet is _aten.arange:
        numbers = [*args, 0]
        is_small = max(numbers) - min(numbers) <= LARGEST
        return is_small and (_is_integer(dtype) if dtype else all(isinstance(number, int) for number in args))
    if packet not in _FILLED or prod(args[0]) > LARGEST:
        return False
    return _is_integer(dtype) if dtype else packet is _aten.full and isinstance(args[1], int)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _as_indices(mask: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the indices of the elements under a mask; all of them if it has no values. Others as they are."""
    if mask is None or mask.dtype != torch.bool or mask.numel() > LARGEST:
        return (mask,)
    with unset_fake_temporarily():
        return torch.nonzero(mask if _is_known(mask) else torch.ones(mask.shape), as_tuple=True)
