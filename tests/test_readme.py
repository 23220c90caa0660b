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
from echelon.pipeline.action import SENDS
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.schedules import SCHEDULES, build_schedule, style_errors
from echelon.pipeline.simulate import Costs, simulate
from echelon.plugins.colossalai import HYBRID

from .pipeline.small_schedules import written

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
COMING = ROOT / "docs" / "coming-from-colossalai.md"
PIPELINE = ROOT / "docs" / "pipeline.md"
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


@pytest.mark.slow
def test_the_script_moved_from_colossalai_runs(tmp_path: Path) -> None:
    (script,) = code_blocks(COMING, "python")
    found = losses(run_script(script, tmp_path, num_processes=2))
    assert len(found) == 8
    assert all(map(isfinite, found))


@pytest.mark.slow
def test_the_schedule_of_the_pipelines_guide_trains_alike_on_one_process_and_on_two(tmp_path: Path) -> None:
    (script,) = code_blocks(PIPELINE, "python")
    alone = losses(run_script(script, tmp_path, num_processes=None))
    assert len(alone) == 5
    assert alone[-1] < alone[0]
    assert losses(run_script(script, tmp_path, num_processes=2)) == alone


def test_what_the_pipelines_guide_says_of_a_schedule_of_ones_own_is_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = code_blocks(PIPELINE, "python")
    names: dict[str, object] = {"Path": Path}
    exec(script.split("launch_from_torch(seed=0)")[0], names)
    (drawing,) = (block for block in code_blocks(PIPELINE, "py") if "simulate(" in block)
    monkeypatch.chdir(tmp_path)
    exec(drawing, names)
    assert capsys.readouterr().out.strip() == re.findall(r"# (.*)$", drawing, flags=re.M)[0]
    assert (tmp_path / "pairs.svg").stat().st_size > 0


def test_the_pipelines_guide_quotes_what_is_said_of_bad_schedules() -> None:
    rows = re.findall(r"^\| `(\d\S* .*)` and `(.*)` \| (.*) \|$", PIPELINE.read_text(), flags=re.M)
    assert len(rows) == 4
    for *ranks, told in rows:
        assert style_errors(written(*ranks), 1, 2) == [told]


def test_the_figures_of_the_pipelines_guide_are_those_of_the_simulation() -> None:
    pattern = r"^\| `(\w+)` \| (\d) \| ([\d.]+) % \| ([\d., ]+) \| (\d+) \|$"
    rows = re.findall(pattern, PIPELINE.read_text(), flags=re.M)
    assert [style for style, *_ in rows] == list(SCHEDULES)
    for style, chunks, bubble, peaks, transfers in rows:
        schedule = with_communication(build_schedule(style, 4, 8, int(chunks)))
        timeline = simulate(schedule, Costs())
        assert {len({action.stage for action in actions}) for actions in schedule} == {int(chunks)}
        assert float(bubble) == pytest.approx(100 * timeline.bubble, abs=0.051)
        assert [float(peak) for peak in peaks.split(", ")] == timeline.peak_shares
        assert int(transfers) == sum(action.op in SENDS for actions in schedule for action in actions)


def test_every_schedule_is_drawn_in_the_pipelines_guide_by_the_command_that_it_says() -> None:
    text = PIPELINE.read_text()
    commands = re.findall(r"^    (echelon timeline .* --out docs/(images/\S+))$", text, flags=re.M)
    assert sorted(image for _, image in commands) == sorted(set(re.findall(r"\]\((images/[^)]+)\)", text)))
    drawn = [words[words.index("--schedule") + 1] for words in (command.split() for command, _ in commands)]
    assert set(drawn) == set(SCHEDULES)
    for command, image in commands:
        picture = (PIPELINE.parent / image).read_text()
        style = command.split("--schedule ")[1].split()[0]
        assert f"{style}, {command.split('--pp ')[1].split()[0]} ranks" in picture


def test_every_argument_of_the_plugin_is_listed_where_it_belongs() -> None:
    taken = set(inspect.signature(HybridParallelPlugin).parameters) - {"others"}
    assert names_after(COMING.read_text(), "Work") | {"dp_size"} == taken
    assert HYBRID.keys() & taken == set()  # of the page these are in tests/plugins/test_colossalai.py


@pytest.mark.parametrize(
    "path", [README, COMING, PIPELINE, ROOT / "docs" / "design.md"], ids=lambda path: path.stem
)
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
