"""Tables of encoder-decoders: Whisper, BART, Pegasus, T5."""

from dataclasses import replace

import torch

from ...cluster.transformers_api import BaseModelOutput
from ...pipeline.stage_plan import OutputStructure, StagePlan
from .table import RegionDropout, Table

# The output of an encoder.
_STATES = OutputStructure.of(BaseModelOutput(last_hidden_state=torch.empty(0)))

# Whisper: convolutions before an encoder, and a decoder with cross attention.
_WHISPER_CROSS = "encoder_attn"
_WHISPER_ATTENTIONS = ("self_attn", _WHISPER_CROSS)

WHISPER = Table(
    stage=StagePlan(
        module="decoder",
        layers="decoder.layers",
        entry=("decoder.embed_tokens", "decoder.embed_positions"),
        sent={"encoder": _STATES},
        encoder=StagePlan(
            module="encoder",
            returned=_STATES,
            layers="encoder.layers",
            entry=("encoder.conv1", "encoder.conv2", "encoder.embed_positions"),
            derives_entry_shapes=True,
        ),
    ),
    regions=(*_WHISPER_ATTENTIONS, "fc1"),
    column=(*(f"{path}.{name}_proj" for path in _WHISPER_ATTENTIONS for name in "qkv"), "fc1"),
    row=(*(f"{path}.out_proj" for path in _WHISPER_ATTENTIONS), "fc2"),
    attention={path: f"{path}.out_proj" for path in _WHISPER_ATTENTIONS},
    query_heads="self_attn.num_heads",  # encoder and decoder may differ
    second_input={_WHISPER_CROSS: "key_value_states"},
    optional=(_WHISPER_CROSS,),
    divide=tuple(f"{path}.num_heads" for path in _WHISPER_ATTENTIONS),
    dropout={
        **{
            path: RegionDropout(probability=f"{path}.dropout", row=f"{path}.out_proj")
            for path in _WHISPER_ATTENTIONS
        },
        "fc1": RegionDropout(probability="activation_dropout", row="fc2"),
    },
    further_embeddings=("decoder.embed_tokens",),
    heads=("proj_out",),
)


# BART and its family (mBART, Pegasus, Marian): Whisper's layers with token embeddings.
def _bart_stage(*entry: str) -> StagePlan:
    """Return the plan of encoder and decoder with these modules before the layers of both."""
    return StagePlan(
        module="decoder",
        layers="decoder.layers",
        entry=tuple(f"decoder.{name}" for name in entry),
        sent={"encoder": _STATES},
        encoder=StagePlan(
            module="encoder",
            returned=_STATES,
            layers="encoder.layers",
            entry=("shared", *(f"encoder.{name}" for name in entry)),
        ),
    )


PEGASUS = replace(
    WHISPER,
    stage=_bart_stage("embed_tokens", "embed_positions"),
    further_embeddings=("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
    heads=("lm_head",),
)
# BART's embeddings are of a scaling class and stay replicated, and so does the tied head.
BART: Table = replace(
    PEGASUS,
    stage=_bart_stage("embed_tokens", "embed_positions", "layernorm_embedding"),
    further_embeddings=(),
    heads=(),
)

# T5 and its family (mT5, umT5): one class of blocks in encoder and decoder, relative position biases by head.
_T5_CROSS = "layer.1.EncDecAttention"
_T5_ATTENTIONS = ("layer.0.SelfAttention", _T5_CROSS)
# The first in encoder blocks, the second, after cross attention, in decoder blocks.
_T5_FEED_FORWARDS = ("layer.1.DenseReluDense", "layer.2.DenseReluDense")
# Plain or gated feed-forward layers.
_T5_WIDENING = tuple(f"{path}.{name}" for path in _T5_FEED_FORWARDS for name in ("wi", "wi_0", "wi_1"))
# In the first block of a stack, which passes its biases to the other blocks; in umT5 in every block.
_T5_BIAS = "layer.0.SelfAttention.relative_attention_bias"
# So a stage that begins in the middle of a stack needs the bias too.
_T5_REPEATED = {_T5_BIAS: "layer.0.SelfAttention.has_relative_attention_bias"}

_T5_ENCODER = StagePlan(
    module="encoder",
    returned=_STATES,
    layers="encoder.block",
    entry=("shared", "encoder.embed_tokens"),
    arity=3,
    repeated=_T5_REPEATED,
)
_T5_STAGE = StagePlan(
    module="decoder",
    layers="decoder.block",
    entry=("decoder.embed_tokens",),
    sent={"encoder": _STATES},
    arity=3,
    repeated=_T5_REPEATED,
    encoder=_T5_ENCODER,
)
T5 = Table(
    stage=_T5_STAGE,
    regions=(*_T5_ATTENTIONS, *_T5_FEED_FORWARDS),
    column=(*(f"{path}.{name}" for path in _T5_ATTENTIONS for name in "qkv"), *_T5_WIDENING),
    row=(*(f"{path}.o" for path in _T5_ATTENTIONS), *(f"{path}.wo" for path in _T5_FEED_FORWARDS)),
    attention={path: f"{path}.o" for path in _T5_ATTENTIONS},
    second_input={_T5_CROSS: "key_value_states"},
    optional=(_T5_CROSS, *_T5_FEED_FORWARDS, *_T5_WIDENING, _T5_BIAS),
    divide=tuple(f"{path}.{name}" for path in _T5_ATTENTIONS for name in ("n_heads", "inner_dim")),
    split={f"{_T5_BIAS}.weight": 1},
    dropout={
        path: RegionDropout(probability=f"{path}.{probability}", row=f"{path}.{row}")
        for paths, probability, row in (
            (_T5_ATTENTIONS, "dropout", "o"),
            (_T5_FEED_FORWARDS, "dropout.p", "wo"),
        )
        for path in paths
    },
    embedding="shared",
    further_embeddings=("encoder.embed_tokens", "decoder.embed_tokens"),
    heads=("lm_head",),
)

# Each block has its own biases, and returns only the hidden states.
UMT5 = replace(
    T5,
    stage=replace(_T5_STAGE, repeated={}, arity=0, encoder=replace(_T5_ENCODER, repeated={}, arity=0)),
    second_input={_T5_CROSS: "encoder_hidden_states"},
)

# The table of each model type.
TABLES = {
    "bart": BART,
    "marian": PEGASUS,
    "mbart": BART,
    "mt5": T5,
    "pegasus": PEGASUS,
    "t5": T5,
    "umt5": UMT5,
    "whisper": WHISPER,
}
