"""The Shardformer example: words, refusals, and losses and norms of a layout equal to those of one process."""

import re
from pathlib import Path

import pytest
import torch

from ..pool import Pool
from .scripts import load, records_of, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "shardformer"
SCRIPT = EXAMPLE / "finetune.py"
data = load(EXAMPLE / "data.py")


def test_words_are_different_and_follow_the_seed() -> None:
    words = data.words(300, length=4, seed=1)
    assert torch.equal(words, data.words(300, length=4, seed=1))
    assert not torch.equal(words, data.words(300, length=4, seed=2))
    assert len(words.unique(dim=0)) == 300


def test_a_sample_is_word_and_answer_with_labels_for_the_answer_only() -> None:
    words = torch.tensor([[0, 1, 25]])
    (sample,) = data.samples(words)
    assert data.spelled(sample["input_ids"]) == "abz.dec."
    assert sample["labels"].tolist() == [data.IGNORED_LABEL] * 4 + [3, 4, 2, data.END]


@pytest.mark.slow
def test_it_learns_the_cipher_without_a_booster_and_answers_by_generation(pool: Pool, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    words = ("--steps", "80", "--target_accuracy", "0.9", "--log_losses", str(log))
    output = run(pool, SCRIPT, *words, processes=2)
    assert re.search(r"^[a-z]{6} -> [a-z]{6}$", output, flags=re.M)
    assert re.search(r"^accuracy=\S+ loss=\S+ seconds=\S+$", output.strip().splitlines()[-1])
    records = records_of(log)
    assert len(records) == 80
    assert records[-1]["loss"] < 0.1 < records[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (2, ("--model_type", "llama")),
        (2, ("--model_type", "qwen3", "--tp_size", "1")),
        (4, ("--model_type", "qwen3", "--tp_size", "2")),
        (4, ("--model_type", "qwen3", "--key_value_heads", "2")),
    ],
)
def test_losses_and_norms_are_those_of_one_process(
    pool: Pool, tmp_path: Path, processes: int, words: tuple[str, ...]
) -> None:
    alone, together = tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    common = ("--steps", "12", "--key_value_heads", "1", *words[:2])
    heads = words[2:] if "--key_value_heads" in words else ()
    run(pool, SCRIPT, *common, *heads, "--log_losses", str(alone))
    run(pool, SCRIPT, *common, *words, "--log_losses", str(together), processes=processes)
    expected, found = records_of(alone), records_of(together)
    assert len(found) == 12
    for key in ("loss", "norm"):
        # Replicas get different words of the same epoch: the global batches are equal.
        assert [one[key] for one in found] == pytest.approx([one[key] for one in expected], rel=1e-3)


def test_all_bad_arguments_are_reported_at_once(pool: Pool) -> None:
    reported = run(pool, SCRIPT, "--tp_size", "2", "--key_value_heads", "3", "--length", "2", status=2)
    for error in (
        "--tp_size 2 does not divide the 1 processes",
        "--key_value_heads 3 does not divide 4 heads",
        "--length 2 makes too few words",
    ):
        assert reported.count(error) == 1, error
