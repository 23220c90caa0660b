"""BLIP-2: a vision model, a Q-Former that attends to it every second layer, and a language model with its own table."""

from dataclasses import replace

from ...pipeline.plan import StagePlan
from ..table import PartStages, RegionDropout, Table

_VISION = Table(
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

_ATTENTIONS = ("attention", "crossattention")
# Of text, which not every Q-Former takes, and of its queries.
_FEED_FORWARDS = {"intermediate": "output.dense", "intermediate_query": "output_query.dense"}

_NEWER_QFORMER = Table(
    stage=StagePlan(layers="encoder.layer", entry=("layernorm",)),
    regions=(*(f"{path}.attention" for path in _ATTENTIONS), *_FEED_FORWARDS),
    column=(
        *(f"{path}.attention.{name}" for path in _ATTENTIONS for name in ("query", "key", "value")),
        *(f"{path}.dense" for path in _FEED_FORWARDS),
    ),
    row=(*(f"{path}.output.dense" for path in _ATTENTIONS), *_FEED_FORWARDS.values()),
    attention={f"{path}.attention": f"{path}.output.dense" for path in _ATTENTIONS},
    second_input={"crossattention.attention": "encoder_hidden_states"},
    optional=("crossattention", "intermediate", "output.dense"),
    dropout={
        f"{path}.attention": RegionDropout(
            probability=f"{path}.attention.attention_dropout", row=f"{path}.output.dense"
        )
        for path in _ATTENTIONS
    },
)
# Of releases whose attention drops in a module of its own, and counts its heads.
_OLDER = "encoder.layer.0.attention.attention.dropout"
_QFORMER = replace(
    _NEWER_QFORMER,
    older={
        _OLDER: replace(
            _NEWER_QFORMER,
            divide=tuple(
                f"{path}.attention.{name}"
                for path in _ATTENTIONS
                for name in ("num_attention_heads", "all_head_size")
            ),
            dropout={
                region: replace(dropout, probability=f"{region}.dropout.p")
                for region, dropout in _NEWER_QFORMER.dropout.items()
            },
        )
    },
)


def _table(*qformer: str) -> Table:
    """The table with these modules of the Q-Former before the language model."""
    leading = ("vision_model.encoder.layers", "vision_model.post_layernorm", *qformer, "language_projection")
    return Table(
        stage=(
            # The language model is the largest: the others stand on its first stage.
            PartStages(part="language_model", entry=("vision_model.embeddings",), leading=leading),
            # Retrieval has none, and runs its Q-Former twice in one forward, for images and for text.
            PartStages(part="vision_model"),
            PartStages(part="qformer", entry=("embeddings",)),  # of text alone
        ),
        parts={"vision_model": _VISION, "qformer": _QFORMER, "language_model": None},
        further_embeddings=("embeddings.word_embeddings",),
    )


BLIP2 = replace(
    _table("qformer.layernorm", "qformer.encoder.layer"),
    # There the Q-Former asks its parameters for their precision, so that none of it can stand elsewhere.
    older={f"qformer.{_OLDER}": _table("qformer")},
)
