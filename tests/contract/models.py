"""Models of the contract's rows that are no plain `ModelChoice`, and what types of models refuse."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.beit import modeling_beit

from echelon.verify.models import ModelChoice

# Experts so narrow that a fourth of one is no row of 16 bytes in 16 bits.
NARROW_EXPERTS = (("intermediate_size", 48),)
# Model types whose own code computes attention, and no other.
OWN_ATTENTION = {"bloom", "gemma2", "gpt_neo", "gptj", "swinv2"}
# Those that choose between their own and sdpa when they are built.
BUILT_ATTENTION = {"falcon", "sam", "sam_vision_model"}
# Layers that work on windows of images, or run several times, or know of all positions besides.
_NEVER = {"albert", "sam", "sam_vision_model", "swin", "swinv2"}
# So does BEiT's since transformers 5.9; before that it is told the image's size.
_KNOWS_POSITIONS = {"beit"} if hasattr(modeling_beit, "BeitMLP") else set()
# Attention to another sequence, and attention that computes by the model's own code alone.
_CROSS = {"bart", "blip-2", "marian", "mbart", "mt5", "pegasus", "t5", "umt5", "whisper"}
_OWN_CODE = {"bloom", "falcon", "gpt_neo", "gptj"}
# The model types with a table that refuse a mode of sequence parallelism.
REFUSED_MODES = {
    "split_gather": _NEVER | _KNOWS_POSITIONS,
    "ring": _NEVER | _KNOWS_POSITIONS,
    "all_to_all": _NEVER | _CROSS | _OWN_CODE | {"beit"},
    "ring_attn": _NEVER | _CROSS | _OWN_CODE | {"beit"},
}
# Layers that are no GradientCheckpointingLayer of transformers.
NOT_RECOMPUTED = {"albert"}
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


@dataclass(frozen=True, kw_only=True)
class EagerChoice(ModelChoice):
    """A small model that computes attention by the plain code of transformers, where it can be told to."""

    def build(self, seed: int = 0) -> nn.Module:
        """The model; see `ModelChoice.build`."""
        model: Any = super().build(seed)
        if self.model_type not in BUILT_ATTENTION:
            model.set_attn_implementation("eager")
        return model


@dataclass(frozen=True, kw_only=True)
class LoopChoice(ModelChoice):
    """A small model that computes one expert after the other."""

    def build(self, seed: int = 0) -> nn.Module:
        """The model; see `ModelChoice.build`."""
        model: Any = super().build(seed)
        model.set_experts_implementation("eager")
        return model
