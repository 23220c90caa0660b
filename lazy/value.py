"""What memory is to hold, as the calls that lead there. Recording calls is tensor.py, running them memory.py.

[Note: values] A value is one state of a tensor's memory. It never changes: a call that writes makes another one out of
it. So whoever reads a tensor names the value that it had then, and a value that nobody needs any more is forgotten:
for example what torch's constructors draw, where transformers draws all of it anew. A call that draws at random has
the generator's state with it, so each value can be made on its own, at any time and in any order, equal to the bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..cluster.agreement import batch_hash


@dataclass(frozen=True)
class Geometry:
    """Where in its memory a tensor's entries are."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> "Geometry":
        """A tensor's own."""
        return Geometry(
            dtype=tensor.dtype,
            size=tuple(tensor.size()),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )

    @staticmethod
    def dense(dtype: torch.dtype, size: Iterable[int]) -> "Geometry":
        """Of a tensor whose entries lie end to end, the first at the beginning of its memory."""
        shape = tuple(size)
        stride = tuple(prod(max(1, each) for each in shape[dim + 1 :]) for dim in range(len(shape)))
        return Geometry(dtype=dtype, size=shape, stride=stride, offset=0)

    @property
    def num_bytes(self) -> int:
        """How much memory its entries span, from the first to the last."""
        if 0 in self.size:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def of_memory(self, storage: UntypedStorage) -> Tensor:
        """The tensor of this geometry in some memory."""
        blank = torch.empty(0, dtype=self.dtype, device=storage.device)
        return blank.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Read:
    """A tensor among a call's arguments. `value` is None where it lies in the memory that the call writes to."""

    value: "Value | None"
    geometry: Geometry


class Source(Protocol):
    """A tensor that is somewhere else, in a file for example."""

    @property
    def geometry(self) -> Geometry:
        """Where its entries are in the memory that a call brings."""

    @property
    def num_bytes(self) -> int:
        """How long that memory is."""

    def __call__(self) -> Tensor:
        """The tensor, in memory that is nobody's to write to, nor to keep."""

    def look(self) -> str:
        """What tells it from other ones, on whatever machine."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call of one of torch's operators, or of a source.

    Args:
        function: what is called.
        args, kwargs: its arguments, `Read` in the place of tensors that are not there yet.
        generator_state: the state of the generator that it draws from, before it did; None if it draws nothing.
    """

    function: OpOverload | Source
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    generator_state: Tensor | None

    def reads(self) -> list[Read]:
        """The tensors that it needs."""
        return [each for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, Read)]

    def run(self, tensor_of: Callable[[Read], Tensor]) -> list[Tensor]:
        """Do it once more, and leave the generator as it was.

        Raises:
            RuntimeError: torch cannot; names the operator.
        """
        args, kwargs = tree_map_only(Read, tensor_of, (self.args, self.kwargs))
        try:
            with torch.no_grad(), _drawing_from(self.generator_state):
                returned = self.function(*args, **kwargs)
        except Exception as error:  # an operator may raise anything, and the user's call of it is long past
            raise RuntimeError(f"{self.function} could not be run: {error}") from error
        return [each for each in tree_leaves(returned) if isinstance(each, Tensor)]


@dataclass(frozen=True, eq=False)
class Value:
    """What some memory holds once a call is done; see [Note: values].

    Args:
        num_bytes: of the memory.
        call: the call.
        returned: which of the tensors that it returns lies in this memory, and where; None for a call that writes to
            memory that is there.
        before: what a call that writes finds there; None where it does not matter.
    """

    num_bytes: int
    call: Call
    returned: tuple[int, Geometry] | None = None
    before: "Value | None" = None

    @staticmethod
    def of_source(source: Source) -> "Value":
        """What is somewhere else."""
        call = Call(function=source, args=(), kwargs={}, generator_state=None)
        return Value(num_bytes=source.num_bytes, call=call, returned=(0, source.geometry))

    @property
    def is_borrowed(self) -> bool:
        """Whether the memory that it is found in is not its own."""
        return not isinstance(self.call.function, OpOverload)

    def needs(self) -> list["Value"]:
        """The values that it is made of, each once."""
        read = [each.value for each in self.call.reads()]
        return [each for each in dict.fromkeys([self.before, *read]) if each is not None]


def fingerprint(value: Value) -> int:
    """A number that differs where a value does: in its calls, their arguments, or the generator's state."""
    codes: dict[Value | None, int] = {None: 0}
    for each in in_order(value):
        call = each.call
        described = tree_map(lambda leaf: _described(leaf, codes), (call.args, dict(call.kwargs)))
        rest = (call.generator_state, codes[each.before], each.num_bytes, repr(each.returned))
        name = str(call.function) if isinstance(call.function, OpOverload) else call.function.look()
        codes[each] = batch_hash([name, described, rest])
    return codes[value]


def _described(leaf: Any, codes: Mapping[Value | None, int]) -> Any:
    if isinstance(leaf, Read):
        return [codes[leaf.value], repr(leaf.geometry)]
    return leaf if isinstance(leaf, Tensor) else repr(leaf)


def in_order(value: Value) -> list[Value]:
    """A value and all that it is made of, each after what it needs itself."""
    order: list[Value] = []
    seen: set[Value] = set()
    to_do = [(value, False)]
    while to_do:
        each, has_needs = to_do.pop()
        if has_needs:
            order.append(each)
        elif each not in seen:
            seen.add(each)
            to_do.append((each, True))
            to_do += [(need, False) for need in each.needs()]
    return order


@contextmanager
def _drawing_from(state: Tensor | None) -> Iterator[None]:
    """Let the CPU's generator begin at a state; afterwards it is where it was."""
    if state is None:
        yield
        return
    present = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(present)
