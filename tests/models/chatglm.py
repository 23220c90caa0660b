"""A small ChatGLM2 with the names, shapes and axis orders of its checkpoints; transformers has no such model.

Written from the published description: a decoder with RMS norms and gated MLPs without biases, rotary positions on the
first half of each head, and few key-value heads. The layers compute on (S, B, H).
"""

# B batch, S sequence, H hidden, N query heads, G key-value groups, D width of a head

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput

DEFAULTS = dict(
    num_layers=4,
    padded_vocab_size=101,
    hidden_size=32,
    ffn_hidden_size=48,
    kv_channels=8,
    num_attention_heads=4,
    multi_query_attention=True,
    multi_query_group_num=2,
    attention_dropout=0.0,
    layernorm_epsilon=1e-5,
)


class ChatGLMConfig(PretrainedConfig):
    model_type = "chatglm"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**DEFAULTS | settings)


def rotated(x_SBND: Tensor, angles_SD4: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the first half of each head by the angles of their positions."""
    turned, kept = x_SBND.chunk(2, -1)
    even, odd = turned[..., 0::2], turned[..., 1::2]
    cos, sin = angles_SD4.cos()[:, None, None], angles_SD4.sin()[:, None, None]
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return torch.cat([pairs.flatten(-2), kept], -1)


class CoreAttention(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.num_attention_heads_per_partition = config.num_attention_heads
        self.hidden_size_per_partition = config.num_attention_heads * config.kv_channels
        self.attention_dropout = nn.Dropout(config.attention_dropout)

    def forward(self, query_SBND: Tensor, key_SBND: Tensor, value_SBND: Tensor, mask_B1SS: Tensor) -> Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_SBND, key_SBND, value_SBND))
        assert query.shape[1] == self.num_attention_heads_per_partition
        scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
        weights = self.attention_dropout(scores.masked_fill(~mask_B1SS, -1e9).softmax(-1))
        context_SBND = (weights @ value).permute(2, 0, 1, 3)
        return context_SBND.reshape(*context_SBND.shape[:2], self.hidden_size_per_partition)


class SelfAttention(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.num_attention_heads_per_partition = config.num_attention_heads
        self.hidden_size_per_attention_head = config.kv_channels
        groups = 0
        if config.multi_query_attention:
            groups = self.num_multi_query_groups_per_partition = config.multi_query_group_num
        projection = config.num_attention_heads * config.kv_channels
        self.query_key_value = nn.Linear(config.hidden_size, projection + 2 * groups * config.kv_channels)
        self.core_attention = CoreAttention(config)
        self.dense = nn.Linear(projection, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        heads, groups = self.num_attention_heads_per_partition, self.num_multi_query_groups_per_partition
        counts = (heads, groups, groups)
        mixed = self.query_key_value(hidden_states).split(
            [count * self.hidden_size_per_attention_head for count in counts], -1
        )
        query, key, value = (
            tensor.unflatten(-1, (count, -1)) for tensor, count in zip(mixed, counts, strict=True)
        )
        key = rotated(key, rotary_pos_emb).repeat_interleave(heads // groups, 2)
        value = value.repeat_interleave(heads // groups, 2)
        return self.dense(self.core_attention(rotated(query, rotary_pos_emb), key, value, attention_mask))


class MLP(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.dense_4h_to_h = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(hidden_states).chunk(2, -1)
        return self.dense_4h_to_h(F.silu(gate) * up)


class GLMBlock(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.self_attention = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.mlp = MLP(config)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Tensor
    ) -> tuple[Tensor, None]:
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attention(normed, attention_mask, rotary_pos_emb)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), None


class Embedding(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.word_embeddings(input_ids).transpose(0, 1)


class GLMTransformer(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GLMBlock(config) for _ in range(config.num_layers)])
        self.final_layernorm = nn.RMSNorm(config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states, attention_mask, rotary_pos_emb)
        return self.final_layernorm(hidden_states)


class ChatGLMPreTrainedModel(PreTrainedModel):
    config_class = ChatGLMConfig
    base_model_prefix = "transformer"


class ChatGLMModel(ChatGLMPreTrainedModel):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.embedding = Embedding(config)
        self.encoder = GLMTransformer(config)
        self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.word_embeddings

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        length, rotary = input_ids.shape[1], self.config.kv_channels // 2
        frequencies = 10000 ** (-torch.arange(0, rotary, 2, device=input_ids.device) / rotary)
        angles = torch.arange(length, device=input_ids.device)[:, None] * frequencies
        causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        mask = causal & attention_mask.bool()[:, None, None]
        return self.encoder(self.embedding(input_ids), mask, angles)


class ChatGLMForConditionalGeneration(ChatGLMPreTrainedModel):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.transformer = ChatGLMModel(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.output_layer

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> CausalLMOutput:
        logits = self.transformer.output_layer(self.transformer(input_ids, attention_mask)).transpose(0, 1)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


class ChatGLMForSequenceClassification(ChatGLMPreTrainedModel):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.transformer = ChatGLMModel(config)
        self.classifier_head = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> SequenceClassifierOutput:
        logits = self.classifier_head(self.transformer(input_ids, attention_mask)[-1])
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def register_chatglm() -> None:
    """Register the model type with transformers, as `trust_remote_code` does with a checkpoint's code."""
    AutoConfig.register("chatglm", ChatGLMConfig, exist_ok=True)
    AutoModelForCausalLM.register(ChatGLMConfig, ChatGLMForConditionalGeneration, exist_ok=True)
    AutoModelForSequenceClassification.register(
        ChatGLMConfig, ChatGLMForSequenceClassification, exist_ok=True
    )
