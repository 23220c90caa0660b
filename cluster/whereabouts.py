"""The place of a thread in words, read from its Python stack: schedule action, module, collective, line of the script.

Nothing is recorded in advance. The watch thread reads the stack of a thread that has been in one call for longer than
a second, so a warm step pays nothing. Objects whose methods wait or run one of several actions describe themselves
(`Described`). Communication that a stack does not show, because it was started before, is named by torch's recorder.

The thread that is read keeps running. Under the interpreter's lock its frames stay as they are; but in Python 3.11 the
allocation of a frame object may collect garbage, which gives the lock away: the process then deadlocks (cpython issue
106883) or reads freed memory. So nothing is collected meanwhile. Nor is anything read that changes without the lock, as
autograd's graph.
"""

import gc
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from . import group_sum
from .flight_recorder import Recorded, in_flight

_COLLECTIVES = (distributed_c10d.__file__, group_sum.__file__)
_MODULE_CALL = nn.Module._call_impl.__code__
_DATA = ("torch.utils.data.", "echelon.data.")
_NOT_OF_SCRIPTS = ("echelon.", "torch.", "importlib.")
_STDLIB = (sysconfig.get_path("stdlib"), "<")  # how its paths begin; "<" begins those of generated code
_INSTALLED = "site-packages"  # stands in the paths of installed packages
# The argument with the other rank, of functions of torch.distributed for two ranks.
_PEERS = {"recv": "src", "irecv": "src", "send": "dst", "isend": "dst"}


class Described(ABC):
    """An object whose methods stand on the stack of a thread that waits, and that says in words what they do."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the present action. Another thread calls it, so nothing may be changed."""

    def peers(self) -> tuple[int, ...]:
        """The global ranks that the present action waits for; none if it waits for no particular ones."""
        return ()


class DescribedCollective(Described):
    """A collective in flight, which waits for all ranks of its group.

    Attributes:
        activity: in words, "all-gathering slices".
        group: None is the world.
    """

    activity: ClassVar[str]
    group: dist.ProcessGroup | None

    def describe(self) -> str:
        """Name the activity and the group."""
        return f"{self.activity} {described_group(self.group)}"

    def peers(self) -> tuple[int, ...]:
        """All ranks of the group."""
        return tuple(dist.get_process_group_ranks(self.group))


class Place(NamedTuple):
    """The place of a thread.

    Args:
        steps: what it does, from the outside to the inside: an action, a module, a collective or a transfer.
        line: the innermost line of the user's script.
        waits_for: the ranks that its collective or transfer needs; empty if it waits for none.
        collective: name and group of its collective; empty if it is in none.
        sizes: shapes and dtypes of the collective's tensors.
        is_in_data: True within a dataloader.
    """

    steps: tuple[str, ...] = ()
    line: str = ""
    waits_for: tuple[int, ...] = ()
    collective: str = ""
    sizes: str = ""
    is_in_data: bool = False

    @classmethod
    def read(cls, values: Sequence[Any]) -> "Place":
        """Read a place from JSON, which has lists in place of tuples."""
        steps, line, waits_for, *others = values
        return cls(tuple(steps), line, tuple(waits_for), *others)

    def __str__(self) -> str:
        collective = [f"{self.collective} of {self.sizes or 'objects'}"] if self.collective else []
        steps = [*self.steps, *collective, *(["in the dataloader"] if self.is_in_data else [])]
        line = [f"({self.line})" if steps else f"at {self.line}"] if self.line else []
        return " ".join([", ".join(steps), *line]).strip()


def place_of(thread_id: int) -> Place:
    """Read the place of a thread of this process from its stack. No communication, no wait for a device."""
    with _no_collection():
        return _place(list(_outward(sys._current_frames().get(thread_id))))


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def place_of_error(error: BaseException) -> Place:
    """Read where an error was raised in this thread, from its traceback; the line is of the script that called."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)][::-1]
    return _place(frames)._replace(line=_script_line([*frames, *_outward(sys._getframe())]))


def _place(frames: Sequence[FrameType]) -> Place:
    """Read the place of a stack, the innermost frame first."""
    collective, sizes, ranks = _collective(frames)
    owners = {id(owner): owner for frame in frames if isinstance(owner := _owner(frame), Described)}
    described = list(owners.values())
    module = _module(frames)
    steps = [owner.describe() for owner in reversed(described)]
    if module:
        steps.insert(1 if steps else 0, module)
    peers = next((peers for owner in described if (peers := owner.peers())), ())
    if (
        not collective
        and not peers
        and (inner := next((frame for frame in frames if _module_name(frame).startswith("echelon.")), None))
    ):
        steps.append(f"{inner.f_code.co_name} of {_module_name(inner)[:-1]}:{inner.f_lineno}")
    return Place(
        steps=tuple(steps),
        line=_script_line(frames),
        waits_for=ranks or peers,
        collective=collective,
        sizes=sizes,
        is_in_data=any(_module_name(frame).startswith(_DATA) for frame in frames),
    )


def with_communication_in_flight(place: Place) -> Place:
    """Add the oldest collective of this process in flight to a place in which the stack shows none.

    For places that a thread does not leave: torch's recorder takes a tenth of a second.
    """
    recorded: Recorded | None = None if place.waits_for else next(iter(in_flight()), None)
    if recorded is None:
        return place
    groups = {str(group.group_name): group for group in distributed_c10d._world.pg_names}
    group = groups.get(recorded.group)
    name = f"{recorded.name} {recorded.description if group is None else described_group(group)}"
    # If Echelon's innermost function is a `wait` (see `_place`), it waits for this collective. Others may compute.
    is_waiting = bool(place.steps) and place.steps[-1].startswith("wait of ")
    if group is None or not is_waiting:
        return place._replace(steps=(*place.steps, f"with {name} in flight"))
    ranks = tuple(dist.get_process_group_ranks(group))
    return place._replace(collective=name, sizes=described_tensors(recorded.inputs), waits_for=ranks)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a stack, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_name(frame: FrameType) -> str:
    """The dotted name of the frame's module, with a dot at its end."""
    return f"{frame.f_globals.get('__name__', '')}."


def _locals(frame: FrameType) -> dict[str, Any]:
    """The local variables of a function's frame.

    Before Python 3.13 the frame keeps the dictionary that it returns, and with it the tensors of this moment: it is
    emptied.
    """
    kept = frame.f_locals
    values = dict(kept)
    if isinstance(kept, dict):
        kept.clear()
    return values


def _owner(frame: FrameType) -> Any:
    """The object whose method a frame of Echelon runs; None for functions and other frames."""
    is_method = frame.f_code.co_varnames[:1] == ("self",) and _module_name(frame).startswith("echelon.")
    return _locals(frame).get("self") if is_method else None


def _module(frames: Sequence[FrameType]) -> str:
    """The innermost module whose forward runs, by its path from the outermost one."""
    modules = [_locals(frame)["self"] for frame in frames if frame.f_code is _MODULE_CALL]
    if not modules:
        return ""
    paths = (path for path, module in modules[-1].named_modules() if module is modules[0])
    return f"module {next(paths, '') or type(modules[0]).__name__}"


def _collective(frames: Sequence[FrameType]) -> tuple[str, str, tuple[int, ...]]:
    """The collective that a thread is in, of torch.distributed or group_sum.py: name and group, tensors, ranks."""
    calls = [frame for frame in frames if frame.f_code.co_filename in _COLLECTIVES]
    public = [frame for frame in calls if not frame.f_code.co_name.startswith("_")]
    if not public:
        return "", "", ()
    values = _locals(public[0])
    name = public[0].f_code.co_name
    tensors = [
        (str(tensor.dtype).removeprefix("torch."), tensor.shape)
        for value in values.values()
        for tensor in _tensors(value)
    ]
    group = values.get("group")
    if (peer := values.get(_PEERS.get(name, ""))) is not None:
        return f"{name} with rank {peer}", described_tensors(tensors), (peer,)
    return (
        f"{name} {described_group(group)}",
        described_tensors(tensors),
        tuple(dist.get_process_group_ranks(group)),
    )


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [element for element in values if isinstance(element, Tensor)]


def described_group(group: dist.ProcessGroup | None) -> str:
    """Describe a group by its axis and its ranks; None is the world."""
    ranks = dist.get_process_group_ranks(group)
    axis = "" if group is None else (group.group_desc or "").removeprefix("mesh_")
    named = "" if axis in ("", "undefined", "default_pg") else f"{axis}, "
    return f"over {named}ranks {', '.join(map(str, ranks))}"


def described_tensors(tensors: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Describe dtypes and shapes."""
    texts = [f"{dtype}{list(shape)}" for dtype, shape in tensors]
    return ", ".join(dict.fromkeys(texts))


def _script_line(frames: Sequence[FrameType]) -> str:
    """The innermost line of the user's script, or of an installed package if no frame is of a script.

    Args:
        frames: the innermost first.
    """
    foreign = [
        frame
        for frame in frames
        if not _module_name(frame).startswith(_NOT_OF_SCRIPTS)
        and (_INSTALLED in frame.f_code.co_filename or not frame.f_code.co_filename.startswith(_STDLIB))
    ]
    scripts = [frame for frame in foreign if _INSTALLED not in frame.f_code.co_filename]
    innermost = next(iter(scripts or foreign), None)
    if innermost is None:
        return ""
    code = innermost.f_code
    return f"{Path(code.co_filename).name}:{innermost.f_lineno} in {code.co_name}"
