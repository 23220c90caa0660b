"""Code and links of the documents: scripts run as shown, and linked files exist."""

import inspect
import re
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

from .docs.scripts import code_blocks, losses, printed, run_script
from .pipeline.small_schedules import written
from .pool import Pool

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
COMING = DOCS / "coming-from-colossalai.md"
PIPELINE = DOCS / "pipeline.md"


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(path).items()}


def names_after(text: str, label: str) -> set[str]:
    """Return the argument names in the list item that begins with a bold label."""
    (item,) = re.findall(rf"^- \*\*{label}.*?(?=^- |^$)", text, flags=re.M | re.S)
    return set(re.findall(r"`([a-z0-9_]+)`", item))


def test_the_script_of_the_readme_trains_equally_on_one_process_and_on_four(
    pool: Pool, tmp_path: Path
) -> None:
    (script,) = code_blocks(README, "python")
    assert len(script.splitlines()) <= 25
    alone = losses(pool.run(1, printed, script, tmp_path)[0])
    saved_alone = shapes(tmp_path / "llama.safetensors")
    together = losses("".join(pool.run(4, printed, script, tmp_path)))
    assert len(alone) == 5
    assert alone == sorted(alone, reverse=True)
    assert alone[-1] < 0.8 * alone[0]
    # The global batches are the same; the tolerance is for 20 steps of float32 sums in another order.
    assert together == pytest.approx(alone, abs=1e-4)
    assert shapes(tmp_path / "llama.safetensors") == saved_alone


@pytest.mark.slow
def test_the_script_of_the_readme_is_started_by_python_and_by_torchrun(tmp_path: Path) -> None:
    (script,) = code_blocks(README, "python")
    alone, together = (losses(run_script(script, tmp_path, num_processes=number)) for number in (None, 4))
    assert len(alone) == 5 and together == pytest.approx(alone, abs=1e-4)


@pytest.mark.slow
def test_the_script_moved_from_colossalai_runs(tmp_path: Path) -> None:
    (script,) = code_blocks(COMING, "python")
    printed_losses = losses(
        run_script(script, tmp_path, num_processes=2, warning="fp16 on a CPU is 10 to 20 times slower")
    )
    assert len(printed_losses) == 8
    assert all(map(isfinite, printed_losses))


def test_the_script_moved_from_accelerate_trains_equally_on_one_process_and_on_two(
    pool: Pool, tmp_path: Path
) -> None:
    (script,) = code_blocks(DOCS / "coming-from-accelerate.md", "python")
    outputs = [pool.run(number, printed, script, tmp_path)[0] for number in (1, 2)]
    assert [re.findall(r"of (\d+) are right", output) for output in outputs] == [["12", "12"]] * 2


@pytest.mark.slow
def test_the_schedule_of_the_pipelines_guide_trains_equally_on_one_process_and_on_two(tmp_path: Path) -> None:
    (script,) = code_blocks(PIPELINE, "python")
    alone = losses(run_script(script, tmp_path, num_processes=None))
    assert len(alone) == 5
    assert alone[-1] < alone[0]
    assert losses(run_script(script, tmp_path, num_processes=2)) == alone


def test_the_pipelines_guide_is_right_about_a_custom_schedule(
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


def test_the_pipelines_guide_quotes_the_errors_of_bad_schedules() -> None:
    rows = re.findall(r"^\| `(\d\S* .*)` and `(.*)` \| (.*) \|$", PIPELINE.read_text(), flags=re.M)
    assert len(rows) == 4
    for *ranks, reported in rows:
        assert style_errors(written(*ranks), 1, 2) == [reported]


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


def test_every_schedule_is_drawn_in_the_pipelines_guide_by_the_quoted_command() -> None:
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
    taken = set(inspect.signature(HybridParallelPlugin).parameters)
    assert names_after(COMING.read_text(), "Supported") | {"dp_size"} == taken
    assert HYBRID.keys() & taken == set()  # those of this page are in tests/plugins/test_colossalai.py


def test_the_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    commands = set(re.findall(r"\bmake ([a-z-]+)", README.read_text()))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert {"finetune", "test"} <= commands <= targets
