"""The tensors of a call that enter a region."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.shardformer.layers import region


class Attention(nn.Module):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return hidden_states


def test_the_first_input_of_the_signature_enters_however_it_is_given() -> None:
    hidden, mask = torch.ones(2, requires_grad=True), torch.zeros(2)
    entered = []

    def enter(xs: list[Tensor], group: dist.ProcessGroup | None, *_: object) -> list[Tensor]:
        entered.extend(xs)
        return xs

    module = region.Region.from_native_module(Attention(), None)  # type: ignore[arg-type]
    with patch.object(region, "enter", enter):
        module(attention_mask=mask, hidden_states=hidden)
        module(hidden, attention_mask=mask)
    assert [x is hidden for x in entered] == [True, True]
