"""A warm step sends no message between CPUs, and what ranks must have alike is compared all the same."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.plugins import engine
from echelon.verify.batch import loss_of, make_batch

from ..pool import Pool
from ..slow import slow, slow_row
from .training import LLAMA, boosted, calls_of, hybrid, steps

COMPARED = 3
TENSOR, STAGES = {"tp_size": 2}, {"pp_size": 2}


def batch_of(booster: Any, step: int) -> dict[str, torch.Tensor]:
    return make_batch(LLAMA, num_samples=4, seed=10 * step + booster.plugin.data_rank[0])


def run_step(
    booster: Any, model: Any, optimizer: Any, batch: dict[str, torch.Tensor], outputs: bool | str = False
) -> Any:
    returned = booster.execute_pipeline(iter([batch]), model, loss_of, optimizer, return_outputs=outputs)
    optimizer.step()
    optimizer.zero_grad()
    return returned["outputs"] if outputs else float(returned["loss"])


def calls_of_steps(sizes: dict[str, Any], num_steps: int) -> list[dict[tuple[str, str], int]]:
    """The number of collectives by axis and kind in each step."""
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, LLAMA)
    calls_by_step = []
    for step in range(num_steps):
        with booster.plugin.ledger(optimizer) as ledger:
            run_step(booster, model, optimizer, batch_of(booster, step))
        calls_by_step.append(calls_of(ledger))
    return calls_by_step


@pytest.mark.parametrize("sizes", [TENSOR, *slow(STAGES, {"zero_stage": 1})], ids=str)
def test_a_warm_step_gathers_less_than_one_that_compares(pool: Pool, sizes: dict[str, Any]) -> None:
    steps = pool.run(2, calls_of_steps, {**sizes, "check_every": 5}, 7)[0]
    gathers = [sum(calls for (_, kind), calls in step.items() if "all_gather" in kind) for step in steps]
    assert steps[3] == steps[4] == steps[6]
    assert gathers[0] >= gathers[1] == gathers[2] == gathers[5] > gathers[3], steps


def depart(what: str, sizes: dict[str, Any]) -> tuple[str, bool]:
    """The last rank departs in the sixth step. Return the error, and whether no parameter has changed in it."""
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, LLAMA)
    run: Any = {"call": call_step, "clipping": clip}.get(what, run_step)
    engine._MAX_BYTES_HASHED_ON_HOST = -1 if what == "large batch" else 2**20
    for step in range(COMPARED + 2):
        run(booster, model, optimizer, batch_of(booster, step))
    batch = batch_of(booster, 7)
    if dist.get_rank() == dist.get_world_size() - 1:
        batch["input_ids"] = batch["input_ids"].roll(1, 0)
    before = [parameter.clone() for parameter in model.parameters()]
    try:
        run(booster, model, optimizer, batch)
    except (ValueError, RuntimeError) as error:
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return f"{type(error).__name__}: {error}", same
    return "", False


def call_step(booster: Any, model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    next(steps(booster, model, optimizer, [batch], by_calls=True))


def clip(booster: Any, model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.zero_grad()


@pytest.mark.parametrize("sizes", [slow_row(TENSOR), STAGES, {**TENSOR, "max_norm": 1.0}], ids=str)
def test_a_batch_that_departs_in_a_warm_step_is_named_before_parameters_change(
    pool: Pool, sizes: dict[str, Any]
) -> None:
    what = "large batch" if "pp_size" in sizes else "batch"  # hashed on the device, or as it comes
    for text, is_unchanged in pool.run(2, depart, what, sizes):
        assert text.startswith("ValueError: the batches differ between ranks of one replica")
        assert "replica 0: rank(s) [1]" in text
        assert is_unchanged


@pytest.mark.parametrize("what", [slow_row("call"), "clipping"])
def test_a_batch_that_departs_is_named_by_the_step_of_a_plain_call_and_by_clipping(
    pool: Pool, what: str
) -> None:
    for text, is_unchanged in pool.run(2, depart, what, {"tp_size": 2}):
        assert "replica 0: rank(s) [1]" in text
        assert is_unchanged


def losses_of_ranks_seeded_apart() -> list[float]:
    booster = hybrid(zero_stage=1)
    model, optimizer = boosted(booster, LLAMA)
    torch.manual_seed(dist.get_rank())
    return [run_step(booster, model, optimizer, batch_of(booster, step)) for step in range(COMPARED + 3)]


def test_ranks_that_are_seeded_apart_train_as_ever(pool: Pool) -> None:
    first, second = pool.run(2, losses_of_ranks_seeded_apart)
    assert first == second


def require_named(error: BaseException | None, call: str) -> None:
    """Require the error of a rank that waits for a call of another."""
    assert type(error).__name__ in ("RankFailure", "UnmatchedCall"), error
    assert call in str(error)


def test_a_rank_whose_data_ends_early_in_a_warm_step_is_named(pool: Pool) -> None:
    for error in pool.run_failing(2, take_all, 1, timeout=60.0):
        require_named(error, "at the end of its data")


def take_all(missing: int) -> None:
    """Of the second rank so many batches are missing."""
    booster = hybrid(tp_size=2)
    model, optimizer = boosted(booster, LLAMA)
    num_steps = COMPARED + 2 - dist.get_rank() * missing
    data = iter([batch_of(booster, step) for step in range(num_steps)])
    while True:
        booster.execute_pipeline(data, model, loss_of, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def test_data_that_ends_everywhere_in_a_warm_step_ends_the_loop(pool: Pool) -> None:
    errors = pool.run_failing(2, take_all, 0)
    assert all(isinstance(error, StopIteration) for error in errors), errors


def ask_for_outputs(sizes: dict[str, Any], ranks: tuple[int, ...], steps: tuple[int, ...]) -> list[Any]:
    """Steps of which some ask for outputs on some ranks: what came, and the traffic. An evaluation before the fifth."""
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, LLAMA)
    calls_by_step = []
    for step in range(COMPARED + 5):
        batch = batch_of(booster, step)
        if step == COMPARED + 1:
            with torch.no_grad():
                booster.execute_pipeline(iter([batch]), model, loss_of, return_outputs="all_ranks")
        asked = "all_ranks" if dist.get_rank() in ranks and step in steps else False
        with booster.plugin.ledger(optimizer) as ledger:
            came = run_step(booster, model, optimizer, batch, asked)
        assert not asked or came.logits.shape[0] == len(batch["input_ids"])
        calls_by_step.append(calls_of(ledger))
    return calls_by_step


@pytest.mark.parametrize("sizes", [TENSOR, slow_row(STAGES)], ids=str)
def test_outputs_of_one_step_cost_no_other_step_anything(pool: Pool, sizes: dict[str, Any]) -> None:
    for calls in pool.run(2, ask_for_outputs, sizes, (0, 1), (0, 5)):
        assert calls[3] == calls[4] == calls[7] != calls[5]


@pytest.mark.parametrize("sizes", [slow_row(TENSOR), STAGES], ids=str)
def test_a_rank_that_always_asks_for_outputs_is_given_them(pool: Pool, sizes: dict[str, Any]) -> None:
    for calls in pool.run(2, ask_for_outputs, sizes, (0,), tuple(range(8))):
        assert calls[3] == calls[4] == calls[7]


@pytest.mark.parametrize("sizes", [slow_row(TENSOR), STAGES], ids=str)
def test_a_rank_that_alone_begins_to_ask_for_outputs_is_named(pool: Pool, sizes: dict[str, Any]) -> None:
    for error in pool.run_failing(2, ask_for_outputs, sizes, (1,), (5,), timeout=60.0):
        require_named(error, "execute_pipeline")


def switch_to_evaluation(ranks: tuple[int, ...], check_every: int) -> None:
    """Steps with gradients; the model is in evaluation mode on some ranks from the sixth on."""
    booster = hybrid(tp_size=2, check_every=check_every)
    model, optimizer = boosted(booster, LLAMA)
    for step in range(COMPARED + 4):
        if step == COMPARED + 2 and dist.get_rank() in ranks:
            model.eval()
        run_step(booster, model, optimizer, batch_of(booster, step))


def test_a_rank_that_alone_is_in_evaluation_mode_is_named_by_the_comparison(pool: Pool) -> None:
    for error in pool.run_failing(2, switch_to_evaluation, (1,), 1, timeout=60.0):
        assert "training mode on rank(s) [0] and in evaluation mode on the others" in str(error)


def test_a_rank_that_alone_goes_to_evaluation_mode_in_a_warm_step_is_named(pool: Pool) -> None:
    for error in pool.run_failing(2, switch_to_evaluation, (1,), 100, timeout=60.0):
        require_named(error, "execute_pipeline in evaluation mode")


def test_ranks_that_go_to_evaluation_mode_together_train_on(pool: Pool) -> None:
    pool.run(2, switch_to_evaluation, (0, 1), 100)


def depart_in_shape(what: str, sizes: dict[str, Any]) -> None:
    """The last rank has a batch of another dtype or name in the sixth step."""
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, LLAMA)
    for step in range(COMPARED + 3):
        batch = batch_of(booster, step)
        batch["metadata"] = torch.zeros(len(batch["input_ids"]), 3)
        if step == COMPARED + 2 and dist.get_rank() == dist.get_world_size() - 1:
            if what == "dtype":
                batch["metadata"] = batch["metadata"].int()
            else:
                batch["other"] = batch.pop("metadata")
        run_step(booster, model, optimizer, batch)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["dtype", "name"])
def test_stages_with_batches_of_other_shapes_in_a_warm_step_are_named(pool: Pool, what: str) -> None:
    texts = [str(error) for error in pool.run_failing(2, depart_in_shape, what, STAGES, timeout=120.0)]
    needle = {"dtype": "metadata int32[4, 3]", "name": "other float32[4, 3]"}[what]
    assert any(needle in text and "same batch" in text for text in texts), texts
