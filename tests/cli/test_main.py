"""The command line: help needs no large import, and commands import what they need when they run."""

import subprocess
import sys
from pathlib import Path

import pytest

import echelon

HELP = (
    "",
    "models",
    "timeline",
    "verify",
    "checkpoint",
    "checkpoint inspect",
    "checkpoint diff",
    "checkpoint verify",
)
LARGE = ("torch", "transformers", "datasets", "numpy", "matplotlib")

# Runs each line of stdin as a command line, and prints the large packages that were imported so far.
SCRIPT = f"""
import sys
from echelon.cli import main
for line in sys.stdin:
    sys.argv = ["echelon", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0, line
    print("IMPORTED", line.strip(), *[name for name in {LARGE} if name in sys.modules], sep="|")
"""


def imported(*lines: str) -> list[str]:
    """Return the large packages that a fresh process imported, a line for each command line."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if line.startswith("IMPORTED")]


def test_help_and_models_import_neither_torch_nor_transformers() -> None:
    lines = [
        *(f"{command} --help" for command in HELP),
        "models",
        "models llama",
        "models --markdown",
        "--version",
    ]
    assert imported(*lines) == [f"IMPORTED|{line.strip()}" for line in lines]


def test_a_simulated_timeline_imports_matplotlib_alone(tmp_path: Path) -> None:
    (line,) = imported(f"timeline --out {tmp_path}/drawn.svg")
    assert line == f"IMPORTED|timeline --out {tmp_path}/drawn.svg|numpy|matplotlib"


def in_fresh_process(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_echelon_imports_no_torch_and_knows_all_names() -> None:
    script = """
import sys
import echelon
assert echelon.__version__
listed = dir(echelon)
assert set(echelon.__all__) <= set(listed) and "shardformer" in listed, listed
assert "torch" not in sys.modules
try:
    echelon.Boost
except AttributeError as error:
    print(error)
assert "torch" not in sys.modules
"""
    assert in_fresh_process(script) == "module 'echelon' has no attribute 'Boost'"


def test_all_names_are_imported_from_echelon() -> None:
    names: dict[str, object] = {}
    exec("from echelon import *", names)
    assert set(echelon.__all__) <= names.keys()
    assert echelon.shardformer.ShardFormer is names["ShardFormer"]


@pytest.mark.slow
def test_the_names_of_a_training_script_are_imported_soon_after_torch_and_transformers() -> None:
    script = """
import time
import torch
from contextlib import suppress
from transformers import PreTrainedModel
with suppress(ImportError):
    import sklearn.metrics  # which older releases of transformers import with their layers
start = time.process_time()
from echelon import Booster, HybridParallelPlugin
print(time.process_time() - start)
"""
    assert float(in_fresh_process(script)) < 1  # 0.3 s on an idle machine
