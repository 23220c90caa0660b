"""Parity rows of every class of loss in docs/decisions/loss.md: replicas and microbatches have unequal numbers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from echelon.verify.batch import loss_of, make_batch
from echelon.verify.layout_choice import Layout, Training
from echelon.verify.model_choice import ModelChoice

from .models import BySamples
from .row import ParityRow, as_quick

UNEQUAL = Training(extra_samples=(1, 2))  # 7 or 8 samples in 3 microbatches
REPLICAS = Layout(dp=2, zero=1)
ALONE, SHARDED = (REPLICAS, Layout()), (REPLICAS, Layout(tp=2))
EVERY = (*SHARDED, Layout(pp=2), Layout(dp=2, pp=2, zero=2, schedule="zbh1"))

LLAMA, BERT = ModelChoice(model_type="llama"), ModelChoice(model_type="bert")
PRETRAINING, QUESTION = (replace(BERT, head=head) for head in ("pretraining", "question"))
SOUNDS, PAIRS = ModelChoice(model_type="wav2vec2"), ModelChoice(model_type="clip")


def of_kind(problem_type: str) -> ModelChoice:
    """Return a classifier whose labels are numbers."""
    return replace(BERT, settings=(("problem_type", problem_type),))


def with_numbers(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Any]:
    """Make a batch whose labels are three numbers from 0 to 1 for each sample."""
    drawn = torch.Generator().manual_seed(seed)
    batch = make_batch(choice, num_samples=num_samples, seed=seed)
    return batch | {"labels": torch.rand(num_samples, 3, generator=drawn)}


def with_divisor(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Any]:
    """Make a batch with the divisor of its summed loss."""
    return make_batch(choice, num_samples=num_samples, seed=seed) | {"num_items_in_batch": 40}


def with_ignored_positions(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Any]:
    """Make a batch in which two starts and one end are not in the text."""
    batch = make_batch(choice, num_samples=num_samples, seed=seed)
    outside = batch["input_ids"].shape[1]
    batch["start_positions"][:2], batch["end_positions"][-1] = outside, outside
    return batch


def sum_and_weight(outputs: Any, inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all tokens, and their number."""
    count = (inputs["labels"][:, 1:] != -100).sum()
    return outputs.loss * count, count


def another_mean(outputs: Any, inputs: Any) -> Tensor:
    """Return a mean that is not the model's own."""
    return loss_of(outputs, inputs) / 2


@dataclass(frozen=True, kw_only=True)
class LossClass:
    """A class of loss: a model, its layouts, and further fields of its rows."""

    choice: ModelChoice
    layouts: tuple[Layout, ...] = EVERY
    further: tuple[tuple[str, Any], ...] = ()


def by(criterion: Any) -> tuple[tuple[str, Any], ...]:
    """Return the field of a criterion."""
    return (("training", replace(UNEQUAL, criterion=criterion)),)


CLASSES = {
    "of the next token": LossClass(choice=LLAMA),
    "of classes": LossClass(choice=BERT),
    "of several labels": LossClass(
        choice=of_kind("multi_label_classification"), further=(("batch", with_numbers),)
    ),
    "of regression": LossClass(choice=of_kind("regression"), further=(("batch", with_numbers),)),
    "of two terms": LossClass(choice=PRETRAINING),
    "of answers": LossClass(choice=QUESTION, further=(("batch", with_ignored_positions),)),
    "that adds up": LossClass(choice=SOUNDS, layouts=ALONE),
    "of sounds": LossClass(choice=replace(SOUNDS, settings=(("ctc_loss_reduction", "mean"),)), layouts=ALONE),
    "with a divisor in the batch": LossClass(choice=LLAMA, further=(("batch", with_divisor),)),
    "with an auxiliary one": LossClass(
        choice=ModelChoice(model_type="mixtral", settings=(("output_router_logits", True),)), layouts=SHARDED
    ),
    "of pairs, by softmax": LossClass(choice=PAIRS, layouts=ALONE),
    "of pairs, by sigmoid": LossClass(choice=ModelChoice(model_type="siglip"), layouts=ALONE),
    "with a weight": LossClass(choice=LLAMA, further=by(sum_and_weight)),
    "of another criterion": LossClass(choice=BySamples(model_type="llama"), further=by(another_mean)),
}


QUICK = ("of pairs, by softmax", "of pairs, by sigmoid", "with a divisor in the batch", "with a weight")


def loss_rows() -> Iterator[ParityRow]:
    """Yield every class of loss under its layouts; quick are those that tests/plugins/test_whole_batch.py lacks."""
    for name, kind in CLASSES.items():
        for layout in kind.layouts:
            fields = {"training": UNEQUAL, **dict(kind.further)}
            row = ParityRow(name=f"a loss {name}", choice=kind.choice, layout=layout, **fields)
            yield as_quick(row) if layout is REPLICAS and name in QUICK else row
