"""The store of one attempt of a run that torchrun may restart.

[Note: attempts] torchrun's agents keep one store for all attempts. It still has the addresses that gloo and NCCL
published in earlier ones, their heartbeats and events, so every attempt gets a prefix of its own. The restart count
cannot be the prefix: agents count separately, and count no change of membership. So the processes agree by random
numbers, and every process draws its own:

    rank 0        draws NAME, sets current = NAME, waits for all NAME/RANK, sets NAME/members to their numbers
    other ranks   read `current`, set NAME/RANK to their number, wait until NAME/members has it or `current` changes

- Rank 0 reads no earlier rank's number: all keys below NAME were written by processes that read NAME.
- No rank reads an earlier answer as its own: members of an earlier attempt lack the number of a new process. It goes
  on reading `current`, which the new rank 0 sets.
- A process of an earlier attempt that is still ending writes below the earlier name only. One that is still starting
  (static rendezvous, where agents do not stop each other's processes) may join, as the only process of its rank: a key
  has one number, and a process whose number was replaced is no member.
- A member that ends before the group is connected makes all members fail, and torchrun starts the next attempt.

NCCL's monitor writes two keys outside of every prefix, and ends the process that reads them. Rank 0 deletes those of
the attempt before. (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp: kStoreDumpKey, kStoreErrorSignalKey)
"""

import secrets
import time
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from .errors import RankFailure

_NCCL_SIGNALS = ("exception_dump", "remote_error")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.25


def shares_store(environment: Mapping[str, str]) -> bool:
    """Return True if the store of env:// is that of torchrun's agents, which outlives an attempt."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def may_restart(environment: Mapping[str, str]) -> bool:
    """Return True if torchrun may start this process again, with the store of the attempt before."""
    return shares_store(environment) and int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def attempt_store(store: dist.Store, rank: int, world_size: int, *, timeout_seconds: float) -> dist.Store:
    """The keys of this attempt in the store of torchrun's agents; see [Note: attempts].

    Every rank must call: it waits for all of them, through the store.

    Raises:
        RankFailure: another rank did not start in time.
    """
    attempts, number = dist.PrefixStore("echelon/attempts", store), secrets.token_hex(8)
    if rank == 0:
        for key in _NCCL_SIGNALS:
            store.delete_key(key)
        name = number
        _gather_members(attempts, name, world_size, timeout_seconds)
    else:
        name = _join(attempts, rank, number, timeout_seconds)
    return dist.PrefixStore(name, attempts)


def _gather_members(attempts: dist.Store, name: str, world_size: int, timeout_seconds: float) -> None:
    """Open an attempt as its rank 0, and answer once all other ranks have joined."""
    keys = {rank: f"{name}/{rank}" for rank in range(1, world_size)}
    attempts.set("current", name)
    for _ in _polls(timeout_seconds):
        if attempts.check([*keys.values()]):
            numbers = attempts.multi_get([*keys.values()]) if keys else []
            attempts.set(f"{name}/members", b" ".join(numbers).decode())
            return
    absent = [rank for rank, key in keys.items() if not attempts.check([key])]
    absent = absent or [*keys][-1:]  # the last ones joined just after the timeout
    raise RankFailure(
        f"rank {absent[0]} did not start within {timeout_seconds:g} s, as {len(absent)} of {world_size} ranks did not: "
        "look at its own output, and at its node",
        absent[0],
    )


def _join(attempts: dist.Store, rank: int, number: str, timeout_seconds: float) -> str:
    """Join the current attempt, and the one that replaces it until rank 0 has answered; return its name."""
    name = ""
    for _ in _polls(timeout_seconds):
        current = attempts.get("current").decode() if attempts.check(["current"]) else name
        if current != name:
            name = current
            attempts.set(f"{name}/{rank}", number)
        members = f"{name}/members"
        if attempts.check([members]) and number in attempts.get(members).decode().split():
            return name
    raise RankFailure(
        f"rank 0 did not start rank {rank}'s attempt within {timeout_seconds:g} s: look at its output, and at that of "
        "ranks that it waits for",
        0,
    )


def _polls(timeout_seconds: float) -> Iterator[None]:
    """Yield at once and after growing pauses, until the time is over."""
    end, pause = time.monotonic() + timeout_seconds, _FIRST_PAUSE_SECONDS
    while time.monotonic() < end:
        yield
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
