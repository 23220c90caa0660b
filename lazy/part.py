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
    return _Pruning().value(value)


class _Pruning:
    """What was cut down so far, so that what two calls read stays one value."""

    def __init__(self) -> None:
        self._values: dict[Value, Value] = {}
        self._parts: dict[tuple[Value, _Box], tuple[Value, Geometry] | None] = {}

    def value(self, value: Value) -> Value:
        """See `pruned`."""
        if value not in self._values:
            small = (
                value if value.call.function not in _NEW else replace(value, call=_of_no_content(value.call))
            )
            reads = {id(each): self._read(each) for each in small.call.reads()}
            if any(reads[id(each)] is not each for each in small.call.reads()):
                args, kwargs = tree_map_only(
                    Read, lambda each: reads[id(each)], (small.call.args, dict(small.call.kwargs))
                )
                small = replace(small, call=replace(small.call, args=args, kwargs=kwargs))
            self._values[value] = _copied(small) or small
        return self._values[value]

    def _read(self, read: Read) -> Read:
        """What is read, of a value as small as may be."""
        value = read.value
        if value is None or value.returned is None or value.call.function not in (*_DIVIDED, *_NEW):
            return read
        whole = value.returned[1]
        place = _place_of(read.geometry, whole) if value.call.function in _DIVIDED else None
        if place is not None and place[0].sizes != whole.size:
            box, dims = place
            if (part := self._part(value, box)) is not None:
                return Read(part[0], _in_part(part[1], read.geometry, dims))
        small = self.value(value)
        return read if small is value else Read(small, read.geometry)

    def _part(self, value: Value, box: _Box) -> tuple[Value, Geometry] | None:
        """A box of what a call returns, and where in its memory it is; None where the call has to return all of it."""
        if (value, box) not in self._parts:
            args = _DIVIDED[value.call.function](value.call, box)
            if args is None:
                self._parts[value, box] = None
            else:
                part = _value_of(replace(value.call, args=args))
                assert part.returned is not None
                self._parts[value, box] = self.value(part), part.returned[1]
        return self._parts[value, box]


def _of_no_content(call: Call) -> Call:
    """A call that wants a tensor's format alone, given that."""
    source, *rest = call.args
    if not isinstance(source, Read):
        return call
    return replace(call, args=(torch.empty(0, dtype=source.geometry.dtype), *rest))


def _copied(value: Value) -> Value | None:
    """What a value is an exact copy of, in memory of the same form; so it is the same value."""
    if value.call.function is not _ops.clone.default or value.returned is None:
        return None
    read = value.call.args[0]
    if not isinstance(read, Read) or read.value is None:
        return None
    if _form(read.geometry) != _form(value.returned[1]):
        return None
    return read.value if read.value.num_bytes == value.num_bytes else None


def _form(geometry: Geometry) -> Geometry:
    """The same where a dimension has a single entry, whatever its stride."""
    sizes = zip(geometry.size, geometry.stride, strict=True)
    return replace(geometry, stride=tuple(stride if size != 1 else 1 for size, stride in sizes))


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


def _place_of(read: Geometry, whole: Geometry) -> tuple[_Box, list[int | None]] | None:
    """Which box of the whole is read, and along which of its dimensions; None if it is no box."""
    if (dims := _dims_of(read, whole)) is None:
        return None
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
    return (_Box(tuple(starts), tuple(sizes)), dims) if is_inside and not left else None


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


def _of_padding(call: Call, box: _Box) -> tuple[Any, ...] | None:
    source, pads, *fill = call.args
    if not isinstance(source, Read) or min(pads) < 0:
        return None
    padded = list[int]()
    for dim, size in enumerate(source.geometry.size):
        index = 2 * (len(source.geometry.size) - 1 - dim)
        before = pads[index] if index < len(pads) else 0
        start, length = box.starts[dim] - before, box.sizes[dim]
        first, last = (min(max(place, 0), size) for place in (start, start + length))
        box = box.along(dim, first, last - first)
        missing = min(max(-start, 0), length)
        padded = [missing, length - missing - (last - first), *padded]
    return (box.of(source), padded, *fill)


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
    _ops.constant_pad_nd.default: _of_padding,
    _ops.stack.default: _of_stack,
}
# Calls that look at nothing of their tensor but its format and device.
_NEW = (_ops.new_empty.default, _ops.new_full.default, _ops.new_ones.default, _ops.new_zeros.default)
