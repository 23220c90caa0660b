"""Attention by heads against attention in one process: results, gradients, bytes, dropout."""

# B batch, L length, N query heads, M key-value heads, D width of a head

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from echelon.shardformer.sequence.all_to_all import attend_by_heads
from echelon.shardformer.sequence.axis import SequenceAxis
from echelon.shardformer.sequence.order import SequenceOrder

from ...pool import Pool

B, D, VALUE_WIDTH = 2, 4, 6
MASKS = ("causal", "all", "padded", "by head", "bias")


class Attention(nn.Module):
    """What attention functions of transformers look at."""

    def __init__(self, num_queries: int, num_keys: int, *, is_causal: bool = True) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = num_queries // num_keys, is_causal


@dataclass(frozen=True)
class Case:
    num_queries: int
    num_keys: int
    length: int
    mask: str

    def tensors(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.length)
        widths = (self.num_queries, D), (self.num_keys, D), (self.num_keys, VALUE_WIDTH)
        return [torch.randn(B, heads, self.length, width, generator=generator) for heads, width in widths]

    def about_mask(self) -> dict[str, Any]:
        length, generator = self.length, torch.Generator().manual_seed(1)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        if self.mask == "padded":
            lengths = torch.tensor([length, max(length - 3, 1)])
            return {"mask": (torch.arange(length) < lengths[:, None])[:, None, None] & causal}
        if self.mask == "by head":
            drawn = torch.rand(B, self.num_queries, length, length, generator=generator) < 0.6
            return {"mask": drawn | torch.eye(length, dtype=torch.bool)}
        if self.mask == "bias":
            bias = torch.randn(1, self.num_queries, length, length, generator=generator)
            return {"mask": causal[None, None], "position_bias": bias}
        return {"mask": None}


def new_axis(length: int) -> SequenceAxis:
    group = dist.group.WORLD
    assert group is not None
    axis = SequenceAxis(group, SequenceOrder(size=group.size()))
    axis.length = length
    return axis


def compare(case: Case) -> None:
    """Attention of all ranks and of this one alone, and what both give to queries, keys, values and biases."""
    axis = new_axis(case.length)
    module = Attention(case.num_queries, case.num_keys, is_causal=case.mask == "causal")
    found = run(case, lambda *args, **rest: split(axis, module, *args, **rest))
    expected = run(case, lambda *args, **rest: sdpa_attention_forward(module, *args, **rest)[0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6, msg=lambda text: f"{case}: {text}")


def run(case: Case, attend: Callable[..., Tensor]) -> Iterator[Tensor]:
    """Result and gradients of whole sequences."""
    inputs = [each.requires_grad_() for each in case.tensors()]
    given = case.about_mask()
    if "position_bias" in given:
        inputs.append(given["position_bias"].requires_grad_())
    out_BLND = attend(*inputs[:3], given.pop("mask"), **given)
    (out_BLND * torch.linspace(0, 1, out_BLND.numel()).view_as(out_BLND).cos()).sum().backward()
    yield out_BLND.detach()
    for each in inputs:
        assert each.grad is not None
        yield each.grad


def split(axis: SequenceAxis, module: nn.Module, *given: Any, **rest: Any) -> Tensor:
    """`attend_by_heads`, with whole tensors in and out; gradients are those of all ranks."""
    inputs = [own(each, axis, 2) for each in given[:3]]
    if "position_bias" in rest:
        rest["position_bias"] = _Summed.apply(rest["position_bias"], axis.group)
    out = attend_by_heads(sdpa_attention_forward, module, *inputs, given[3], axis, **rest)
    return _Whole.apply(out, axis)


def own(x: Tensor, axis: SequenceAxis, dim: int) -> Tensor:
    return axis.own(_Summed.apply(x, axis.group), dim)


class _Summed(torch.autograd.Function):
    """Equal on all ranks; its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Whole(torch.autograd.Function):
    """All ranks' parts; each takes its own part of the gradient, which is equal on all."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: SequenceAxis) -> Tensor:
        ctx.axis = axis
        parts = [torch.empty_like(part) for _ in range(axis.order.size)]
        dist.all_gather(parts, part.contiguous(), group=axis.group)
        return axis.order.whole(parts, 1, axis.length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.own(gradient, 1), None


HEADS = [(4, 4), (6, 2), (4, 1), (8, 2), (12, 4)]


def compare_all() -> None:
    for (queries, keys), length, mask in product(HEADS, (8, 7), MASKS):
        compare(Case(queries, keys, length, mask))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_by_heads_is_that_of_one_process(pool: Pool, ranks: int) -> None:
    pool.run(ranks, compare_all)
