"""`echelon timeline`: figures, pictures, refusals, and the evaluation of measurements."""

import sys
from pathlib import Path

import pytest

from echelon.cli import timeline as command
from echelon.cli.timeline import Pipeline, mean_costs, median_step
from echelon.pipeline.action import Action, Op
from echelon.pipeline.schedules import SCHEDULES
from echelon.pipeline.simulate import Costs, Span
from echelon.pipeline.timeline_drawing import Panel

from .calls import call, cells, require_refused


@pytest.mark.parametrize(
    ("schedule", "bubble", "last_row"),
    [
        ("gpipe", "37.5%", ["3", "3", "37.5%", "8"]),  # 3 of 8; all microbatches
        ("1f1b", "37.5%", ["3", "3", "37.5%", "1"]),
        ("interleaved --chunks 2", "18.8%", ["3", "3, 7", "18.8%", "2.5"]),  # 3 of 2 · 8
        ("zbh1", "12.5%", ["3", "3", "12.5%", "4"]),  # a third of 37.5%
        ("zbh1 --costs 1,1,0.5", "22.5%", ["3", "3", "22.5%", "4"]),  # 3 · 1.5 of 8 · 2.5
        ("zbv", "6.2%", ["3", "3, 4", "6.2%", "4"]),
    ],
)
def test_a_schedule_is_drawn_and_its_figures_are_printed(
    tmp_path: Path, schedule: str, bubble: str, last_row: list[str]
) -> None:
    out = tmp_path / "drawn.svg"
    status, output = call(f"timeline --schedule {schedule} --pp 4 --microbatches 8 --out {out}")
    assert status == 0, output
    assert f"bubble {bubble} of the work" in output and f"drawn to {out}" in output
    assert [row[0] for row in cells(output)] == ["0", "1", "2", "3"]
    assert cells(output)[-1] == last_row
    assert f"bubble {bubble} of the work" in out.read_text()


@pytest.mark.parametrize("style", SCHEDULES)
def test_every_schedule_can_be_selected_by_its_name_alone(tmp_path: Path, style: str) -> None:
    status, output = call(f"timeline --schedule {style} --pp 2 --out {tmp_path}/drawn.svg")
    assert status == 0, output


@pytest.mark.parametrize(
    "row",
    [
        ("--schedule zigzag --out a.gif", "no schedule 'zigzag'", "out='a.gif' must end in one of .pdf"),
        ("--costs 1,2 --out /nonesuch/a.png", "costs='1,2' must be three positive", "no folder '/nonesuch'"),
        ("--costs 1,0,1", "costs='1,0,1'"),
        ("--costs 1,1,inf", "costs='1,1,inf'"),
        ("--costs 1e308,1e308,1e308", "from 1e-100 to 1e+100"),
        ("--costs 1e-320,1,1", "at most 1e+06 times as large as each other"),
        ("--costs one,1,1", "costs='one,1,1'"),
        ("--pp 0 --microbatches 0", "pp=0 must be at least 1", "microbatches=0 must be at least 1"),
        ("--schedule zbh1 --chunks 2", "'zbh1'", "cannot have num_model_chunks=2"),
        ("--steps 3 --model llama", "--steps is for measuring", "--model is for measuring"),
        ("--measure --costs 1,1,1 --steps 0", "leave one of the two out", "steps=0 must be at least 1"),
        ("--measure --model nonesuch --hidden 12", "'nonesuch' is not a model type", "hidden=12"),
        ("--measure --model nonesuch --schedule zigzag", "'nonesuch' is not", "no schedule 'zigzag'"),
        ("--measure --layers 7 --chunks 2 --schedule interleaved", "7 layers and the pipeline 8 stages"),
        ("--measure --layers 0", "layers=0 must be at least 1"),
        ("--measure --model xglm", "a 'xglm', which is built by general rules"),
    ],
)
def test_bad_arguments_are_refused_all_at_once_with_status_2(
    monkeypatch: pytest.MonkeyPatch, row: tuple[str, ...]
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr(command, "save_timelines", lambda *_, **__: pytest.fail("something was drawn"))
    arguments, *words = row
    require_refused(f"timeline {arguments}", *words)


def test_a_file_that_cannot_be_written_is_reported_after_the_figures() -> None:
    status, output = call("timeline --out /proc/drawn.svg")  # a folder where not even root can create a file
    assert status == 1, output
    assert "37.5%" in output and "out='/proc/drawn.svg' cannot be written (" in output


def test_a_missing_matplotlib_is_reported_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, output = call("timeline --measure")
    assert (status, "pip install 'echelon[plot]'" in output) == (2, True)


def test_a_process_that_fails_is_reported_with_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_, **__: "rank 1 failed: no such luck")
    status, output = call(f"timeline --measure --out {tmp_path}/a.png")
    assert (status, "rank 1 failed: no such luck" in output) == (1, True)
    assert not (tmp_path / "a.png").exists()


def test_a_measurement_is_drawn_above_the_simulation_of_its_mean_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Panel] = []
    spans = Pipeline(style="1f1b", num_ranks=2, num_microbatches=4).simulate(Costs(forward=3.0)).spans
    late = [
        [Span(action, start + rank, end + rank) for action, start, end in spans[rank]] for rank in range(2)
    ]
    monkeypatch.setattr(command, "measure", lambda *_, **__: late)
    monkeypatch.setattr(command, "save_timelines", lambda panels, *_, **__: drawn.extend(panels))
    status, output = call(f"timeline --measure --pp 2 --microbatches 4 --out {tmp_path}/a.png")
    assert status == 0, output
    measured, simulated = (panel.timeline for panel in drawn)
    assert measured.spans == late and measured.peak_activations == simulated.peak_activations == [2, 1]
    assert simulated.spans == spans
    assert "bubble 25.0% of the work, 25 ms in all" in output and "bubble 25.0%" in output


def span(op: Op, start: float, end: float, microbatch: int = 0) -> Span:
    return Span(Action(op, 0, microbatch), start, end)


def test_the_median_step_is_drawn_from_its_own_start_in_milliseconds() -> None:
    lengths = (5.0, 1.0, 3.0, 4.0)
    steps = [
        [[span(Op.FORWARD, 100 + index, 100 + index + 0.5)] for index in range(4)],
        [[span(Op.FORWARD, 100.5 + index, 100 + index + length)] for index, length in enumerate(lengths)],
    ]
    assert median_step(steps) == [[span(Op.FORWARD, 0, 500)], [span(Op.FORWARD, 500, 3000)]]


def test_mean_costs_are_those_of_the_measured_parts() -> None:
    unsplit = [
        [span(Op.FORWARD, 0, 2), span(Op.BACKWARD, 2, 8)],
        [span(Op.FORWARD, 0, 4), span(Op.BACKWARD, 4, 14)],
    ]
    assert mean_costs(unsplit) == Costs(forward=3, backward_input=4, backward_weight=4)
    parts = [[span(Op.FORWARD, 0, 1), span(Op.BACKWARD_INPUT, 1, 3), span(Op.BACKWARD_WEIGHT, 3, 6)]]
    assert mean_costs(parts) == Costs(forward=1, backward_input=2, backward_weight=3)


@pytest.mark.slow  # starts processes, like quick tests of `echelon verify`
def test_local_processes_are_measured_and_drawn(tmp_path: Path) -> None:
    out = tmp_path / "measured.svg"
    status, output = call(f"timeline --measure --pp 2 --microbatches 3 --hidden 32 --steps 1 --out {out}")
    assert status == 0, output
    assert output.count("of the work") == 2
    drawn = out.read_text()
    for panel in (0, 1):
        for rank in (0, 1):
            assert f'id="box-{panel}-{rank}-5"' in drawn and f'id="box-{panel}-{rank}-6"' not in drawn
    assert "time (ms)" in drawn
