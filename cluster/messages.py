"""A few numbers from process to process of one machine. What they mean is slices.py's, read_sums.py's and direct.py's.

[Note: lines] A Unix socket goes between each two processes. The kernel wakes up who waits for a message; with gloo a
thread of its own takes it in and wakes up the one that waits. From asking to being there a number took 79 µs by gloo
and takes 22 here (2 cores), and the cores are busy with nothing else.

[Note: nobody waits to tell] A message that the kernel has no room for waits in the process, and goes as soon as there
is room and this process waits for one from whomever: so two that tell each other much cannot block each other.
"""

import socket
import struct
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from weakref import WeakSet, finalize

from .board import has_ended

_TICK_SECONDS = 1.0  # how often who waits looks whether the other process still lives
_PAUSE_SECONDS = 0.001  # between two attempts to send what there was no room for
MOST_NUMBERS = 500  # in a message, besides its tag
_LONGEST = 8 * (MOST_NUMBERS + 1)  # bytes
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
        self._lines, self._pids, self._patience = lines, pids, patience
        self._heard: dict[tuple[int, int], deque[array[int]]] = defaultdict(deque)
        self._unsent: deque[tuple[int, bytes]] = deque()
        for line in lines.values():
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_TICK_SECONDS), 0))
        finalize(self, _close, lines.values())

    def tell(self, rank: int, tag: int, *numbers: int) -> None:
        """Send a rank 64-bit integers; it finds them under the tag. Returns at once, also where it is gone."""
        message = array("q", (tag, *numbers)).tobytes()
        if self._unsent or not self._goes(rank, message):
            self._unsent.append((rank, message))
            _WAITING.add(self)

    def hear(self, rank: int, tag: int) -> "array[int]":
        """What a rank has told under a tag, in the order in which it did. Waits for it.

        Raises:
            RuntimeError: the process is gone, or nothing came within the patience.
        """
        found = self._heard[rank, tag]
        until = 0.0
        while not found:
            until = until or time.monotonic() + self._patience
            message = self._receive(rank, until)
            self._heard[rank, message[0]].append(message[1:])
        return found.popleft()

    def send_what_waits(self) -> None:
        """Send what there was no room for, as far as there is now."""
        while self._unsent and self._goes(*self._unsent[0]):
            self._unsent.popleft()
        if not self._unsent:
            _WAITING.discard(self)

    def _goes(self, rank: int, message: bytes) -> bool:
        """Send; whether that is done."""
        try:
            self._lines[rank].send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except ConnectionError:  # it is gone: who waits for it will find that out
            pass
        return True

    def _receive(self, rank: int, until: float) -> "array[int]":
        message = array("q")
        while not message:
            for each in list(_WAITING):
                each.send_what_waits()
            try:
                message.frombytes(self._next(rank))
            except BlockingIOError:
                self._look_after(rank, until)
        return message

    def _next(self, rank: int) -> bytes:
        line, flags = self._lines[rank], socket.MSG_DONTWAIT if _WAITING else 0
        with suppress(
            ConnectionResetError
        ):  # told once to who had not read all; what the other sent is still there
            if message := line.recv(_LONGEST, flags):
                return message
        if message := line.recv(_LONGEST, flags):
            return message
        raise RuntimeError(f"Connection closed by peer: process {self._pids[rank]}, rank {rank} of the group")

    def _look_after(self, rank: int, until: float) -> None:
        """Raise where it is in vain to wait on."""
        process = f"process {self._pids[rank]}, rank {rank} of the group"
        if time.monotonic() > until:
            raise RuntimeError(f"Timed out waiting {self._patience:.0f} s for {process}")
        if _WAITING:
            time.sleep(_PAUSE_SECONDS)
        elif has_ended(self._pids[rank]):  # a child that it left may hold its end open
            raise RuntimeError(f"Connection closed by peer: {process}, has ended")


# With messages that there was no room for.
_WAITING: WeakSet[Messages] = WeakSet()


class Door:
    """Where other processes of this machine can open a line to this one."""

    def __init__(self, number: int, places: int) -> None:
        """Open it.

        Args:
            number: what nobody else calls theirs.
            places: how many may come.
        """
        self._socket = _socket()
        self._socket.bind(_name(number))
        self._socket.listen(max(places, 1))

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


def knock(number: int) -> socket.socket | None:
    """A line to the process whose door has the number, None where none can be had."""
    line = _socket()
    try:
        line.connect(_name(number))
    except OSError:
        line.close()
        return None
    return line


def _socket() -> socket.socket:
    """One that keeps messages apart, and in order."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _name(number: int) -> str:
    """In Linux's own name space for sockets, where nothing is left behind."""
    return f"\0echelon-{number:x}"


def _close(lines: Iterable[socket.socket]) -> None:
    for line in lines:
        line.close()
