"""How parameters are cut and put together again. No processes: the ranks are numbers."""

import pytest
import torch
from torch.nn import Parameter

from echelon.cluster.placement import Placement, Shard, Shared, place, placement_of


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    ("size", "blocks", "padded", "copies"),
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
    dim: int, size: int, blocks: tuple[int, ...], padded: tuple[int, ...] | None, copies: int
) -> None:
    shard = Shard(size=size, dim=dim, blocks=blocks, padded=padded, copies=copies)
    shape = [2, 3, 5]
    shape[dim] = sum(blocks)
    whole = torch.randn(shape)
    pieces = [shard.local(whole, rank) for rank in range(size)]
    assert torch.equal(shard.whole(pieces), whole)
    assert len({piece.shape for piece in pieces}) == 1


def test_each_block_is_cut_on_its_own() -> None:
    shard = Shard(size=2, dim=0, blocks=(4, 2))
    assert shard.local(torch.arange(6), 0).tolist() == [0, 1, 4]
    assert shard.local(torch.arange(6), 1).tolist() == [2, 3, 5]


def test_padding_is_zero_and_on_the_last_ranks() -> None:
    shard = Shard(size=3, dim=0, blocks=(5,), padded=(9,))
    assert [shard.local(torch.arange(1, 6), rank).tolist() for rank in range(3)] == [
        [1, 2, 3],
        [4, 5, 0],
        [0, 0, 0],
    ]


def test_neighbours_hold_the_copies_of_a_piece() -> None:
    shard = Shard(size=4, dim=0, blocks=(2,), copies=2)
    assert [shard.local(torch.arange(2), rank).tolist() for rank in range(4)] == [[0], [0], [1], [1]]


def test_a_stretch_is_cut_over_its_own_ranks_and_comes_back() -> None:
    shard = Shard(size=4, dim=0, blocks=(4, 2, 4, 2), stretches=2)
    whole = torch.arange(12)
    pieces = [shard.local(whole, rank) for rank in range(4)]
    assert [piece.tolist() for piece in pieces] == [[0, 1, 4], [2, 3, 5], [6, 7, 10], [8, 9, 11]]
    assert torch.equal(shard.whole(pieces), whole)


def test_each_block_is_padded_at_its_own_end_and_comes_back() -> None:
    """Three query heads for each of two key-value heads on four ranks, then three key-value heads on two."""
    queries = Shard(size=4, dim=0, blocks=(3, 3), padded=(4, 4), stretches=2)
    whole = torch.arange(1, 7)
    pieces = [queries.local(whole, rank) for rank in range(4)]
    assert [piece.tolist() for piece in pieces] == [[1, 2], [3, 0], [4, 5], [6, 0]]
    assert torch.equal(queries.whole(pieces), whole)
    added = Shard(size=4, dim=0, blocks=(2, 2, 2, 0), padded=(2, 2, 2, 2), stretches=4)
    assert [added.local(whole, rank).tolist() for rank in range(4)] == [[1, 2], [3, 4], [5, 6], [0, 0]]


def test_padding_shorter_than_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padded=\(4,\) is shorter than blocks=\(5,\)"):
        Shard(size=2, dim=0, blocks=(5,), padded=(4,))


def test_stretches_that_differ_or_do_not_go_over_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"stretches=2 neither repeats blocks=\(4, 2, 2, 4\)"):
        Shard(size=4, dim=0, blocks=(4, 2, 2, 4), stretches=2)
    with pytest.raises(ValueError, match="nor divides the 2 pieces"):
        Shard(size=2, dim=0, blocks=(2, 2, 2, 2), stretches=4)


def test_a_piece_has_memory_of_its_own() -> None:
    whole = torch.zeros(4)
    Shard(size=1, dim=0, blocks=(4,)).local(whole, 0).fill_(1)
    assert whole.sum() == 0


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="10 entries along dim 0 are not divisible by 4 ranks"):
        Shard(size=4, dim=0, blocks=(8, 10))
    with pytest.raises(ValueError, match="copies=3 does not divide size=4"):
        Shard(size=4, dim=0, blocks=(12,), copies=3)


def test_blocks_of_another_length_than_the_tensor_are_refused() -> None:
    with pytest.raises(AssertionError, match="length 6 of dim 0"):
        Shard(size=2, dim=0, blocks=(4,)).local(torch.zeros(6), 0)


def test_placing_cuts_the_parameter_in_place() -> None:
    parameter = Parameter(torch.arange(6.0))
    place(parameter, Shard(size=2, dim=0, blocks=(6,)), 1)
    assert parameter.tolist() == [3, 4, 5]
    assert parameter.requires_grad
    assert placement_of(parameter) == Shard(size=2, dim=0, blocks=(6,))


def test_a_tied_parameter_is_cut_once() -> None:
    parameter = Parameter(torch.arange(4.0))
    for _ in range(2):
        place(parameter, Shard(size=2, dim=0, blocks=(4,)), 0)
    assert parameter.tolist() == [0, 1]


@pytest.mark.parametrize("other", [Shard(size=2, dim=1, blocks=(4,)), Shared(size=2)])
def test_a_tied_parameter_with_two_placements_is_an_error(other: Placement) -> None:
    parameter = Parameter(torch.zeros(4, 4))
    place(parameter, Shard(size=2, dim=0, blocks=(4,)), 0)
    with pytest.raises(AssertionError, match="a tied parameter was placed as"):
        place(parameter, other, 0)


def test_a_shared_parameter_stays_whole() -> None:
    parameter = Parameter(torch.arange(4.0))
    assert placement_of(parameter) is None
    place(parameter, Shared(size=2), 1)
    assert parameter.tolist() == [0, 1, 2, 3]
    assert placement_of(parameter) == Shared(size=2)
