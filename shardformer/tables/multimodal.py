"""Tables of image-text models, whose language model has its own table: BLIP-2, Gemma 3."""

from dataclasses import replace

from ...pipeline.stage_plan import StagePlan
from .table import PartStages, RegionDropout, Table

# BLIP-2: a vision model, a Q-Former that attends to it every second layer, and a language model with its own table.
_BLIP2_VISION = Table(
    stage=StagePlan(layers="encoder.layers", entry=("embeddings",)),
    regions=("self_attn", "mlp"),
    column=("self_attn.qkv", "mlp.fc1"),
    row=("self_attn.projection", "mlp.fc2"),
    attention={"self_attn": "self_attn.projection"},
    fused={"self_attn.qkv": 3},
    divide=("self_attn.num_heads",),
    divisors=("self_attn.num_heads",),
    dropout={
        "self_attn": RegionDropout(probability="self_attn.attention_dropout", row="self_attn.projection")
    },
)

_QFORMER_ATTENTIONS = ("attention", "crossattention")
# Feed-forward layers of text, which not every Q-Former has, and of the Q-Former's queries.
_QFORMER_FEED_FORWARDS = {"intermediate": "output.dense", "intermediate_query": "output_query.dense"}

_NEWER_QFORMER = Table(
    stage=StagePlan(layers="encoder.layer", entry=("layernorm",)),
    regions=(*(f"{path}.attention" for path in _QFORMER_ATTENTIONS), *_QFORMER_FEED_FORWARDS),
    column=(
        *(f"{path}.attention.{name}" for path in _QFORMER_ATTENTIONS for name in ("query", "key", "value")),
        *(f"{path}.dense" for path in _QFORMER_FEED_FORWARDS),
    ),
    row=(*(f"{path}.output.dense" for path in _QFORMER_ATTENTIONS), *_QFORMER_FEED_FORWARDS.values()),
    attention={f"{path}.attention": f"{path}.output.dense" for path in _QFORMER_ATTENTIONS},
    second_input={"crossattention.attention": "encoder_hidden_states"},
    optional=("crossattention", "intermediate", "output.dense"),
    dropout={
        f"{path}.attention": RegionDropout(
            probability=f"{path}.attention.attention_dropout", row=f"{path}.output.dense"
        )
        for path in _QFORMER_ATTENTIONS
    },
)
# Older releases: attention has a dropout module, and attributes with its number of heads.
_OLDER_QFORMER = "encoder.layer.0.attention.attention.dropout"
_QFORMER = replace(
    _NEWER_QFORMER,
    older={
        _OLDER_QFORMER: replace(
            _NEWER_QFORMER,
            divide=tuple(
                f"{path}.attention.{name}"
                for path in _QFORMER_ATTENTIONS
                for name in ("num_attention_heads", "all_head_size")
            ),
            dropout={
                region: replace(dropout, probability=f"{region}.dropout.p")
                for region, dropout in _NEWER_QFORMER.dropout.items()
            },
        )
    },
)


def _blip2_table(*qformer: str) -> Table:
    """Return the table with these modules of the Q-Former before the language model."""
    leading = ("vision_model.encoder.layers", "vision_model.post_layernorm", *qformer, "language_projection")
    return Table(
        stage=(
            # The language model is the largest: the other parts are on its first stage.
            PartStages(part="language_model", entry=("vision_model.embeddings",), leading=leading),
            # Retrieval models have no language model, and run the Q-Former twice per forward, for images and for text.
            PartStages(part="vision_model"),
            PartStages(part="qformer", entry=("embeddings",)),  # models of text only
        ),
        parts={"vision_model": _BLIP2_VISION, "qformer": _QFORMER, "language_model": None},
        further_embeddings=("embeddings.word_embeddings",),
    )


BLIP2 = replace(
    _blip2_table("qformer.layernorm", "qformer.encoder.layer"),
    # In older releases the Q-Former reads the dtype of its parameters, so all of it must be on one stage.
    older={f"qformer.{_OLDER_QFORMER}": _blip2_table("qformer")},
)

# Gemma 3 with images: SigLIP's vision model, a projector, and the language model with its own table.
_SIGLIP = Table(
    stage=StagePlan(layers="encoder.layers", entry=("embeddings",)),
    regions=("self_attn", "mlp"),
    column=(*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.fc1"),
    row=("self_attn.out_proj", "mlp.fc2"),
    attention={"self_attn": "self_attn.out_proj"},
    divide=("self_attn.num_heads", "self_attn.embed_dim"),
    dropout={"self_attn": RegionDropout(probability="self_attn.dropout", row="self_attn.out_proj")},
)
# In older releases attention reshapes its output to the width of its input, so it stays replicated.
_OLDER_SIGLIP = replace(
    _SIGLIP,
    regions=("mlp",),
    column=("mlp.fc1",),
    row=("mlp.fc2",),
    attention={},
    divide=(),
    divisible=(),
    dropout={},
)


def _gemma3_table(vision: str, vision_table: Table) -> Table:
    """Return the table of a model whose vision model is at the path `vision` and has the table `vision_table`."""
    head = f"{vision}.head"  # not used by the language model
    stages = PartStages(
        part="language_model",
        entry=(f"{vision}.embeddings",),
        leading=(f"{vision}.encoder.layers", f"{vision}.post_layernorm", head, "multi_modal_projector"),
        optional=(head,),
    )
    parts = {vision: vision_table, "language_model": None}  # None: the table of its own model type
    return Table(stage=(stages,), parts=parts, heads=("lm_head",))


_OLDER_TOWER = "vision_tower.vision_model"
GEMMA3 = replace(
    _gemma3_table("vision_tower", _SIGLIP), older={_OLDER_TOWER: _gemma3_table(_OLDER_TOWER, _OLDER_SIGLIP)}
)

# The table of each model type.
TABLES = {
    "blip-2": BLIP2,
    "gemma3": GEMMA3,
}
