"""Helpers to run the examples as a user does, and to load their modules."""

import contextlib
import importlib.util
import io
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

from ..pool import Pool

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_SECONDS = 280
FP32 = "--precision fp32"
# Numbers of processes and options of layouts whose fine-tuning is compared with one process.
LAYOUTS = {
    "tp2": (2, f"{FP32} --tp_size 2 --pp_size 1"),
    "pp2": (2, f"{FP32} --tp_size 1 --pp_size 2"),
    "tp2pp2": (4, f"{FP32} --tp_size 2 --pp_size 2"),
    "dp2zero1": (2, f"{FP32} --tp_size 1 --pp_size 1 --zero_stage 1"),
    "low_level_zero": (2, f"{FP32} --plugin low_level_zero --zero_stage 2 --num_microbatches 2"),
}


def load(path: Path) -> ModuleType:
    """Load a module of an example under a unique name, since examples have modules of equal names."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look up the module of their class
    spec.loader.exec_module(module)
    return module


def run(pool: Pool, script: Path, *arguments: str, processes: int = 1, status: int = 0) -> str:
    """Run a script on all ranks and return the first rank's output with errors; see `reported_alone`."""
    outcomes = pool.run(processes, run_here, script, *arguments, timeout=TIMEOUT_SECONDS)
    return reported_alone(outcomes, status=status)


def reported_alone(outcomes: list[tuple[int, str]], *, status: int) -> str:
    """Return the first rank's output; check that all ranks have this status and the others print nothing."""
    (found, reported), *others = outcomes
    assert found == status, reported[-4000:]
    assert others == [(status, "")] * len(others)
    return reported


def run_here(script: Path, *arguments: str) -> tuple[int, str]:
    """Run a script in this process, a worker of the pool; return its exit status and output with errors."""
    printed = io.StringIO()
    status: int | str | None = 0
    with (
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            status = end.code
        finally:
            for name, module in list(sys.modules.items()):  # other examples have modules of these names
                if Path(getattr(module, "__file__", None) or "/").parent == script.parent:
                    del sys.modules[name]
    assert isinstance(status, int)
    return status, printed.getvalue()


def figures_of(printed: str) -> dict[str, float]:
    """Parse the name=value figures of a script's last line."""
    words = printed.strip().splitlines()[-1].split()
    return {name: float(value) for name, value in (word.split("=") for word in words)}


def records_of(path: Path) -> list[dict]:
    """Read the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(records: list[dict]) -> list[float]:
    """Return the losses of all steps and of their evaluations."""
    return [record[name] for record in records for name in ("loss", "eval_loss") if name in record]


def trained(
    pool: Pool, script: Path, log: Path, num_processes: int, *arguments: str
) -> tuple[list[dict], dict[str, float]]:
    """Fine-tune; return the records and the figures of the last line. Only the first rank prints."""
    printed = run(pool, script, *arguments, "--metrics", str(log), processes=num_processes)
    return records_of(log), figures_of(printed)
