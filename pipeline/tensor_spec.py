"""What a receiver must know of tensors before they arrive, and how it is told. Who tells it is transport.py."""

import zlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Both ends write a dtype as its place in this list.
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
)


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def spec_of(tensor: Tensor) -> TensorSpec:
    """The shape and dtype of a tensor."""
    return TensorSpec(tensor.shape, tensor.dtype)


def takes_gradient(dtype: torch.dtype) -> bool:
    """Whether the next stage answers a tensor of this dtype with a gradient."""
    return dtype.is_floating_point or dtype.is_complex


def packed(specs: Sequence[TensorSpec], key: Hashable) -> tuple[Tensor, Tensor]:
    """Specs as two tensors of int64: length and checksum of the key, then dtype, dim and shape of each.

    Raises:
        ValueError: a dtype that cannot travel.
    """
    numbers = [len(specs)]
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ValueError(f"a stage sends a tensor of {spec.dtype}, and only {_DTYPES} can travel")
        numbers += [_DTYPES.index(spec.dtype), len(spec.shape), *spec.shape]
    return torch.tensor([len(numbers), checksum(key)]), torch.tensor(numbers)


def unpacked(numbers: Sequence[int]) -> tuple[TensorSpec, ...]:
    """The specs that `packed` wrote."""
    rest = iter(numbers)
    count = next(rest)
    specs = []
    for _ in range(count):
        dtype, dim = _DTYPES[next(rest)], next(rest)
        specs.append(TensorSpec(tuple(next(rest) for _ in range(dim)), dtype))
    return tuple(specs)


def checksum(key: Hashable) -> int:
    """A number that is equal on all processes for equal keys."""
    return zlib.crc32(repr(key).encode())


def told(specs: Sequence[TensorSpec]) -> str:
    """Specs in words."""
    return (
        ", ".join(f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}" for spec in specs)
        or "nothing"
    )
