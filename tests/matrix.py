"""Results of `make test-all`, in parts: each part writes a file, and all parts of a commit make docs/models.md.

    PART=3/8 KEEP_RESULTS=tests/results pytest tests     # every eighth test, from the third on
    python -m tests.matrix                               # tests/results → cli/matrix.json → docs/models.md

The parameters of a test name its row: a `ModelChoice` and a `Layout`, or a `FeatureCase`. For a refused feature a test
calls `record_property("refused", reason)` and passes. A row that no part ran is kept, with the commit of its result.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from echelon.cli.models import FAILED, FEATURES, PASSED, REFUSED, page
from echelon.shardformer import model_types
from echelon.shardformer.tables import table
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from .commit import MATRIX, PAGE, RESULTS, current_commit


@dataclass(frozen=True, kw_only=True)
class FeatureCase:
    """Parameter of a test of one feature on one model type; identifies its result.

    Args:
        model_type: `config.model_type` of transformers.
        feature: one of FEATURES.
    """

    model_type: str
    feature: str

    def __post_init__(self) -> None:
        if self.feature not in FEATURES:
            raise ValueError(f"feature={self.feature!r} must be one of {', '.join(FEATURES)}")


def part_of_environment() -> tuple[int, int]:
    """Return the part of the tests that PART=k/n requests; (1, 1) without it."""
    number, _, count = os.environ.get("PART", "1/1").partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(
            f"PART={os.environ['PART']!r} is no part: write PART=3/8 for the third of eight"
        )
    return int(number), int(count)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of other parts. Neighbouring tests, which take similar times, go to different parts."""
    number, count = part_of_environment()
    if count > 1:
        chosen = items[number - 1 :: count]
        del items[number - 1 :: count]
        config.hook.pytest_deselected(items=items[:])
        items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the row of a test to its report, which pytest-xdist sends to the main process."""
    report = yield
    callspec = getattr(item, "callspec", None)  # only parametrized tests have it
    parameters = [] if callspec is None else list(callspec.params.values())
    if [type(parameter) for parameter in parameters] == [ModelChoice, Layout]:
        choice, layout = parameters
        report.user_properties.append(
            ("matrix", ["rows", choice.model_type, choice.described_head, str(layout)])
        )
    if [type(parameter) for parameter in parameters] == [FeatureCase]:
        report.user_properties.append(
            ("matrix", ["features", parameters[0].model_type, parameters[0].feature])
        )
    return report


class Keeper:
    """Collector of a run's rows, written to a file at the end of the session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, Any] = {"rows": {}, "features": {}}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test that has a row."""
        if report.when != "call" or report.skipped:
            return
        for name, place in report.user_properties:
            if name == "matrix":
                kind, *path, last = place  # type: ignore[misc]
                cells = self.results[kind]
                for key in path:
                    cells = cells.setdefault(key, {})
                cells[last] = report.passed if kind == "rows" else _outcome(report)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the file of this part, unless the run was interrupted."""
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        number, count = part_of_environment()
        kept = self.results | {
            "part": [number, count],
            "commit": current_commit(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tables": types_with_a_table(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / f"{number}-of-{count}.json", kept)


def pytest_configure(config: pytest.Config) -> None:
    """Collect results if KEEP_RESULTS names a folder, in the main process only."""
    if "KEEP_RESULTS" in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Keeper(Path(os.environ["KEEP_RESULTS"])), "results of the matrix")


def types_with_a_table() -> list[str]:
    """Return the model types, and libraries of classes, that have a table of Echelon; tests register others."""
    libraries = (name.partition(".")[0] for name in table._TABLES_OF_CLASSES)
    return sorted({*model_types(), *libraries} - {"tests"})


def complete_parts(parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the parts of one commit, release and number of parts; an empty list if parts are missing."""
    groups: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for part in parts:
        number, count = part["part"]
        key = (part["commit"], part["torch"], part["transformers"], count)
        groups.setdefault(key, {})[number] = part
    return next((list(group.values()) for (*_, count), group in groups.items() if len(group) == count), [])


def merged(before: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the parts of one commit into the matrix; cells that no part has are kept.

    The commit of most cells becomes that of the matrix. Cells of other commits, older or tested again, are listed under
    "others".
    """
    first, others = parts[0], before.get("others", {})
    cells = {
        path: (value, others.get(_name(path), before.get("commit", "an unknown commit")))
        for kind in ("rows", "features")
        for path, value in _cells(before.get(kind, {}), kind)
    } | {
        path: (value, first["commit"])
        for part in parts
        for kind in ("rows", "features")
        for path, value in _cells(part[kind], kind)
    }
    commit = Counter(commit for _, commit in cells.values()).most_common(1)[0][0]
    kept: dict[str, Any] = {key: first[key] for key in ("torch", "transformers", "tables")}
    kept |= {"commit": commit, "rows": {}, "features": {}}
    kept["others"] = {
        _name(path): cell_commit for path, (_, cell_commit) in cells.items() if cell_commit != commit
    }
    for (*folders, last), (value, _) in cells.items():
        within = kept
        for key in folders:
            within = within.setdefault(key, {})
        within[last] = value
    return kept


def _name(path: Sequence[str]) -> str:
    return " ".join(path[1:])


def make_page(results: Path = RESULTS, matrix: Path = MATRIX, document: Path = PAGE) -> str:
    """Merge the parts if all are there, write the page, remove the parts, and return a summary."""
    files = {path: json.loads(path.read_text()) for path in sorted(results.glob("*-of-*.json"))}
    parts = complete_parts(list(files.values()))
    if not parts:
        there = ", ".join(f"{path.stem} ({part['commit']})" for path, part in files.items()) or "none"
        return f"{document.name} stays as it is until all parts of one commit are there: {there}"
    kept = merged(json.loads(matrix.read_text()) if matrix.exists() else {}, parts)
    _write(matrix, kept)
    document.write_text(page(kept))
    for path, part in files.items():
        if part in parts:
            path.unlink()
    return f"{document.name} is made from {len(parts)} parts of commit {parts[0]['commit']}"


def _cells(cells: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(cells, Mapping):
        yield path, cells
        return
    for key, value in cells.items():
        yield from _cells(value, *path, key)


def _outcome(report: pytest.TestReport) -> str:
    refused = [str(value) for name, value in report.user_properties if name == "refused"]
    if not report.passed:
        return FAILED
    return f"{REFUSED}{refused[0]}" if refused else PASSED


def _write(path: Path, kept: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.stdout.write(f"{make_page()}\n")
