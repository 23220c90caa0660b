"""Results of `make gpu`: a JSON file for each part, with which an interrupted run continues.

A file has the measured machine and sources, and a row for each piece of work. A row is written when it begins and again
when it ends, so a row that ended its process or hung is known by its state, and is not tried again.
"""

import hashlib
import json
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[2]
RUNNING, PASSED, FAILED, UNAVAILABLE = "running", "passed", "failed", "unavailable"
Row = dict[str, Any]


def measured_on() -> dict[str, Any]:
    """Return the hash of the sources, the machine and its releases: results are valid for equal ones."""
    has_gpu = torch.cuda.is_available()
    return {
        "sources": sources(),
        "device": torch.cuda.get_device_name() if has_gpu else "CPU",
        "num_devices": torch.cuda.device_count() if has_gpu else 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda or "",
    }


def sources() -> str:
    """Return a hash of the sources under test, which also works in a copy without git."""
    folders = [path.parent for path in ROOT.glob("*/__init__.py")]  # of the package
    digest = hashlib.sha1()
    for path in sorted(path for folder in (*folders, ROOT / "tests") for path in folder.rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Return the current commit; an empty string without git."""
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@dataclass
class Results:
    """Rows of a part, and their file.

    Args:
        path: the file; it is started anew for other sources or another machine.
        part: name of the part.
    """

    path: Path
    part: str

    def __post_init__(self) -> None:
        on = measured_on()
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        if known.get("on") != on:
            known = {"part": self.part, "commit": commit(), "on": on, "rows": {}}
        self._known = known

    @property
    def rows(self) -> dict[str, Row]:
        """Return the rows by name, in the order in which they began."""
        rows: dict[str, Row] = self._known["rows"]
        return rows

    def left(self, names: list[str]) -> list[str]:
        """Return the names that have no result."""
        return [name for name in names if name not in self.rows]

    def running(self) -> list[str]:
        """Return the rows that have begun and not ended."""
        return [name for name, row in self.rows.items() if row["state"] == RUNNING]

    def begin(self, name: str) -> None:
        """Record that a row begins."""
        self.put(name, RUNNING, begun=time.time())

    def forget(self, name: str) -> None:
        """Remove a row, if present, so that it is tried again."""
        if self.rows.pop(name, None) is not None:
            self._write()

    def put(self, name: str, state: str, **figures: Any) -> None:
        """Record the state of a row."""
        self.rows[name] = {"state": state, **figures}
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(".tmp")
        written.write_text(json.dumps(self._known, indent=1) + "\n")
        written.replace(self.path)


def running_since(path: Path) -> float:
    """Return the time at which the running row of a part's file began, in seconds; infinity if none is running."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    return min((row["begun"] for row in rows.values() if row["state"] == RUNNING), default=inf)


class Unavailable(Exception):
    """The machine cannot run a row; the message is the reason."""


def run_rows(results: Results, rows: dict[str, Callable[[], Row]], *, seconds: float) -> bool:
    """Run the rows that have no result until the time is over; failures are recorded and the rest continues.

    Args:
        results: results of the part.
        rows: functions that return figures, by name; a figure "departure" that is not empty is a failure.
        seconds: time after which no further row begins.

    Returns:
        True if all rows have a result.
    """
    end = time.monotonic() + seconds
    for name in results.left(list(rows)):
        if time.monotonic() > end:
            return False
        results.begin(name)
        start = time.monotonic()
        figures: Row = {}
        try:
            figures = rows[name]()
            state = FAILED if figures.get("departure") else PASSED
        except Unavailable as reason:
            state, figures = UNAVAILABLE, {"reason": str(reason)}
        except Exception as error:
            state, figures = FAILED, {"error": described(error)}
        results.put(name, state, **figures, seconds=round(time.monotonic() - start, 2))
        print(f"{state:13}{name}  {short(figures)}", flush=True)
    return True


def described(error: BaseException) -> str:
    """Return the text of an error and its stack, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = " > ".join(f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno}" for frame in frames)
    return f"{type(error).__name__}: {str(error)[:1500]} [{places}]"


def short(figures: Row) -> str:
    """Return figures in one line."""
    return ", ".join(f"{name} {value}" for name, value in figures.items() if value != "")[:300]


def every(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the contents of all parts' files in a folder."""
    for path in sorted(folder.glob("*.json")):
        yield json.loads(path.read_text())
