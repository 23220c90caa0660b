"""Counting what this rank communicates, by axis and kind. Which memory it holds is not counted here."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .mesh import ParallelMesh

# Smaller messages are what ranks agree by (flags, norms, losses), and are listed apart.
SMALL_BYTES = 4096

# By operation: what it is called, and which argument is counted. A gather is counted by its result, a reduce-scatter
# by what goes in: the whole tensor.
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
# By kind: how often a rank sends it in a ring of d, as the factor of (d-1)/d.
_RING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1, "broadcast": 1}


@dataclass
class Count:
    """Messages of one kind.

    Attributes:
        calls: how many.
        nbytes: of the whole tensors that they are about.
        sent: bytes that this rank sends for them, if collectives run as rings.
    """

    calls: int = 0
    nbytes: int = 0
    sent: float = 0.0


class Traffic(TorchDispatchMode):
    """A context that counts this process's communication.

    Args:
        mesh: by whose axes messages are counted.

    Attributes:
        counts: by axis (or "world") and kind; kinds of messages below `SMALL_BYTES` begin with "small ".
    """

    open: ClassVar[list["Traffic"]] = []
    pauses: ClassVar[bool] = False  # within `one_collective`

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.counts: dict[tuple[str, str], Count] = defaultdict(Count)
        self._mesh = mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; count it if it communicates."""
        operation = func._schema.name.split("::")[1] if func.namespace == "c10d" else ""
        if operation in _KINDS and not Traffic.pauses:  # barriers and the like move nothing
            kind, place = _KINDS[operation]
            nbytes = sum(tensor.nbytes for tensor in _tensors(args[place]))
            self.count(kind, nbytes, _group_of(args))
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> "Traffic":
        """Begin to count."""
        Traffic.open.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        Traffic.open.remove(self)
        super().__exit__(*error)

    def count(self, kind: str, nbytes: int, group: dist.ProcessGroup) -> None:
        """Count one message, or one collective, about tensors of so many bytes."""
        count = self.counts[self._mesh.axis_of(group), f"small {kind}" if nbytes < SMALL_BYTES else kind]
        count.calls += 1
        count.nbytes += nbytes
        count.sent += nbytes * _share_sent(kind, group.size())


@contextmanager
def one_collective(kind: str, nbytes: int, group: dist.ProcessGroup) -> Iterator[None]:
    """Count all messages inside as one collective.

    Args:
        kind: of the collective.
        nbytes: of the whole tensor that it is about.
        group: of several ranks.
    """
    for traffic in Traffic.open:
        traffic.count(kind, nbytes, group)
    Traffic.pauses = True
    try:
        yield
    finally:
        Traffic.pauses = False


def _share_sent(kind: str, size: int) -> float:
    """The part of a message that a rank sends."""
    return _RING[kind] * (size - 1) / size if kind in _RING else float(kind == "send")


def _group_of(args: Any) -> dist.ProcessGroup:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    raise AssertionError(f"no process group among {args}")


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for item in tree for tensor in _tensors(item)]
