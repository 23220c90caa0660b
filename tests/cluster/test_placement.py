"""How parameters are cut and put together again. No processes: the ranks are numbers."""

import pytest
import torch
from torch.nn import Parameter

from echelon.cluster.layout import MeshLayout
from echelon.cluster.placement import (
    PartialGrad,
    Placement,
    Replicated,
    Shard,
    is_primary,
    place,
    placement_on,
    shards_of,
)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    ("size", "blocks", "padded", "replicas"),
    [
        (1, (12,), None, 1),
        (4, (12,), None, 1),
        (2, (4, 4, 4), None, 1),
        (4, (8, 4, 4), None, 1),  # a query wider than key and value
        (4, (10,), (12,), 1),  # a vocabulary that does not divide
        (2, (4, 3), (4, 4), 1),
        (4, (6, 3, 3), (8, 4, 4), 1),  # heads that do not divide
        (4, (3,), (4,), 2),
        (4, (6,), None, 2),  # two key-value heads on four ranks
        (4, (2, 2), None, 4),
        (8, (3, 0), None, 8),
    ],
)
def test_the_whole_comes_back_from_the_pieces(
    dim: int, size: int, blocks: tuple[int, ...], padded: tuple[int, ...] | None, replicas: int
) -> None:
    shard = Shard(size=size, dim=dim, blocks=blocks, padded=padded, replicas=replicas)
    shape = [2, 3, 5]
    shape[dim] = sum(blocks)
    tensor = torch.randn(shape)
    shards = [shard.local(tensor, rank) for rank in range(size)]
    assert torch.equal(shard.full(shards), tensor)
    assert len({local.shape for local in shards}) == 1


PIECES: dict[str, tuple[Shard, list[list[int]]]] = {
    "blocks": (Shard(size=2, dim=0, blocks=(4, 2)), [[1, 2, 5], [3, 4, 6]]),
    "padding": (Shard(size=3, dim=0, blocks=(5,), padded=(9,)), [[1, 2, 3], [4, 5, 0], [0, 0, 0]]),
    "replicas": (Shard(size=4, dim=0, blocks=(2,), replicas=2), [[1], [1], [2], [2]]),
    "stretches": (
        Shard(size=4, dim=0, blocks=(4, 2, 4, 2), stretches=2),
        [[1, 2, 5], [3, 4, 6], [7, 8, 11], [9, 10, 12]],
    ),
    # Three query heads for each of two key-value heads on four ranks, then three key-value heads on two.
    "padded stretches": (
        Shard(size=4, dim=0, blocks=(3, 3), padded=(4, 4), stretches=2),
        [[1, 2], [3, 0], [4, 5], [6, 0]],
    ),
    "a padded block": (
        Shard(size=4, dim=0, blocks=(2, 2, 2, 0), padded=(2, 2, 2, 2), stretches=4),
        [[1, 2], [3, 4], [5, 6], [0, 0]],
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_shards_are_those_of_blocks_copies_and_stretches(name: str) -> None:
    shard, expected = PIECES[name]
    tensor = torch.arange(1, 1 + sum(shard.blocks))
    shards = [shard.local(tensor, rank) for rank in range(shard.size)]
    assert [local.tolist() for local in shards] == expected
    assert torch.equal(shard.full(shards), tensor)
    for rank, local in enumerate(shards):
        for interval in shard.intervals_of(rank):
            of_tensor = tensor[interval.full : interval.full + interval.length]
            assert torch.equal(local[interval.shard : interval.shard + interval.length], of_tensor)


def test_a_piece_has_memory_of_its_own() -> None:
    tensor = torch.zeros(4)
    Shard(size=1, dim=0, blocks=(4,)).local(tensor, 0).fill_(1)
    assert tensor.sum() == 0


def test_placing_cuts_the_parameter_in_place() -> None:
    parameter = Parameter(torch.arange(6.0))
    place(parameter, Shard(size=2, dim=0, blocks=(6,)), 1)
    assert parameter.tolist() == [3, 4, 5]
    place(parameter, Shard(size=2, dim=0, blocks=(6,)), 1)  # a tied one
    assert parameter.tolist() == [3, 4, 5]
    assert parameter.requires_grad
    assert placement_on(parameter, "tp") == Shard(size=2, dim=0, blocks=(6,))


def test_a_parameter_has_a_placement_per_axis() -> None:
    layout = MeshLayout(dp=2, wp=2, tp=2, rank=3)
    weight = torch.arange(8.0).view(4, 2)
    experts = Shard(size=2, dim=0, blocks=(4,), axis="wp")
    for inner in (Shard(size=2, dim=1, blocks=(2,)), Shard(size=2, dim=0, blocks=(2,))):
        parameter = Parameter(weight)
        place(parameter, experts, layout.coordinate("wp"))
        place(parameter, inner, layout.coordinate("tp"))
        place(parameter, experts, layout.coordinate("wp"))  # a tied one
        assert parameter.tolist() == ([[5.0], [7.0]] if inner.dim else [[6.0, 7.0]])
        assert shards_of(parameter, layout) == ((experts, 1), (inner, 1))
        assert shards_of(parameter, layout.at(2)) == ((experts, 1), (inner, 0))


@pytest.mark.parametrize(
    ("placements", "primary"),
    [
        ((), "10001000"),
        ((PartialGrad(size=4),), "10001000"),
        ((Replicated(size=4),), "10001000"),
        ((Shard(size=4, dim=0, blocks=(8,)),), "11111111"),
        ((Shard(size=4, dim=0, blocks=(8,), replicas=2),), "10101010"),
        ((Shard(size=2, dim=0, blocks=(8,), axis="wp"),), "10001000"),
        ((Shard(size=2, dim=0, blocks=(8,), axis="wp"), PartialGrad(size=4)), "10001000"),
        ((Shard(size=2, dim=0, blocks=(8,), axis="wp"), Shard(size=4, dim=0, blocks=(4,))), "11111111"),
    ],
)
def test_a_shard_is_counted_by_one_rank_of_the_layer_axes(
    placements: tuple[Placement, ...], primary: str
) -> None:
    layout = MeshLayout(dp=2, wp=2, tp=4)
    parameter = Parameter(torch.zeros(8))
    for placement in placements:
        place(parameter, placement, 0)
    counted = [is_primary(parameter, layout.at(rank).coordinate) for rank in range(8)]
    assert counted == [digit == "1" for digit in primary]


def test_a_shared_parameter_stays_whole() -> None:
    parameter = Parameter(torch.arange(4.0))
    assert placement_on(parameter, "tp") is None
    place(parameter, PartialGrad(size=2), 1)
    assert parameter.tolist() == [0, 1, 2, 3]
    assert placement_on(parameter, "tp") == PartialGrad(size=2)
