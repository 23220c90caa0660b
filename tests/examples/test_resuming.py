"""The examples save, and go on: a run that was interrupted ends with the figures of one that was not, bit for bit."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..pool import Pool
from .resuming import Trial, signalled_here
from .scripts import EXAMPLES, load, losses, run_here

PRETRAIN = EXAMPLES / "language" / "llama" / "pretrain.py"
saving = load(EXAMPLES / "saving.py")

Make = Callable[[Path], Trial]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text, packed once, and a small GPT-2 with dropout."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text("".join(f"{number} sheep of {number % 7}.\n" for number in range(70)))
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    dropouts = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    (folder / "config.json").write_text(json.dumps({**config, **dropouts, "vocab_size": 301}))
    return folder


@pytest.fixture
def make(pool: Pool, texts: Path) -> Make:
    """Makes trials of a short pretraining, of six steps and four an epoch."""

    def of(folder: Path) -> Trial:
        words = (
            *("--data", str(texts / "text.txt"), "--cache_dir", str(texts / "cache")),
            *("--config", str(texts / "config.json"), "--vocab_size", "300", "--sequence_length", "8"),
            *("--batch_size", "16", "--steps", "6", "--eval_every", "2", "--eval_sequences", "9"),
            *("--num_microbatches", "2", "--precision", "fp32"),
        )
        return Trial(pool, PRETRAIN, folder, *words)

    return of


def test_a_run_that_was_stopped_goes_on_bit_for_bit(make: Make, pool: Pool, tmp_path: Path) -> None:
    layout = ("--tp_size", "2", "--pp_size", "1")
    whole = make(tmp_path / "whole")
    whole.folder.mkdir()
    assert "gpt2 of" in whole.run(2, *layout, "--save_every", "3")
    expected = whole.records()
    assert [record["step"] for record in expected] == list(range(1, 7))
    # Killed after the sixth step, which the metrics have and no checkpoint.
    whole.forget_after(3)
    assert "going on after step 3/6" in whole.run(2, *layout, "--save_every", "3")
    assert whole.records() == expected
    # A signal is not lost on the rank that gets it, and the step that it falls into is saved.
    other = make(tmp_path / "other")
    other.folder.mkdir()
    words = (*other.words, *layout, "--keep_last", "1", "--save_async")
    (status, told), (second, _) = pool.run(2, signalled_here, PRETRAIN, "training", 5, *words)
    assert (status, second) == (143, 143), told
    assert f"interrupted after step 5/6, which is saved in {other.checkpoints}" in told
    assert (other.steps(), other.records()) == ([5], expected[:5])
    other.run(2, *layout, "--keep_last", "1")
    assert (other.steps(), other.records()) == ([6], expected)


def test_a_run_that_had_ended_says_so_and_another_one_is_refused(make: Make, tmp_path: Path) -> None:
    trial = make(tmp_path)
    model = tmp_path / "model"
    first = trial.run(1, "--steps", "1", "--save_model", str(model))
    expected = trial.metrics.read_text()
    again = trial.run(1, "--steps", "1")
    assert f"the run had ended after step 1/1: {trial.checkpoints / 'step-00000001'}" in again
    assert again.splitlines()[-1].rpartition(" ")[0] == first.splitlines()[-1].rpartition(" ")[0]
    assert trial.metrics.read_text() == expected
    told = trial.refusal(1, "--steps", "1", "--lr", "1", "--weight_decay", "0.5", "--max_norm", "3")
    for fault in ("--lr is 1.0 here, and ", "was saved with 0.003: give", "--weight_decay is 0.5 here"):
        assert told.count(fault) == 1, told
    assert trial.metrics.read_text() == expected
    assert "there is no checkpoint" in trial.refusal(1, "--steps", "1", "--resume", "2")
    read = AutoModelForCausalLM.from_pretrained(model)
    ids = AutoTokenizer.from_pretrained(model)("7 sheep", return_tensors="pt").input_ids
    assert torch.isfinite(read(ids, labels=ids).loss)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    saving.add_saving_options(parser)
    return parser.parse_args(words)


def test_options_that_make_no_sense_are_told_before_any_work(tmp_path: Path) -> None:
    (fault,) = saving.saving_faults(options("--save_every", "5", "--save_async", "--resume", "auto"))
    assert fault.startswith("--save_every, --save_async, --resume without --save_dir")
    (tmp_path / "file").touch()
    words = ("--save_dir", str(tmp_path / "file" / "below"), "--save_model", str(tmp_path / "file"))
    faults = saving.saving_faults(options(*words, "--save_every", "0", "--keep_last", "0"))
    assert [fault.partition(" ")[0] for fault in faults] == [
        "--save_every",
        "--keep_last",
        "--save_dir",
        "--save_model",
    ]
    (tmp_path / "step-00000007").mkdir()
    (fault,) = saving.saving_faults(options("--save_dir", str(tmp_path)))
    assert "has checkpoints already, the last one step-00000007: give --resume auto" in fault
    assert (
        saving.saving_faults(options("--save_dir", str(tmp_path / "new" / "folder"), "--resume", "3")) == []
    )
    assert (options("--resume", "none").resume, options("--resume", "12").resume) == (None, 12)


def test_a_word_that_resume_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        options("--resume", "newest")
    assert end.value.code == 2
    assert "'newest' must be auto, the number of a step, or none" in capsys.readouterr().err
