"""Single layers with sequences sharded between regions, against the native ones; on every rank of a tensor axis."""

from collections.abc import Callable
from copy import deepcopy
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    BertConfig,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
)
from transformers.models.albert.modeling_albert import AlbertLayerGroup
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from echelon.cluster.collectives import all_gather
from echelon.shardformer.layer_split import LayerSplit
from echelon.shardformer.layers.sequence_axis import SequenceAxis, SequenceOrder
from echelon.shardformer.layers.split_gather import RegionSequence
from echelon.shardformer.tables.decoders import DEEPSEEK_V3, GPT2, LLAMA, MIXTRAL, OPT
from echelon.shardformer.tables.encoders import ALBERT, BERT
from echelon.shardformer.tables.table import Table

from ..compare import numbers, require_same_gradients

BATCH, HIDDEN = 2, 32
Built = tuple[nn.Module, Table, Any]


def llama(**settings: Any) -> Built:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        **settings,
    )
    return LlamaDecoderLayer(config, 0), LLAMA, config


def gpt2(**settings: Any) -> Built:
    config = GPT2Config(
        n_embd=HIDDEN, n_inner=48, n_head=4, attn_implementation="eager", **_NO_DROPOUT_GPT2 | settings
    )
    return GPT2Block(config, 0), GPT2, config


def bert(**settings: Any) -> Built:
    config = BertConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        attn_implementation="eager",
        **_NO_DROPOUT_BERT | settings,
    )
    return BertLayer(config), BERT, config


def opt(**settings: Any) -> Built:
    config = OPTConfig(
        hidden_size=HIDDEN,
        ffn_dim=48,
        num_attention_heads=4,
        word_embed_proj_dim=HIDDEN,
        attn_implementation="eager",
        **{"dropout": 0.0, **settings},
    )
    return OPTDecoderLayer(config, 0), OPT, config


def mixtral(**settings: Any) -> Built:
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        attn_implementation="eager",
        experts_implementation="eager",
        **settings,
    )
    return MixtralDecoderLayer(config, 0), MIXTRAL, config


def deepseek(**settings: Any) -> Built:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        attn_implementation="eager",
        **settings,
    )
    return DeepseekV3DecoderLayer(config, 0), DEEPSEEK_V3, config


def albert(**settings: Any) -> Built:
    config = AlbertConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        attn_implementation="eager",
        **_NO_DROPOUT_BERT | settings,
    )
    return AlbertLayerGroup(config), ALBERT, config


_NO_DROPOUT_GPT2 = {"resid_pdrop": 0.0, "attn_pdrop": 0.0}
_NO_DROPOUT_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ROTARY = {
    "llama": LlamaRotaryEmbedding,
    "mixtral": LlamaRotaryEmbedding,
    "deepseek": DeepseekV3RotaryEmbedding,
}
LAYERS: dict[str, Callable[..., Built]] = {"llama": llama, "gpt2": gpt2, "bert": bert}
# One that flattens, one with experts, one that multiplies latents, one whose attention uses its input whole besides.
FURTHER: dict[str, Callable[..., Built]] = {
    "opt": opt,
    "mixtral": mixtral,
    "deepseek": deepseek,
    "albert": albert,
}


def built(name: str, **settings: Any) -> Built:
    """A layer with its table and config, equal on all ranks, all parameters drawn."""
    torch.manual_seed(5)
    layer, table, config = (LAYERS | FURTHER)[name](**settings)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.train(), table, config


def inputs_of(name: str, config: Any, length: int) -> dict[str, Any]:
    """Arguments of a layer besides hidden states: whole, and a causal mask that pads a row."""
    seen = torch.ones(length, length, dtype=torch.bool).tril().expand(BATCH, 1, length, length).clone()
    seen[1, :, :, length - length // 3 :] = False
    mask = torch.zeros(BATCH, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
    if name not in _ROTARY:
        return {"attention_mask": mask}
    positions = torch.arange(length)[None]
    rotary = _ROTARY[name](config)
    return {"attention_mask": mask, "position_embeddings": rotary(torch.zeros(1), positions)}


def sequence_sharded(built: Built, sequence: RegionSequence | None) -> nn.Module:
    """A copy of a native layer, split over the world."""
    native, table, config = built
    layer, group = deepcopy(native), dist.group.WORLD
    split = LayerSplit(table, layer, config, group, sequence=sequence)
    replacements = [*split.replacements(), *split.split_parameters()]
    for path, value in split.attributes().items():
        *owners, own = path.split(".")
        setattr(reduce(getattr, owners, layer), own, value)
    for each in replacements:
        module = layer.get_submodule(each.suffix)
        target = each.target_module.from_native_module(module, group, **each.kwargs)
        if target is not module:
            layer.set_submodule(each.suffix, target)
    return layer


def world_sequence(style: Any, *, overlap: bool = False) -> RegionSequence:
    """The regions of a model over the world."""
    axis = SequenceAxis(dist.group.WORLD, SequenceOrder(size=dist.get_world_size()))  # type: ignore[arg-type]
    return RegionSequence(axis, regathers=style == "regather", overlap=overlap)


def whole(part: Tensor, sequence: RegionSequence) -> Tensor:
    """The true sequence from the parts of all ranks."""
    pieces = all_gather(part.detach()[None], sequence.axis.group, 0)
    return sequence.axis.order.whole(list(pieces.unbind(0)), 1, sequence.axis.length)


def require_same(
    name: str,
    sequence: RegionSequence,
    length: int,
    *,
    run: Callable[..., Any] = lambda layer, x, **inputs: layer(x, **inputs),
    backward: Callable[[nn.Module, Tensor], None] = lambda layer, loss: loss.backward(),
    change: Callable[[nn.Module], None] = lambda layer: None,
) -> nn.Module:
    """Output, gradient of the input and of every parameter are those of the native layer.

    Args:
        name: of the layer.
        sequence: how it is sharded.
        length: of the sequence.
        run: the sequence-sharded layer.
        backward: of the sequence-sharded layer, from its loss.
        change: both layers before they run.
    """
    made = built(name)
    native, layer = made[0], sequence_sharded(made, sequence)
    change(native)
    change(layer)
    inputs = inputs_of(name, made[2], length)
    sequence.axis.length = length
    x, weights = numbers(BATCH, length, HIDDEN), numbers(BATCH, length, HIDDEN, seed=2)
    whole_x, part_x = x.clone().requires_grad_(), sequence.axis.own(x, 1).requires_grad_()
    expected = first_of(native(whole_x, **inputs))
    output = first_of(run(layer, part_x, **inputs))
    torch.testing.assert_close(whole(output, sequence), expected, rtol=1e-5, atol=1e-5)
    (expected * weights).sum().backward()
    backward(layer, (output * sequence.axis.own(weights, 1)).sum())
    torch.testing.assert_close(whole(part_x.grad, sequence), whole_x.grad, rtol=1e-4, atol=1e-4)
    require_same_gradients(layer, native)
    return layer


def first_of(output: Any) -> Tensor:
    """The hidden states among what a layer returns."""
    return output[0] if isinstance(output, tuple) else output
