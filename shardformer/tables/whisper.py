"""Whisper: convolutions before an encoder, and a decoder with cross attention."""

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

_CROSS = "encoder_attn"
_ATTENTIONS = ("self_attn", _CROSS)

WHISPER = Table(
    stage=StagePlan(
        module="decoder",
        layers="decoder.layers",
        entry=("decoder.embed_tokens", "decoder.embed_positions"),
        encoder=StagePlan(
            module="encoder",
            layers="encoder.layers",
            entry=("encoder.conv1", "encoder.conv2", "encoder.embed_positions"),
            are_entries_reckoned=True,
        ),
    ),
    regions=(*_ATTENTIONS, "fc1"),
    column=(*(f"{path}.{name}_proj" for path in _ATTENTIONS for name in "qkv"), "fc1"),
    row=(*(f"{path}.out_proj" for path in _ATTENTIONS), "fc2"),
    attention={path: f"{path}.out_proj" for path in _ATTENTIONS},
    query_heads="self_attn.num_heads",  # encoder and decoder may differ
    second_input={_CROSS: "key_value_states"},
    optional=(_CROSS,),
    divide=tuple(f"{path}.num_heads" for path in _ATTENTIONS),
    dropout={
        **{
            path: RegionDropout(probability=f"{path}.dropout", row=f"{path}.out_proj") for path in _ATTENTIONS
        },
        "fc1": RegionDropout(probability="activation_dropout", row="fc2"),
    },
    further_embeddings=("decoder.embed_tokens",),
    heads=("proj_out",),
)
