"""Facts that are read from the code of forwards."""

from torch import Tensor, nn

from echelon.shardformer.layers.forward_code import returns_tuple


class Tuples(nn.Module):
    def forward(self, hidden: Tensor, position_ids: Tensor, **kwargs: object) -> tuple:
        outputs = (hidden, None)
        return outputs


class Tensors(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def test_a_forward_that_returns_a_tuple_is_recognized() -> None:
    assert returns_tuple(Tuples())
    assert not returns_tuple(Tensors())
