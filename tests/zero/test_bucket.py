import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.bucket import ALIGNMENT, make_buckets
from echelon.zero.partition import ManagedParameter, Partition

from ..pool import Pool
from .helpers import assert_equal, loss_of, managed, shard, small_model, weights_of


def test_parameters_and_gradients_are_aligned_views(pool: Pool) -> None:
    pool.run(3, check_views)


def check_views() -> None:
    model = small_model()
    before, objects = weights_of(model), list(model.parameters())
    partition = Partition.of(ParallelMesh(), 3)
    (bucket,) = make_buckets(
        [managed(model)], dtype=torch.float32, partitions={None: partition}, bucket_size=1000
    )
    assert [slot.start for slot in bucket.slots] == [0, 48, 64, 96]  # 35, 7, 21 and 3 elements
    assert bucket.parameters.numel() == bucket.gradients.numel() == 144  # 112 rounded up to 3 * ALIGNMENT
    assert all(own is other for own, other in zip(model.parameters(), objects, strict=True))
    assert_equal(weights_of(model), before)
    bucket.parameters.fill_(1)
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())
    assert bucket.masters.data_ptr() == bucket.parameters.data_ptr() + dist.get_rank() * 48 * 4


def test_buckets_fill_up_to_their_size_and_larger_parameters_stand_alone(pool: Pool) -> None:
    pool.run(1, check_filling)


def check_filling() -> None:
    model = nn.ParameterList([torch.zeros(size) for size in (4, 4, 4, 20, 1, 9, 2)])
    partition = Partition.of(ParallelMesh(), 1)
    members = managed(model)
    buckets = make_buckets(
        [members[:6], members[6:]], dtype=torch.float32, partitions={None: partition}, bucket_size=10
    )
    sizes = [[slot.stop - slot.start for slot in bucket.slots] for bucket in buckets]
    assert sizes == [[4, 4], [4], [20], [1, 9], [2]]
    assert [bucket.group_index for bucket in buckets] == [0, 0, 0, 0, 1]


def test_masters_are_unrounded(pool: Pool) -> None:
    pool.run(2, check_unrounded)


def check_unrounded() -> None:
    model = small_model()
    before = weights_of(model)
    optimizer = shard(model, precision="bf16")
    assert_equal(optimizer.masters(), before, rtol=0, atol=0)
    assert_equal(weights_of(model), {name: each.bfloat16() for name, each in before.items()}, rtol=0, atol=0)


def test_ranks_start_from_the_parameters_of_the_first(pool: Pool) -> None:
    pool.run(2, check_common_start)


def check_common_start() -> None:
    model = small_model()
    before = weights_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    shard(model)
    assert_equal(weights_of(model), before, rtol=0, atol=0)


def test_states_are_shared_out_evenly(pool: Pool) -> None:
    numbers = pool.run(3, held_state_elements)
    assert sum(numbers) == 2 * (35 + 7 + 21 + 3)
    assert max(numbers) <= 2 * 48  # a third of the padded bucket


def held_state_elements() -> int:
    model = small_model()
    optimizer = shard(model, torch.optim.AdamW)
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    return sum(x.numel() for state in optimizer.state.values() for x in state.values() if x.dim())


def test_more_ranks_than_elements(pool: Pool) -> None:
    pool.run(4, check_more_ranks_than_elements)


def check_more_ranks_than_elements() -> None:
    model = nn.ParameterList([torch.ones(1), torch.ones(0), torch.ones(())])
    optimizer = shard(model, torch.optim.AdamW, bucket_size=1)
    assert bool(optimizer.param_groups[0]["params"]) == (dist.get_rank() == 0)
    for _ in range(2):
        optimizer.backward(3 * model[0].sum() + model[1].sum() + 4 * model[2])
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_norm == pytest.approx(5.0)
    # 1e-3 per step is AdamW's; its weight decay takes 1e-5 more.
    for parameter in (model[0], model[2]):
        assert parameter.item() == pytest.approx(1 - 2e-3 - 2e-5, abs=1e-6)


def test_alignment_serves_vector_loads() -> None:
    assert ALIGNMENT * torch.bfloat16.itemsize % 16 == 0


def test_different_parameters_on_two_ranks_are_refused_on_both(pool: Pool) -> None:
    errors = pool.run_failing(2, build_different_models)
    for error in errors:
        assert isinstance(error, ValueError)
        assert (
            "number 1 is '0.bias (7,) of group 0, counts=True' on rank(s) [0] and nothing on rank(s) [1]"
            in str(error)
        )


def build_different_models() -> None:
    shard(nn.Sequential(nn.Linear(5, 7, bias=dist.get_rank() == 0)))


def test_different_sums_on_two_ranks_are_refused_on_both(pool: Pool) -> None:
    for error in pool.run_failing(2, build_different_sums):
        assert isinstance(error, ValueError) and "gradients are summed" in str(error)


def build_different_sums() -> None:
    from echelon.zero.optimizer import ShardedOptimizer
    from echelon.zero.precision import PrecisionConfig

    mesh = ParallelMesh(pp=2)
    parameter = nn.Parameter(torch.zeros(3 + dist.get_rank()))
    tied = ManagedParameter(name="tied", parameter=parameter, sum_groups=(mesh.group("pp"),))
    ShardedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), [tied], mesh=mesh, stage=1, precision=PrecisionConfig()
    )
