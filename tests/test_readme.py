"""What the documents show runs as it stands, and what they point to exists."""

import inspect
import os
import re
import signal
import subprocess
import sys
from math import isfinite
from pathlib import Path

import pytest
from safetensors.torch import load_file

from echelon import HybridParallelPlugin

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
COMING = ROOT / "docs" / "coming-from-colossalai.md"
TIMEOUT_SECONDS = 300.0


def code_blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language, as they stand."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), flags=re.M | re.S)


def run_script(script: str, folder: Path, *, num_processes: int | None) -> str:
    """What a script prints, run in a folder by python, or by torchrun where processes are given."""
    (folder / "train.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    process = subprocess.Popen(
        [sys.executable, *(torchrun if num_processes else []), "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun passes it on to its workers
        out, err = process.communicate()
        pytest.fail(f"the script did not end in {TIMEOUT_SECONDS} s; it printed\n{out}\n{err}")
    assert process.returncode == 0, err
    return out


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed)]


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(path).items()}


def names_after(text: str, label: str) -> set[str]:
    """The argument names in the item of a list that begins with a bold label."""
    (item,) = re.findall(rf"^- \*\*{label}.*?(?=^- |^$)", text, flags=re.M | re.S)
    return set(re.findall(r"`([a-z0-9_]+)`", item))


def test_the_script_of_the_readme_trains_alike_on_one_process_and_on_four(tmp_path: Path) -> None:
    (script,) = code_blocks(README, "python")
    assert len(script.splitlines()) <= 25
    alone = losses(run_script(script, tmp_path, num_processes=None))
    saved_alone = shapes(tmp_path / "llama.safetensors")
    together = losses(run_script(script, tmp_path, num_processes=4))
    assert len(alone) == 5
    assert alone == sorted(alone, reverse=True)
    assert alone[-1] < 0.8 * alone[0]
    # The same global batches: 20 steps of float32 sums in another order.
    assert together == pytest.approx(alone, abs=1e-4)
    assert shapes(tmp_path / "llama.safetensors") == saved_alone


def test_the_script_moved_from_colossalai_runs(tmp_path: Path) -> None:
    (script,) = code_blocks(COMING, "python")
    found = losses(run_script(script, tmp_path, num_processes=2))
    assert len(found) == 8
    assert all(map(isfinite, found))


def test_every_argument_of_the_plugin_is_listed_where_it_belongs() -> None:
    text = COMING.read_text()
    work, refused, unknown = (names_after(text, label) for label in ("Work", "Taken", "Not taken"))
    taken = set(inspect.signature(HybridParallelPlugin).parameters)
    assert work | refused | {"dp_size"} == taken
    assert work & refused == set()
    assert unknown & taken == set()


@pytest.mark.parametrize("path", [README, COMING, ROOT / "docs" / "design.md"], ids=lambda path: path.stem)
def test_what_a_document_points_to_exists(path: Path) -> None:
    text = path.read_text()
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    local = [target for target in targets if "://" not in target]
    files = re.findall(r"`((?:tests|docs|examples)/[\w/.]*)`", text)
    missing = [target for target in local if not (path.parent / target).exists()]
    assert missing + [name for name in files if not (ROOT / name).exists()] == []


def test_the_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    commands = set(re.findall(r"\bmake ([a-z-]+)", README.read_text()))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert {"finetune", "test"} <= commands <= targets
