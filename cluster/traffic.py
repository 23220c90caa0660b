"""Count the communication of this rank, by axis and kind."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Smaller messages (flags, norms, losses) are listed separately.
SMALL_BYTES = 4096

# By operation: its kind, and the index of the argument whose bytes count, the full tensor: the result of a gather,
# the input of a reduce-scatter.
_KINDS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
_UNEVEN = "alltoall_base_"
# By kind: the factor of (d-1)/d by which a rank sends the tensor in a ring of d ranks.
_RING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1, "broadcast": 1}


@dataclass
class Count:
    """Messages of one kind.

    Attributes:
        calls: number of messages.
        nbytes: bytes of their full tensors.
        sent: bytes that this rank sends, if collectives run as rings.
    """

    calls: int = 0
    nbytes: int = 0
    sent: float = 0.0

    def __add__(self, other: "Count") -> "Count":
        return Count(self.calls + other.calls, self.nbytes + other.nbytes, self.sent + other.sent)

    def __sub__(self, other: "Count") -> "Count":
        return Count(self.calls - other.calls, self.nbytes - other.nbytes, self.sent - other.sent)


class HasAxes(Protocol):
    """A mesh that knows the axes of its groups."""

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """Return the axis of a group; "world" for any other group."""
        ...


class Traffic(TorchDispatchMode):
    """Context manager that counts this process's communication.

    Args:
        mesh: the mesh whose axes messages are attributed to.

    Attributes:
        counts: counts by axis (or "world") and kind; kinds of messages below `SMALL_BYTES` begin with "small ".
    """

    open: ClassVar[list["Traffic"]] = []
    pauses: ClassVar[bool] = False  # True within `one_collective`

    def __init__(self, mesh: HasAxes) -> None:
        super().__init__()
        self.counts: dict[tuple[str, str], Count] = defaultdict(Count)
        self._mesh = mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; count it if it communicates."""
        self.note(func, args)
        return func(*args, **(kwargs or {}))

    def note(self, func: Any, args: Any) -> None:
        """Count an operation if it communicates; for a mode that sees all operations anyway."""
        operation = func._schema.name.split("::")[1] if func.namespace == "c10d" else ""
        if operation in _KINDS and not Traffic.pauses:  # others, such as barriers, move no data
            kind, argument = _KINDS[operation]
            nbytes = sum(tensor.nbytes for tensor in tensors_of((args[argument],)))
            self.count(
                kind, nbytes, _group_of(args), sent=_sent_unevenly(args) if operation == _UNEVEN else None
            )

    def __enter__(self) -> "Traffic":
        """Start counting."""
        Traffic.open.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        Traffic.open.remove(self)
        super().__exit__(*error)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Count what is noted within the block, and `one_collective`, without seeing operations."""
        Traffic.open.append(self)
        try:
            yield
        finally:
            Traffic.open.remove(self)

    def count(self, kind: str, nbytes: int, group: dist.ProcessGroup, sent: int | None = None) -> None:
        """Count one message or collective with full tensors of `nbytes` bytes; `sent` None is as in a ring."""
        count = self.counts[self._mesh.axis_of(group), f"small {kind}" if nbytes < SMALL_BYTES else kind]
        count.calls += 1
        count.nbytes += nbytes
        count.sent += sent if sent is not None else nbytes * _share_sent(kind, group.size())


@contextmanager
def one_collective(kind: str, nbytes: int, group: dist.ProcessGroup) -> Iterator[None]:
    """Count all messages inside as one collective.

    Args:
        kind: kind of the collective.
        nbytes: bytes of its full tensor.
        group: its group, of several ranks.
    """
    for traffic in Traffic.open:
        traffic.count(kind, nbytes, group)
    Traffic.pauses = True
    try:
        yield
    finally:
        Traffic.pauses = False


def _sent_unevenly(args: Any) -> int | None:
    """Return the bytes that an all-to-all sends to other ranks; None if all ranks get equally many."""
    _, rows, group, _, lengths, *_ = args
    if not lengths:
        return None
    rank = dist.ProcessGroup.unbox(group).rank()
    return int(rows.nbytes * (sum(lengths) - lengths[rank]) // max(1, sum(lengths)))


def _share_sent(kind: str, size: int) -> float:
    """The bytes that a rank sends, as a fraction of the full tensor."""
    return _RING[kind] * (size - 1) / size if kind in _RING else float(kind == "send")


def _group_of(args: Any) -> dist.ProcessGroup:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    raise AssertionError(f"no process group among {args}")


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results, and those in lists among them."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_of(value)
    return tensors
