import torch
import torch.distributed as dist
from torch import nn

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.bucket import make_buckets
from echelon.zero.partition import Partition

from ..pool import on_ranks
from .helpers import assert_equal, assert_same_bits, managed, shard, small_model, weights_of


@on_ranks(3)
def test_parameters_and_gradients_are_aligned_views() -> None:
    model = small_model()
    before, objects = weights_of(model), list(model.parameters())
    partition = Partition.of(ParallelMesh(), 3)
    (bucket,) = make_buckets(
        [managed(model)], dtype=torch.float32, partitions={None: partition}, bucket_size=1000
    )
    assert [slot.start for slot in bucket.slots] == [0, 48, 64, 96]  # 35, 7, 21 and 3 elements
    assert bucket.parameters.numel() == bucket.gradients.numel() == 144  # 112 rounded up to 3 * ALIGNMENT
    assert all(parameter is other for parameter, other in zip(model.parameters(), objects, strict=True))
    assert_equal(weights_of(model), before)
    bucket.parameters.fill_(1)
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())
    assert bucket.masters.data_ptr() == bucket.parameters.data_ptr() + dist.get_rank() * 48 * 4


@on_ranks(1)
def test_buckets_fill_up_to_their_size_and_larger_parameters_have_their_own() -> None:
    model = nn.ParameterList([torch.zeros(size) for size in (4, 4, 4, 20, 1, 9, 2)])
    partition = Partition.of(ParallelMesh(), 1)
    members = managed(model)
    buckets = make_buckets(
        [members[:6], members[6:]], dtype=torch.float32, partitions={None: partition}, bucket_size=10
    )
    sizes = [[slot.stop - slot.start for slot in bucket.slots] for bucket in buckets]
    assert sizes == [[4, 4], [4], [20], [1, 9], [2]]
    assert [bucket.group_index for bucket in buckets] == [0, 0, 0, 0, 1]


@on_ranks(2)
def test_masters_are_unrounded() -> None:
    model = small_model()
    before = weights_of(model)
    optimizer = shard(model, precision="bf16")
    assert_same_bits(optimizer.masters(), before)
    assert_same_bits(weights_of(model), {name: weight.bfloat16() for name, weight in before.items()})


@on_ranks(2)
def test_ranks_start_from_the_parameters_of_the_first() -> None:
    model = small_model()
    before = weights_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    shard(model)
    assert_same_bits(weights_of(model), before)
