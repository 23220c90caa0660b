"""Rows of the stored matrix, docs/models.md: every model type with all its heads, and the layouts that are tested.

All of them are `slow`; the quick rows are the covering array of parity_rows.py.
"""

from collections.abc import Iterator
from dataclasses import replace

import transformers
from transformers import CONFIG_MAPPING, MixtralConfig

from echelon.shardformer import model_types, table_for
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import FURTHER_HEADS, HEADS, ModelChoice

from .models import NARROW_EXPERTS, REFUSED_MODES

LAYOUTS = (Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(tp=2, dp=2, zero=1))
FOUR = (Layout(tp=4), Layout(pp=4))
# Heads that may be tied to the embedding.
TIED_HEADS = ("causal", "double", "seq2seq", "masked", "speech", "image_text")
# Model types of six kinds that also run on four ranks of one axis.
WIDE = ("llama", "gpt2", "bert", "t5", "swin", "vit")
# Model types without a table, sharded by transformers' own plans.
DERIVED = (
    *("exaone_moe", "minicpm3", "qwen3_5_text", "apertus", "arcee", "cwm", "deepseek_v2", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "gemma", "glm", "glm4", "glm4_moe", "granite_swa", "helium", "hy_v3"),
    *("hyperclovax", "internlm3", "iquestcoder", "jais2", "laguna", "mellum", "ministral", "ministral3"),
    "olmo",
)
# Older releases have layers that return tuples, and inconsistent plans for experts, which are refused.
ARE_PLANS_OLDER = "moe_tp_experts" not in MixtralConfig.base_model_tp_plan.values()

SEQUENCE_TYPES = ("llama", "gpt2", "bert")
TENSOR_LAYOUTS = (Layout(tp=2), Layout(tp=4), Layout(tp=2, pp=2), Layout(tp=2, dp=2, zero=1))
SEQUENCE_LAYOUTS = (
    *(Layout(sp=2), Layout(sp=4), Layout(sp=2, tp=2), Layout(sp=2, pp=2)),
    Layout(sp=2, dp=2, zero=1),
)
REGATHER, OVERLAP = "enable_sequence_regather", "enable_sequence_overlap"
# Layouts that each test one more option.
FURTHER_SEQUENCE_LAYOUTS = (
    Layout(tp=2, sequence="split_gather", options=(REGATHER,)),
    Layout(tp=2, sequence="split_gather", options=(OVERLAP,)),
    Layout(tp=2, pp=2, sequence="split_gather", schedule="zbh1", options=(REGATHER, OVERLAP)),
    Layout(tp=2, sequence="ring", options=(OVERLAP,)),
    Layout(tp=2, sequence="split_gather", recompute=1.0),
    Layout(tp=2, pp=2, sequence="ring", schedule="interleaved", chunks=2, recompute=0.5),
    Layout(tp=2, sequence="split_gather", precision="bf16"),
    Layout(sp=2, sequence="all_to_all", recompute=1.0),
    Layout(sp=2, pp=2, sequence="all_to_all", schedule="zbv", recompute=0.5),
    Layout(sp=2, dp=2, zero=2, sequence="all_to_all", max_norm=0.1),
    Layout(sp=2, sequence="all_to_all", precision="fp16"),
    Layout(sp=2, sequence="ring_attn", recompute=1.0),
    Layout(sp=2, pp=2, sequence="ring_attn", schedule="interleaved", chunks=2),
    Layout(sp=2, zero=2, sequence="ring_attn", max_norm=0.1),
    Layout(sp=2, sequence="ring_attn", precision="bf16"),
    Layout(sp=4, sequence="ring_attn", inner_ring=2),
    Layout(sp=3, sequence="ring_attn"),
    # Sharded weights of linear layers, with replicated and with sharded sequences.
    Layout(dp=2, wp=2),
    Layout(dp=4, wp=2, zero=1),
    Layout(dp=4, wp=2, zero=2, precision="bf16"),
    Layout(dp=2, wp=2, pp=2, schedule="zbh1", recompute=0.5, zero=1),
    Layout(sp=2, wp=2, sequence="all_to_all", max_norm=0.1),
    Layout(sp=2, dp=2, wp=4, sequence="all_to_all", zero=1),
    Layout(sp=4, wp=2, sequence="ring_attn", zero=1),
    Layout(sp=2, pp=2, wp=2, sequence="all_to_all", precision="fp16"),
)
# Small models with fewer than four heads.
FEWEST_HEADS = {"whisper": 2}

INTERLEAVED = Layout(pp=2, schedule="interleaved", chunks=2)
ZERO_BUBBLE = Layout(pp=2, schedule="zbv")
GROUPS = ModelChoice(model_type="albert", num_layers=6, settings=(("num_hidden_groups", 2),))
# Several stages per rank, for models whose layers are shared, change the shape, or are all read at the end.
SEVERAL_STAGES = (
    (GROUPS, INTERLEAVED),
    (GROUPS, ZERO_BUBBLE),
    (GROUPS, Layout(tp=2, pp=2, precision="bf16")),
    (ModelChoice(model_type="swin", head="backbone"), INTERLEAVED),
    (ModelChoice(model_type="swin"), ZERO_BUBBLE),
    (ModelChoice(model_type="swinv2"), ZERO_BUBBLE),
    (ModelChoice(model_type="swinv2"), Layout(tp=2, pp=2, schedule="zbh1")),
    (ModelChoice(model_type="swinv2", head="backbone"), Layout(pp=2, schedule="zbh1")),
    (ModelChoice(model_type="beit", head="segmentation"), INTERLEAVED),
    (ModelChoice(model_type="beit", head="masked_image"), ZERO_BUBBLE),
    (ModelChoice(model_type="vit"), Layout(tp=2, pp=2, precision="bf16")),
)


def choices(model_type: str) -> list[ModelChoice]:
    """Return the small models of a type, first that of its usual head; of two heads with one class only the first."""
    by_class = {kind: head for head, kind in reversed(class_names(model_type).items())}
    heads = sorted(by_class.values(), key=lambda head: head != ModelChoice(model_type=model_type).head_name)
    return [
        ModelChoice(model_type=model_type, head=head, tied=is_tied)
        for head in heads
        for is_tied in ((False, True) if head in TIED_HEADS else (False,))
    ]


def class_names(model_type: str) -> dict[str, str]:
    """Return the names of the classes of `heads_of`, without importing the models at collection."""
    class_by_head = {}
    for head, auto in HEADS.items():
        names = {} if auto is None else getattr(transformers, auto)._model_mapping._model_mapping
        if name := names.get(model_type) or FURTHER_HEADS.get((model_type, head)):
            class_by_head[head] = name if isinstance(name, str) else name[0]
    return class_by_head


def types_with_tables() -> list[str]:
    """Return the model types with a table that the installed transformers has; chatglm is not part of it."""
    return [model_type for model_type in model_types() if model_type in CONFIG_MAPPING]


def missing(model_type: str) -> str:
    """Return the reason why the installed transformers has no plan for a model type, or an empty string."""
    release = f"transformers {transformers.__version__}"
    if model_type not in CONFIG_MAPPING:
        return f"{release} knows no {model_type}"
    plan = CONFIG_MAPPING[model_type].base_model_tp_plan or {}
    if ARE_PLANS_OLDER and "gather" in plan.values():
        return f"{release} has an older plan for the experts of {model_type}"
    return ""


def matrix_rows() -> Iterator[tuple[ModelChoice, Layout]]:
    """Yield model and layout of every row, some of them twice."""
    for model_type in types_with_tables():
        for choice in choices(model_type):
            for layout in (*LAYOUTS, *(FOUR if model_type in WIDE else ())):
                yield choice, layout
    for model_type in DERIVED:
        if table_for(model_type) is None:
            yield from ((ModelChoice(model_type=model_type), layout) for layout in LAYOUTS)
    for head in ("causal", "classification"):  # two key-value heads: of four ranks two share one
        yield from (
            (ModelChoice(model_type="chatglm", head=head), layout) for layout in (*LAYOUTS, Layout(tp=4))
        )
    yield from _sequence_rows()
    yield from SEVERAL_STAGES
    yield ModelChoice(model_type="granitemoe", settings=NARROW_EXPERTS), Layout(tp=2, precision="fp16")
    yield ModelChoice(model_type="granitemoe", settings=NARROW_EXPERTS), Layout(tp=4)


def _sequence_rows() -> Iterator[tuple[ModelChoice, Layout]]:
    """Yield three types in every layout, and all others in the modes that they do not refuse."""
    layouts = [
        *(replace(layout, sequence=mode) for mode in ("split_gather", "ring") for layout in TENSOR_LAYOUTS),
        *(
            replace(layout, sequence=mode)
            for mode in ("all_to_all", "ring_attn")
            for layout in SEQUENCE_LAYOUTS
        ),
    ]
    others = [model_type for model_type in types_with_tables() if model_type not in SEQUENCE_TYPES]
    for model_type in (*SEQUENCE_TYPES, *others):
        for layout in layouts:
            is_refused = model_type in REFUSED_MODES[str(layout.sequence)]
            if not is_refused and layout.tp <= FEWEST_HEADS.get(model_type, 4):
                yield ModelChoice(model_type=model_type), layout
    for model_type in SEQUENCE_TYPES:
        yield from ((ModelChoice(model_type=model_type), layout) for layout in FURTHER_SEQUENCE_LAYOUTS)
