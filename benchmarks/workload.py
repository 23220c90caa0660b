"""The workload of all contenders of a benchmark: a Llama with equal weights, and its batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

# B batch, S sequence
_SEED = 17
# The settings of the optimizer that every contender uses.
ADAMW = {"lr": 1e-4, "fused": True}
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A Llama, and the batch of a step.

    Args:
        hidden, layers, vocabulary: sizes of the model; heads are 64 wide if an even number of them fits, else 16.
        sequence, batch: tokens of a sample, samples of a step.
        microbatches: the number of microbatches of a batch.
        max_norm: the norm to which gradients are clipped before a step; 0 for no clipping.
    """

    hidden: int = 512
    layers: int = 8
    vocabulary: int = 8192
    sequence: int = 256
    batch: int = 8
    microbatches: int = 8
    max_norm: float = 0.0
    model_class: ClassVar[Any] = LlamaForCausalLM

    def __post_init__(self) -> None:
        if self.hidden % 16:
            raise ValueError(
                f"--hidden {self.hidden} must be a multiple of 16, so that heads divide it evenly"
            )
        if not 1 <= self.microbatches <= self.batch or self.batch % self.microbatches:
            raise ValueError(
                f"--batch {self.batch} must be a multiple of --microbatches {self.microbatches}: "
                "torch's schedules take microbatches of one size"
            )

    def __str__(self) -> str:
        return (
            f"Llama {self.hidden} × {self.layers}, vocabulary {self.vocabulary}, sequence {self.sequence}, "
            f"batch {self.batch}"
        )

    @property
    def intermediate(self) -> int:
        """The width of the gated layers: 8/3 of the hidden size, rounded to a multiple of 32."""
        return -(-self.hidden * 8 // 3 // 32) * 32

    @property
    def head_in_layers(self) -> float:
        """The products of the head relative to those of a layer, without attention."""
        return self.vocabulary / (4 * self.hidden + 3 * self.intermediate)

    @property
    def config(self) -> PretrainedConfig:
        """The model's config: no cache, and attention by torch's fused kernel."""
        head = 64 if self.hidden % 128 == 0 else 16
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // head,
            num_key_value_heads=self.hidden // head,
            vocab_size=self.vocabulary,
            max_position_embeddings=max(self.sequence, 64),
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )

    def model(self) -> Any:
        """Build a model in training mode, with the same weights at every call and on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            return self.model_class(self.config).train()

    def data(self, device: torch.device) -> dict[str, Tensor]:
        """Return `input_ids` and `labels`, (B, S) each, the same on every rank."""
        generator = torch.Generator().manual_seed(_SEED)
        tokens = torch.randint(self.vocabulary, (self.batch, self.sequence), generator=generator).to(device)
        return {"input_ids": tokens, "labels": tokens.clone()}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of every contender, where a benchmark does not compare optimizers."""
    return torch.optim.AdamW(model.parameters(), **ADAMW)
