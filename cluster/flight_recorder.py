"""torch's flight recorder: the latest collectives of a process, with their group, sizes and state.

torch records collectives of NCCL, and in later releases of gloo, in a ring buffer (`TORCH_FR_BUFFER_SIZE`, in older
releases `TORCH_NCCL_TRACE_BUFFER_SIZE`). `TORCH_NCCL_DUMP_ON_TIMEOUT=1` writes it to one file per rank
(`TORCH_NCCL_DEBUG_INFO_TEMP_FILE`, by default /tmp/nccl_trace_rank_RANK) when a collective times out. `echelon explain`
reads these files.

[Note: what is compared] Collectives of one group have numbers that count alike on all its ranks. The first number that
some ranks have not reached, or where names, sizes or dtypes differ, is where a run came apart. Point-to-point messages
have numbers of their own, which are counted by pairs of ranks, so that they are listed and not compared.
"""

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch._C import _distributed_c10d

_RANK = re.compile(r"(\d+)(?:\.\w+)?$")  # at the end of a file's name
_WRAPPER = re.compile(r"/torch/|/typing_extensions\.py$")  # files whose frames call a collective for others
_COMPLETED = "completed"


class Recorded(NamedTuple):
    """One collective of one rank.

    Args:
        group: name of its group, equal on all ranks.
        description: of the group: an axis.
        number: its number among the collectives of the group.
        name: "all_reduce".
        inputs: dtype and shape of each input.
        is_transfer: True for a message between two ranks.
        state: "scheduled", "started" or "completed".
        line: file and line of Python that called it; empty if stacks were not recorded.
    """

    group: str
    description: str
    number: int
    name: str
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    is_transfer: bool
    state: str
    line: str

    @property
    def call(self) -> str:
        """Name and tensors, which all ranks must have alike."""
        return f"{self.name} of {', '.join(f'{dtype}{list(shape)}' for dtype, shape in self.inputs)}"

    def __str__(self) -> str:
        line = f", {self.line}" if self.line else ""
        return f"{self.call} ({self.state}{line})"


def in_flight() -> list[Recorded]:
    """The collectives of this process that were started and are not complete, oldest first; none without a recorder."""
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None) or getattr(
        _distributed_c10d, "_dump_fr_trace", None
    )
    if dump is None:
        return []
    entries = pickle.loads(dump(True, False, True)).get("entries", ())
    return [_recorded(entry) for entry in entries if not entry.get("retired", False)]


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    """Read one entry of a dump."""
    group, description = entry["process_group"]
    is_transfer = entry.get("is_p2p", False)
    frames = [frame for frame in entry.get("frames", ()) if not _WRAPPER.search(frame["filename"])]
    line = f"{Path(frames[0]['filename']).name}:{frames[0]['line']}" if frames else ""
    return Recorded(
        group=str(group),
        description="the world" if description == "default_pg" else description.removeprefix("mesh_"),
        number=entry["p2p_seq_id" if is_transfer else "collective_seq_id"],
        name=entry["profiling_name"].rpartition(":")[2],
        inputs=tuple(
            (dtype.lower(), tuple(shape))
            for dtype, shape in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
        ),
        is_transfer=is_transfer,
        state=_COMPLETED if entry.get("retired", False) else entry["state"],
        line=line,
    )


def read_dumps(folder: Path) -> dict[int, list[Recorded]]:
    """Read the dumps of all ranks in a folder, pickled by torch or as JSON, by the rank at the end of their names.

    Raises:
        ValueError: there are none, or a file is no dump.
    """
    dumps = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and (rank := _RANK.search(path.name)):
            dumps[int(rank[1])] = _read(path)
    if not dumps:
        raise ValueError(
            f"{folder} has no dumps: give the folder of TORCH_NCCL_DEBUG_INFO_TEMP_FILE, whose files end in the rank"
        )
    return dict(sorted(dumps.items()))


class _Plain(pickle.Unpickler):
    """Unpickler of plain values, since a dump may come from anywhere."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump has plain values only, not {module}.{name}")


def _read(path: Path) -> list[Recorded]:
    """Read one dump."""
    try:
        with path.open("rb") as file:
            is_json = file.read(1) == b"{"
            file.seek(0)
            content = json.load(file) if is_json else _Plain(file).load()
        return [_recorded(entry) for entry in content["entries"]]
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is no dump of torch's flight recorder ({error}): leave it out") from error


def explain_dumps(dumps: Mapping[int, Sequence[Recorded]]) -> list[str]:
    """Say in one line per finding where the ranks came apart, and then the unfinished collectives of each rank.

    See [Note: what is compared].

    Args:
        dumps: by rank, its collectives, oldest first.
    """
    findings = []
    for group in dict.fromkeys(entry.group for entries in dumps.values() for entry in entries):
        by_rank = {
            rank: {entry.number: entry for entry in entries if entry.group == group and not entry.is_transfer}
            for rank, entries in dumps.items()
        }
        findings += _first_difference({rank: calls for rank, calls in by_rank.items() if calls})
    for rank, entries in dumps.items():
        unfinished = [entry for entry in entries if entry.state != _COMPLETED]
        findings += [
            f"rank {rank} waits in {entry.description} (number {entry.number}): {entry}"
            for entry in unfinished[:3]
        ]
        if not unfinished:
            last = f"; its last was {entries[-1]}" if entries else ""
            findings.append(f"rank {rank} waits in no collective{last}")
    return findings


def _first_difference(by_rank: Mapping[int, Mapping[int, Recorded]]) -> list[str]:
    """Say at which collective of one group the ranks came apart; nothing if they did not.

    Args:
        by_rank: by rank of the group, its collectives by number. A buffer may have lost the oldest.
    """
    if len(by_rank) < 2:
        return []
    first = max(min(calls) for calls in by_rank.values())
    last = max(max(calls) for calls in by_rank.values())
    for number in range(first, last + 1):
        calls = {rank: calls.get(number) for rank, calls in by_rank.items()}
        made = {rank: call for rank, call in calls.items() if call is not None}
        if not made:  # a number that no dump has any more
            continue
        missing = sorted(calls.keys() - made.keys())
        kinds: dict[str, list[int]] = {}
        for rank, call in made.items():
            kinds.setdefault(call.call, []).append(rank)
        group = next(iter(made.values())).description
        if missing:
            call, ranks = next(iter(made.values())), _ranks(sorted(made))
            return [
                f"{_ranks(missing)} never made {call.name} number {number} of {group}, but {ranks} did: {call}"
            ]
        if len(kinds) > 1:
            texts = "; ".join(f"{_ranks(ranks)}: {kind}" for kind, ranks in kinds.items())
            return [f"ranks made different calls as number {number} of {group}: {texts}"]
    return []


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
