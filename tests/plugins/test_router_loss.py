"""The auxiliary loss of mixtures in direct calls, its outputs and cost; parity rows are in tests/contract."""

import copy
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.shardformer.layers.sequence_axis import SequenceAxis, SequenceOrder
from echelon.shardformer.router_loss import local_mask
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice

from ..host_reads import Places, host_reads
from ..pool import Pool, on_ranks
from .training import boosted, hybrid, parts, sgd, steps

COMPARED, MICROBATCHES, NUM_EXPERTS = 3, 3, 4


def mixture(*, adds: bool = True, model_type: str = "mixtral", **settings: Any) -> ModelChoice:
    all_settings = {"output_router_logits": adds, "num_hidden_layers": 2, **settings}
    return ModelChoice(model_type=model_type, num_layers=2, settings=tuple(all_settings.items()))


@on_ranks(2)
def test_direct_calls_have_the_loss_of_all_ranks() -> None:
    """Router gradients by `booster.backward` are those of one process, too."""
    booster, plain, model = hybrid(), mixture().build(), mixture()
    batch = make_batch(mixture(), num_samples=6, seed=3)
    wanted = plain(**batch).aux_loss
    wanted.backward()
    model, optimizer = boosted(booster, model, sgd)
    rank, size = booster.plugin.data_rank
    loss = model(**{name: tensor.tensor_split([2])[rank] for name, tensor in batch.items()}).aux_loss
    booster.backward(loss, optimizer)
    optimizer.reduce_gradients()
    name = "model.layers.1.mlp.gate.weight"
    gradient, expected = optimizer.gradients()[name], plain.get_parameter(name).grad
    assert size == 2
    assert abs(float(loss.detach() / wanted.detach()) - 1) < 1e-6
    assert (gradient - expected).norm() < 1e-5 * expected.norm()


@on_ranks(2)
def test_copies_and_calls_without_gradients_compute_their_own_tokens() -> None:
    """One rank calls alone."""
    plain, model = mixture().build(), mixture().build()
    hybrid().boost(model, sgd(model))
    if dist.get_rank() == 1:
        return
    batch = make_batch(mixture(), num_samples=3, seed=3)
    copied = copy.deepcopy(model)(**batch).aux_loss.detach()
    with torch.no_grad():
        losses = torch.stack([model(**batch).aux_loss, copied])
        assert (losses / plain(**batch).aux_loss - 1).abs().max() < 1e-6, losses


def returned(choice: ModelChoice, **settings: Any) -> tuple[float, bool] | None:
    """Return the distance of the auxiliary loss in the outputs of a pipeline's evaluation, and if it has logits."""
    booster, batch = hybrid(**settings), make_batch(choice, num_samples=4, seed=3)
    expected = [choice.build()(**microbatch).aux_loss.detach() for microbatch in parts(batch, 2)]
    model, _ = boosted(booster, choice, sgd)
    with torch.no_grad():
        outputs = booster.execute_pipeline(iter([batch]), model, loss_of, return_outputs=True)["outputs"]
    if outputs is None:
        return None
    ratio = outputs["aux_loss"] / torch.stack(expected).mean()
    return abs(float(ratio) - 1), outputs.get("router_logits") is not None


# Of four layers: mixtures on one of the stages alone.
DENSE_FIRST, DENSE_LAST = (
    mixture(model_type="qwen3_moe", num_hidden_layers=4, mlp_only_layers=layers)
    for layers in ([0, 1], [2, 3])
)


@pytest.mark.parametrize(
    "choice", [mixture(), DENSE_FIRST, DENSE_LAST], ids=["all", "mixtures last", "mixtures first"]
)
def test_outputs_have_the_loss_but_no_logits_of_some_layers(pool: Pool, choice: ModelChoice) -> None:
    outcomes = [outcome for outcome in pool.run(2, returned, choice, pp_size=2) if outcome is not None]
    assert [has_logits for _, has_logits in outcomes] == [False]
    assert outcomes[0][0] < 1e-6


def cost(adds: bool) -> tuple[Counter[tuple[str, str, str]], Places, bool]:
    """Return calls and bytes of a warm step under pp2·dp2, its host reads, and True on the last stage."""
    choice = mixture(adds=adds)
    booster = hybrid(pp_size=2, num_microbatches=MICROBATCHES)
    model, optimizer = boosted(booster, choice, sgd)
    rank, _ = booster.plugin.data_rank
    for step in range(COMPARED + 1):
        batch = make_batch(choice, num_samples=2 * MICROBATCHES, seed=10 * step + rank)
        with booster.plugin.ledger(optimizer) as ledger, host_reads() as reads:
            next(steps(booster, model, optimizer, [batch]))
    traffic: Counter[tuple[str, str, str]] = Counter()
    for (axis, kind), count in ledger.traffic.items():
        kind = kind.removeprefix("small ")
        traffic[axis, kind, "calls"] += count.calls
        traffic[axis, kind, "bytes"] += count.nbytes
    return traffic, reads, booster.plugin.mesh.rank("pp") == 1


def test_a_warm_step_sums_statistics_once_in_each_direction(pool: Pool) -> None:
    """Beside them, the counts of a loss of several terms; see docs/cuda.md."""
    size = 4 * 3 * NUM_EXPERTS
    for without, having in zip(pool.run(4, cost, False), pool.run(4, cost, True), strict=True):
        (before, reads, is_last), (after, further, _) = without, having
        added = Counter(after)
        added.subtract(before)
        expected = {("pp", kind, "calls"): MICROBATCHES for kind in ("send", "recv")}
        expected |= {("pp", kind, "bytes"): MICROBATCHES * size for kind in ("send", "recv")}
        if is_last:
            expected["dp", "all_reduce", "calls"] = 2 * MICROBATCHES + 1
            expected["dp", "all_reduce", "bytes"] = 2 * MICROBATCHES * size + 8 * 5
        assert {key: count for key, count in added.items() if count} == expected
        assert reads == further


def test_padding_of_a_shard_does_not_count() -> None:
    second_of_two: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    axis = SequenceAxis(second_of_two, SequenceOrder(size=2))
    axis.length = 5
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]])
    layer_NE = torch.zeros(6, 4)
    assert local_mask(layer_NE, None, axis).tolist() == [[1, 1, 0], [1, 1, 0]]
    assert local_mask(layer_NE, mask, axis).tolist() == [[1, 1, 0], [1, 0, 0]]
