"""Rows of a run that goes on where it was ended: one JSON line each, made in a process of its own."""

import argparse
import importlib
import json
import os
import random
import resource
import selectors
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..commit import ROOT, current_commit

# The field of a record's rows that says how a type is supported, or one of `UNSUPPORTED`.
FIELDS = {
    "stages": "stages",
    "splits": "split",
    **dict.fromkeys(("parity", "five", "sequences", "heads"), "parity"),
}
UNSUPPORTED = ("refused", "fails", "departs")
FOLDER = ROOT / "build" / "coverage"


def released() -> dict[str, str]:
    """Return what every row is about: the commit and the releases."""
    return {"commit": current_commit(), **{name: version(name) for name in ("torch", "transformers")}}


class Records:
    """Rows by model type, kept in a file of JSON lines; the last line of a type counts.

    Args:
        name: name of the file.
        about: added to each new row. Rows about other releases of transformers are left out.
    """

    def __init__(self, name: str, about: dict[str, str], folder: Path = FOLDER) -> None:
        self.path, self.about = folder / f"{name}.jsonl", about
        self.rows: dict[str, dict[str, Any]] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            row = json.loads(line)
            if row["transformers"] == about["transformers"]:
                self.rows[row["type"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, in the file at once."""
        self.rows[row["type"]] = row = row | self.about
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def warmed() -> None:
    """Import what most model types need, once before processes are forked."""
    for name in ("llama", "bert", "t5", "vit", "clip", "qwen2_vl", "wav2vec2"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def run_each(
    function: Callable[[str], dict[str, Any]],
    arguments: Sequence[str],
    *,
    jobs: int,
    cpu_seconds: int,
    wall_seconds: int,
    memory: int,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results of a function for each argument, each from a forked process, as they end.

    A process that passes a limit is a row with a reason; processes that it has forked end with it.
    """
    waiting, selector = list(arguments), selectors.DefaultSelector()
    running: dict[int, tuple[int, str, int]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                argument = waiting.pop(0)
                child, read = _forked(function, argument, cpu_seconds, wall_seconds, memory)
                running[ends := os.pidfd_open(child)] = (child, argument, read)
                selector.register(ends, selectors.EVENT_READ)
            for key, _ in selector.select():
                selector.unregister(key.fd)
                os.close(key.fd)
                child, argument, read = running.pop(key.fd)
                signaled = os.waitpid(child, 0)[1]
                _end_group(child)
                with os.fdopen(read) as pipe:  # a row fits into a pipe
                    text = pipe.read()
                name = signal.Signals(os.WTERMSIG(signaled)).name if os.WIFSIGNALED(signaled) else "exit"
                reason = {"reason": f"passed a limit of time or memory ({name})"}
                yield argument, json.loads(text) if text else reason
    finally:
        for child, _, _ in running.values():
            _end_group(child)


def _end_group(child: int) -> None:
    """End the processes that a child has forked, and itself."""
    with suppress(ProcessLookupError):  # none is left
        os.killpg(child, signal.SIGKILL)


def run_options(description: str | None, *, layouts: Sequence[str] = ()) -> Any:
    """Return the command line's options of a run: `part` as (number, count), `date`, `count`, and those with help.

    Args:
        description: shown as help.
        layouts: the values of `layouts`, the first by default; none if the run has no such option.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--part", default=(1, 1), type=lambda text: tuple(map(int, text.split("/"))))
    parser.add_argument("--date", help="of a random order; default: in the order of names")
    parser.add_argument("--count", type=int, help="end after so many types")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--limit", type=int, default=1, help="so many times the usual limits")
    parser.add_argument("--failed", action="store_true", help="try those again that were refused")
    parser.add_argument("--jobs", type=int, default=2)
    if layouts:
        parser.add_argument("--layouts", choices=layouts, default=layouts[0])
    return parser.parse_args()


def run_types(
    name: str,
    function: Callable[[str], dict[str, Any]],
    options: Any,
    *,
    cpu_seconds: int,
    wall_seconds: int,
    memory: int,
    types: Sequence[str] | None = None,
) -> None:
    """Make the rows of a record for model types, as the command line asks, and then the page.

    Args:
        name: name of the record, a key of `FIELDS`.
        function: makes the row of a type.
        options: from `run_options`.
        cpu_seconds, wall_seconds, memory: limits of the process of a type.
        types: those of a full run, in order; by default all that train.
    """
    from .page import make_page

    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes of `run_each` end, too
    number, count = options.part
    records, field = Records(name, released()), FIELDS[name]
    done = {
        model_type
        for model_type, row in (kept_rows(name, records.about) | records.rows).items()
        if row[field] not in UNSUPPORTED or not options.failed
    }
    types = trained_types(options.date) if types is None else types
    types = options.only or [
        model_type for model_type in types[number - 1 :: count] if model_type not in done
    ]
    warmed()
    limits = {"cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds, "memory": memory}
    limits = {limit: options.limit * value for limit, value in limits.items()}
    for model_type, row in run_each(function, types[: options.count], jobs=options.jobs, **limits):
        if "reason" in row:
            row = {field: "fails" if field == "parity" else "refused", "why": row["reason"]}
        records.add({"type": model_type} | row)
        print(model_type, row[field], row.get("why", "")[:200], flush=True)
    print(make_page(**{name: records.rows}))


def kept_rows(name: str, about: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the rows of docs/coverage.json by type, of these releases: those of a run elsewhere count, too."""
    from .page import DATA

    rows = json.loads(DATA.read_text()).get(name, ())
    return {row["type"]: row for row in rows if row["transformers"] == about["transformers"]}


def trained_types(date: str | None = None, *, convolutional: bool = False) -> list[str]:
    """Return the types that train, convolutional or not: in the order of their names, or drawn by a date."""
    from .page import DATA

    known = json.loads(DATA.read_text())["rows"]
    types = [
        row["type"] for row in known if row.get("trains") and bool(row.get("convolutional")) == convolutional
    ]
    return types if date is None else random.Random(date).sample(types, len(types))


def _forked(
    function: Callable[[str], dict[str, Any]], argument: str, cpu_seconds: int, wall_seconds: int, memory: int
) -> tuple[int, int]:
    """Start the function in a child; return the child, and where to read its result."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        return child, read
    os.close(read)
    os.setpgid(0, 0)
    signal.alarm(wall_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 2))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    import torch

    torch.set_num_threads(1)
    try:
        text = json.dumps(function(argument))
    except BaseException as error:
        text = json.dumps({"reason": f"{type(error).__name__}: {error}"[:500]})
    with os.fdopen(write, "w") as pipe:
        pipe.write(text)
    os._exit(0)
