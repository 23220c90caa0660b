"""Memory that holds a value. Of what values are made is value.py, how little of them is enough part.py."""

from collections import Counter

from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from .part import pruned
from .value import Geometry, Value, in_order


def make(value: Value) -> UntypedStorage:
    """Memory on the CPU that holds a value, of its own. What that is made of is freed as soon as it is not needed.

    Raises:
        RuntimeError: torch refuses to repeat a call, or a file was changed; names the operator or tensor.
    """
    made = borrow(value)
    return made.clone() if value.is_borrowed else made


def borrow(value: Value) -> UntypedStorage:
    """As `make`, or for what is in a file the pages of that, which are as private, and read when they are looked at."""
    value = pruned(value)
    order = in_order(value)
    uses = Counter(need for each in order for need in each.needs())
    found: dict[Value, UntypedStorage] = {}
    for each in order:
        needs = {need: found[need] for need in each.needs()}
        for need in needs:
            uses[need] -= 1
            if not uses[need]:
                del found[need]
        found[each] = _made_of(each, needs, is_kept=each.before in found)
    return found[value]


def _made_of(value: Value, needs: dict[Value, UntypedStorage], *, is_kept: bool) -> UntypedStorage:
    """A value from the memory of those that it needs; what it writes to is taken over, unless it is kept."""
    if value.returned is not None:
        return _returned(value, needs)
    if value.before is None:
        own = UntypedStorage(value.num_bytes, device="cpu")
    elif is_kept or value.before.is_borrowed:
        own = needs[value.before].clone()
    else:
        own = needs[value.before]
    value.call.run(lambda read: read.geometry.of_memory(own if read.value is None else needs[read.value]))
    return own


def _returned(value: Value, needs: dict[Value, UntypedStorage]) -> UntypedStorage:
    """The memory of a tensor that a call returns; a copy where it lies otherwise than was recorded, or is not new."""
    assert value.returned is not None
    index, geometry = value.returned
    inputs = [each for each in tree_leaves((value.call.args, value.call.kwargs)) if isinstance(each, Tensor)]
    old = {each.data_ptr() for each in (*needs.values(), *(each.untyped_storage() for each in inputs))}
    found = value.call.run(lambda read: read.geometry.of_memory(needs[_known(read.value)]))[index]
    if (found.dtype, tuple(found.size())) != (geometry.dtype, geometry.size):
        raise AssertionError(
            f"{value.call.function} returned {found.dtype} {tuple(found.size())}, not {geometry}"
        )
    own = found.untyped_storage()
    if Geometry.of(found) == geometry and own.nbytes() == value.num_bytes and own.data_ptr() not in old:
        return own
    own = UntypedStorage(value.num_bytes, device="cpu")
    geometry.of_memory(own).copy_(found)
    return own


def _known(value: Value | None) -> Value:
    assert value is not None, "only a call that writes reads the memory that it writes to"
    return value
