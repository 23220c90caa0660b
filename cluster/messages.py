"""A few numbers from process to process of one machine. What they mean is slices.py's, read_sums.py's and direct.py's.

[Note: lines] A Unix socket goes between each two processes. The kernel wakes up who waits for a message; with gloo a
thread of its own takes it in and wakes up the one that waits. From asking to being there a number took 79 µs by gloo
and takes 22 here (2 cores), and the cores are busy with nothing else.

[Note: nobody waits to tell] The kernel has room for some 280 messages that nobody has taken in yet. What comes then
waits in the process, on each line for itself, and a thread that lives as long sends it: the process may wait elsewhere
meanwhile, for a collective of gloo's that the other process joins only once it has heard all.
"""

import atexit
import os
import socket
import struct
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from weakref import WeakSet, finalize

from .board import has_ended
from .faults import raise_if_in_vain

_TICK_SECONDS = 1.0  # how often who waits looks whether the other process still lives
# For room, when a process ends. Who ends takes in nothing any more, and is told so little.
_PATIENCE_SECONDS = 600.0
MOST_NUMBERS = 500  # in a message, besides its tag
_LONGEST = 8 * (MOST_NUMBERS + 1)  # bytes
_STRANGERS = 64  # that may stand before a door too
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Messages:
    """The lines from this process to others. One thread at a time uses them.

    Args:
        lines: by the others' ranks, connected, and closed with this.
        pids: their processes.
        patience: the seconds after which who waits for a message gives up.
    """

    def __init__(
        self, lines: Mapping[int, socket.socket], pids: Mapping[int, int], patience: float = 1800.0
    ) -> None:
        self._lines = {rank: _Line(line, pids[rank]) for rank, line in lines.items()}
        self._patience = patience
        self._heard: dict[tuple[int, int], deque[array[int]]] = {}  # what was not asked for yet
        self._closing = finalize(self, _leave, self._lines.values())

    def tell(self, rank: int, tag: int, *numbers: int) -> None:
        """Send a rank 64-bit integers; it finds them under the tag. Returns at once, also where it is gone."""
        self._lines[rank].send(array("q", (tag, *numbers)).tobytes())

    def hear(self, rank: int, tag: int) -> "array[int]":
        """What a rank has told under a tag, in the order in which it did. Waits for it.

        Raises:
            RuntimeError: the process is gone, or nothing came within the patience.
        """
        key, until = (rank, tag), 0.0
        while key not in self._heard:
            until = until or time.monotonic() + self._patience
            message = self._receive(rank, until)
            self._heard.setdefault((rank, message[0]), deque()).append(message[1:])
        numbers = self._heard[key].popleft()
        if not self._heard[key]:  # most tags are used once
            del self._heard[key]
        return numbers

    def count_heard(self, rank: int, tag: int) -> int:
        """How many messages are there without waiting, since they came before what was heard of that rank."""
        return len(self._heard.get((rank, tag), ()))

    def close(self) -> None:
        """Close the lines, of which no more is made use then. What was told still goes."""
        self._closing()

    def _receive(self, rank: int, until: float) -> "array[int]":
        line, is_over = self._lines[rank], False
        while True:
            with suppress(BlockingIOError):
                if message := line.receive():
                    return array("q", message)
                is_over = True
            raise_if_in_vain()
            process = f"process {line.pid}, rank {rank} of the group"
            if is_over:
                raise RuntimeError(f"Connection closed by peer: {process}")
            if time.monotonic() > until:
                raise RuntimeError(f"Timed out waiting {self._patience:.0f} s for {process}")
            # A child that it left may hold its end open. What it told before is there, and is taken in first.
            is_over = has_ended(line.pid)


class _Line:
    """A way to another process, and what there was no room for on it.

    Args:
        connected: a socket that keeps messages apart, and in order.
        pid: the other process.
    """

    def __init__(self, connected: socket.socket, pid: int) -> None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_TICK_SECONDS), 0))
        self.pid = pid
        self._socket, self._owner = connected, os.getpid()
        self._unsent: deque[bytes] = deque()  # the first is being sent
        self._lock = threading.Lock()
        self._is_left = False
        _LINES.add(self)

    @property
    def is_own(self) -> bool:
        """Whether it is this process's, and not that of one which this was forked from."""
        return os.getpid() == self._owner

    @property
    def is_sending(self) -> bool:
        """Whether something waits for room that there may be some day."""
        return bool(self._unsent) and not has_ended(self.pid)

    def send(self, message: bytes) -> None:
        """Send it, now or as soon as there is room; where nobody is there it is dropped."""
        if not self._unsent and self._goes(message):
            return
        with self._lock:
            self._unsent.append(message)
            is_first = len(self._unsent) == 1
        if is_first:
            atexit.unregister(_end_sending)  # once is enough
            atexit.register(_end_sending)
            threading.Thread(target=self._send_unsent, name="echelon messages", daemon=True).start()

    def receive(self) -> bytes:
        """The next message, empty where no more can come. Raises BlockingIOError where none comes for a while."""
        # Of what it has not read the other end tells in an error, once, before what it sent or in place of the end.
        for _ in range(2):
            with suppress(ConnectionResetError):
                if message := self._socket.recv(_LONGEST):
                    return message
        return b""

    def listen_no_more(self) -> None:
        """Let the other process drop what it has for this one."""
        with suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RD)

    def leave(self) -> None:
        """Close it, once what waits is sent."""
        if not self.is_own:  # a fork has no such thread, and perhaps a lock that nobody opens
            self._socket.close()
            return
        with self._lock:
            self._is_left = True
            if not self._unsent:
                self._socket.close()

    def _goes(self, message: bytes) -> bool:
        """Send; whether that is done."""
        try:
            self._socket.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except ConnectionError:  # it is gone: who waits for it will find that out
            pass
        return True

    def _send_unsent(self) -> None:
        """What a thread does, see [Note: nobody waits to tell]."""
        is_done = False
        while not is_done:
            with suppress(OSError):  # nobody is there
                self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
            with self._lock:
                self._unsent.popleft()
                is_done = not self._unsent
                if is_done and self._is_left:
                    self._socket.close()


_LINES: WeakSet[_Line] = WeakSet()


def _leave(lines: Iterable[_Line]) -> None:
    for line in lines:
        line.leave()


def _end_sending() -> None:
    """Wait until what was told is sent."""
    if is_ended_by_an_error():
        return
    lines = [line for line in _LINES if line.is_own]
    for line in lines:  # or two that end would wait for each other
        line.listen_no_more()
    wait_at_the_end(lambda: not any(line.is_sending for line in lines), _PATIENCE_SECONDS)


def is_ended_by_an_error() -> bool:
    """Whether an error ends this process: then others may wait for it, and it must wait for none of them."""
    return getattr(sys, "last_type", None) is not None


def wait_at_the_end(is_done: Callable[[], bool], patience: float) -> None:
    """Where a process ends, wait for what others do meanwhile, for so many seconds."""
    deadline = time.monotonic() + patience
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.001)


class Door:
    """Where other processes of this machine can open a line to this one."""

    def __init__(self, number: int, places: int) -> None:
        """Open it.

        Args:
            number: what nobody else calls theirs.
            places: how many may come.
        """
        with ExitStack() as stack:
            self._socket = stack.enter_context(_socket())
            self._socket.bind(_name(number))
            self._socket.listen(places + _STRANGERS)
            stack.pop_all()

    def let_in(self, ranks: Mapping[int, int]) -> dict[int, socket.socket]:
        """The lines of those that have come, by rank.

        Args:
            ranks: of those that have, by process.
        """
        lines: dict[int, socket.socket] = {}
        while len(lines) < len(ranks):
            line, _ = self._socket.accept()
            pid, _, _ = _CREDENTIALS.unpack(
                line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if pid in ranks:
                lines[ranks[pid]] = line
            else:  # a stranger
                line.close()
        return lines

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()


def open_door(number: int, places: int) -> Door | None:
    """A `Door`, None where there can be none."""
    try:
        return Door(number, places)
    except OSError:  # too many files are open, or such sockets are forbidden
        return None


def knock(number: int) -> socket.socket | None:
    """A line to the process whose door has the number, None where none can be had."""
    with ExitStack() as stack, suppress(OSError):
        line = stack.enter_context(_socket())
        line.setblocking(False)  # before a door at which too many stand nobody waits
        line.connect(_name(number))
        line.setblocking(True)
        stack.pop_all()
        return line
    return None


def _socket() -> socket.socket:
    """One that keeps messages apart, and in order."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _name(number: int) -> str:
    """In Linux's own name space for sockets, where nothing is left behind."""
    return f"\0echelon-{number:x}"
