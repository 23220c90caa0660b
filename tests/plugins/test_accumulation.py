"""`gradient_accumulation_steps`: a step uses the mean of several calls, like one process that averages."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.verify.batch import loss_of, make_batch
from echelon.verify.parity import make_optimizer

from ..pool import Pool, on_ranks
from ..slow import slow_row
from .training import (
    BERT,
    LLAMA,
    boosted,
    booster_of,
    calls_of,
    hybrid,
    norm_of_gradients,
    parts,
    refused,
    share,
)

CALLS = 3  # before each step
STEPS = 2


def batch_of(step: int, call: int) -> dict[str, Tensor]:
    return make_batch(BERT, num_samples=8, seed=10 * step + call)


def averaged_by_one_process() -> list[float]:
    """Return the mean losses and the norms of steps that use the mean of several batches."""
    model = BERT.build()
    optimizer = make_optimizer(model)
    figures = []
    for step in range(STEPS):
        losses = [model(**batch_of(step, call)).loss for call in range(CALLS)]
        torch.stack(losses).mean().backward()
        figures += [*(loss.item() for loss in losses), norm_of_gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return figures


@pytest.mark.parametrize(
    "sizes",
    [
        slow_row({"zero_stage": 1, "overlap_communication": False}),
        slow_row({"zero_stage": 2}),
        {"pp_size": 2, "pp_style": "zbh1", "precision": "fp16"},
    ],
    ids=str,
)
def test_several_calls_are_averaged_as_by_one_process(pool: Pool, sizes: dict[str, Any]) -> None:
    tolerance = 2e-2 if sizes.get("precision") == "fp16" else 1e-5
    for figures in pool.run(2, accumulate, sizes, by_calls=False):
        assert figures == pytest.approx(averaged_by_one_process(), rel=tolerance)


@pytest.mark.parametrize("stage", [slow_row(0), 2])
def test_several_backwards_are_averaged_as_by_one_process(pool: Pool, stage: int) -> None:
    expected = averaged_by_one_process()[CALLS :: CALLS + 1]
    for figures in pool.run(2, accumulate, {"zero_stage": stage}, by_calls=True):
        assert figures[CALLS :: CALLS + 1] == pytest.approx(expected, rel=1e-5)


def accumulate(sizes: dict[str, Any], *, by_calls: bool) -> list[float]:
    booster = hybrid(gradient_accumulation_steps=CALLS, **sizes)
    model, optimizer = boosted(booster)
    rank, size = booster.plugin.data_rank
    figures = []
    for step in range(STEPS):
        for call in range(CALLS):
            batch = parts(batch_of(step, call), size)[rank]
            if by_calls:
                booster.backward(loss := model(**batch).loss, optimizer)
            else:
                loss = booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"]
                with torch.no_grad():  # not counted
                    booster.execute_pipeline(iter([batch]), model)
            figures.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        figures.append(optimizer.last_norm)
    return figures


def test_weighted_calls_are_one_batch(pool: Pool) -> None:
    """The loss is the mean over all tokens, as for one larger batch."""
    expected = pool.run(1, weigh, 1)[0]
    for norms in pool.run(2, weigh, 2):
        assert norms == pytest.approx(expected, rel=1e-5)


def weigh(calls: int) -> list[float]:
    booster = hybrid(gradient_accumulation_steps=calls, max_norm=0.5)
    model, optimizer = boosted(booster, LLAMA)

    def criterion(outputs: Any, inputs: Any) -> tuple[Tensor, Tensor]:
        weight = (inputs["labels"][:, 1:] != -100).sum()
        return outputs.loss * weight, weight

    rank, size = booster.plugin.data_rank
    figures = []
    for step in range(STEPS):
        for of_call in parts(make_batch(LLAMA, num_samples=8, seed=step), calls):
            batch = parts(of_call, size)[rank]
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
            with torch.no_grad():  # of another size
                booster.execute_pipeline(iter([make_batch(LLAMA, num_samples=5, seed=9)]), model, criterion)
        optimizer.step()
        optimizer.zero_grad()
        figures.append(optimizer.last_norm)
    return figures


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(2)
def test_replicas_are_averaged_in_the_last_call_only(stage: int) -> None:
    booster = booster_of(f"zero{stage}", precision="fp32", gradient_accumulation_steps=CALLS)
    model, optimizer = boosted(booster)
    reductions = []
    for call in range(CALLS):
        with booster.plugin.ledger() as ledger:
            booster.execute_pipeline(share(booster, BERT, call), model, loss_of, optimizer)
        calls = calls_of(ledger).items()
        reductions.append(sum(n for (_, kind), n in calls if "reduce" in kind and "small" not in kind))
    assert reductions[:-1] == [0] * (CALLS - 1) and reductions[-1] > 0, reductions


def test_a_step_after_another_number_of_calls_is_refused(pool: Pool) -> None:
    for early, late, norm, other in pool.run(2, count_wrongly):
        assert "optimizer.step() after 1 of gradient_accumulation_steps=2 calls" in early
        assert "optimizer.zero_grad()" in early
        assert "call 3 since the last optimizer.step(), and gradient_accumulation_steps=2" in late
        assert norm == pytest.approx(other)


def count_wrongly() -> tuple[str, str, float, float]:
    """Return both errors, and the norms of a step with previous errors and of one without."""
    booster = hybrid(gradient_accumulation_steps=2)

    def call(number: int, pair: tuple[Any, Any]) -> None:
        model, optimizer = pair
        booster.execute_pipeline(share(booster, BERT, number), model, loss_of, optimizer)

    wrong, right = boosted(booster), boosted(booster)
    call(5, wrong)
    early = refused(wrong[1].step)
    wrong[1].zero_grad()  # drops the accumulated gradients
    for pair in (wrong, right):
        call(0, pair)
        call(1, pair)
    late = refused(partial(call, 2, wrong))
    for _, optimizer in (wrong, right):
        optimizer.step()
    return early, late, wrong[1].last_norm, right[1].last_norm


# By order of calls, see `norms_of_mixtures`, the number of gradients that the norm of the last step is of.
MIXTURES = dict(cb=2, bc=2, bbc=3, cbc=3, lc=2, cl=2, clc=3, blc=3, ccl=3)
MIXTURES |= dict(csc=2, cslbc=4, csmc=1, czlzc=1, bZc=1)  # leftovers of a step
# Calls that fail, and calls at the end of the data.
MIXTURES |= dict(xc=1, cx=1, ccxl=3, cxc=2, lxcx=2, csxc=2, cxmc=1, cxmlc=2, cxml=1, bZxc=1)
MIXTURES |= dict(ccezc=1, cce=2, ece=1, cesmc=1)
QUICK = ("bbc", "clc", "cslbc", "czlzc", "ccxl", "cxmlc", "cce")
ALL = [(tuple(MIXTURES), *settings) for settings in ((0, False), (0, True), (2, False), (2, True))]


@pytest.mark.parametrize(
    ("orders", "stage", "overlaps"), [(QUICK, 2, True), *(slow_row(*arguments) for arguments in ALL)], ids=str
)
def test_backwards_and_calls_before_a_step_add_up(
    pool: Pool, orders: tuple[str, ...], stage: int, *, overlaps: bool
) -> None:
    """As in plain torch, leftovers of a step without `zero_grad` count as well."""
    for alone, *mixed in pool.run(2, norms_of_mixtures, orders, stage, overlaps=overlaps):
        expected = {order: pytest.approx(alone * MIXTURES[order], rel=1e-5) for order in orders}
        assert dict(zip(orders, mixed, strict=True)) == expected


def norms_of_mixtures(orders: tuple[str, ...], stage: int, *, overlaps: bool) -> list[float]:
    """Return the norms of a call alone and of mixtures."""
    booster = hybrid(zero_stage=stage, num_microbatches=2, overlap_communication=overlaps)
    return [norm_of(booster, order) for order in ("c", *orders)]


@on_ranks(2)
def test_a_call_adds_to_gradients_that_were_unscaled() -> None:
    """The loss scale is applied to them again, before products are added to them."""
    booster = hybrid(pp_size=2, precision="fp16", initial_scale=2.0**8)
    one, two = norm_of(booster, "c"), norm_of(booster, "cnc")
    assert two == pytest.approx(2 * one, rel=1e-2), one  # fp16


@on_ranks(2)
def test_clipping_between_the_calls_of_a_step_is_refused() -> None:
    booster = hybrid(gradient_accumulation_steps=2)
    with pytest.raises(
        RuntimeError, match=r"clip_grad_by_norm\(\) after 1 of gradient_accumulation_steps=2 calls"
    ):
        norm_of(booster, "cnc")


def norm_of(booster: Any, order: str) -> float:
    """Return the norm of a step after calls (c) and backwards of the booster (b) and of torch (l).

    All are of one batch on every replica. Others: a call that fails in the second microbatch (x), and one at the end of
    the data (e); a step (s), without an update; `zero_grad` of the optimizer (z), to zeros (Z), of the bare model (m);
    `clip_grad_by_norm` to a norm that no gradient has (n).
    """
    model, optimizer = boosted(booster, LLAMA)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    batch = make_batch(LLAMA, num_samples=3, seed=0)
    for kind in (*order, "s"):
        if kind == "c":
            booster.execute_pipeline(iter([batch]), model, None, optimizer)
        elif kind in "xe":
            with pytest.raises(KeyError if kind == "x" else StopIteration):
                fail(booster, model, optimizer, batch if kind == "x" else None)
        elif kind == "b":
            booster.backward(model(**batch).loss, optimizer)
        elif kind == "l":
            model(**batch).loss.backward()
        elif kind == "s":
            optimizer.step()
        elif kind == "n":
            optimizer.clip_grad_by_norm(1e6)
        elif kind == "m":
            model.unwrap().zero_grad()
        elif kind in "zZ":
            optimizer.zero_grad(set_to_none=kind == "z")
    return optimizer.last_norm


def fail(booster: Any, model: Any, optimizer: Any, batch: Any) -> None:
    """Make a call that raises KeyError in its second microbatch; StopIteration without a batch."""
    losses: list[Tensor] = []

    def criterion(outputs: Any, inputs: Any) -> Tensor:
        losses.append(outputs.loss)
        if len(losses) > 1:
            raise KeyError("the second microbatch")
        return losses[0]

    batches = [] if batch is None else [batch]
    booster.execute_pipeline(iter(batches), model, criterion, optimizer)


@pytest.mark.parametrize("stage", [0, slow_row(2)])
@on_ranks(2)
def test_gradients_of_zeros_stay_zeros_when_a_call_fails(stage: int) -> None:
    """With zeros, unlike None, a parameter decays in the next step."""
    booster = hybrid(zero_stage=stage)
    model, optimizer = boosted(booster, LLAMA)
    batch = make_batch(LLAMA, num_samples=3, seed=0)
    for to_none in (False, True):
        booster.execute_pipeline(iter([batch]), model, None, optimizer)
        optimizer.zero_grad(set_to_none=to_none)
        with pytest.raises(KeyError):
            fail(booster, model, optimizer, batch)
        assert {slot.has_gradient for slot in optimizer.reducer.slots} == {not to_none}


@pytest.mark.parametrize("stage", [slow_row(0), 2])
def test_leftovers_and_failures_under_accumulation(pool: Pool, stage: int) -> None:
    for alone, with_leftovers, after_plain, before_plain, again, between, kinds, missing in pool.run(
        2, accumulate_otherwise, stage
    ):
        assert [with_leftovers, after_plain, before_plain, again] == pytest.approx(
            [2 * alone, 2 * alone, 2 * alone, alone], rel=1e-5
        )
        assert "execute_pipeline and backward were both called for one step" in between
        assert "execute_pipeline and backward were both called for one step" in kinds
        assert "after 1 of gradient_accumulation_steps=2 calls" in missing


def accumulate_otherwise(stage: int) -> tuple[float | str, ...]:
    """Return norms of steps of two calls with other gradients, after a failure, and errors."""
    booster = hybrid(zero_stage=stage, num_microbatches=2, gradient_accumulation_steps=2)
    norm = partial(norm_of, booster)
    refusals = [refused(partial(norm, order)) for order in ("clc", "bc", "cxc")]
    return (*map(norm, ("cc", "ccscc", "lcc", "ccl", "cxcc")), *refusals)


@on_ranks(2)
def test_gradients_dropped_by_the_bare_model_cost_no_reduction() -> None:
    """A call and its step have as many messages, in whatever way the gradients before were dropped."""
    booster = booster_of("zero1", precision="fp32")
    model, optimizer = boosted(booster)
    counts = []
    drops = (lambda: None, optimizer.zero_grad, model.zero_grad, model.unwrap().zero_grad)
    for call in range(3 + len(drops)):
        drops[max(call - 3, 0)]() if call > 2 else optimizer.zero_grad()
        with booster.plugin.ledger() as ledger:
            booster.execute_pipeline(share(booster, BERT, call), model, loss_of, optimizer)
            optimizer.step()
        if call >= 3:
            counts.append(calls_of(ledger))
    assert counts == [counts[0]] * 4, counts
