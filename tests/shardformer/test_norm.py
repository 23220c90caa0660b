"""Which norms and embeddings can be split: told by what they compute, not by their names."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from echelon.shardformer.layer.embedding import embedding_faults
from echelon.shardformer.layer.norm import norm_faults
from echelon.shardformer.layer.scaled_embedding import is_scaled


@pytest.mark.parametrize("kind", [Olmo2RMSNorm, LlamaRMSNorm, nn.RMSNorm])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_root_mean_square_norms_can_be_split(kind: type[nn.Module], device: str) -> None:
    with torch.device(device):
        assert norm_faults(kind(8, eps=1e-5)) == []


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
    (fault,) = norm_faults(native)
    assert reason in fault


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
    assert embedding_faults(native) == []


@pytest.mark.parametrize("kind", [Divided, Shifted])
def test_one_that_does_more_cannot(kind: type[nn.Embedding]) -> None:
    assert not is_scaled(kind(5, 4))
    assert "what it does of its own would be lost" in embedding_faults(kind(5, 4))[0]
