"""One trace of all ranks, on the first rank's clock, from their profilers."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import profile

from ..cluster.failures import all_ranks_in
from ..cluster.gathering import gather_integers, gather_objects_on_first, run_or_raise_together
from ..cluster.layout import AXES
from ..cluster.mesh import ParallelMesh
from ..pipeline.profiled import chrome_trace

_ROUNDS = 16  # of messages between the ranks' clocks
_NANOSECONDS = 1000  # per microsecond, the unit of traces


def save_trace(profiler: profile, path: str | Path, mesh: ParallelMesh) -> None:
    """Merge the ranks' profiles in one file, which the first rank writes. Collective over the world.

    Args:
        profiler: of this rank, after its block.
        path: a .json file.
        mesh: all ranks.

    Raises:
        ValueError: the path does not end in .json, or the profiler has recorded nothing.
        OSError: it cannot be written. On every rank.
    """
    path = Path(path)
    with all_ranks_in("booster.save_trace", raised_alike=(ValueError, OSError)):
        world = mesh.side_group()
        run_or_raise_together(lambda: _require(profiler, path), world)
        offsets = clock_offsets()
        place = ", ".join(f"{axis} {mesh.rank(axis)}" for axis in AXES if mesh.size(axis) > 1)
        traces = gather_objects_on_first((place, chrome_trace(profiler)), world)
        run_or_raise_together(
            lambda: None if traces is None else _write(path, merged(traces, offsets)), world
        )


def _write(path: Path, trace: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace))


def _require(profiler: Any, path: Path) -> None:
    if getattr(profiler, "profiler", None) is None:
        raise ValueError(
            "the profiler has recorded nothing: give the one of a block, with torch.profiler.profile() as profiler"
        )
    if path.suffix != ".json":
        raise ValueError(f"{str(path)!r} must end in .json, which ui.perfetto.dev opens")


def merged(traces: Sequence[tuple[str, dict[str, Any]]], offsets: Sequence[int]) -> dict[str, Any]:
    """Return one trace with the events of all ranks, each as a process of its own.

    Args:
        traces: by rank, its place in the mesh and its trace, in microseconds after `baseTimeNanoseconds` of its clock.
        offsets: by rank, nanoseconds by which its clock is ahead of the first one's.
    """
    bases = [  # the start of each trace, on the first rank's clock
        trace.get("baseTimeNanoseconds", 0) - offset
        for (_, trace), offset in zip(traces, offsets, strict=True)
    ]
    events: list[dict[str, Any]] = []
    for rank, ((place, trace), base) in enumerate(zip(traces, bases, strict=True)):
        title = f"rank {rank} ({place})" if place else f"rank {rank}"
        events += _events_of_rank(rank, title, trace["traceEvents"], (base - bases[0]) / _NANOSECONDS)
    return {"baseTimeNanoseconds": bases[0], "displayTimeUnit": "ms", "traceEvents": events}


def _events_of_rank(
    rank: int, title: str, events: Sequence[dict[str, Any]], shift: float
) -> Iterator[dict[str, Any]]:
    """Yield a rank's events, later by `shift` microseconds, with names for its processes that no other rank has.

    A rank has several processes in a trace: the host, and each device.
    """
    pids = dict.fromkeys(event.get("pid") for event in events)
    for event in events:
        if event.get("ph") == "M" and event["name"].startswith("process_"):
            continue  # names and order of processes are given below
        changes: dict[str, Any] = {"pid": f"rank {rank}: {event.get('pid')}"}
        if "ts" in event:
            changes["ts"] = event["ts"] + shift
        if "id" in event:  # arrows between events join equal ones
            changes["id"] = f"{rank}.{event['id']}"
        yield {**event, **changes}
    for pid in pids:
        for name, value in (("name", f"{title}, {pid}" if pid else title), ("sort_index", rank)):
            yield {"ph": "M", "name": f"process_{name}", "pid": f"rank {rank}: {pid}", "args": {name: value}}


def clock_offsets() -> list[int]:
    """Measure by how many nanoseconds the clock of each rank is ahead of the first rank's. Several all-gathers.

    Of several messages in both directions the fastest count, as in the Network Time Protocol (RFC 5905, section 8).
    """
    delays = [2**62] * dist.get_world_size()  # from each rank to this one, with the difference of the clocks
    for _ in range(_ROUNDS):
        sent = gather_integers((time.time_ns(),))
        received = time.time_ns()
        delays = [min(delay, received - start) for delay, (start,) in zip(delays, sent, strict=True)]
    by_rank = gather_integers(delays)
    return [(row[0] - by_rank[0][rank]) // 2 for rank, row in enumerate(by_rank)]
