"""Losses of several terms, with scales, constants and rests; contrastive losses; budgets of a warm step."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..host_reads import Places, host_reads
from ..log_lines import logged
from ..pool import Pool
from ..slow import slow_except, slow_row
from .test_whole_batch import SAMPLES, share
from .training import boosted, calls_of, hybrid, parts, refused, sgd

Batch = dict[str, Any]
Combine = Callable[["TwoTerms", Tensor, Tensor], Tensor]


def in_place(model: "TwoTerms", first: Tensor, second: Tensor) -> Tensor:
    first += 0.3 * second
    return first


def learned(model: "TwoTerms", first: Tensor, second: Tensor) -> Tensor:
    """Return terms with learned weights, arXiv:1705.07115."""
    return first * (-model.scales[0]).exp() + second * (-model.scales[1]).exp() + model.scales.sum()


COMBINED: dict[str, Combine] = {
    "scaled": lambda _, first, second: 0.5 * (first + second),
    "stacked": lambda _, first, second: torch.stack([first, second]).mean(),
    "in place": in_place,
    "learned weights": learned,
    "a constant": lambda _, first, second: first + second,
    "one of two": lambda _, first, second: first * 0.1,
    "the first": lambda _, first, second: first,
}
OF_BATCH: dict[str, Combine] = {
    "a factor of the batch": lambda model, first, second: first + second * model.mean_value
}
NOT_LINEAR: dict[str, Combine] = {
    "a product": lambda _, first, second: first * second,
    "a root": lambda _, first, second: first.sqrt() + second,
}


class TwoTerms(nn.Module):
    """A classifier with an ignored class, and a regression of some samples; see COMBINED."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.scales, self.kind = nn.Linear(6, 5), nn.Parameter(torch.tensor([0.2, -0.3])), kind

    def forward(self, x: Tensor, classes: Tensor, values: Tensor) -> Batch:
        scores = self.body(x).tanh()
        known = scores.detach() if self.kind == "a constant" else scores
        of_classes = F.cross_entropy(known[:, :4], classes.clamp(0, 4).view(-1), ignore_index=4)
        of_values = F.mse_loss(scores[:, 4:], values.unsqueeze(-1))
        self.mean_value = values.mean()
        if self.kind == "a divided sum":
            total = F.cross_entropy(scores[:, :4], classes.clamp(0, 4), ignore_index=4, reduction="sum")
            loss = total / len(classes)
        elif self.kind == "each sample":
            pairs = zip(scores[:, :4], classes.clamp(0, 3), strict=True)
            loss = torch.stack([F.cross_entropy(*pair) for pair in pairs]).mean()
        elif self.kind == "checkpointed":
            loss = checkpoint(F.cross_entropy, scores[:, :4], classes.clamp(0, 3), use_reentrant=False)
        else:
            loss = (COMBINED | OF_BATCH | NOT_LINEAR)[self.kind](self, of_classes, of_values)
        return {"loss": loss, "logits": scores}


def two_batch(*, empty: int = 7) -> Batch:
    drawn = torch.Generator().manual_seed(3)
    classes = torch.randint(0, 7, (SAMPLES,), generator=drawn).index_fill(0, torch.arange(empty), 9)
    return {
        "x": torch.randn(SAMPLES, 6, generator=drawn),
        "classes": classes,
        "values": torch.rand(SAMPLES, generator=drawn),
    }


class Pairs(nn.Module):
    """A contrastive loss of pairs, as CLIP's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.kind = nn.Linear(6, 4), nn.Linear(6, 4), kind

    def forward(self, x: Tensor, y: Tensor) -> Batch:
        scores = self.left(x) @ self.right(y).T
        pairs = torch.arange(len(scores), device=scores.device)
        loss = F.cross_entropy(scores, pairs)
        if self.kind == "both ways":
            loss = (loss + F.cross_entropy(scores.T, pairs)) / 2
        return {"loss": loss}


def pairs_batch() -> Batch:
    drawn = torch.Generator().manual_seed(3)
    return {name: torch.randn(SAMPLES, 6, generator=drawn) for name in "xy"}


def trained(model: nn.Module, batch: Batch, calls: int = 1) -> tuple[dict[str, Tensor], float, float]:
    """Return gradients, loss, and loss of an evaluation, of a boosted model."""
    booster = hybrid(num_microbatches=4)
    model, optimizer = boosted(booster, model, sgd)
    replica_batch = share(batch, booster.plugin)
    with torch.inference_mode():
        evaluated = float(booster.execute_pipeline(iter([replica_batch]), model)["loss"])
    for _ in range(calls):
        optimizer.zero_grad()
        loss = booster.execute_pipeline(iter([replica_batch]), model, optimizer=optimizer)["loss"]
    optimizer.reduce_gradients()
    return optimizer.gradients(), float(loss), evaluated


def compared(kind: str) -> list[str]:
    plain, batch = TwoTerms(kind), two_batch()
    expected = plain(**batch)["loss"]
    expected.backward()
    gradients, loss, evaluated = trained(TwoTerms(kind), batch, calls=5)
    far = [
        name
        for name, parameter in plain.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
        if not (gradients[name] - parameter.grad).abs().max() <= 5e-6 * parameter.grad.abs().max()
    ]
    return far + [str(mean) for mean in (loss, evaluated) if abs(mean / expected.item() - 1) > 1e-6]


@pytest.mark.parametrize("kind", [*slow_except([*COMBINED][::2], COMBINED), "checkpointed"])
@pytest.mark.parametrize("size", [slow_row(1), 2])
def test_terms_may_be_scaled_and_constant(pool: Pool, kind: str, size: int) -> None:
    """In the first call and in a warm one; in evaluation under `torch.inference_mode()`."""
    for far in pool.run(size, compared, kind):
        assert far == []


def by_samples(kind: str) -> tuple[list[float], list[str]]:
    """Return loss and evaluated loss relative to the mean of microbatches by samples, and the logged lines."""
    make, batch = (
        (Pairs, pairs_batch()) if kind in ("one way", "both ways") else (TwoTerms, two_batch(empty=0))
    )
    plain, expected = make(kind), 0.0
    for microbatch in parts(batch, 4):
        expected += plain(**microbatch)["loss"].item() * len(microbatch["x"]) / SAMPLES
    with logged() as lines:
        _, *losses = trained(make(kind), batch, calls=3)
    return [loss / expected for loss in losses], lines


@pytest.mark.parametrize("kind", ["one way", "both ways", *NOT_LINEAR, "a divided sum", "each sample"])
def test_a_loss_that_is_no_sum_weighs_by_samples_and_says_so_once(pool: Pool, kind: str) -> None:
    ((ratios, lines),) = pool.run(1, by_samples, kind)
    assert ratios == pytest.approx([1, 1], rel=1e-6)
    assert sum("no sum of means over labels" in line for line in lines) == 1


def warm_step(kind: str) -> tuple[Counter[tuple[str, str]], Places]:
    """Return messages and host reads of the fifth step, by axis and kind."""
    booster, batch = hybrid(num_microbatches=4, zero_stage=1), two_batch()
    model, optimizer = boosted(booster, TwoTerms(kind), sgd)
    for _ in range(5):
        with booster.plugin.ledger(optimizer) as ledger, host_reads() as reads:
            booster.execute_pipeline(iter([share(batch, booster.plugin)]), model, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return Counter(calls_of(ledger)), reads


def test_a_warm_step_of_several_terms_sends_their_counts_alone(pool: Pool) -> None:
    of_one, of_several = (pool.run(2, warm_step, kind) for kind in ("the first", "scaled"))
    for (messages, reads), (more, also_read) in zip(of_one, of_several, strict=True):
        assert (more - messages).total() == 1
        assert reads == also_read


def of_replicas() -> tuple[float, float]:
    """Return the loss of this replica's batch and the expected one."""
    booster = hybrid(num_microbatches=4)
    model, _ = boosted(booster, TwoTerms("scaled"), sgd)
    replica_batch = share(two_batch(), booster.plugin)
    with torch.no_grad():
        loss = booster.execute_pipeline(iter([replica_batch]), model, average_loss=False)["loss"]
    return float(loss), TwoTerms("scaled")(**replica_batch)["loss"].item()


def test_a_replica_has_the_loss_of_its_batch(pool: Pool) -> None:
    losses = pool.run(2, of_replicas)
    assert [loss for loss, _ in losses] == pytest.approx([expected for _, expected in losses], rel=1e-6)
    assert losses[0] != losses[1]


class Wrong(TwoTerms):
    """Ignores other labels in the first three microbatches than in the last, by a number that Python keeps."""

    def forward(self, x: Tensor, classes: Tensor, values: Tensor) -> Batch:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x, classes * (self.calls % 4), values)


def changing(kinds: tuple[str, ...], calls: int) -> tuple[list[str], list[str]]:
    """Return the kinds of losses that depart after some calls, and the logged lines."""
    batch, booster, plain = two_batch(), hybrid(num_microbatches=4), TwoTerms(kinds[0])
    model, optimizer = boosted(booster, plain, lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    departing_kinds: list[str] = []
    with logged() as lines:
        for call in range(calls):
            plain.kind = kinds[call % len(kinds)] if call > 3 else kinds[0]
            batches = iter([share(batch, booster.plugin)])
            loss = float(booster.execute_pipeline(batches, model, optimizer=optimizer)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            if abs(loss / TwoTerms(plain.kind)(**batch)["loss"].item() - 1) > 1e-6:
                departing_kinds.append(plain.kind)
    return departing_kinds, lines


@pytest.mark.parametrize("size", [slow_row(1), 2])
def test_a_loss_may_lose_its_second_term_and_get_it_again(pool: Pool, size: int) -> None:
    for departing_kinds, _ in pool.run(size, changing, ("scaled", "the first"), 9):
        assert departing_kinds == []


@pytest.mark.parametrize("size", [slow_row(1), 2])
def test_a_new_term_weighs_by_samples_and_says_so(pool: Pool, size: int) -> None:
    """In the call where it appears; between replicas up to the next compared one, here none."""
    (departing_kinds, lines), *_ = pool.run(size, changing, ("the first", "scaled"), 9)
    assert departing_kinds == ["scaled"] * (1 if size == 1 else 2)
    assert sum("more terms than in the calls before" in line for line in lines) == 1


def with_a_learned_temperature(of_model: bool) -> str:
    booster, model = hybrid(num_microbatches=4), TwoTerms("scaled")
    scales = model.scales if of_model else nn.Parameter(torch.ones(2))
    boosted_model, optimizer = boosted(booster, model, sgd)

    def criterion(outputs: Any, inputs: Any) -> Tensor:
        return F.mse_loss(outputs["logits"][:, 4] * scales[0], inputs["values"])

    batches = iter([two_batch()])
    booster.execute_pipeline(batches, boosted_model, criterion, optimizer=optimizer)
    return "trained"


def test_a_criterion_trains_no_parameter_that_the_model_lacks(pool: Pool) -> None:
    assert pool.run(1, with_a_learned_temperature, True) == ["trained"]
    (error,) = pool.run(1, refused, partial(with_a_learned_temperature, False))
    assert error.startswith("the criterion trains a parameter of shape (2,) that is not in the model")
