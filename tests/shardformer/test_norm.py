"""Norms and embeddings that can be split: recognized by their computation, not by their names."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from echelon.cluster.placement import Shard, placement_of
from echelon.shardformer.layers.embedding import embedding_errors, is_scaled
from echelon.shardformer.layers.norm import SplitRMSNorm, norm_errors

from ..pool import Pool


@pytest.mark.parametrize("kind", [Olmo2RMSNorm, LlamaRMSNorm, nn.RMSNorm])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_root_mean_square_norms_can_be_split(kind: type[nn.Module], device: str) -> None:
    with torch.device(device):
        assert norm_errors(kind(8, eps=1e-5)) == []


@pytest.mark.parametrize(
    ("native", "reason"),
    [
        (Gemma2RMSNorm(8, eps=1e-6), "computes something else"),  # adds 1 to its weight
        (nn.LayerNorm(8, bias=False), "computes something else"),  # subtracts the mean
        (nn.LayerNorm(8), "is not a root-mean-square norm"),
        (nn.Linear(8, 8), "is not a root-mean-square norm"),
    ],
)
def test_other_norms_cannot(native: nn.Module, reason: str) -> None:
    (fault,) = norm_errors(native)
    assert reason in fault


# Features, what they are padded to, and how many neighbouring ranks hold the same.
@pytest.mark.parametrize(
    ("ranks", "features", "padded", "copies"),
    [(2, 16, None, 1), (2, 24, 32, 1), (4, 16, None, 2), (4, 12, 16, 2)],
    ids=["even", "padded", "copies", "padded copies"],
)
def test_a_split_norm_takes_the_mean_over_what_one_process_has(
    pool: Pool, ranks: int, features: int, padded: int | None, copies: int
) -> None:
    pool.run(ranks, check_split, features, padded, copies)


def check_split(features: int, padded: int | None, copies: int) -> None:
    """Each copy goes on to another sum, as keys go to other queries; their gradients together are the one process's."""
    group = dist.group.WORLD
    assert group is not None
    rank = group.rank()
    torch.manual_seed(0)
    native = Olmo2RMSNorm(features, eps=1e-3)
    native.weight.data.uniform_(0.5, 1.5)
    split = Olmo2RMSNorm(features, eps=1e-3)
    split.load_state_dict(native.state_dict())
    parallel = SplitRMSNorm(split, group, padded_sizes=None if padded is None else (padded,), copies=copies)
    placement = placement_of(parallel.weight)
    assert isinstance(placement, Shard)
    cut = replace(placement, dim=2)
    x_BSH, goes_on_CBSH = torch.randn(2, 3, features), torch.randn(copies, 2, 3, features)

    whole_BSH = x_BSH.clone().requires_grad_()
    expected_BSH = native(whole_BSH)
    (expected_BSH * goes_on_CBSH.sum(0)).sum().backward()
    own_BSH = cut.local(x_BSH, rank).clone().requires_grad_()
    found_BSH = parallel(own_BSH)
    (found_BSH * cut.local(goes_on_CBSH[rank % copies], rank)).sum().backward()

    torch.testing.assert_close(found_BSH, cut.local(expected_BSH, rank))
    for own, whole, shard in (
        (own_BSH.grad, whole_BSH.grad, cut),
        (parallel.weight.grad, native.weight.grad, placement),
    ):
        assert own is not None and whole is not None
        by_rank = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(by_rank, own)
        first = rank - rank % copies
        torch.testing.assert_close(sum(by_rank[first : first + copies]), shard.local(whole, rank))


class Divided(nn.Embedding):
    """Divides where the others multiply."""

    embed_scale = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / self.embed_scale


class Shifted(nn.Embedding):
    """Adds what it was not split with."""

    embed_scale = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale + self.shift


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_embedding_that_only_scales_can_be_split(device: str) -> None:
    with torch.device(device):
        native = Gemma3TextScaledWordEmbedding(5, 4, padding_idx=0, embed_scale=2.0)
    assert is_scaled(native)
    assert embedding_errors(native) == []


@pytest.mark.parametrize("kind", [Divided, Shifted])
def test_one_that_does_more_cannot(kind: type[nn.Embedding]) -> None:
    assert not is_scaled(kind(5, 4))
    assert "what it does of its own would be lost" in embedding_errors(kind(5, 4))[0]
