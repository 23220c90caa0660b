"""Attention by heads against attention in one process: results, gradients, bytes, dropout."""

# B batch, L length, N query heads, M key-value heads, D width of a head

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.traffic import Traffic
from echelon.shardformer.layers.sequence_axis import SequenceAxis, SequenceOrder
from echelon.shardformer.sequence.ulysses import HeadShare, attend_by_heads, heads_errors

from ...pool import Pool

B, D, VALUE_WIDTH = 2, 4, 6
MASKS = ("causal", "all", "padded", "by head", "bias")
HAS_BIASES = "position_bias" in signature(sdpa_attention_forward).parameters  # in older releases it has not


class Attention(nn.Module):
    """The attributes that attention functions of transformers read."""

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


HEADS = ((4, 4), (6, 2), (4, 1), (8, 2), (12, 4))
LENGTHS = (8, 7)


def compare_all(*, is_short: bool) -> None:
    everything = list(product(range(len(HEADS)), range(len(LENGTHS)), range(len(MASKS))))
    for heads, length, mask in everything:
        if MASKS[mask] == "bias" and not HAS_BIASES:
            continue
        if not is_short or heads == (mask + 2 * length) % len(HEADS):  # then each of all of them in some case
            compare(Case(*HEADS[heads], LENGTHS[length], MASKS[mask]))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_attention_by_heads_is_that_of_one_process(pool: Pool, ranks: int, *, is_short: bool) -> None:
    pool.run(ranks, compare_all, is_short=is_short)


def compare_sinks(num_queries: int, num_keys: int) -> None:
    """A logit for each head that the module holds, and one that it hands on."""
    axis = new_axis(7)
    generator = torch.Generator().manual_seed(0)
    q, k, v = Case(num_queries, num_keys, 7, "all").tensors()
    mask = torch.zeros(7, 7).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -1e9)[None, None]
    sinks = torch.randn(num_queries, generator=generator)
    results = []
    for attend in (split_of(axis), whole):
        module = Attention(num_queries, num_keys)
        module.sinks = nn.Parameter(sinks)
        handed = sinks.clone().requires_grad_()
        out_BLND = attend(attention_with_sinks, module, q, k, v, mask, scaling=0.5, s_aux=handed)
        out_BLND.cos().sum().backward()
        assert module.sinks.grad is not None and handed.grad is not None
        if attend is not whole:
            dist.all_reduce(module.sinks.grad)
            dist.all_reduce(handed.grad)
        results.append((out_BLND.detach(), module.sinks.grad, handed.grad))
    for found, expected in zip(*results, strict=True):
        assert expected.abs().min() > 0
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def attention_with_sinks(module: Any, *given: Any, s_aux: Tensor, **rest: Any) -> tuple[Tensor, Any]:
    out, weights = gpt_oss_attention(module, *given, **rest)
    return out * s_aux.exp()[:, None], weights


def split_of(axis: SequenceAxis) -> Callable[..., Tensor]:
    def attend(
        function: Any, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any
    ) -> Tensor:
        parts = [axis.own(each, 2) for each in (q, k, v)]
        return _Whole.apply(attend_by_heads(function, module, *parts, *rest, axis, **named), axis)

    return attend


def whole(function: Any, *given: Any, **named: Any) -> Tensor:
    return function(*given, **named)[0]


def test_what_belongs_to_a_head_goes_with_it(pool: Pool) -> None:
    pool.run(2, compare_sinks, 6, 1)
    pool.run(2, compare_sinks, 4, 4)


def drop(num_heads: int) -> tuple[Tensor, list[Tensor]]:
    """The dropped entries, and the values' gradients without checkpointing and with it."""
    length, rate = 16, 0.4
    axis = new_axis(length)
    module = Attention(num_heads, num_heads)
    q = torch.zeros(1, num_heads, length, D)
    v = torch.eye(length).expand(1, num_heads, length, length).contiguous()  # so the result is the weights
    q, v = (axis.own(each, 2) for each in (q, v))

    def attend(v: Tensor) -> Tensor:
        given = dict(dropout=rate, is_causal=False)
        return attend_by_heads(sdpa_attention_forward, module, q, q, v, None, axis, **given)

    gradients, weights = [], []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        given = v.clone().requires_grad_()
        out = checkpoint(attend, given, use_reentrant=False) if is_recomputed else attend(given)
        after = torch.rand(4)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        assert given.grad is not None
        gradients.append(given.grad)
        weights.append(_Whole.apply(out, axis).detach())
        common = after.clone()
        dist.broadcast(common, 0)
        assert torch.equal(after, common), "the ranks' common random state went apart"
    assert torch.equal(*weights)
    kept = weights[0][weights[0] > 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / length / (1 - rate)))
    assert abs(float((weights[0] == 0).float().mean()) - rate) < 0.05
    return weights[0], gradients


def test_dropout_differs_from_head_to_head_and_is_drawn_again_as_it_was(pool: Pool) -> None:
    for weights, gradients in pool.run(2, drop, 4):
        patterns = {tuple((weights[:, :, head] == 0).flatten().tolist()) for head in range(4)}
        assert len(patterns) == 4
        assert torch.equal(*gradients)


def count_bytes(num_queries: int, num_keys: int) -> dict[Any, Any]:
    mesh = ParallelMesh(tp=dist.get_world_size())
    axis = SequenceAxis(mesh.group("tp"), SequenceOrder(size=mesh.size("tp")))
    axis.length = 120
    inputs = [
        torch.randn(B, heads, 120 // axis.order.size, D, requires_grad=True)
        for heads in (num_queries, num_keys, num_keys)
    ]
    counts = []
    module = Attention(num_queries, num_keys)
    for _ in range(2):
        with Traffic(mesh) as traffic:
            if not counts:
                out = attend_by_heads(sdpa_attention_forward, module, *inputs, None, axis)
            else:
                out.sum().backward()
        counts.append({key: (count.calls, count.sent) for key, count in traffic.counts.items()})
    assert counts[0] == counts[1], "backward sends what forward does"
    return counts[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formula(pool: Pool, ranks: int) -> None:
    for queries, keys in ((8, 4), (8, 8)):
        elements = (2 * queries + 2 * keys) * B * 120 * D / ranks
        expected = {("tp", "all_to_all"): (2, 4 * elements * (ranks - 1) / ranks)}
        assert pool.run(ranks, count_bytes, queries, keys) == [expected] * ranks


def test_few_key_value_heads_are_repeated_no_more_than_ranks_need() -> None:
    def share(queries: int, keys: int, size: int) -> tuple[int, int, int]:
        found = HeadShare.least(queries, keys, size)
        return found.queries, found.keys, found.repeats

    assert share(8, 4, 2) == (4, 2, 1)
    assert share(8, 2, 4) == (2, 1, 2)
    assert share(8, 1, 8) == (1, 1, 8)
    assert share(12, 12, 5) == (3, 3, 1)
    assert share(32, 8, 6) == (6, 3, 2)


def test_more_ranks_than_heads_are_refused() -> None:
    assert heads_errors(4, 4, "all_to_all") == []
    (fault,) = heads_errors(4, 6, "sequence_parallelism_mode='all_to_all'")
    assert "sp_size=6 is more than the 4 attention heads" in fault
    assert "sp_size=4 or less" in fault and "ring_attn" in fault


def attend_wrongly() -> None:
    axis = new_axis(7)
    module = Attention(4, 4)
    q = torch.zeros(B, 4, 4, D)

    def attend(*given: Any, **rest: Any) -> Tensor:
        return attend_by_heads(sdpa_attention_forward, module, *given, axis, **rest)

    with pytest.raises(
        ValueError, match="attends from 4 to 5 positions, where this rank holds 4 of a sequence of 7"
    ):
        attend(q, torch.zeros(B, 4, 5, D), torch.zeros(B, 4, 5, D), None)
    with pytest.raises(ValueError, match=r"mask or bias of shape \(2, 1, 4, 4\) for sequences of length 7"):
        attend(q, q, q, torch.zeros(B, 1, 4, 4))
    with pytest.raises(ValueError, match=r"mask or bias of shape \(1, 4, 4, 4\) for sequences of length 7"):
        attend(q, q, q, None, position_bias=torch.zeros(1, 4, 4, 4))
    with pytest.raises(ValueError, match="for 4 query heads"):
        attend(q, q, q, torch.zeros(B, 3, 7, 7))


def test_shapes_of_another_sequence_are_refused(pool: Pool) -> None:
    pool.run(2, attend_wrongly)
