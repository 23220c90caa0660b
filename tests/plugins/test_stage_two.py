"""zero_stage 2 behind the Booster: plain loops, uneven replicas, and what forgets gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon import Booster, HybridParallelPlugin, LowLevelZeroPlugin
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.models import ModelChoice
from echelon.verify.parity import make_optimizer

from ..pool import Pool
from .training import hybrid

LLAMA = ModelChoice(model_type="llama", tied=True, num_layers=2)


def reference_weights(batches: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """A plain torch loop: in every step the gradients of the mean over these batches' losses."""
    model = LLAMA.build()
    optimizer = make_optimizer(model)
    for step in batches:
        for batch in step:
            (loss_of(model(**batch), batch) / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def batch_of(seed: int, samples: int = 2) -> dict[str, Tensor]:
    return make_batch(LLAMA, num_samples=samples, seed=seed)


def assert_weights(model: torch.nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_plain_loop_with_accumulation_trains_as_one_process(pool: Pool) -> None:
    pool.run(2, train_plainly)


def train_plainly() -> None:
    rank = dist.get_rank()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp32", reduce_bucket_size_in_m=0.01))
    model = LLAMA.build()
    boosted, optimizer, *_ = booster.boost(model, make_optimizer(model))
    for step in range(3):
        for number in range(2):
            batch = batch_of(10 * step + 2 * number + rank)
            booster.backward(loss_of(boosted(**batch), batch) / 2, optimizer)
        optimizer.step()
        boosted.zero_grad()  # the boosted model's own reaches what the optimizer has taken
    assert_weights(model, reference_weights([[batch_of(10 * s + n) for n in range(4)] for s in range(3)]))


def test_replicas_of_different_numbers_of_microbatches_train_as_one_process(pool: Pool) -> None:
    pool.run(2, train_unevenly)


def train_unevenly() -> None:
    """Three microbatches on rank 0 and one on rank 1: their means count equally."""
    rank = dist.get_rank()
    booster = hybrid(zero_stage=2, num_microbatches=None, microbatch_size=2, zero_bucket_size_in_m=0.01)
    model = LLAMA.build()
    untouched = copy.deepcopy(model)
    boosted, optimizer, criterion, *_ = booster.boost(model, make_optimizer(model), loss_of)
    for step in range(2):
        batch = batch_of(step, samples=6) if rank == 0 else batch_of(7 + step)
        booster.execute_pipeline(iter([batch]), boosted, criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    plain = make_optimizer(untouched)
    for step in range(2):
        first = batch_of(step, samples=6)
        for start in range(0, 6, 2):
            part = {name: tensor[start : start + 2] for name, tensor in first.items()}
            (loss_of(untouched(**part), part) / 6).backward()
        second = batch_of(7 + step)
        (loss_of(untouched(**second), second) / 2).backward()
        plain.step()
        plain.zero_grad()
    assert_weights(model, {name: each.detach() for name, each in untouched.named_parameters()})


def test_the_plugins_ledger_tells_what_a_step_of_tensor_and_pipeline_ranks_costs(pool: Pool) -> None:
    for axes, table in pool.run(4, count_a_step):
        assert axes == {"tp", "pp", "world"}
        assert "held" in table and "pp      send" in table


def count_a_step() -> tuple[set[str], str]:
    booster = hybrid(tp_size=2, pp_size=2)
    model = LLAMA.build()
    boosted, optimizer, criterion, *_ = booster.boost(model, make_optimizer(model), loss_of)
    plugin = booster.plugin
    assert isinstance(plugin, HybridParallelPlugin)
    with plugin.ledger(optimizer) as ledger:
        booster.execute_pipeline(iter([batch_of(0, samples=8)]), boosted, criterion, optimizer)
        optimizer.step()
    counts = ledger.traffic
    assert counts["tp", "all_reduce"].nbytes > 0
    # Two microbatches of 4 samples: one boundary each way. The tied embedding is summed over the stages.
    sent = counts["pp", "send"]
    assert sent.calls == 2 and counts["pp", "recv"].calls == 2
    assert sent.nbytes == 2 * 4 * batch_of(0)["input_ids"].shape[1] * model.config.hidden_size * 4
    assert counts["pp", "all_reduce"].calls == 1
    return {axis for axis, _ in counts}, ledger.table()


def test_a_format_that_does_not_travel_is_refused(pool: Pool) -> None:
    pool.run(1, refuse_format)


def refuse_format() -> None:
    for given in ("int8", torch.int8):
        with pytest.raises(
            ValueError, match=r"communication_dtype=.*int8.* must be None or one of 'fp32', 'bf16'"
        ):
            HybridParallelPlugin(precision="fp32", communication_dtype=given)
    assert (
        HybridParallelPlugin(precision="fp32", communication_dtype="bf16").config.wire_dtype is torch.bfloat16
    )
