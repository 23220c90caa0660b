"""The T5 example: task, answers under any layout, and training and evaluation of a layout equal to one process."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from echelon import Booster, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from echelon.plugins.base import Plugin

from ..pool import Pool
from .scripts import EXAMPLES, FP32, load, losses, run_here, trained

SCRIPT = EXAMPLES / "language" / "t5" / "finetune.py"
tasks = load(SCRIPT.parent / "tasks.py")
decoding = load(SCRIPT.parent / "decoding.py")

# Three digits are learned fast; with batches of 50 the last one has 3 of the 103 test texts.
SMALL = (
    *("--longest", "3", "--num_train", "1500", "--num_test", "103", "--batch_size", "50", "--lr", "4e-3"),
    *("--epochs", "2", "--num_microbatches", "2"),
)
# Numbers of processes and plugins for `answers_and_expected`.
PLUGINS: dict[str, tuple[int, Callable[[], Plugin]]] = {
    "tp2pp2": (4, partial(HybridParallelPlugin, 2, 2, precision="fp32", num_microbatches=2)),
    "ddp2": (2, TorchDDPPlugin),
    "tp2": (2, partial(HybridParallelPlugin, 2, 1, precision="fp32")),
    "pp2": (2, partial(HybridParallelPlugin, 1, 2, precision="fp32", num_microbatches=3)),
    "zbv": (
        2,
        partial(HybridParallelPlugin, 1, 2, precision="fp32", num_microbatches=4, pp_style="zbv"),
    ),
    "dp2zero1": (2, partial(LowLevelZeroPlugin, precision="fp32")),
}
QUICK = ("tp2pp2", "ddp2")


def test_answers_follow_the_task() -> None:
    pairs = [
        pair for split in tasks.make_pairs(num_train=500, num_test=50, longest=6, seed=0) for pair in split
    ]
    for pair in pairs:
        task, *digits = pair.text.split()
        answer = pair.answer.split()
        assert task == pair.task
        assert 2 <= len(digits) <= 6
        if task == "sum":
            assert int("".join(answer)) == sum(int(digit) for digit in digits)
        else:
            assert Counter(answer) == Counter(digits)
            assert answer == (sorted(digits) if task == "sort" else digits[::-1])
    assert {pair.task for pair in pairs} == set(tasks.TASKS)


def test_texts_are_distinct_and_no_training_text_has_the_digits_of_a_test_text() -> None:
    train, test = tasks.make_pairs(num_train=3000, num_test=400, longest=8, seed=1)
    assert (len({pair.text for pair in train}), len({pair.text for pair in test})) == (3000, 400)
    assert (train, test) == tasks.make_pairs(num_train=3000, num_test=400, longest=8, seed=1)
    assert train != tasks.make_pairs(num_train=3000, num_test=400, longest=8, seed=2)[0]
    bags = [{tuple(sorted(pair.text.split()[1:])) for pair in pairs} for pairs in (train, test)]
    assert not bags[0] & bags[1]


def test_texts_survive_their_tokens_and_padding_has_no_label() -> None:
    pairs = [
        tasks.Pair(task="sort", text="sort 3 1 2", answer="1 2 3"),
        tasks.Pair(task="sum", text="sum 1 2", answer="3"),
    ]
    tokenizer = tasks.make_tokenizer()
    samples = tasks.with_numbers(tasks.encode(pairs, tokenizer), pairs)
    assert [sample["task"].item() for sample in samples] == [0, 2]
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert samples[1]["input_ids"].tolist()[-2:] == [end, pad]
    assert samples[1]["attention_mask"].tolist() == [1, 1, 1, 1, 0]
    assert samples[1]["labels"].tolist()[1:] == [end, -100, -100]
    texts = [tokenizer.decode(sample["input_ids"], skip_special_tokens=True) for sample in samples]
    assert texts == [pair.text for pair in pairs]


def answers_and_expected(plugin: str) -> tuple[Tensor, Tensor]:
    """Return the answers of a small T5 under a plugin, and those that the unsharded model generates."""
    torch.manual_seed(5)
    config = T5Config(
        **dict(vocab_size=20, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.5),
        **dict(pad_token_id=0, eos_token_id=14, decoder_start_token_id=0),
    )
    model = T5ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data *= 3  # for answers that differ
    tokens = torch.randint(2, 20, (12, 7))
    mask = (torch.arange(7) < torch.randint(3, 8, (12, 1))).long()
    expected = model.generate(tokens * mask, attention_mask=mask, max_new_tokens=6, do_sample=False)[:, 1:]
    booster = Booster(plugin=PLUGINS[plugin][1]())
    model, *_ = booster.boost(model)
    batch = {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens}
    return decoding.greedy_answers(booster, model, batch, length=6), expected


@pytest.mark.parametrize(
    "plugin", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLUGINS]
)
def test_answers_on_every_rank_equal_those_of_the_unsharded_model(pool: Pool, plugin: str) -> None:
    num_processes, _ = PLUGINS[plugin]
    for answers, expected in pool.run(num_processes, answers_and_expected, plugin):
        length = expected.shape[1]
        assert torch.equal(answers[:, :length], expected)
        assert not answers[:, length:].any()
        assert len(set(map(tuple, answers.tolist()))) > 3
        assert 0 < (expected == 14).any(1).sum() < len(expected)  # some have ended, others not


def test_texts_that_do_not_exist_are_refused_by_one_rank(pool: Pool) -> None:
    words = ("--longest", "2", "--num_test", "100", "--num_train", "262", "--lr", "-1", "--batch_size", "5")
    (status, reported), *others = pool.run(2, run_here, SCRIPT, *words, "--tp_size", "1", "--pp_size", "1")
    assert (status, others) == (2, [(2, "")])
    for error in (
        "--num_train 262 can be at most 261 with --longest 2",
        "--num_test 100 can be at most 39 with --longest 2",
        "--lr -1.0 must be at least 0",
        "--batch_size 5 does not divide by 2 data-parallel ranks",
    ):
        assert reported.count(error) == 1, error


@pytest.mark.slow
def test_the_first_steps_of_tp2_pp2_are_those_of_one_process(pool: Pool, tmp_path: Path) -> None:
    words = (*SMALL, *FP32.split(), "--epochs", "1", "--max_steps", "3")
    expected, alone = trained(pool, SCRIPT, tmp_path / "alone.jsonl", 1, *words)
    found, figures = trained(
        pool, SCRIPT, tmp_path / "log.jsonl", 4, *words, "--tp_size", "2", "--pp_size", "2"
    )
    assert losses(found) == pytest.approx(losses(expected), abs=1e-4)  # sums in another order
    del alone["seconds"], figures["seconds"]
    assert figures == pytest.approx(alone, abs=1e-4)
    assert figures.keys() == {"exact", "exact_sort", "exact_reverse", "exact_sum", "loss"}


@pytest.mark.slow
def test_a_missed_target_ends_with_status_1_and_the_curve_is_drawn(pool: Pool, tmp_path: Path) -> None:
    words = (*SMALL, "--epochs", "1", "--max_steps", "2", "--curve", str(tmp_path / "curve.svg"))
    ((status, printed),) = pool.run(1, run_here, SCRIPT, *words, "--target_exact", "1.01")
    assert status == 1
    assert "exact 0.0000 is below the target 1.01" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("step ")]
    assert line.startswith("step 2/2, loss ") and ", eval exact sort 0, " in line
    assert sum(" → " in line for line in printed.splitlines()) == 6
    assert (tmp_path / "curve.svg").read_text().count("<!-- share of the test samples -->") == 1
