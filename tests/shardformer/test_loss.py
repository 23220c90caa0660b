"""Cross entropy of split logits against torch's and transformers' own."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from echelon.cluster.placement import Shard
from echelon.shardformer.layers import VocabParallelLMHead1D, vocab_parallel_cross_entropy
from echelon.shardformer.layers.embedding import vocab_range, vocab_shard
from echelon.shardformer.layers.loss import _causal_lm_loss

from ..pool import Pool
from .compare import named, numbers, require_equal_on_ranks

N = 12


def labels_of(entries: int, shard: Shard, ignore_index: int) -> Tensor:
    """The first and last entry of every rank, some more, some ignored."""
    ranges = [vocab_range(shard, rank) for rank in range(shard.size)]
    borders = [entry for held in ranges if held.valid for entry in (held.first, held.first + held.valid - 1)]
    labels = torch.tensor((borders + [0, entries // 2, entries - 1] * N)[:N])
    labels[[2, 7]] = ignore_index
    return labels


def check(
    entries: int, multiple: int, *, dtype: torch.dtype, scale: float, reduction: str, ignore_index: int
) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    shard = vocab_shard(entries, size, multiple)
    logits = (scale * numbers(N, entries)).to(dtype)
    labels = labels_of(entries, shard, ignore_index)
    whole = logits.clone().requires_grad_()
    local = Shard(size=size, dim=1, blocks=shard.blocks, padded=shard.padded).local(logits, rank)
    held = vocab_range(shard, rank)
    local[:, held.valid :] = 1e4  # what stands in the padding counts for nothing
    local.requires_grad_()
    expected = F.cross_entropy(whole.float(), labels, ignore_index=ignore_index, reduction=reduction)
    before = local.detach().clone()
    found = vocab_parallel_cross_entropy(
        local, labels, held=held, group=dist.group.WORLD, ignore_index=ignore_index, reduction=reduction
    )
    assert torch.equal(local, before), "the logits were written to"
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * max(1, scale))
    require_equal_on_ranks(found, "the loss")
    weights = numbers(*expected.shape, seed=3) if expected.dim() else torch.tensor(1.7)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    assert whole.grad is not None
    assert local.grad is not None
    assert local.grad.dtype == dtype
    assert not local.grad[:, held.valid :].any(), "padding has a gradient"
    last_bit = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(
        local.grad[:, : held.valid],
        whole.grad[:, held.first : held.first + held.valid],
        rtol=last_bit,
        atol=1e-6 * whole.grad.abs().max().item(),
    )


def cross_entropies() -> None:
    for entries, multiple in ((24, 1), (101, 8), (23, 1), (3, 64), (1, 1)):
        for reduction in ("mean", "sum", "none"):
            with named(f"{entries} entries, multiple {multiple}, {reduction}"):
                check(
                    entries, multiple, dtype=torch.float32, scale=3.0, reduction=reduction, ignore_index=-100
                )
    with named("a label that is ignored and an entry"):
        check(24, 1, dtype=torch.float32, scale=3.0, reduction="mean", ignore_index=5)
    with named("large logits"):
        check(101, 8, dtype=torch.float32, scale=1e3, reduction="mean", ignore_index=-100)
    for dtype in (torch.float16, torch.bfloat16):
        with named(dtype):
            check(101, 8, dtype=dtype, scale=3.0, reduction="mean", ignore_index=-100)


def all_ignored() -> tuple[bool, bool, float, float]:
    """True where the mean is nan; whether its gradient is finite; the sum; the largest of the losses."""
    held = vocab_range(vocab_shard(8, dist.get_world_size(), 1), dist.get_rank())
    labels = torch.full((N,), -100)

    def loss(reduction: str) -> tuple[Tensor, Tensor]:
        local = numbers(N, held.width).requires_grad_()
        found = vocab_parallel_cross_entropy(
            local, labels, held=held, group=dist.group.WORLD, reduction=reduction
        )
        found.sum().backward()
        assert local.grad is not None
        return found.detach(), local.grad

    mean, gradient = loss("mean")
    return (
        bool(mean.isnan()),
        bool((gradient == 0).all()),
        loss("sum")[0].item(),
        loss("none")[0].abs().max().item(),
    )


def label_of(label: int) -> None:
    held = vocab_range(vocab_shard(10, 2, 8), dist.get_rank())
    vocab_parallel_cross_entropy(
        numbers(2, held.width), torch.tensor([1, label]), held=held, group=dist.group.WORLD
    )


def infinite_logits() -> float:
    """One logit of one rank overflowed: the loss says so on all ranks."""
    held = vocab_range(vocab_shard(8, 2, 1), dist.get_rank())
    local = numbers(2, held.width)
    if dist.get_rank() == 1:
        local[0, 0] = torch.inf
    return vocab_parallel_cross_entropy(local, torch.tensor([1, 6]), held=held, group=dist.group.WORLD).item()


def causal_losses() -> None:
    """As transformers computes it: shifted, with a count of items, with labels already shifted."""
    torch.manual_seed(0)
    native = nn.Linear(6, 23)
    hidden = numbers(3, 7, 6)
    logits = native(hidden).detach()
    head = VocabParallelLMHead1D(native, dist.group.WORLD, make_vocab_size_divisible_by=2)
    head.gather_output = False
    local = head(hidden).detach()
    labels = torch.arange(21).view(3, 7)
    labels[1, 4:] = -100
    ours = partial(_causal_lm_loss, head=head)
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "a number of items": {"num_items_in_batch": 40},
        "a tensor of items": {"num_items_in_batch": torch.tensor(40)},
        "shifted labels": {"shift_labels": labels.flip(1)},
        "another label to ignore": {"ignore_index": 3},
        "keywords that the loss does not know": {"use_cache": False},
    }
    for name, kwargs in cases.items():
        if "ignore_index" in kwargs:
            kwargs["shift_labels"] = labels.clamp(min=0)
        expected = ForCausalLMLoss(logits, labels, 23, **kwargs)
        with named(name):
            torch.testing.assert_close(ours(local, labels, 23, **kwargs), expected, rtol=1e-6, atol=1e-6)
    head.gather_output = True  # the model's forward was called without its hooks: the logits are whole
    expected = ForCausalLMLoss(logits, labels, 23)
    torch.testing.assert_close(ours(head(hidden).detach(), labels, 23), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_loss_of_split_logits_and_its_gradient_are_those_of_torch(pool: Pool, ranks: int) -> None:
    pool.run(ranks, cross_entropies)


def test_where_all_labels_are_ignored_the_mean_is_nan_as_in_torch_and_the_gradient_zero(pool: Pool) -> None:
    logits = numbers(N, 8).requires_grad_()
    expected = F.cross_entropy(logits, torch.full((N,), -100))
    expected.backward()
    assert expected.isnan()
    assert not logits.grad.any()  # type: ignore[union-attr]
    assert pool.run(2, all_ignored) == [(True, True, 0.0, 0.0)] * 2


@pytest.mark.parametrize("label", [10, 15, 16, -1])
def test_a_label_outside_the_vocabulary_is_an_error_on_every_rank(pool: Pool, label: int) -> None:
    errors = pool.run_failing(2, label_of, label)
    assert [str(error) for error in errors] == [f"label {label} is outside the vocabulary of 10"] * 2


def test_a_logit_that_overflowed_on_one_rank_is_seen_on_all(pool: Pool) -> None:
    assert all(loss != loss for loss in pool.run(2, infinite_logits))


def test_the_causal_loss_of_split_logits_is_that_of_transformers(pool: Pool) -> None:
    pool.run(2, causal_losses)


def curvature() -> None:
    held = vocab_range(vocab_shard(8, 2, 1), dist.get_rank())
    local = numbers(2, held.width).requires_grad_()
    found = vocab_parallel_cross_entropy(local, torch.tensor([1, 6]), held=held, group=dist.group.WORLD)
    (gradient,) = torch.autograd.grad(found.square(), local, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_a_second_derivative_is_an_error_and_not_wrong(pool: Pool) -> None:
    pool.run(2, curvature)


def one_rank() -> None:
    held = vocab_range(vocab_shard(8, 1, 1), 0)
    with pytest.raises(ValueError, match="reduction='avg' must be"):
        vocab_parallel_cross_entropy(
            numbers(2, 8), torch.tensor([1, 2]), held=held, group=dist.group.WORLD, reduction="avg"
        )


def test_an_unknown_reduction_is_refused(pool: Pool) -> None:
    pool.run(1, one_rank)
