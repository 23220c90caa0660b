"""The ViT example: digits, refusals, and training and evaluation of a layout equal to one process."""

import importlib.util
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from ..pool import Pool
from .scripts import EXAMPLES, FP32, load, losses, run_here, trained
from .scripts import LAYOUTS as ALL_LAYOUTS

SCRIPT = EXAMPLES / "images" / "vit" / "finetune.py"
digits = load(SCRIPT.parent / "digits.py")

LAYOUTS = {
    **ALL_LAYOUTS,
    "pp2zbh1": (2, f"{FP32} --tp_size 1 --pp_size 2 --pp_style zbh1"),
    "ddp2": (2, "--plugin torch_ddp"),
}
needs_digits = pytest.mark.skipif(bool(digits.errors()), reason="scikit-learn is not installed")


@needs_digits
def test_no_digit_is_lost_and_all_runs_have_the_same_test_digits() -> None:
    train, test = digits.splits()
    assert (len(train), len(test)) == (1437, 360)
    torch.manual_seed(1)
    assert torch.equal(digits.splits()[1][0]["pixel_values"], test[0]["pixel_values"])
    pixels = torch.stack([sample["pixel_values"] for sample in train + test])
    assert pixels.shape == (1797, 1, 8, 8)
    assert (pixels.min(), pixels.max()) == (-1, 1)
    # 1,797 and the number of each digit are from scikit-learn's own description.
    counted = torch.stack([sample["labels"] for sample in train + test]).bincount().tolist()
    assert counted == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.stack([sample["labels"] for sample in test]).bincount().min() > 20


def without_scikit_learn(*words: str) -> tuple[int, str]:
    find = importlib.util.find_spec

    def found(name: str, *others: str) -> object:
        return None if name == "sklearn" else find(name, *others)

    with mock.patch("importlib.util.find_spec", found):
        return run_here(SCRIPT, *words)


@pytest.mark.slow
@needs_digits
def test_a_pretrained_model_gets_a_new_head(pool: Pool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTForImageClassification(ViTConfig(image_size=12, patch_size=6, **sizes)).save_pretrained(tmp_path)
    words = ("--model_name_or_path", str(tmp_path), "--epochs", "1", "--max_steps", "2")
    records, figures = trained(pool, SCRIPT, tmp_path / "log.jsonl", 1, *words)
    assert records[0]["loss"] == pytest.approx(math.log(10), abs=0.5)
    assert figures.keys() == {"accuracy", "loss", "seconds"}


def test_all_errors_are_reported_at_once_by_one_rank(pool: Pool) -> None:
    words = ("--epochs", "0", "--dropout", "2", "--precision", "fp8", "--metrics", "/nowhere/log.jsonl")
    (status, reported), *others = pool.run(2, without_scikit_learn, *words)
    assert (status, others) == (2, [(2, "")])
    for error in (
        "digits come with scikit-learn, which is not installed: pip install scikit-learn",
        "--epochs 0 must be at least 1",
        "--dropout 2.0 must be from 0 to 1",
        "precision='fp8'",
        "there is no folder /nowhere",
    ):
        assert reported.count(error) == 1, error


@needs_digits
def test_a_layout_that_does_not_fit_the_model_is_reported_by_one_rank(pool: Pool) -> None:
    (status, reported), *others = pool.run(
        2, run_here, SCRIPT, "--pp_size", "2", "--num_layers_per_stage", "9", "1"
    )
    assert (status, others) == (2, [(2, "")])
    assert reported.count("finetune.py: error: ") == 1
    assert "num_layers_per_stage" in reported


@pytest.mark.slow
@needs_digits
def test_the_first_steps_of_tp2_pp2_are_those_of_one_process(pool: Pool, tmp_path: Path) -> None:
    words = ("--epochs", "2", "--max_steps", "3", *FP32.split())
    expected, alone = trained(pool, SCRIPT, tmp_path / "alone.jsonl", 1, *words)
    found, figures = trained(
        pool, SCRIPT, tmp_path / "log.jsonl", 4, *words, "--tp_size", "2", "--pp_size", "2"
    )
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in found if "eval_accuracy" in record] == [3, 6]
    assert losses(found) == pytest.approx(losses(expected), abs=1e-5)  # sums in another order, over six steps
    assert found[-1]["eval_accuracy"] == expected[-1]["eval_accuracy"]
    assert figures["accuracy"] == alone["accuracy"] == pytest.approx(found[-1]["eval_accuracy"], abs=5e-5)
    assert (360 * found[-1]["eval_accuracy"]).is_integer()


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Records of two epochs of one process."""
    log = tmp_path_factory.mktemp("alone") / "log.jsonl"
    return trained(pool, SCRIPT, log, 1, *FP32.split(), "--epochs", "2")[0]


@pytest.mark.slow
@needs_digits
@pytest.mark.parametrize("layout", LAYOUTS)  # the last batch of 32, the default, has 8 of 360 test samples
def test_a_layout_reads_as_many_digits_as_one_process(
    pool: Pool, tmp_path: Path, alone: list[dict], layout: str
) -> None:
    num_processes, words = LAYOUTS[layout]
    records, _ = trained(pool, SCRIPT, tmp_path / "log.jsonl", num_processes, "--epochs", "2", *words.split())
    assert alone[-1]["eval_accuracy"] > 0.85
    assert records[-1]["eval_accuracy"] == alone[-1]["eval_accuracy"]
    assert losses(records) == pytest.approx(losses(alone), abs=1e-5)  # 88 steps: 8e-7 was seen
