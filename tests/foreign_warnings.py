"""Warnings of other packages under `make test-newest`: collected, and reported by one test.

    FOREIGN_WARNINGS=build/warnings pytest tests        # a warning of torch or transformers fails no test
    FOREIGN_WARNINGS=build/warnings pytest tests/foreign_warnings.py    # one test fails, with every message once

Without the variable every warning is an error, as are Echelon's own and those of the tests with it.
"""

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

FOLDER = "FOREIGN_WARNINGS"  # the variable that names the folder of the messages
# Code whose warnings are errors.
_FIRST_PARTY = frozenset(("echelon", "tests", "examples", "benchmarks", "__main__"))
_BY_C = "Triggered internally"  # in a warning of torch's C++ code, which `warnings.warn` does not see


def install() -> None:
    """Collect the warnings of other packages that would be errors, in this process; without the variable, nothing."""
    if FOLDER not in os.environ or hasattr(warnings.warn, "native"):
        return
    native = warnings.warn

    def warn(
        message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **others: Any
    ) -> None:
        try:
            native(message, category, stacklevel + 1, source, **others)
        except Warning as error:
            module = sys._getframe(1).f_globals.get("__name__", "")
            if module.partition(".")[0] in _FIRST_PARTY:
                raise
            keep(error, module)

    warn.native = native  # type: ignore[attr-defined]
    warnings.warn = warn  # type: ignore[assignment]


def keep(warning: Warning, module: str) -> None:
    """Write a message into the folder, once for all processes."""
    row = {"category": type(warning).__name__, "message": str(warning), "module": module}
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(f"{row['category']} {row['message']}".encode()).hexdigest()[:16]
    (folder / f"{name}.json").write_text(json.dumps(row))


def kept() -> list[str]:
    """Return the messages in the folder, each with its category and the module that warned."""
    rows = [json.loads(path.read_text()) for path in sorted(Path(os.environ[FOLDER]).glob("*.json"))]
    return [f"{row['category']} of {row['module']}: {row['message']}" for row in rows]


def pytest_configure(config: pytest.Config) -> None:
    """Let warnings of torch's C++ code pass: `pytest_warning_recorded` gets them."""
    if FOLDER in os.environ:
        config.addinivalue_line("filterwarnings", rf"default:[\s\S]*{_BY_C}")


def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Keep a warning of torch's C++ code."""
    if FOLDER in os.environ and _BY_C in str(warning_message.message):
        keep(warning_message.message, "torch's C++ code")  # type: ignore[arg-type]


@pytest.mark.skipif(FOLDER not in os.environ, reason="see `make test-newest`")
def test_other_packages_did_not_warn() -> None:
    messages = kept()
    assert not messages, "\n".join([f"{len(messages)} messages:", *messages])
