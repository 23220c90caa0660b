"""The user's own torch.utils.checkpoint around a boosted model with dropout: gradients are those without it."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from echelon.cluster.forward_random import ForwardRandom
from echelon.verify.batch import make_batch
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from ..slow import slow_row
from .training import boosted, booster_of, full

GPT2 = ModelChoice(model_type="gpt2", settings=(("resid_pdrop", 0.5), ("attn_pdrop", 0.2)))
Again = Callable[[Callable[[], Tensor]], Tensor]  # calls a function that computes a loss, and may repeat it


class Losses:
    """Ways to compute losses of a boosted model; `again` stands around the calls that a script would checkpoint."""

    def __init__(self, booster: Any, model: Any, again: Again) -> None:
        self.booster, self.model, self.again = booster, model, again

    def call(self, number: int) -> Tensor:
        batch = make_batch(GPT2, num_samples=4, seed=10 * number + self.booster.plugin.data_rank[0])
        return (1 + number) * self.model(**batch).loss

    def one_call(self) -> list[Tensor]:
        return [self.again(lambda: self.call(0))]

    def two_calls_in_one_backward(self) -> list[Tensor]:
        return [self.again(lambda: self.call(0)) + self.again(lambda: self.call(1))]

    def two_backwards_in_the_order_of_the_calls(self) -> list[Tensor]:
        return [self.again(lambda: self.call(0)), self.again(lambda: self.call(1))]

    def one_batch_twice(self) -> list[Tensor]:
        return [self.again(lambda: self.call(0)) + 2 * self.again(lambda: self.call(0))]

    def two_calls_in_one_function(self) -> list[Tensor]:
        return [self.again(lambda: self.call(0) + 2 * self.call(0)) + self.again(lambda: self.call(1))]

    def nested(self) -> list[Tensor]:
        return [self.again(lambda: 2 * self.again(lambda: self.call(0))) + self.call(1)]

    def calls_without_gradients_between(self) -> list[Tensor]:
        with torch.no_grad():
            self.call(1)
        first = self.again(lambda: self.call(0))
        with torch.no_grad():
            self.call(2)
        second = self.again(lambda: self.call(1) + self.without_gradients())
        with torch.no_grad():
            self.call(0)
        return [first + second]

    def without_gradients(self) -> Tensor:
        with torch.no_grad():
            return self.call(2)

    def seeded_again_before_backward(self) -> list[Tensor]:
        loss = self.again(lambda: self.call(0))
        self.booster.seed(self.model, 3)
        return [loss]


def gradients(kind: str, sizes: dict[str, Any], way: str, again: Again) -> dict[str, Tensor]:
    booster = booster_of(kind, **sizes)
    model, optimizer = boosted(booster, GPT2)
    booster.seed(model, 0)
    for loss in getattr(Losses(booster, model, again), way)():
        booster.backward(loss, optimizer)
    if kind in ("ddp", "fsdp"):
        return {name: full(parameter.grad) for name, parameter in model.unwrap().named_parameters()}
    optimizer.reduce_gradients()
    return optimizer.gradients()


def once(function: Callable[[], Tensor]) -> Tensor:
    return function()


def repeated(function: Callable[[], Tensor]) -> Tensor:
    return checkpoint(function, use_reentrant=False)


def repeated_by_reentry(function: Callable[[], Tensor]) -> Tensor:
    return checkpoint(lambda _: function(), torch.zeros(1, requires_grad=True), use_reentrant=True)


def departures(kind: str, sizes: dict[str, Any], way: str, again: Again) -> list[str]:
    """Return the names of parameters whose gradients differ from those without repetition."""
    expected, repeated = (gradients(kind, sizes, way, repeat) for repeat in (once, again))
    assert expected.keys() == repeated.keys() and any(gradient.any() for gradient in expected.values())
    return [
        name for name, gradient in expected.items() if not torch.allclose(repeated[name], gradient, rtol=1e-5)
    ]


WAYS = [
    "one_call",
    "two_calls_in_one_backward",
    "two_backwards_in_the_order_of_the_calls",
    "one_batch_twice",
    "two_calls_in_one_function",
    "calls_without_gradients_between",
    "seeded_again_before_backward",
]


@pytest.mark.parametrize(
    ("way", "again"),
    [
        *((way, repeated) for way in (*WAYS, "nested")),
        (WAYS[0], repeated_by_reentry),
        *(slow_row(way, repeated_by_reentry) for way in WAYS[1:]),
    ],
)
def test_a_repeated_call_drops_the_same_entries(pool: Pool, way: str, again: Again) -> None:
    assert pool.run(1, departures, "hybrid", {}, way, again) == [[]]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("hybrid", {"tp_size": 2}),
        ("zero", {"stage": 2}),
        ("fsdp", {}),
        *(slow_row(kind, {}) for kind in ("hybrid", "ddp")),
    ],
    ids=str,
)
def test_a_call_is_repeated_alike_under_every_plugin(pool: Pool, kind: str, sizes: dict[str, Any]) -> None:
    assert pool.run(2, departures, kind, sizes, "one_call", repeated) == [[]] * 2


def test_nested_checkpoints_by_reentry_are_refused(pool: Pool) -> None:
    (error,) = pool.run_failing(1, departures, "hybrid", {}, "nested", repeated_by_reentry)
    assert isinstance(error, RuntimeError) and "give use_reentrant=False" in str(error)


def departures_after_a_fault() -> list[str]:
    with patch.object(ForwardRandom, "_repeated_calls", lambda *_: []):
        return departures("hybrid", {}, "one_call", repeated)


def test_other_masks_in_the_repetition_are_seen(pool: Pool) -> None:
    assert len(pool.run(1, departures_after_a_fault)[0]) > 10
