import pytest
import torch

from echelon.shardformer.layers.sequence_axis import SequenceOrder


@pytest.mark.parametrize("is_zigzag", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 12, 24])
def test_parts_make_up_the_sequence(size: int, length: int, *, is_zigzag: bool) -> None:
    order = SequenceOrder(size=size, is_zigzag=is_zigzag)
    x = torch.arange(1, 2 * length * 3 + 1).view(2, length, 3)
    parts = [order.own(x, 1, rank) for rank in range(size)]
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(order.whole(parts, 1, length), x)
    for rank, part in enumerate(parts):
        positions = [each for stretch in order.stretches(rank, length) for each in stretch]
        for index, position in enumerate(positions):
            expected = x[:, position] if position < length else torch.zeros(2, 3, dtype=x.dtype)
            assert torch.equal(part[:, index], expected)


def test_zigzag_gives_each_rank_as_much_of_a_causal_mask() -> None:
    order = SequenceOrder(size=4, is_zigzag=True)
    seen = [
        sum(1 + position for stretch in order.stretches(rank, 32) for position in stretch)
        for rank in range(4)
    ]
    assert len(set(seen)) == 1
