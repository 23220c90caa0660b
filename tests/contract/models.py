"""Models of the contract's rows that are no plain `ModelChoice`."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.verify.models import ModelChoice

UNUSED = "model.layers.0.post_attention_layernorm.unused"


class OccasionalNorm(nn.Module):
    """A norm with a bias that batches of two samples or fewer leave out, and a weight that nothing uses."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = norm
        self.bias = nn.Parameter(torch.full((width,), 0.1))
        self.unused = nn.Parameter(torch.ones(1, 3))

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        normed_BSH = self.norm(hidden_BSH)
        return normed_BSH + self.bias if len(hidden_BSH) > 2 else normed_BSH


@dataclass(frozen=True, kw_only=True)
class Occasional(ModelChoice):
    """A Llama, some parameters of whose layers get no gradient in some microbatches, steps and replicas."""

    def build(self, seed: int = 0) -> nn.Module:
        """The model; see `ModelChoice.build`."""
        model = super().build(seed)
        for layer in model.model.layers:
            layer.post_attention_layernorm = OccasionalNorm(
                layer.post_attention_layernorm, model.config.hidden_size
            )
        return model
