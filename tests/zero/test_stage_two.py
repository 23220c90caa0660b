"""Stage 2: gradients that are averaged in every backward and then are no longer whole on any rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.zero.bucket import Bucket
from echelon.zero.optimizer import ShardedOptimizer

from ..pool import Pool
from .helpers import Precision, assert_equal, loss_of, shard, small_model, weights_of
from .test_gradients import mean_gradients


def watch(optimizer: ShardedOptimizer) -> list[str]:
    """What happens to which bucket, by its first parameter: + where it starts, - where its memory is back."""
    events: list[str] = []
    for bucket in optimizer.buckets:

        def start(bucket: Bucket = bucket) -> None:
            events.append(f"+{bucket.slots[0].managed.name}")
            Bucket.start_reduction(bucket)

        def give_back(bucket: Bucket = bucket) -> None:
            if bucket.gradients is not None:
                events.append(f"-{bucket.slots[0].managed.name}")
            Bucket._give_back(bucket)

        bucket.start_reduction = start  # type: ignore[method-assign]
        bucket._give_back = give_back  # type: ignore[method-assign]
    return events


def test_every_backward_averages_bucket_by_bucket_in_the_memory_of_two(pool: Pool) -> None:
    order = ["+2.bias", "+2.weight", "-2.bias", "+0.bias", "-2.weight", "+0.weight", "-0.bias"]
    assert pool.run(2, check_passing) == [[*order, "-0.weight"] * 3] * 2


def check_passing() -> list[str]:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0, 2, 4], [1, 3, 5]])
    optimizer = shard(model, stage=2, bucket_size=1)
    events = watch(optimizer)
    for number in range(3):
        optimizer.backward(loss_of(model, rank + 2 * number))
        for parameter in model.parameters():
            with pytest.raises(
                RuntimeError, match=r"parameter\.grad cannot be read.*optimizer\.gradients\(\)"
            ):
                parameter.grad.norm()  # type: ignore[union-attr]
        if number < 2:  # the last bucket is on its way, until a backward or the reduction needs it
            optimizer.reducer._finish(0)
    optimizer.reduce_gradients()
    longest = max(bucket.parameters.numel() for bucket in optimizer.buckets)
    assert optimizer.held_bytes().buffers == 2 * 4 * longest
    assert all(bucket.gradients is None for bucket in optimizer.buckets)
    assert sum(bucket.own_gradients.numel() for bucket in optimizer.buckets) * 2 == sum(
        bucket.parameters.numel() for bucket in optimizer.buckets
    )
    assert_equal(optimizer.gradients(), expected)
    return events


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_trains_as_stage_one_does(pool: Pool, precision: Precision) -> None:
    pool.run(2, check_training, precision)


def check_training(precision: Precision) -> None:
    found: list[tuple[dict[str, Tensor], list[float | None]]] = []
    for stage in (1, 2):
        model, rank = small_model(), dist.get_rank()
        optimizer = shard(
            model, torch.optim.AdamW, stage=stage, precision=precision, bucket_size=30, max_norm=0.1
        )
        norms = []
        for step in range(4):
            for number in range(3):
                factor = float("inf") if step == 1 and number == 1 and precision == "fp16" else 1.0
                optimizer.backward(factor * loss_of(model, 20 * step + 2 * number + rank))
            optimizer.step()
            norms.append(optimizer.last_norm)
            optimizer.zero_grad()
        assert optimizer.skipped_steps == (precision == "fp16"), (stage, optimizer.skipped_steps, norms)
        found.append((weights_of(model), norms))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5, nan_ok=True)
    assert_equal(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)


def test_no_sync_keeps_gradients_whole_and_averages_them_once(pool: Pool) -> None:
    assert pool.run(2, check_no_sync) == [4, 4]


def check_no_sync() -> int:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0, 2], [1, 3]])
    optimizer = shard(model, stage=2, bucket_size=1)
    events = watch(optimizer)
    with optimizer.no_sync():
        optimizer.backward(loss_of(model, rank))
    assert not events and all(parameter.grad is not None for parameter in model.parameters())
    optimizer.backward(loss_of(model, rank + 2))
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)
    return sum(event.startswith("+") for event in events)


def test_padding_never_counts(pool: Pool) -> None:
    """Memory that another bucket had holds its gradients where this one has padding."""
    pool.run(2, check_padding)


def check_padding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 16, bias=False), nn.Linear(16, 1, bias=False), nn.Linear(1, 3))
    optimizer = shard(model, stage=2, bucket_size=20)
    for bucket in optimizer.buckets:  # whatever the memory held
        bucket.borrow()
        assert bucket.gradients is not None
        bucket.gradients.fill_(torch.nan)
        bucket._give_back()
    optimizer.backward(model(torch.ones(2, 17)).sum())
    optimizer.step()
    assert optimizer.skipped_steps == 0


def test_a_backward_that_is_not_the_optimizers_is_reduced_in_the_step(pool: Pool) -> None:
    pool.run(2, check_plain_backward)


def check_plain_backward() -> None:
    model, rank = small_model(), dist.get_rank()
    expected = mean_gradients(model, [[0], []])
    optimizer = shard(model, stage=2)
    if rank == 0:
        loss_of(model, 0).backward()
    optimizer.reduce_gradients()
    assert_equal(optimizer.gradients(), expected)


def test_a_plain_models_zero_grad_drops_what_was_stepped_and_is_refused_before(pool: Pool) -> None:
    pool.run(2, check_plain_zero_grad)


def check_plain_zero_grad() -> None:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, stage=2)
    for _ in range(2):
        expected = mean_gradients(model, [[2], [3]])
        optimizer.backward(loss_of(model, 2 + rank))
        optimizer.step()
        assert_equal(optimizer.gradients(), expected)
        model.zero_grad()
    optimizer.backward(loss_of(model, rank))
    model.zero_grad()
    for further in (optimizer.step, lambda: optimizer.backward(loss_of(model, rank))):
        with pytest.raises(
            RuntimeError, match=r"was dropped after booster\.backward.*call optimizer\.zero_grad"
        ):
            further()
        dist.barrier()
