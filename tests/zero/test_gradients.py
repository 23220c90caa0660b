"""When gradients are reduced, kept and forgotten."""

from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter
from echelon.zero.precision import PrecisionConfig

from ..pool import Pool
from .helpers import Precision, assert_equal, loss_of, shard, small_model, weights_of

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
WITH_WHOLE_GRADIENTS = pytest.mark.parametrize("stage", [0, 1])


def mean_gradients(model: nn.Sequential, seeds_of_ranks: list[list[int]]) -> dict[str, Tensor]:
    """The mean over ranks of the sum over microbatches, in plain torch; leaves the model's gradients alone."""
    sums = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for seeds in seeds_of_ranks:
        for seed in seeds:
            gradients = torch.autograd.grad(loss_of(model, seed), list(model.parameters()))
            for name, gradient in zip(sums, gradients, strict=True):
                sums[name] += gradient / len(seeds_of_ranks)
    return sums


@STAGES
def test_reducing_twice_reduces_once(pool: Pool, stage: int) -> None:
    pool.run(2, check_reducing_twice, stage)


def check_reducing_twice(stage: int) -> None:
    model = small_model()
    expected = mean_gradients(model, [[0], [1]])
    optimizer = shard(model, stage=stage)
    optimizer.backward(loss_of(model, dist.get_rank()))
    optimizer.reduce_gradients()
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)
    optimizer.step()
    assert_equal(optimizer.gradients(), expected)


@STAGES
def test_backward_after_a_reduction_adds_to_it(pool: Pool, stage: int) -> None:
    pool.run(3, check_backward_after_reduction, stage)


def check_backward_after_reduction(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0, 3, 6], [1, 4, 7], [2, 5, 8]])
    optimizer = shard(model, stage=stage)
    for seeds in ((rank, rank + 3), (rank + 6,)):
        for seed in seeds:
            optimizer.backward(loss_of(model, seed))
        optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)


@WITH_WHOLE_GRADIENTS
def test_reduction_that_a_rank_gave_nothing_to_is_added_to_as_well(pool: Pool, stage: int) -> None:
    pool.run(2, check_addition_to_the_others, stage)


def check_addition_to_the_others(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    first = mean_gradients(model, [[0], []])
    second = mean_gradients(model, [[1], [2]])
    optimizer = shard(model, stage=stage)
    with optimizer.no_sync():
        if rank == 0:
            optimizer.backward(loss_of(model, 0))
    optimizer.reduce_gradients()
    optimizer.backward(loss_of(model, 1 + rank))
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), {name: first[name] + second[name] for name in first})


@STAGES
@pytest.mark.parametrize("zeroing", ["optimizer", "optimizer to zeros", "model", "model to zeros"])
def test_zeroed_gradients_are_forgotten(
    pool: Pool,
    stage: int,
    zeroing: Literal["optimizer", "optimizer to zeros", "model", "model to zeros"],
) -> None:
    pool.run(2, check_zeroing, stage, zeroing)


def check_zeroing(stage: int, zeroing: str) -> None:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, stage=stage)
    expected = mean_gradients(model, [[2], [3]])
    for reduced in (False, True):
        optimizer.backward(loss_of(model, rank))
        if reduced:
            optimizer.reduce_gradients()
        # At stage 2 a plain model reaches what the optimizer has taken only after a step: a boosted one does.
        zeroed = optimizer if zeroing.startswith("optimizer") or stage == 2 else model
        zeroed.zero_grad(set_to_none=not zeroing.endswith("zeros"))
        for parameter in model.parameters():
            assert parameter.grad is None or not parameter.grad.any()
        optimizer.backward(loss_of(model, 2 + rank))
        optimizer.reduce_gradients()
        assert_equal(optimizer.gradients(), expected)
        optimizer.zero_grad()


def test_zeroed_gradients_step_and_missing_ones_do_not(pool: Pool) -> None:
    pool.run(1, check_zeros_against_none)


def check_zeros_against_none() -> None:
    for set_to_none in (True, False):
        model = small_model()
        optimizer = shard(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0, weight_decay=0.5))
        optimizer.backward(loss_of(model, 0))
        optimizer.zero_grad(set_to_none=set_to_none)
        before = weights_of(model)
        optimizer.step()
        factor = 1.0 if set_to_none else 0.5
        assert_equal(weights_of(model), {name: factor * weight for name, weight in before.items()})


@WITH_WHOLE_GRADIENTS
def test_gradients_that_the_user_assigns_are_taken(pool: Pool, stage: int) -> None:
    pool.run(2, check_assigned_gradients, stage)


def check_assigned_gradients(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, stage=stage)
    with optimizer.no_sync():
        optimizer.backward(loss_of(model, 0))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + 2 * rank)
    optimizer.backward(0 * loss_of(model, 1))
    optimizer.reduce_gradients()
    assert_equal(
        optimizer.gradients(), {name: torch.full_like(w, 2.0) for name, w in weights_of(model).items()}
    )


def test_gradient_left_from_before_boost_is_kept(pool: Pool) -> None:
    pool.run(1, check_gradient_from_before)


def check_gradient_from_before() -> None:
    model = small_model()
    expected = mean_gradients(model, [[0, 1]])
    loss_of(model, 0).backward()
    optimizer = shard(model)
    optimizer.backward(loss_of(model, 1))
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_gradient_factor_acts_on_one_step(pool: Pool, precision: Precision, as_tensor: bool) -> None:
    pool.run(2, check_gradient_factor, precision, as_tensor)


def check_gradient_factor(precision: Precision, as_tensor: bool) -> None:
    model = small_model()
    optimizer = shard(model, precision=precision, max_norm=0.125)
    optimizer.backward(loss_of(model, dist.get_rank()))
    optimizer.reduce_gradients()
    plain, before = optimizer.gradients(), optimizer.masters()
    norm = torch.cat([gradient.flatten() for gradient in plain.values()]).norm().item()
    optimizer.gradient_factor = torch.tensor(0.5) if as_tensor else 0.5
    halved = {name: gradient / 2 for name, gradient in plain.items()}
    assert_equal(optimizer.gradients(), halved)
    optimizer.step()
    assert optimizer.last_norm == pytest.approx(norm / 2, rel=1e-5)
    assert_equal(optimizer.gradients(), halved)
    clip = min(1.0, 0.125 / (norm / 2))
    expected = {name: before[name] - clip * gradient for name, gradient in halved.items()}
    assert_equal(optimizer.masters(), expected, rtol=1e-5, atol=2e-6)  # the 1e-6 in torch's clipping
    assert optimizer.gradient_factor is None


def test_gradients_accumulate_in_float32(pool: Pool) -> None:
    pool.run(1, check_float32_accumulation)


def check_float32_accumulation() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = shard(model, precision="bf16")
    for value in (256.0, 1.0, 1.0):  # 256 + 1 is 256 in bfloat16
        optimizer.backward(model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum())
    assert model.weight.grad is not None and model.weight.grad.item() == 258.0


def test_unreduced_gradients_are_not_handed_out(pool: Pool) -> None:
    pool.run(1, check_unreduced)


def check_unreduced() -> None:
    model = small_model()
    optimizer = shard(model)
    optimizer.backward(loss_of(model, 0))
    with pytest.raises(RuntimeError, match="call reduce_gradients"):
        optimizer.gradients()


def test_sparse_gradients_are_refused_by_name(pool: Pool) -> None:
    pool.run(1, check_sparse)


def check_sparse() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    optimizer = shard(model)
    with pytest.raises(ValueError, match=r"0\.weight is torch.sparse_coo.*sparse=False"):
        optimizer.backward(model(torch.tensor([1])).sum())


def test_closure_computes_the_gradients(pool: Pool) -> None:
    pool.run(1, check_closure)


def check_closure() -> None:
    model = small_model()
    before, expected = weights_of(model), mean_gradients(model, [[0]])
    optimizer = shard(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure).item() > 0
    assert_equal(weights_of(model), {name: before[name] - expected[name] for name in before})


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_second_step_on_the_same_gradients_repeats_the_first(pool: Pool, precision: Precision) -> None:
    pool.run(2, check_second_step, precision)


def check_second_step(precision: Precision) -> None:
    model = small_model()
    optimizer = shard(model, precision=precision, max_norm=0.125)
    before = optimizer.masters()
    optimizer.backward(loss_of(model, dist.get_rank()))
    optimizer.step()
    once = optimizer.masters()
    optimizer.step()
    twice = optimizer.masters()
    expected = {name: once[name] + (once[name] - before[name]) for name in once}
    assert_equal(twice, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_backward_after_a_step_adds_to_its_gradients_as_in_torch(pool: Pool, precision: Precision) -> None:
    pool.run(2, check_backward_after_step, precision)


def check_backward_after_step(precision: Precision) -> None:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, lambda parameters: torch.optim.SGD(parameters, lr=0.0), precision=precision)
    seeds = (0, 1)
    for seed in seeds:
        optimizer.backward(loss_of(model, seed + 10 * rank))
        optimizer.step()
    together = optimizer.gradients()
    optimizer.zero_grad()
    for seed in seeds:
        optimizer.backward(loss_of(model, seed + 10 * rank))
    optimizer.reduce_gradients()
    assert_equal(together, optimizer.gradients(), rtol=1e-5, atol=1e-6)


def test_gradients_are_summed_over_every_group_though_ranks_have_none(pool: Pool) -> None:
    pool.run(4, check_sums)


def check_sums() -> None:
    mesh, rank = ParallelMesh(sp=2, tp=2), dist.get_rank()
    both, one, none = (nn.Parameter(torch.zeros(size)) for size in (3, 2, 4))
    optimizer = ShardedOptimizer(
        torch.optim.SGD([both, one, none], lr=1.0, weight_decay=0.5),
        [
            ManagedParameter(name="both", parameter=both, sum_groups=(mesh.group("tp"), mesh.group("sp"))),
            ManagedParameter(name="one", parameter=one, sum_groups=(mesh.group("sp"),)),
            ManagedParameter(name="none", parameter=none, sum_groups=(mesh.group("tp"),)),
        ],
        mesh=mesh,
        stage=1,
        precision=PrecisionConfig(),
    )
    if rank < 3:
        both.grad = torch.full((3,), 10.0**rank)
    if rank > 1:
        one.grad = torch.full((2,), 10.0**rank)
    optimizer.reduce_gradients()
    # Ranks 0 and 2, and 1 and 3, differ in sp alone.
    expected = {"both": torch.full((3,), 111.0), "one": torch.full((2,), 1000.0 if rank % 2 else 100.0)}
    assert_equal(optimizer.gradients(), expected)
    for _ in range(2):  # a backward that follows a reduction is summed on its own
        optimizer.backward(both.sum() + one.sum())
        optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), {"both": expected["both"] + 8, "one": expected["one"] + 4})


def test_a_rank_without_trainable_parameters_steps_too(pool: Pool) -> None:
    pool.run(2, check_nothing_to_train)


def check_nothing_to_train() -> None:
    model = small_model().requires_grad_(False)
    for stage in (0, 1):
        optimizer = shard(model, torch.optim.AdamW, stage=stage, precision="fp16", max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_norm == 0.0 and optimizer.masters() == {}


@STAGES
def test_gradient_of_an_earlier_reduction_counts_though_the_later_has_none(pool: Pool, stage: int) -> None:
    pool.run(2, check_gradient_of_earlier_reduction, stage)


def check_gradient_of_earlier_reduction(stage: int) -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0], [1]])
    optimizer = shard(model, stage=stage)
    optimizer.backward(loss_of(model, rank))
    optimizer.reduce_gradients()
    optimizer.backward(model[2].bias.sum())
    optimizer.step()
    assert_equal(optimizer.gradients(), expected | {"2.bias": expected["2.bias"] + 1})
