"""Models of the contract's rows that are more than a `ModelChoice`, and the modes that model types refuse."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.models.beit import modeling_beit
from transformers.models.gptj import modeling_gptj

from echelon.verify.model_choice import ModelChoice

# Experts so narrow that in 16 bits a quarter of one is not a multiple of 16 bytes.
NARROW_EXPERTS = (("intermediate_size", 48),)
# Model types that only support attention by their own code.
_OLDER_GPTJ = set() if hasattr(modeling_gptj, "GPTJRotaryEmbedding") else {"gptj"}  # before 5.24
_OLDER_BEIT = {"beit"} if hasattr(modeling_beit, "BeitSdpaSelfAttention") else set()  # before 5.24
OWN_ATTENTION = {"bloom", "gemma2", "gpt_neo", "swinv2"} | _OLDER_GPTJ
# Model types that choose between their own attention and sdpa at construction.
BUILT_ATTENTION = {"falcon", "sam", "sam_vision_model"}
# Layers that work on windows of images, run several times, or depend on all positions.
_NEVER = {"albert", "sam", "sam_vision_model", "swin", "swinv2"}
# Cross-attention, and attention that is only computed by the model's own code.
_CROSS = {"bart", "blip-2", "marian", "mbart", "mt5", "pegasus", "t5", "umt5", "whisper"}
_OWN_CODE = {"bloom", "falcon", "gpt_neo"} | _OLDER_GPTJ
# The model types with a table that refuse a mode of sequence parallelism.
REFUSED_MODES = {
    "split_gather": _NEVER,
    "ring": _NEVER,
    "all_to_all": _NEVER | _CROSS | _OWN_CODE | _OLDER_BEIT,
    "ring_attn": _NEVER | _CROSS | _OWN_CODE | {"beit"},  # its relative positions are added to the mask
}
# Model types whose layers are not GradientCheckpointingLayer of transformers.
NOT_RECOMPUTED = {"albert"}
UNUSED = "model.layers.0.post_attention_layernorm.unused"


class OccasionalNorm(nn.Module):
    """A norm whose bias is only used by batches of more than two samples, and whose weight is unused."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = norm
        self.bias = nn.Parameter(torch.full((width,), 0.1))
        self.unused = nn.Parameter(torch.ones(1, 3))

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        normed_BSH = self.norm(hidden_BSH)
        return normed_BSH + self.bias if len(hidden_BSH) > 2 else normed_BSH


@dataclass(frozen=True, kw_only=True)
class PerMicrobatch(ModelChoice):
    """A model whose forward depends on the number of samples in a microbatch."""

    @property
    def weighed_by(self) -> Literal["samples", "labels"] | None:
        """Labels: the reference computes microbatch by microbatch."""
        return "labels"


@dataclass(frozen=True, kw_only=True)
class BySamples(ModelChoice):
    """A model whose loss weighs by samples."""

    @property
    def weighed_by(self) -> Literal["samples", "labels"] | None:
        """Samples, whatever the loss counts."""
        return "samples"


@dataclass(frozen=True, kw_only=True)
class Occasional(PerMicrobatch):
    """A Llama with layer parameters that get no gradient in some microbatches, steps and replicas."""

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model; see `ModelChoice.build`."""
        model = super().build(seed)
        for layer in model.model.layers:
            layer.post_attention_layernorm = OccasionalNorm(
                layer.post_attention_layernorm, model.config.hidden_size
            )
        return model


@dataclass(frozen=True, kw_only=True)
class EagerChoice(ModelChoice):
    """A small model with transformers' eager attention, if it supports the choice."""

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model; see `ModelChoice.build`."""
        model: Any = super().build(seed)
        if self.model_type not in BUILT_ATTENTION:
            model.set_attn_implementation("eager")
        return model


@dataclass(frozen=True, kw_only=True)
class LoopChoice(ModelChoice):
    """A small model that computes its experts one by one."""

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model; see `ModelChoice.build`."""
        model: Any = super().build(seed)
        model.set_experts_implementation("eager")
        return model
