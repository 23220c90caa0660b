"""Values cut down to what is read of them. What a value is, is value.py.

[Note: parts of values] What is read from files is often converted, put together of several tensors (as experts are),
and then cut. Each of these calls is recorded, on whole tensors. Before they are run, a call that only copies is told
which box of its result is read, and is run on the same box of what it copies: so of what is in files nothing is looked
at but what stays. Where it is not seen to be a box (behind a reshape, for example) the whole is made, as ever.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from .value import Call, Geometry, Read, Value

_META = torch.device("meta")
_ops = torch.ops.aten


@dataclass(frozen=True)
class _Box:
    """A box of a tensor: where it begins and how long it is along each dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, read: Read) -> Read:
        """The same box of a tensor that is read."""
        geometry = read.geometry
        skipped = sum(start * stride for start, stride in zip(self.starts, geometry.stride, strict=True))
        return Read(read.value, replace(geometry, size=self.sizes, offset=geometry.offset + skipped))

    def along(self, dim: int, start: int, size: int) -> "_Box":
        """Another stretch along a dimension."""
        return _Box(
            (*self.starts[:dim], start, *self.starts[dim + 1 :]),
            (*self.sizes[:dim], size, *self.sizes[dim + 1 :]),
        )

    def without(self, dim: int) -> "_Box":
        """The box without a dimension."""
        return _Box(
            self.starts[:dim] + self.starts[dim + 1 :],
            self.sizes[:dim] + self.sizes[dim + 1 :],
        )


def pruned(value: Value) -> Value:
    """A value with the same content, of whose needs no more is made than is read; see [Note: parts of values]."""
    return _pruned(value, {})


def _pruned(value: Value, found: dict[Any, Value]) -> Value:
    """See `pruned`. What was done already is found, so that what two calls read stays one value."""
    if value not in found:
        reads = {id(each): _part(each, found) for each in value.call.reads()}
        if all(reads[id(each)] is each for each in value.call.reads()):
            found[value] = value
        else:
            args, kwargs = tree_map_only(
                Read, lambda each: reads[id(each)], (value.call.args, dict(value.call.kwargs))
            )
            found[value] = replace(value, call=replace(value.call, args=args, kwargs=kwargs))
    return found[value]


def _part(read: Read, found: dict[Any, Value]) -> Read:
    """What is read, of a value as small as may be."""
    value = read.value
    if value is None or value.before is not None or value.returned is None:
        return read
    divided = _DIVIDED.get(value.call.function)
    if divided is None:
        is_passed = value.call.function in _PASSED
        small = _pruned(value, found) if is_passed else value
        return read if small is value else Read(small, read.geometry)
    whole = value.returned[1]
    dims = _dims_of(read.geometry, whole)
    box = None if dims is None else _box_of(read.geometry, whole, dims)
    if dims is None or box is None or box.sizes == whole.size:
        small = _pruned(value, found)
        return read if small is value else Read(small, read.geometry)
    if (value, box) not in found:
        args = divided(value.call, box)
        if args is None:
            found[value, box] = value
        else:
            found[value, box] = _pruned(_value_of(replace(value.call, args=args)), found)
    small = found[value, box]
    if small is value:
        return read
    assert small.returned is not None
    return Read(small, _in_part(small.returned[1], read.geometry, dims))


def _dims_of(read: Geometry, whole: Geometry) -> list[int | None] | None:
    """Along which dimension of the whole each one of what is read goes, None for one of a single entry.

    None in all where they do not correspond.
    """
    if read.dtype != whole.dtype or 0 in read.size:
        return None
    by_stride = {
        stride: dim
        for dim, (size, stride) in enumerate(zip(whole.size, whole.stride, strict=True))
        if size > 1
    }
    dims = [
        None if size == 1 else by_stride.pop(stride, -1)
        for size, stride in zip(read.size, read.stride, strict=True)
    ]
    return None if -1 in dims else dims


def _box_of(read: Geometry, whole: Geometry, dims: list[int | None]) -> _Box | None:
    """Which box of the whole is read, None if it is none."""
    sizes, starts = [1] * len(whole.size), [0] * len(whole.size)
    for size, dim in zip(read.size, dims, strict=True):
        if dim is not None:
            sizes[dim] = size
    left = read.offset - whole.offset
    for dim in sorted(range(len(starts)), key=lambda dim: -whole.stride[dim]):
        if whole.size[dim] > 1:
            starts[dim], left = divmod(left, whole.stride[dim])
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    is_inside = all(
        start >= 0 and end <= size for start, end, size in zip(starts, ends, whole.size, strict=True)
    )
    return _Box(tuple(starts), tuple(sizes)) if is_inside and not left else None


def _in_part(part: Geometry, read: Geometry, dims: list[int | None]) -> Geometry:
    """How what was read of the whole is read of a part that holds nothing else."""
    stride = tuple(1 if dim is None else part.stride[dim] for dim in dims)
    return replace(read, stride=stride, offset=part.offset)


def _of_copy(call: Call, box: _Box) -> tuple[Any, ...] | None:
    source, *rest = call.args
    return (box.of(source), *rest) if isinstance(source, Read) else None


def _of_concatenation(call: Call, box: _Box) -> tuple[Any, ...] | None:
    tensors = _alike(call)
    if tensors is None or any(len(each.geometry.size) != len(box.sizes) for each in tensors):
        return None
    dim = _dim(call) % len(box.sizes)
    start, end, position, parts = box.starts[dim], box.starts[dim] + box.sizes[dim], 0, []
    for each in tensors:
        length = each.geometry.size[dim]
        first, last = max(start - position, 0), min(end - position, length)
        if first < last:
            parts.append(box.along(dim, first, last - first).of(each))
        position += length
    return parts, dim


def _of_stack(call: Call, box: _Box) -> tuple[Any, ...] | None:
    tensors = _alike(call)
    if tensors is None:
        return None
    dim = _dim(call) % len(box.sizes)
    chosen = tensors[box.starts[dim] : box.starts[dim] + box.sizes[dim]]
    return [box.without(dim).of(each) for each in chosen], dim


def _alike(call: Call) -> list[Read] | None:
    """The tensors that a call puts together, if all are to be read, in one format."""
    tensors = call.args[0]
    reads = [each for each in tensors if isinstance(each, Read)]
    is_one_format = len({each.geometry.dtype for each in reads}) == 1
    return reads if is_one_format and len(reads) == len(tensors) else None


def _dim(call: Call) -> int:
    return int(call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0))


def _value_of(call: Call) -> Value:
    """What a call returns that takes tensors to be read and returns one."""

    def outline(read: Read) -> Tensor:
        assert read.value is not None, "it writes to nothing"
        return read.geometry.of_memory(UntypedStorage(read.value.num_bytes, device=_META))

    on_meta = {"device": _META} if call.kwargs.get("device") is not None else {}
    returned = replace(call, kwargs={**call.kwargs, **on_meta}).run(outline)[0]
    num_bytes = returned.untyped_storage().nbytes()
    return Value(num_bytes=num_bytes, call=call, returned=(0, Geometry.of(returned)))


# Calls whose result is a copy of what they are given, by what they are given for a box of it; None if that is not seen.
_DIVIDED: dict[Any, Callable[[Call, _Box], tuple[Any, ...] | None]] = {
    _ops._to_copy.default: _of_copy,
    _ops.cat.default: _of_concatenation,
    _ops.clone.default: _of_copy,
    _ops.stack.default: _of_stack,
}
# Calls that are run on all that they are given, which may itself be a part.
_PASSED: tuple[OpOverload, ...] = (_ops.constant_pad_nd.default,)
