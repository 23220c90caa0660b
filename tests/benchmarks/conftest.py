"""Fixtures to run a benchmark's script, and to import its modules as the script does."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of the benchmarks by its bare name, as the scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for path in BENCHMARKS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@pytest.fixture
def run_quickly() -> Callable[..., str]:
    """Run a script with --quick and further options, and return its output."""

    def run(script: str, *options: str) -> str:
        command = [sys.executable, str(BENCHMARKS / script), "--quick", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout.strip()

    return run
