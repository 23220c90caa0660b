"""Saving and resuming of the examples: an interrupted run has the figures of an uninterrupted one, bit for bit."""

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..pool import Pool
from .resuming import Trial, signalled_here
from .scripts import EXAMPLES, load, records_of, reported_alone, run, run_here

PRETRAIN = EXAMPLES / "language" / "llama" / "pretrain.py"
saving = load(EXAMPLES / "saving.py")

TP2 = ("--tp_size", "2", "--pp_size", "1")
FP32 = ("--precision", "fp32", "--num_microbatches", "2")
Make = Callable[[Path], Trial]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text, packed once, and a small GPT-2 with dropout."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text("".join(f"{number} sheep of {number % 7}.\n" for number in range(100)))
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    dropouts = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    (folder / "config.json").write_text(json.dumps({**config, **dropouts, "vocab_size": 301}))
    return folder


@pytest.fixture
def make(pool: Pool, texts: Path) -> Make:
    """Make trials of a short pretraining: six steps, four in an epoch."""

    def of(folder: Path) -> Trial:
        words = (
            *("--data", str(texts / "text.txt"), "--cache_dir", str(texts / "cache")),
            *("--config", str(texts / "config.json"), "--vocab_size", "300", "--sequence_length", "8"),
            *("--batch_size", "16", "--steps", "6", "--eval_every", "2", "--eval_sequences", "9"),
        )
        return Trial(pool, PRETRAIN, folder, *words)

    return of


def test_a_run_that_was_stopped_twice_resumes_bit_for_bit(make: Make, pool: Pool, tmp_path: Path) -> None:
    trial, layout = make(tmp_path), (*TP2, *FP32)
    # 82 sequences without the 9 for evaluation make 4 batches.
    assert "82 sequences" in trial.run(2, *layout, "--save_every", "3")
    expected = trial.records()
    assert ([record["step"] for record in expected], trial.steps()) == (list(range(1, 7)), [3, 6])
    # As if the run had been killed after its sixth step, which is in the metrics but not saved.
    trial.forget_after(3)
    # Then one rank receives a signal: the current step is saved.
    words = (*trial.words, *layout, "--keep_last", "1", "--save_async")
    (status, reported), (second, _) = pool.run(2, signalled_here, PRETRAIN, 5, *words)
    assert (status, second) == (143, 143), reported
    assert "resuming after step 3/6" in reported
    assert f"interrupted after step 5/6, which is saved in {trial.checkpoints}" in reported
    assert (trial.steps(), trial.records()) == ([5], expected[:5])
    trial.run(2, *layout, "--keep_last", "1")
    assert (trial.steps(), trial.records()) == ([6], expected)


def test_a_run_that_had_ended_reports_it_and_another_run_is_refused(make: Make, tmp_path: Path) -> None:
    trial = make(tmp_path)
    model = tmp_path / "model"
    first = trial.run(1, "--steps", "1", "--save_model", str(model))
    expected = trial.metrics.read_text()
    again = trial.run(1, "--steps", "1")
    assert f"the run had ended after step 1/1: {trial.checkpoints / 'step-00000001'}" in again
    assert again.splitlines()[-1].rpartition(" ")[0] == first.splitlines()[-1].rpartition(" ")[0]
    assert trial.metrics.read_text() == expected
    reported = trial.run(1, "--steps", "1", "--lr", "1", "--weight_decay", "0.5", "--max_norm", "3", status=2)
    for error in ("--lr is 1.0 here, and ", "was saved with 0.003: give", "--weight_decay is 0.5 here"):
        assert reported.count(error) == 1, reported
    assert trial.metrics.read_text() == expected
    assert "there is no checkpoint" in trial.run(1, "--steps", "1", "--resume", "2", status=2)
    read = AutoModelForCausalLM.from_pretrained(model)
    ids = AutoTokenizer.from_pretrained(model)("7 sheep", return_tensors="pt").input_ids
    assert torch.isfinite(read(ids, labels=ids).loss)


def fail_to_write(script: Path, *arguments: str) -> tuple[int, str]:
    """Call `run_here` with a disk that is full when the manifest is written."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "manifest.json")

    with mock.patch("echelon.checkpoint.step.commit_step", full):
        return run_here(script, *arguments)


@pytest.mark.parametrize("words", (("--save_async",), ()), ids=("beside training", "at once"))
def test_a_run_whose_end_was_not_saved_reports_it_and_fails(
    make: Make, tmp_path: Path, words: tuple[str, ...]
) -> None:
    trial = make(tmp_path)
    model = tmp_path / "model"
    words = (*trial.words, "--steps", "1", "--save_model", str(model), *words)
    reported = reported_alone(trial.pool.run(1, fail_to_write, PRETRAIN, *words), status=1)
    assert f"the end of the run could not be saved in {trial.checkpoints}: " in reported
    assert "No space left on device" in reported
    assert trial.steps() == []
    AutoModelForCausalLM.from_pretrained(model)  # exported nevertheless


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    saving.add_saving_options(parser)
    return parser.parse_args(words)


def test_options_that_make_no_sense_are_reported_before_any_work(tmp_path: Path) -> None:
    (error,) = saving.saving_errors(options("--save_every", "5", "--save_async", "--resume", "auto"))
    assert error.startswith("--save_every, --save_async, --resume without --save_dir")
    (tmp_path / "file").touch()
    words = ("--save_dir", str(tmp_path / "file" / "below"), "--save_model", str(tmp_path / "file"))
    errors = saving.saving_errors(options(*words, "--save_every", "0", "--keep_last", "0"))
    assert [error.partition(" ")[0] for error in errors] == [
        "--save_every",
        "--keep_last",
        "--save_dir",
        "--save_model",
    ]
    (tmp_path / "step-00000007").mkdir()
    (error,) = saving.saving_errors(options("--save_dir", str(tmp_path)))
    assert "has checkpoints already, the last one step-00000007: give --resume auto" in error
    assert (
        saving.saving_errors(options("--save_dir", str(tmp_path / "new" / "folder"), "--resume", "3")) == []
    )
    assert (options("--resume", "none").resume, options("--resume", "12").resume) == (None, 12)


def test_a_word_that_resume_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        options("--resume", "newest")
    assert end.value.code == 2
    assert "'newest' must be auto, must, the number of a step, or none" in capsys.readouterr().err


# Arguments of a short run by example.
SMALL = {
    "language/bert": "--epochs 2 --max_steps 4 --dropout 0.1",
    "language/t5": "--longest 3 --num_train 400 --num_test 30 --epochs 2 --max_steps 4 --batch_size 16 --dropout 0.1",
    "images/vit": "--epochs 2 --max_steps 4 --dropout 0.1",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "num_processes", "layout"),
    [
        ("language/bert", 2, "--plugin low_level_zero --zero_stage 1 --precision fp16 --initial_scale 4e9"),
        ("language/bert", 2, "--plugin torch_ddp_fp16"),
        ("language/t5", 4, "--tp_size 2 --pp_size 2 --precision fp32"),
        ("images/vit", 2, "--tp_size 2 --pp_size 1 --precision bf16 --save_async"),
    ],
)
@pytest.mark.parametrize("stop", (3, 4), ids=("within an epoch", "at its end"))
def test_a_fine_tuning_resumes_bit_for_bit(
    pool: Pool, tmp_path: Path, example: str, num_processes: int, layout: str, stop: int
) -> None:
    words = (*SMALL[example].split(), *layout.split(), "--save_every", str(stop), "--eval_every", "1")
    trial = Trial(pool, EXAMPLES / example / "finetune.py", tmp_path, *words)
    reported = trial.run(num_processes)
    expected = trial.records()
    trial.forget_after(stop)
    assert f"resuming after step {stop}/8" in (again := trial.run(num_processes))
    assert trial.records() == expected
    assert len(expected) == 8
    assert again.splitlines()[-1].rpartition(" ")[0] == reported.splitlines()[-1].rpartition(" ")[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ("--tp_size 2", "--tp_size 1"))
def test_a_run_of_shardformer_alone_resumes(pool: Pool, tmp_path: Path, layout: str) -> None:
    script = EXAMPLES / "shardformer" / "finetune.py"
    trial = Trial(pool, script, tmp_path, "--steps", "6", "--save_every", "4", "--key_value_heads", "1")
    model = tmp_path / "model"
    trial.run(2, "--tp_size", "2", "--save_model", str(model))
    expected = trial.records()
    trial.forget_after(4)
    assert "resuming after step 4/6" in trial.run(2, *layout.split())
    found = trial.records()
    assert found == expected or layout == "--tp_size 1"  # sums in another order
    for key in ("loss", "norm"):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=1e-4)
    read, reported = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not any(reported[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert read.config.num_key_value_heads == 1


def children_of(process: int) -> list[int]:
    """Return the ids of a process's children."""
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat")]
    # The format is "number (name) state parent …"; names may have spaces.
    parents = {int(stat.split(" ", 1)[0]): int(stat.rpartition(")")[2].split()[1]) for stat in stats}
    return [number for number, parent in parents.items() if parent == process]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", (signal.SIGTERM, signal.SIGKILL))
def test_torchrun_is_stopped_and_started_again(
    pool: Pool, texts: Path, tmp_path: Path, stopped: signal.Signals
) -> None:
    """Send a scheduler's signal, or simulate a lost machine, with real processes."""
    checkpoints, log = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    words = (
        *("--data", str(texts / "text.txt"), "--cache_dir", str(texts / "cache"), "--vocab_size", "300"),
        *("--config", str(texts / "config.json"), "--sequence_length", "8", "--batch_size", "16"),
        *("--steps", "120", "--eval_every", "0", "--eval_sequences", "9"),
        *("--save_every", "20", "--keep_last", "2"),
        *("--save_dir", str(checkpoints), "--resume", "auto", "--metrics", str(log)),
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with subprocess.Popen(
        [*command, str(PRETRAIN), *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 50/"):
                # A lost machine ends all processes; a signal goes to torchrun, which forwards it.
                others = children_of(process.pid) if stopped == signal.SIGKILL else []
                for number in (process.pid, *others):
                    os.kill(number, stopped)
                break
        rest = process.stdout.read()
    assert process.returncode != 0
    saved = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))
    assert saved % 20 == 0 if stopped == signal.SIGKILL else saved >= 50
    assert ("which is saved in" in rest) == (stopped != signal.SIGKILL)
    again = run(pool, PRETRAIN, *words, "--tp_size", "1", "--pp_size", "2", processes=2)
    assert f"resuming after step {saved}/120" in again
    assert [record["step"] for record in records_of(log)] == list(range(1, 121))
