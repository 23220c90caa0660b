"""Values of lazy tensors: recorded calls, and their replay into memory.

[Note: values] A value is one state of a tensor's memory. It is immutable: a call that writes makes a new value from it.
A read refers to the value at the time of the read. Values that nothing refers to are dropped, for example the draws of
torch's constructors after transformers has drawn all weights again. A call that draws random numbers stores the
generator's state. So each value can be computed alone, at any time and in any order, with equal bits.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..cluster.hashes import batch_hash

_SAMPLES = 64


@dataclass(frozen=True)
class Geometry:
    """The layout of a tensor's entries in its memory."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> "Geometry":
        """Return the geometry of a tensor."""
        return Geometry(
            dtype=tensor.dtype,
            size=tuple(tensor.size()),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )

    def of_memory(self, storage: UntypedStorage) -> Tensor:
        """Return the tensor of this geometry in a storage."""
        blank = torch.empty(0, dtype=self.dtype, device=storage.device)
        return blank.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Read:
    """A tensor argument of a call. `value` is None if the tensor is in the memory that the call writes to."""

    value: "Value | None"
    geometry: Geometry


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """A recorded call of a torch operator.

    Args:
        function: the operator.
        args, kwargs: its arguments, with `Read` in place of lazy tensors.
        generator_state: state of the random generator before the call; None if the call draws no random numbers.
    """

    function: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    generator_state: Tensor | None

    def reads(self) -> list[Read]:
        """Return the lazy tensors that the call reads."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Read)]

    def run(self, tensor_of: Callable[[Read], Tensor]) -> list[Tensor]:
        """Repeat the call, without changing the state of the random generator.

        Args:
            tensor_of: returns the tensor of a `Read`.

        Returns:
            The tensors that the call returned.

        Raises:
            RuntimeError: the call failed; names the operator.
        """
        args, kwargs = tree_map_only(Read, tensor_of, (self.args, self.kwargs))
        try:
            with torch.no_grad(), _drawing_from(self.generator_state):
                returned = self.function(*args, **kwargs)
        except Exception as error:  # an operator may raise anything, and without the user's call in the trace
            raise RuntimeError(f"{self.function} could not be run: {error}") from error
        return [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, eq=False, kw_only=True)
class Value:
    """The content of a tensor's memory after a call; see [Note: values].

    Args:
        num_bytes: size of the memory.
        call: the call; None for the content of an existing tensor.
        existing: the existing tensor, for example of a file; it must not be written.
        returned: index of the returned tensor in this memory, and its geometry; None for a call that writes in place.
        before: the value before a call that writes in place; None if the call overwrites all of it.
    """

    num_bytes: int
    call: OperatorCall | None = None
    existing: Tensor | None = None
    returned: tuple[int, Geometry] | None = None
    before: "Value | None" = None

    def needs(self) -> list["Value"]:
        """Return the values from which this one is computed, without duplicates."""
        read_values = [] if self.call is None else [read.value for read in self.call.reads()]
        return [value for value in dict.fromkeys([self.before, *read_values]) if value is not None]


def fingerprint(value: Value) -> int:
    """Return a hash of a value's calls, their arguments and random states, and samples of the files."""
    codes: dict[Value | None, int] = {None: 0}
    for step in in_order(value):
        if step.existing is not None:
            codes[step] = batch_hash([tuple(step.existing.shape), _samples(step.existing)])
            continue
        assert step.call is not None
        arguments = tree_map(lambda leaf: _described(leaf, codes), (step.call.args, dict(step.call.kwargs)))
        others = (step.call.generator_state, codes[step.before], step.num_bytes, repr(step.returned))
        codes[step] = batch_hash([str(step.call.function), arguments, others])
    return codes[value]


def _samples(tensor: Tensor) -> Tensor:
    """Return a few entries, so that the file is not read completely."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor[:1].reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)].clone()


def _described(leaf: Any, codes: Mapping[Value | None, int]) -> Any:
    if isinstance(leaf, Read):
        return [codes[leaf.value], repr(leaf.geometry)]
    return leaf if isinstance(leaf, Tensor) else repr(leaf)


def in_order(value: Value) -> list[Value]:
    """Return a value and all values that it depends on, in topological order."""
    order: list[Value] = []
    seen: set[Value] = set()
    to_do = [(value, False)]
    while to_do:
        step, needs_are_done = to_do.pop()
        if needs_are_done:
            order.append(step)
        elif step not in seen:
            seen.add(step)
            to_do.append((step, True))
            to_do += [(need, False) for need in step.needs()]
    return order


@contextmanager
def _drawing_from(state: Tensor | None) -> Iterator[None]:
    """Set the state of the CPU's random generator for a block; afterwards the previous state is restored."""
    if state is None:
        yield
        return
    present = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(present)


def make(value: Value) -> UntypedStorage:
    """Compute a value into new CPU memory. Intermediate values are freed as soon as possible.

    Raises:
        RuntimeError: a repeated call failed; names the operator.
    """
    storage = borrow(value)
    return storage if value.existing is None else storage.clone()


def borrow(value: Value) -> UntypedStorage:
    """Compute a value as `make` does, but without copying an existing tensor: only for reading."""
    order = in_order(value)
    uses = Counter(need for step in order for need in step.needs())
    computed: dict[Value, UntypedStorage] = {}
    for step in order:
        needs = {need: computed[need] for need in step.needs()}
        for need in needs:
            uses[need] -= 1
            if not uses[need]:
                del computed[need]
        computed[step] = _made_of(step, needs, is_kept=step.before in computed)  # a later step needs it too
    return computed[value]


def _made_of(value: Value, needs: dict[Value, UntypedStorage], *, is_kept: bool) -> UntypedStorage:
    """Compute a value from the values that it needs. An in-place call reuses the old memory, unless that is kept."""
    if value.existing is not None:
        return value.existing.untyped_storage()
    assert value.call is not None
    if value.returned is not None:
        return _returned(value.call, *value.returned, value.num_bytes, needs)
    if value.before is None:
        storage = UntypedStorage(value.num_bytes, device="cpu")
    elif is_kept or value.before.existing is not None:
        storage = needs[value.before].clone()
    else:
        storage = needs[value.before]
    value.call.run(lambda read: read.geometry.of_memory(storage if read.value is None else needs[read.value]))
    return storage


def _returned(
    call: OperatorCall, index: int, geometry: Geometry, num_bytes: int, needs: dict[Value, UntypedStorage]
) -> UntypedStorage:
    """Return the memory of a returned tensor; a copy if the recorded geometry differs or the memory is not new."""

    def tensor_of(read: Read) -> Tensor:
        assert read.value is not None, "only a call that writes reads the memory that it writes to"
        return read.geometry.of_memory(needs[read.value])

    result = call.run(tensor_of)[index]
    if (result.dtype, tuple(result.size())) != (geometry.dtype, geometry.size):
        raise AssertionError(
            f"{call.function} returned {result.dtype} {tuple(result.size())}, not {geometry}"
        )
    storage = result.untyped_storage()
    inputs = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    existing = [*needs.values(), *(leaf.untyped_storage() for leaf in inputs)]
    is_new = storage.data_ptr() not in {known.data_ptr() for known in existing}
    if is_new and storage.nbytes() == num_bytes and Geometry.of(result) == geometry:
        return storage
    storage = UntypedStorage(num_bytes, device="cpu")
    geometry.of_memory(storage).copy_(result)
    return storage
