"""Metrics: what a record holds, when it is read, and how it is written."""

import contextlib
import io
import json
import math
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from echelon import Metrics
from echelon.booster import metrics as module
from echelon.shardformer.expert_load import LayerLoad

from ..host_reads import host_reads
from ..plugins.training import hybrid
from ..pool import Pool, on_ranks


class Optimizer:
    """The two readings of a boosted optimizer."""

    skipped_steps = 1

    def get_grad_norm(self) -> float:
        return 0.5


class Mixture:
    def expert_load(self) -> dict[str, LayerLoad]:
        return {"layers.0": LayerLoad([3, 1]), "layers.1": LayerLoad([2, 2])}


def five_steps(path: Path) -> tuple[list[dict[str, Any]], list[int], str]:
    """Return the records of five steps, the steps in which ranks exchanged, and what was printed."""
    exchanges, gather = [], module.gather_integers
    printed = io.StringIO()
    with (
        mock.patch.object(module, "gather_integers", lambda values: exchanges.append(step) or gather(values)),
        contextlib.redirect_stdout(printed),
    ):
        settings = dict(tokens_per_step=1000, flops_per_token=2e6, peak_flops=1e12, mixture=Mixture())
        metrics = Metrics(hybrid(), Optimizer(), every=2, num_steps=5, show="lines", jsonl=path, **settings)
        for step in range(1, 6):
            time.sleep(0.01)
            metrics.step(torch.tensor(float(step + 10 * dist.get_rank())), lr=0.1 * step)
            if step == 4:
                time.sleep(0.3)
                metrics.write(eval_loss=math.inf)
    return metrics.records, exchanges, printed.getvalue()


def test_records_are_read_at_an_interval_and_average_over_steps_and_ranks(pool: Pool, tmp_path: Path) -> None:
    (records, exchanges, printed), (others, _, nothing) = pool.run(
        2, five_steps, tmp_path / "new" / "steps.jsonl"
    )
    assert exchanges == [2, 4, 5] and nothing == ""
    losses = [(record["step"], record.get("loss")) for record in records]
    assert losses == [(2, 6.5), (4, 8.5), (4, None), (5, 10.0)]
    first, second, evaluation, last = records
    assert others[0]["loss"] == first["loss"]
    assert (first["lr"], first["grad_norm"], first["skipped_steps"]) == (0.2, 0.5, 1)
    assert (first["imbalance/layers.0"], first["imbalance/layers.1"]) == (1.5, 1.0)
    assert 0.01 <= first["step_seconds"] < 0.2 and 0.01 <= last["step_seconds"] < 0.2  # no evaluation in it
    assert first["tokens_per_second"] == pytest.approx(1000 / first["step_seconds"])
    assert first["tokens_per_second_per_device"] == pytest.approx(500 / first["step_seconds"])
    assert first["flops_utilisation"] == pytest.approx(500 * 2e6 / 1e12 / first["step_seconds"])
    assert first["peak_memory_bytes"] > 2**20
    assert evaluation == {"step": 4, "eval_loss": math.inf}
    lines = [json.loads(line) for line in (tmp_path / "new" / "steps.jsonl").read_text().splitlines()]
    assert lines == [first, second, {"step": 4, "eval_loss": None}, last]
    assert printed.startswith("step 2/5, loss 6.5, lr 0.2, skipped 1, memory ")
    assert "% of peak FLOPs, " in printed and printed.count("imbalance 1.50\n") == 3


def resumed(path: Path) -> list[int]:
    metrics = Metrics(hybrid(), Optimizer(), every=1, first_step=3, jsonl=path, show=None)
    metrics.step(torch.tensor(1.0))
    return [record["step"] for record in metrics.records]


@on_ranks(1)
def test_nothing_is_read_between_records() -> None:
    """The last of four steps writes a record."""
    metrics = Metrics(hybrid(), Optimizer(), every=4, show=None)
    numbers = []
    for _ in range(4):
        loss = torch.ones((), dtype=torch.bfloat16)
        with host_reads() as reads:
            metrics.step(loss)
        numbers.append(sum(reads.values()))
    assert numbers == [0, 0, 0, 1], numbers


def test_a_resumed_run_keeps_the_lines_of_its_past_alone(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4, 5)) + '{"step": 6, "lo')
    assert pool.run(1, resumed, path) == [[1, 2, 3, 4]]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


class Board:
    """A writer that keeps what TensorBoard's would write."""

    def __init__(self, folder: str) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        pass


def on_a_board(folder: Path) -> list[tuple[str, float, int]]:
    package = types.SimpleNamespace(SummaryWriter=Board)
    with mock.patch.dict(sys.modules, {"torch.utils.tensorboard": package}):  # type: ignore[dict-item]
        metrics = Metrics(hybrid(), Optimizer(), every=1, show=None, tensorboard=folder)
    metrics.step(torch.tensor(2.0))
    metrics.draw(folder / "curve.svg", "loss", "imbalance")
    return metrics._board.scalars


def wrong_arguments(folder: Path) -> list[str]:
    """Return the errors of arguments, the last of them of a file that only the first rank would write."""
    (folder / "file").write_text("")
    calls = (
        lambda: Metrics(hybrid(), Optimizer(), every=0, show="line"),  # type: ignore[arg-type]
        lambda: Metrics(hybrid(), Optimizer(), show=None).step(None),  # type: ignore[arg-type]
        lambda: Metrics(hybrid(), Optimizer(), jsonl=folder / "file" / "steps.jsonl"),
    )
    errors = []
    for call in calls:
        with pytest.raises((ValueError, OSError)) as raised:
            call()
        errors.append(str(raised.value))
    metrics = Metrics(hybrid(), Optimizer(), every=1, show=None)
    metrics.step(1.5)
    assert metrics.records[0]["loss"] == 1.5
    return errors


def test_wrong_arguments_are_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    for arguments, loss, file in pool.run(2, wrong_arguments, tmp_path):
        assert "every=0 must be at least 1" in arguments and "show='line' must be one of 'auto'" in arguments
        assert "loss=None must be a tensor or a number: give the loss" in loss
        assert "Not a directory" in file or "File exists" in file


def without_tensorboard(folder: Path) -> str:
    with mock.patch.dict(sys.modules, {"torch.utils.tensorboard": None}), pytest.raises(ImportError) as error:
        Metrics(hybrid(), Optimizer(), tensorboard=folder)
    return str(error.value)


def test_tensorboard_gets_every_number_and_is_named_where_it_is_missing(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (scalars,) = pool.run(1, on_a_board, tmp_path)
    assert ("loss", 2.0, 1) in scalars and ("grad_norm", 0.5, 1) in scalars
    assert "step" not in [name for name, _, _ in scalars]
    assert "</svg>" in (tmp_path / "curve.svg").read_text()
    for error in pool.run(2, without_tensorboard, tmp_path):
        assert "pip install tensorboard, or leave it out" in error


def with_a_bar() -> tuple[str, str]:
    """Return what a bar of two steps showed, and what was printed, as the evaluation after the last step."""
    shown, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(printed):
        metrics = Metrics(hybrid(), Optimizer(), every=1, num_steps=2, show="bar")
        for _ in range(2):
            metrics.step(torch.tensor(2.0))
        metrics.write(eval_loss=3.0)
    return shown.getvalue(), printed.getvalue()


def test_the_bar_is_one_on_the_first_rank_and_what_follows_it_is_printed(pool: Pool) -> None:
    (shown, printed), nothing = pool.run(2, with_a_bar)
    assert "2/2" in shown and "loss 2" in shown and nothing == ("", "")
    assert printed == "step 2/2, eval_loss 3\n"
