"""Keeping what rows of models and layouts found, in the file that `echelon models` and docs/models.md are made from.

    KEEP_MATRIX=verify/matrix.json pytest tests/models

Rows that were run take the places of those before; the others stay.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
import transformers

from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice

_ROWS = pytest.StashKey[list[tuple[ModelChoice, Layout, bool]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    callspec = getattr(item, "callspec", None)  # of parametrized tests
    given = [] if callspec is None else list(callspec.params.values())
    if report.when == "call" and [type(each) for each in given] == [ModelChoice, Layout]:
        item.config.stash.setdefault(_ROWS, []).append((*given, report.passed))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    rows = session.config.stash.get(_ROWS, [])
    if not rows or "KEEP_MATRIX" not in os.environ:
        return
    path = Path(os.environ["KEEP_MATRIX"])
    kept = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    for choice, layout, passed in rows:
        of_head = kept["rows"].setdefault(choice.model_type, {}).setdefault(choice.described_head, {})
        of_head[str(layout)] = passed
    kept |= {"torch": torch.__version__, "transformers": transformers.__version__}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
