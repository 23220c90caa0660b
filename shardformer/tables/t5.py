"""T5 and its family (mT5, umT5): an encoder and a decoder of one class of blocks, relative position biases by head."""

from dataclasses import replace

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

_CROSS = "layer.1.EncDecAttention"
_ATTENTIONS = ("layer.0.SelfAttention", _CROSS)
# In a block of the encoder, and behind cross attention in one of the decoder.
_FEED_FORWARDS = ("layer.1.DenseReluDense", "layer.2.DenseReluDense")
# Plain, or gated.
_WIDENING = tuple(f"{path}.{name}" for path in _FEED_FORWARDS for name in ("wi", "wi_0", "wi_1"))
# In the first block of a stack, whose biases the others are given; in umT5 in every block.
_BIAS = "layer.0.SelfAttention.relative_attention_bias"
# So every stage needs the bias that begins in the middle of a stack.
_REPEATED = {_BIAS: "layer.0.SelfAttention.has_relative_attention_bias"}

_ENCODER = StagePlan(
    module="encoder",
    layers="encoder.block",
    entry=("shared", "encoder.embed_tokens"),
    arity=3,
    repeated=_REPEATED,
)
_STAGE = StagePlan(
    module="decoder",
    layers="decoder.block",
    entry=("decoder.embed_tokens",),
    arity=3,
    repeated=_REPEATED,
    encoder=_ENCODER,
)
T5 = Table(
    stage=_STAGE,
    regions=(*_ATTENTIONS, *_FEED_FORWARDS),
    column=(*(f"{path}.{name}" for path in _ATTENTIONS for name in "qkv"), *_WIDENING),
    row=(*(f"{path}.o" for path in _ATTENTIONS), *(f"{path}.wo" for path in _FEED_FORWARDS)),
    attention={path: f"{path}.o" for path in _ATTENTIONS},
    second_input={_CROSS: "key_value_states"},
    optional=(_CROSS, *_FEED_FORWARDS, *_WIDENING, _BIAS),
    divide=tuple(f"{path}.{name}" for path in _ATTENTIONS for name in ("n_heads", "inner_dim")),
    split={f"{_BIAS}.weight": 1},
    dropout={
        path: RegionDropout(probability=f"{path}.{probability}", row=f"{path}.{row}")
        for paths, probability, row in ((_ATTENTIONS, "dropout", "o"), (_FEED_FORWARDS, "dropout.p", "wo"))
        for path in paths
    },
    embedding="shared",
    further_embeddings=("encoder.embed_tokens", "decoder.embed_tokens"),
    heads=("lm_head",),
)

# Each block has biases of its own, and returns the hidden states alone.
UMT5 = replace(
    T5,
    stage=replace(_STAGE, repeated={}, arity=0, encoder=replace(_ENCODER, repeated={}, arity=0)),
    second_input={_CROSS: "encoder_hidden_states"},
)
