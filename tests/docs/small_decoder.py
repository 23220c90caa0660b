"""A small decoder outside of transformers: plain modules without a config. docs/policies.md shards it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B batch, S sequence, H width, N heads, D width of a head, V vocabulary


class Attention(nn.Module):
    """Causal attention with per-head norms of queries and keys; one norm weight for all heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.query_norm, self.key_norm = (nn.LayerNorm(width // num_heads) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x_BSH: Tensor) -> Tensor:
        query, key, value = (
            projection(x_BSH).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed_BNSD = F.scaled_dot_product_attention(
            self.query_norm(query), self.key_norm(key), value, is_causal=True
        )
        return self.out(mixed_BNSD.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """An MLP of two linear layers, with an optional third as gate."""

    def __init__(self, width: int, *, is_gated: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        if is_gated:
            self.gate = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def forward(self, x_BSH: Tensor) -> Tensor:
        up = self.up(x_BSH)
        is_gated = hasattr(self, "gate")
        return self.down(self.activation(self.gate(x_BSH)) * up if is_gated else self.activation(up))


class Block(nn.Module):
    """One layer: attention, MLP, and a linear layer between them."""

    def __init__(self, width: int, num_heads: int, *, is_gated: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mixer = nn.Linear(width, width)
        self.mlp = MLP(width, is_gated=is_gated)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        x_BSH = x_BSH * torch.sigmoid(self.mixer(x_BSH))
        return x_BSH + self.mlp(self.mlp_norm(x_BSH))


class Decoder(nn.Module):
    """Decoder that maps tokens to loss and logits. The head is tied to the embedding, unless it is untied."""

    def __init__(
        self,
        vocabulary: int = 101,
        width: int = 32,
        num_heads: int = 4,
        num_blocks: int = 3,
        *,
        is_gated: bool = True,
        is_tied: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, is_gated=is_gated) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.unembedding = nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.unembedding.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x_BSH = self.tokens(input_ids) + self.positions(places)
        for block in self.blocks:
            x_BSH = block(x_BSH)
        logits_BSV = self.unembedding(self.norm(x_BSH))
        if labels is None:
            return {"logits": logits_BSV}
        loss = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits_BSV}
