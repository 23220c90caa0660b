"""SAM: a vision encoder with windowed attention, and a mask decoder that attends both ways; the vision model alone."""

from dataclasses import replace

from ...pipeline.plan import StagePlan
from ..table import PartStages, RegionDropout, Table

# Relative positions are one table for all heads, used with the heads that are held.
_POSITIONS = ("attn.rel_pos_h", "attn.rel_pos_w")

_VISION = Table(
    stage=StagePlan(layers="layers", entry=("patch_embed",)),
    regions=("attn", "mlp"),
    column=("attn.qkv", "mlp.lin1"),
    row=("attn.proj", "mlp.lin2"),
    attention={"attn": "attn.proj"},
    fused={"attn.qkv": 3},
    divide=("attn.num_attention_heads",),
    partial=_POSITIONS,
    optional=_POSITIONS,
    dropout={"attn": RegionDropout(probability="attn.dropout", row="attn.proj")},
)


def _decoder(layers: str, *attentions: str, mlp: tuple[str, str] | None = None) -> Table:
    """Attention takes query, key and value from three inputs, so each projection is an entry."""
    paths = [f"{path}." if path else "" for path in attentions]
    projections = tuple(f"{path}{name}_proj" for path in paths for name in "qkv")
    widening, narrowing = ((mlp[0],), (mlp[1],)) if mlp else ((), ())
    return Table(
        stage=StagePlan(layers=layers, entry=()),
        regions=(*projections, *widening),
        column=(*projections, *widening),
        row=(*(f"{path}out_proj" for path in paths), *narrowing),
        divide=tuple(f"{path}num_attention_heads" for path in paths),
    )


_CROSSES = ("cross_attn_token_to_image", "cross_attn_image_to_token")

SAM_VISION = Table(stage=(PartStages(part="vision_encoder"),), parts={"vision_encoder": _VISION})
SAM = replace(
    SAM_VISION,
    # Positions are made before the vision encoder runs, and used by the mask decoder.
    stage=(PartStages(part="vision_encoder", everywhere=("shared_image_embedding",)),),
    parts={
        "vision_encoder": _VISION,
        "mask_decoder": _decoder("transformer.layers", "self_attn", *_CROSSES, mlp=("mlp.lin1", "mlp.lin2")),
        "mask_decoder.transformer": _decoder("final_attn_token_to_image", ""),
    },
)
