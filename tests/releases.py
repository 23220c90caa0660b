"""Results of test runs by the releases of torch, transformers and peft: each run writes a row, and rows make a page.

    RELEASES=build/releases pytest tests -m "not slow"      # as `make test` does
    python -m tests.releases                                # build/releases → docs/releases.json → docs/releases.md

A row replaces the previous one of the same releases and tests.
"""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from .commit import ROOT, current_commit

ROWS = ROOT / "build" / "releases"
DATA = ROOT / "docs" / "releases.json"
PAGE = ROOT / "docs" / "releases.md"
# Which releases and tests a row is about.
KEY = ("python", "torch", "transformers", "peft", "tests")
_COUNTS = ("passed", "failed", "skipped")


class Recorder:
    """Counts of a run, written as a row at the end of the session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts = dict.fromkeys(_COUNTS, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: by its call, or by a failed or skipped phase around it."""
        if report.when == "call" or report.failed or (report.skipped and report.when == "setup"):
            self.counts[report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the row of a run that was not interrupted."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            row = described(tests_of(session.config)) | self.counts
            name = "-".join(str(row[key]) for key in KEY).replace("/", "_").replace(" ", "")
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{name[:200]}.json").write_text(json.dumps(row, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Record the run if RELEASES names a folder, in the main process only."""
    if "RELEASES" in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(os.environ["RELEASES"])), "results by releases")


def tests_of(config: pytest.Config) -> str:
    """Describe the tests of a run: "quick tests", or "all tests", with the folders if they are not all."""
    kind = "quick tests" if config.option.markexpr == "not slow" else "all tests"
    paths = [argument.removeprefix("tests/") for argument in config.args]
    return kind if paths in (["tests"], []) else f"{kind} of {', '.join(paths)}"


def described(tests: str) -> dict[str, Any]:
    """Return the row of a run of these tests, without its counts."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": current_commit(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: version(name) for name in ("torch", "transformers", "peft")},
        "tests": tests,
    }


def merged(before: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows, newest releases first; a new row replaces an old one with the same KEY."""
    rows = {tuple(row[key] for key in KEY): row for row in (*before, *new)}
    return sorted(
        rows.values(),
        key=lambda row: ([_numbers(row[key]) for key in ("transformers", "torch", "python")], row["tests"]),
        reverse=True,
    )


def _numbers(release: str) -> list[int]:
    return [int(number) for number in release.partition("+")[0].split(".") if number.isdecimal()]


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of the rows."""
    columns = ("transformers", "torch", "peft", "python", "tests", *_COUNTS, "date", "commit")
    lines = [" | ".join(str(row[column]) for column in columns) for row in rows]
    table = [" | ".join(columns), " | ".join(["---"] * len(columns)), *lines]
    return "\n".join(
        (
            "# Releases that were tried",
            "",
            "Made by the runs of the tests (`python -m tests.releases`), not by hand. Another release is no error.",
            "One that is newer than these is a log line at the first boost; `echelon verify` compares a step with",
            "one process.",
            "",
            *(f"| {line} |" for line in table),
            "",
        )
    )


def make_page(rows: Path = ROWS, data: Path = DATA, document: Path = PAGE) -> str:
    """Add the rows of the last runs to the data, write the page, remove them, and return a summary."""
    files = sorted(rows.glob("*.json"))
    before = json.loads(data.read_text()) if data.exists() else []
    kept = merged(before, [json.loads(path.read_text()) for path in files])
    data.write_text(json.dumps(kept, indent=1) + "\n")
    document.write_text(page(kept))
    for path in files:
        path.unlink()
    return f"{document.name} has {len(kept)} rows, {len(files)} of them new"


if __name__ == "__main__":
    sys.stdout.write(f"{make_page()}\n")
