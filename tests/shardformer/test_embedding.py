"""Embedding and head split over the vocabulary, alone, against the whole ones."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.cluster.placement import placement_of
from echelon.shardformer.layers import VocabParallelEmbedding1D, VocabParallelLMHead1D
from echelon.shardformer.layers.embedding import vocab_range, vocab_shard

from ..pool import Pool
from .compare import named, numbers, require_equal_on_ranks, require_same_gradients

H = 6


def embedding(entries: int, padding: int | None) -> nn.Embedding:
    torch.manual_seed(4)
    layer = nn.Embedding(entries, H, padding_idx=padding)
    layer.weight.data.normal_()  # the row of padding too: it need not be zero
    return layer


def check_embedding(entries: int, padding: int | None, multiple: int) -> None:
    native = embedding(entries, padding)
    layer = VocabParallelEmbedding1D.from_native_module(
        deepcopy(native), dist.group.WORLD, make_vocab_size_divisible_by=multiple
    )
    ids = torch.cat([torch.arange(entries), torch.arange(entries - 1, -1, -1), torch.arange(0, entries, 3)])
    ids = ids[: len(ids) // 2 * 2].view(
        2, -1
    )  # each entry at least twice, the borders of all ranks among them
    expected, outputs = native(ids), layer(ids)
    assert torch.equal(outputs, expected)  # one row and zeros are summed
    weights = numbers(*expected.shape)
    (expected * weights).sum().backward()
    (outputs * weights).sum().backward()
    require_same_gradients(layer, native)


def embeddings() -> None:
    size = dist.get_world_size()
    for entries, multiple in ((24, 1), (23, 1), (23, 4), (101, 8), (5, 64), (1, 1)):
        width = sum(vocab_shard(entries, size, multiple).padded or ()) // size
        # No padding, and one on the first and the last entry of each rank.
        borders = {width * rank for rank in range(size)} | {width * (rank + 1) - 1 for rank in range(size)}
        for padding in (None, entries - 1, *(sorted(border for border in borders if border < entries))):
            with named(f"{entries} entries, multiple {multiple}, padding {padding}"):
                check_embedding(entries, padding, multiple)


def look_up(ids: list[int], trained: bool = True) -> Tensor:
    layer = VocabParallelEmbedding1D(embedding(10, None), dist.group.WORLD, make_vocab_size_divisible_by=8)
    layer.weight.requires_grad_(trained)
    return layer(torch.tensor([ids])).detach()


def check_head(entries: int, bias: bool, multiple: int) -> None:
    torch.manual_seed(5)
    native = nn.Linear(H, entries, bias=bias)
    layer = VocabParallelLMHead1D.from_native_module(
        deepcopy(native), dist.group.WORLD, make_vocab_size_divisible_by=multiple
    )
    whole_x, split_x = numbers(2, 3, H).requires_grad_(), numbers(2, 3, H).requires_grad_()
    expected, outputs = native(whole_x), layer(split_x)
    torch.testing.assert_close(outputs, expected, rtol=1e-6, atol=1e-6)
    require_equal_on_ranks(outputs, "the logits")
    weights = numbers(*expected.shape, seed=2)
    (expected * weights).sum().backward()
    (outputs * weights).sum().backward()
    torch.testing.assert_close(split_x.grad, whole_x.grad, rtol=1e-5, atol=1e-5)
    require_same_gradients(layer, native)
    layer.gather_output = False
    local = layer(split_x.detach())
    held = layer.range
    assert local.shape[-1] == held.width
    torch.testing.assert_close(
        local[..., : held.valid], expected[..., held.first : held.first + held.valid], rtol=1e-6, atol=1e-6
    )
    assert torch.equal(layer.gathered(local), layer.gathered(local))


def heads() -> None:
    for entries, multiple in ((24, 1), (23, 1), (101, 8), (5, 64)):
        for bias in (True, False):
            with named(f"{entries} entries, multiple {multiple}, bias={bias}"):
                check_head(entries, bias, multiple)


def tie() -> None:
    """Head and embedding share one weight: it is cut once, its gradient is the sum of both uses."""
    native = embedding(23, 3)
    native_head = nn.Linear(H, 23, bias=False)
    native_head.weight = native.weight
    whole = nn.Sequential(native, native_head)
    tied = deepcopy(whole)
    tied[0] = VocabParallelEmbedding1D(tied[0], dist.group.WORLD, make_vocab_size_divisible_by=4)
    tied[1] = VocabParallelLMHead1D(tied[1], dist.group.WORLD, make_vocab_size_divisible_by=4)
    assert tied[0].weight is tied[1].weight
    assert placement_of(tied[0].weight) == vocab_shard(23, dist.get_world_size(), 4)
    ids, weights = torch.arange(23).view(1, -1), numbers(1, 23, 23)
    for model in (whole, tied):
        (model(ids) * weights).sum().backward()
    require_same_gradients(tied, whole)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_embedding_looks_up_what_the_whole_one_does(pool: Pool, ranks: int) -> None:
    pool.run(ranks, embeddings)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_head_gives_the_logits_and_gradients_of_the_whole_one(pool: Pool, ranks: int) -> None:
    pool.run(ranks, heads)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_tied_weight_is_cut_once_and_gets_both_gradients(pool: Pool, ranks: int) -> None:
    pool.run(ranks, tie)


@pytest.mark.parametrize(
    "entry", [10, 15, 16, -1]
)  # beyond the vocabulary: in the padding, beyond it, negative
def test_an_entry_outside_the_vocabulary_is_an_error_on_every_rank(pool: Pool, entry: int) -> None:
    errors = pool.run_failing(2, look_up, [1, entry, 3])
    assert [str(error) for error in errors] == [f"entry {entry} is outside the vocabulary of 10"] * 2


def test_a_frozen_embedding_looks_up_the_same(pool: Pool) -> None:
    expected = embedding(10, None)(torch.tensor([[0, 9, 4]])).detach()
    for found in pool.run(2, look_up, [0, 9, 4], False):
        assert torch.equal(found, expected)


def test_every_entry_is_held_by_one_rank() -> None:
    for entries in range(1, 40):
        for ranks in (1, 2, 3, 4):
            shard = vocab_shard(entries, ranks, 4)
            held = [vocab_range(shard, rank) for rank in range(ranks)]
            listed = [entry for one in held for entry in range(one.first, one.first + one.valid)]
            assert listed == list(range(entries))


class Group:
    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    "native",
    [
        nn.Embedding(8, H, max_norm=1.0),
        nn.Embedding(8, H, scale_grad_by_freq=True),
        nn.Embedding(8, H, sparse=True),
    ],
)
def test_an_embedding_whose_rows_depend_on_one_another_is_refused(native: nn.Embedding) -> None:
    with pytest.raises(ValueError, match="need all of a row's uses"):
        VocabParallelEmbedding1D.from_native_module(native, Group())  # type: ignore[arg-type]


def test_an_embedding_with_a_hook_is_refused() -> None:
    native = nn.Embedding(8, H)
    native.register_forward_hook(lambda module, args, output: output + 1)  # as noisy embeddings do
    with pytest.raises(TypeError, match="has hooks"):
        VocabParallelEmbedding1D.from_native_module(native, Group())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not a plain torch\.nn\.modules\.linear\.Linear"):
        VocabParallelLMHead1D.from_native_module(nn.Embedding(8, H), Group())  # type: ignore[arg-type]
