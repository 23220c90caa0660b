"""Tables of vision transformers: ViT, BEiT, Swin, SAM, and timm's ViT."""

from dataclasses import replace

from ...pipeline.stage_plan import StagePlan
from .table import PartStages, RegionDropout, Table

# Vision transformers with one width: ViT, DeiT, and BEiT with relative position biases.
_VIT_STAGE = StagePlan(layers="layers", entry=("embeddings",))

# Names in releases before 5.9.
_OLDER_VIT_STAGE = StagePlan(layers="encoder.layer", entry=("embeddings",))
_OLDER_VIT_ATTENTION = "attention.attention"
_OLDER_VIT = Table(
    stage=_OLDER_VIT_STAGE,
    regions=(_OLDER_VIT_ATTENTION, "intermediate"),
    column=(*(f"{_OLDER_VIT_ATTENTION}.{name}" for name in ("query", "key", "value")), "intermediate.dense"),
    row=("attention.output.dense", "output.dense"),
    attention={_OLDER_VIT_ATTENTION: "attention.output.dense"},
    divide=(f"{_OLDER_VIT_ATTENTION}.num_attention_heads", f"{_OLDER_VIT_ATTENTION}.all_head_size"),
    dropout={
        _OLDER_VIT_ATTENTION: RegionDropout(
            probability=f"{_OLDER_VIT_ATTENTION}.dropout_prob", row="attention.output.dense"
        )
    },
)

VIT = Table(
    stage=_VIT_STAGE,
    regions=("attention", "mlp"),
    column=("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"),
    row=("attention.o_proj", "mlp.fc2"),
    attention={"attention": "attention.o_proj"},
    dropout={"attention": RegionDropout(probability="attention.attention_dropout", row="attention.o_proj")},
    older={_OLDER_VIT_STAGE.layers: _OLDER_VIT},
)

_BEIT_BIAS = f"{_OLDER_VIT_ATTENTION}.relative_position_bias"
_BEIT_SHARED = "encoder.relative_position_bias"
_OLDER_BEIT = replace(
    _OLDER_VIT,
    stage=replace(
        _OLDER_VIT_STAGE,
        everywhere=(_BEIT_SHARED,),
        derives_entry_shapes=True,
        arity=1,
        collecting=("out_features", "fpn1"),
    ),
    optional=(_BEIT_BIAS,),
    split={f"{_BEIT_BIAS}.relative_position_bias_table": 1},
    shared_biases={f"{_BEIT_SHARED}.relative_position_bias_table": 1},
    dropout={
        _OLDER_VIT_ATTENTION: RegionDropout(
            probability=f"{_OLDER_VIT_ATTENTION}.dropout.p", row="attention.output.dense"
        )
    },
)

# Position biases of each layer, or one for all layers.
BEIT = replace(
    VIT,
    stage=replace(
        _VIT_STAGE,
        everywhere=("shared_position_bias",),
        collecting=("out_features", "fpn"),  # backbones and semantic segmentation
    ),
    optional=("relative_position_bias",),
    biases={"relative_position_bias.relative_position_bias_table": 1},
    shared_biases={"shared_position_bias.relative_position_bias_table": 1},
    older={_OLDER_VIT_STAGE.layers: _OLDER_BEIT},
)

# Swin and SwinV2: four lists of blocks; a layer between two lists halves height and width.
_SWIN_STAGE = StagePlan(
    layers="encoder.layers.*.blocks",
    between="downsample",
    entry=("embeddings",),
    derives_entry_shapes=True,
    arity=2,
    collecting=("out_features",),
)

# A small perceptron computes the position biases; its last layer has one output per head.
_SWIN_BIASES = "attention.self.continuous_position_bias_mlp"

SWINV2 = Table(
    stage=replace(_SWIN_STAGE, arity=1),
    regions=("attention.self", "intermediate"),
    column=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
    row=("attention.output.dense", "output.dense"),
    attention={"attention.self": "attention.output.dense"},
    query_heads="attention.self.num_attention_heads",
    divide=("attention.self.num_attention_heads", "attention.self.all_head_size"),
    split={"attention.self.logit_scale": 0, f"{_SWIN_BIASES}.2.weight": 0},
    partial=(f"{_SWIN_BIASES}.0",),
    dropout={
        "attention.self": RegionDropout(probability="attention.self.dropout.p", row="attention.output.dense")
    },
)

SWIN = replace(
    VIT,
    stage=_SWIN_STAGE,
    query_heads="attention.num_attention_heads",
    split={"attention.relative_position_bias.relative_position_bias_table": 1},
    # Names in releases before 5.9.
    older={
        "encoder.layers.0.blocks.0.intermediate": replace(
            SWINV2, split={"attention.self.relative_position_bias_table": 1}, partial=()
        )
    },
)

# SAM: a vision encoder with windowed attention, and a mask decoder that attends both ways; also the encoder alone.
# All heads share one table of relative positions, used here with the local heads.
_SAM_POSITIONS = ("attn.rel_pos_h", "attn.rel_pos_w")

_SAM_ENCODER = Table(
    stage=StagePlan(layers="layers", entry=("patch_embed",)),
    regions=("attn", "mlp"),
    column=("attn.qkv", "mlp.lin1"),
    row=("attn.proj", "mlp.lin2"),
    attention={"attn": "attn.proj"},
    fused={"attn.qkv": 3},
    divide=("attn.num_attention_heads",),
    partial=_SAM_POSITIONS,
    optional=_SAM_POSITIONS,
    dropout={"attn": RegionDropout(probability="attn.dropout", row="attn.proj")},
)


def _sam_decoder(layers: str, *attentions: str, mlp: tuple[str, str] | None = None) -> Table:
    """Return a table in which each projection is a region of its own, since q, k and v have three inputs.

    Args:
        layers: path of the list of layers, or of a single one.
        attentions: paths of attentions within a layer; "" is the layer itself.
        mlp: the two linear layers of the MLP, if there is one.
    """
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


_SAM_CROSSES = ("cross_attn_token_to_image", "cross_attn_image_to_token")

SAM_VISION = Table(stage=(PartStages(part="vision_encoder"),), parts={"vision_encoder": _SAM_ENCODER})
SAM = replace(
    SAM_VISION,
    # Positions are computed before the vision encoder, and used by the mask decoder.
    stage=(PartStages(part="vision_encoder", everywhere=("shared_image_embedding",)),),
    parts={
        "vision_encoder": _SAM_ENCODER,
        "mask_decoder": _sam_decoder(
            "transformer.layers", "self_attn", *_SAM_CROSSES, mlp=("mlp.lin1", "mlp.lin2")
        ),
        "mask_decoder.transformer": _sam_decoder("final_attn_token_to_image", ""),
    },
)

# The vision transformers of timm (ViT, DeiT), which have no config: registered by their classes.
TIMM_VIT = Table(
    stage=StagePlan(
        layers="blocks",
        entry=("patch_embed", "norm_pre"),
        everywhere=("cls_token", "reg_token", "dist_token", "pos_embed"),
        derives_entry_shapes=True,  # the tokens come after them
    ),
    regions=("attn", "mlp"),
    column=("attn.qkv", "mlp.fc1"),
    row=("attn.proj", "mlp.fc2"),
    attention={"attn": "attn.proj"},
    query_heads="attn.num_heads",
    fused={"attn.qkv": 3},
    divide=("attn.num_heads", "attn.attn_dim"),
    partial=("attn.q_norm", "attn.k_norm"),
    dropout={
        "attn": RegionDropout(probability="attn.attn_drop.p", row="attn.proj"),
        "mlp": RegionDropout(probability="mlp.drop1.p", row="mlp.fc2"),
    },
)

# The table of each model type.
TABLES = {
    "beit": BEIT,
    "deit": VIT,
    "sam": SAM,
    "sam_vision_model": SAM_VISION,
    "swin": SWIN,
    "swinv2": SWINV2,
    "vit": VIT,
}

# Tables by class, for models without a config.
TABLES_OF_CLASSES = {
    "timm.models.vision_transformer.VisionTransformer": TIMM_VIT,
}
