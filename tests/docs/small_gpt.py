"""A small GPT outside of transformers, with one projection for queries, keys and values. docs/policies.md shards it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B batch, S sequence, H width, N heads, D width of a head, V vocabulary


@dataclass
class GPTConfig:
    """Sizes of a GPT."""

    vocab_size: int = 101
    block_size: int = 64
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 32


class SelfAttention(nn.Module):
    """Causal attention; the outputs of c_attn are all queries, then all keys, then all values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x_BSH: Tensor) -> Tensor:
        batch, length, width = x_BSH.shape
        query, key, value = (
            projected.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for projected in self.c_attn(x_BSH).split(self.n_embd, dim=2)
        )
        mixed_BNSD = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed_BSH = mixed_BNSD.transpose(1, 2).reshape(batch, length, -1)  # -1: a rank has some of the heads
        return self.c_proj(mixed_BSH)


class MLP(nn.Module):
    """An MLP of two linear layers."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BSH)))


class Block(nn.Module):
    """One layer: attention and MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn, self.mlp = SelfAttention(config), MLP(config)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attn(self.ln_1(x_BSH))
        return x_BSH + self.mlp(self.ln_2(x_BSH))


class GPT(nn.Module):
    """Maps tokens and targets to logits and the loss; the head is tied to the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        places = torch.arange(idx.shape[1], device=idx.device)
        x_BSH = self.transformer.wte(idx) + self.transformer.wpe(places)
        for block in self.transformer.h:
            x_BSH = block(x_BSH)
        logits_BSV = self.lm_head(self.transformer.ln_f(x_BSH))
        if targets is None:
            return logits_BSV, None
        return logits_BSV, F.cross_entropy(logits_BSV.flatten(0, 1), targets.flatten())
