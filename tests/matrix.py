"""Keeping what rows of the matrix found, in the file that `echelon models` and docs/models.md are made from.

    KEEP_MATRIX=verify/matrix.json pytest tests

A test is a row by its parameters: a `ModelChoice` and a `Layout`, or a `FeatureCase`. Of a feature that is refused it
says `record_property("refused", reason)`, and passes. Rows that were run take the places of those before; the others
stay.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from echelon.shardformer import model_types
from echelon.shardformer.table import class_libraries
from echelon.verify.layout import Layout
from echelon.verify.matrix import FAILED, PASSED, REFUSED, FeatureCase
from echelon.verify.models import ModelChoice

_ROWS = pytest.StashKey[list[tuple[ModelChoice, Layout, bool]]]()
_FEATURES = pytest.StashKey[list[tuple[FeatureCase, str]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    callspec = getattr(item, "callspec", None)  # of parametrized tests
    given = [] if callspec is None else list(callspec.params.values())
    if report.when == "call" and not report.skipped:
        if [type(each) for each in given] == [ModelChoice, Layout]:
            item.config.stash.setdefault(_ROWS, []).append((*given, report.passed))
        if [type(each) for each in given] == [FeatureCase]:
            item.config.stash.setdefault(_FEATURES, []).append((*given, _outcome(report)))
    return report


def types_with_a_table() -> list[str]:
    """The model types, and libraries of classes, that have a table of Echelon's; tests register some of their own."""
    return sorted({*model_types(), *class_libraries()} - {"tests"})


def pytest_sessionfinish(session: pytest.Session) -> None:
    rows = session.config.stash.get(_ROWS, [])
    features = session.config.stash.get(_FEATURES, [])
    if not (rows or features) or "KEEP_MATRIX" not in os.environ:
        return
    path = Path(os.environ["KEEP_MATRIX"])
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    for choice, layout, passed in rows:
        of_head = kept["rows"].setdefault(choice.model_type, {}).setdefault(choice.described_head, {})
        of_head[str(layout)] = passed
    for case, outcome in features:
        kept.setdefault("features", {}).setdefault(case.model_type, {})[case.feature] = outcome
    kept["tables"] = types_with_a_table()
    kept |= {"torch": torch.__version__, "transformers": transformers.__version__}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def _outcome(report: pytest.TestReport) -> str:
    refused = [str(value) for name, value in report.user_properties if name == "refused"]
    if not report.passed:
        return FAILED
    return f"{REFUSED}{refused[0]}" if refused else PASSED
