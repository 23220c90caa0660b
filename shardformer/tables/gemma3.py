"""Gemma 3 with images: SigLIP's vision model, a projector, and the language model with its own table."""

from dataclasses import replace

from ...pipeline.plan import StagePlan
from ..table import PartStages, RegionDropout, Table

_VISION = Table(
    stage=StagePlan(layers="encoder.layers", entry=("embeddings",)),
    regions=("self_attn", "mlp"),
    column=(*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.fc1"),
    row=("self_attn.out_proj", "mlp.fc2"),
    attention={"self_attn": "self_attn.out_proj"},
    divide=("self_attn.num_heads", "self_attn.embed_dim"),
    dropout={"self_attn": RegionDropout(probability="self_attn.dropout", row="self_attn.out_proj")},
)
# There attention shapes its output by the width of its input, so it stays whole.
_OLDER_VISION = replace(
    _VISION,
    regions=("mlp",),
    column=("mlp.fc1",),
    row=("mlp.fc2",),
    attention={},
    divide=(),
    divisible=(),
    dropout={},
)


def _table(vision: str, table: Table) -> Table:
    """The table for a vision model at this path, with a table of its own."""
    head = f"{vision}.head"  # of which the language model is told nothing
    stages = PartStages(
        part="language_model",
        entry=(f"{vision}.embeddings",),
        leading=(f"{vision}.encoder.layers", f"{vision}.post_layernorm", head, "multi_modal_projector"),
        optional=(head,),
    )
    return Table(stage=(stages,), parts={vision: table, "language_model": None}, heads=("lm_head",))


_OLDER = "vision_tower.vision_model"
GEMMA3 = replace(_table("vision_tower", _VISION), older={_OLDER: _table(_OLDER, _OLDER_VISION)})
