"""Parity rows beside those of the matrix: the covering array, and rows that change one more setting.

A row is quick if it belongs to a covering array, or is the only row of a feature.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from typing import Any

from echelon.pipeline import schedules
from echelon.verify.layout_choice import LEARNING_RATE, Layout, Training
from echelon.verify.model_choice import ModelChoice

from ..compiled import traced_layers
from ..late_completion import late_completion
from .covering import Row, covering
from .expert_rows import expert_rows
from .loss_rows import loss_rows
from .matrix_rows import TIED_HEADS, missing, types_with_tables
from .models import NARROW_EXPERTS, NOT_RECOMPUTED, REFUSED_MODES, LoopChoice, Occasional
from .owner_rows import owner_rows
from .router_loss_rows import router_loss_rows
from .row import ParityRow, as_quick
from .variant_rows import batch_rows, flash_rows, image_rows, variant_rows

OVERFLOW = Training(overflow_step=1)
EQUAL_BITS, EQUAL_SUMS = 0.0, 1e-6

# The covering array.

KINDS = {
    "decoders": ("llama", "gpt2", "falcon", "bloom", "phi3", "opt", "qwen3", "cohere"),
    "further decoders": (*("gpt_neox", "gpt_neo", "gptj", "glm", "olmo2", "starcoder2", "gemma3_text"),),
    "experts": ("mixtral", "deepseek_v3", "qwen3_moe", "qwen2_moe"),
    "encoders": ("bert", "albert", "roberta", "electra"),
    "encoder-decoders": ("t5", "bart", "whisper", "umt5", "pegasus"),
    "images": ("vit", "beit", "swin", "swinv2", "sam", "sam_vision_model", "blip-2", "gemma3"),
}
FACTORS = {
    "kind": tuple(KINDS),
    "tp": (1, 2),
    "schedule": (None, "1f1b", "interleaved", "zbv"),
    "data": (None, "plain", "ZeRO-1", "ZeRO-2", "ZeRO-1, parameters late"),
    "sequence": (None, "split_gather", "all_to_all", "ring_attn"),
    "wp": (1, 2),
    "precision": ("fp32", "bf16", "fp16"),
    "recompute": (0.0, 1.0),  # half of the one layer of a stage would be none
    "tied": (False, True),
}
# Values with the same mechanism, used alternately: unsplit backwards with one stage per rank, split backwards, and two
# names of one mode.
SAME = {"1f1b": ("1f1b", "gpipe"), "zbv": ("zbv", "zbh1"), "split_gather": ("split_gather", "ring")}
LATE = "ZeRO-1, parameters late"
DATA = {
    None: {},
    "plain": dict(dp=2),
    "ZeRO-1": dict(dp=2, zero=1),
    "ZeRO-2": dict(dp=2, zero=2),
    LATE: dict(dp=2, zero=1, overlap_allgather=True),
}
MOST_RANKS = 4
# The quick rows have fewer values, of which some stand for several in turn.
COARSE = {
    **FACTORS,
    "kind": tuple(kind for kind in KINDS if kind != "further decoders"),
    "schedule": (None, "1f1b", "zbv"),
    "data": (None, "ZeRO-1", "ZeRO-2"),
}
IN_TURN = {
    **SAME,
    "decoders": ("decoders", "further decoders"),
    "1f1b": ("interleaved", "1f1b", "gpipe"),
    "ZeRO-1": ("ZeRO-1", LATE, "plain"),
}


def layout_of(row: Row) -> Layout:
    """Return the layout of a row of FACTORS."""
    return Layout(
        tp=row["tp"],
        pp=1 if row["schedule"] is None else 2,
        sp=2 if row["sequence"] in ("all_to_all", "ring_attn") else 1,
        wp=row["wp"],
        schedule=row["schedule"] or "1f1b",
        chunks=2 if row["schedule"] == "interleaved" else 1,
        sequence=row["sequence"],
        precision=row["precision"],
        recompute=row["recompute"],
        **DATA[row["data"]],
    )


def takes(model_type: str, row: Row) -> bool:
    """Return True if a model type supports the row's sequence mode, recomputation and ties."""
    return (
        model_type not in REFUSED_MODES.get(row["sequence"], ())
        and not (row["recompute"] and model_type in NOT_RECOMPUTED)
        and not (row["tied"] and ModelChoice(model_type=model_type).head_name not in TIED_HEADS)
    )


def is_valid(row: Row) -> bool:
    """Return True if a row is a layout of few ranks that a model of its kind supports."""
    layout = layout_of(row)
    return (
        layout.world_size <= MOST_RANKS
        and (row["tp"] == 2 or row["sequence"] != "split_gather")
        and (row["wp"] == 1 or (row["tp"] == 1 and layout.dp * layout.sp == 2))
        and any(takes(model_type, row) for model_type in KINDS[row["kind"]])
    )


def array_rows(
    factors: Mapping[str, Sequence[Any]], same: Mapping[str, Sequence[str]], **fields: Any
) -> Iterator[ParityRow]:
    """Yield every pair of factors, by the type of each kind that occurred least."""
    met = dict.fromkeys((model_type for types in KINDS.values() for model_type in types), 0)
    known = types_with_tables()
    turns = {value: cycle(values) for value, values in same.items()}
    for row in covering(factors, is_valid):
        row |= {factor: next(turns[value]) for factor, value in row.items() if value in turns}
        able = [
            model_type for model_type in KINDS[row["kind"]] if takes(model_type, row) and model_type in known
        ]
        model_type = min(able, key=lambda model_type: met[model_type])
        met[model_type] += 1
        layout = layout_of(row)
        is_short = layout.schedule not in ("interleaved", "zbv") and model_type not in ("beit", "gpt_neo")
        choice = ModelChoice(model_type=model_type, tied=row["tied"], num_layers=2 if is_short else 4)
        yield ParityRow(choice=choice, layout=layout, num_steps=2, **fields)


def covering_rows() -> Iterator[ParityRow]:
    """Yield the array of all factors, that of the coarse ones, of which most are quick, and types that neither has."""
    every = {str(row): row for row in array_rows(FACTORS, SAME, within=late_completion)}
    coarse = {str(row): row for row in array_rows(COARSE, IN_TURN, quick=True)}
    # On CPUs each block of gemma3's masks takes milliseconds, its rows seconds.
    coarse |= {
        name: replace(row, quick=False, within=late_completion)
        for name, row in coarse.items()
        if row.choice.model_type == "gemma3"
    }
    yield from (every | coarse).values()
    met = {row.choice.model_type for row in (every | coarse).values()}
    for model_type in (model_type for types in KINDS.values() for model_type in types):
        if model_type in types_with_tables() and model_type not in met:
            choice = ModelChoice(model_type=model_type, num_layers=2)
            yield ParityRow(choice=choice, layout=Layout(tp=2, pp=2), num_steps=2)


# Schedules, and weights shared between stages.

SCHEDULES: dict[str, dict[str, Any]] = {
    name if chunks == 1 else f"{name}×{chunks}": {"schedule": name, "chunks": chunks}
    for name, style in schedules.SCHEDULES.items()
    for chunks in ((1, 2) if style.chunks is None else (1,))
}
LLAMA, GPT2 = ModelChoice(model_type="llama"), ModelChoice(model_type="gpt2")
CLASSIFYING, MASKED = (ModelChoice(model_type="bert", head=head) for head in ("classification", "masked"))
T5, BERT = ModelChoice(model_type="t5"), ModelChoice(model_type="bert")
TIED_LLAMA, TIED_GPT2, TIED_T5, TIED_BERT = (
    replace(choice, tied=True) for choice in (LLAMA, GPT2, T5, MASKED)
)


def schedule_rows() -> Iterator[ParityRow]:
    """Yield every schedule alone, compared exactly; with shared weights; and with tensor parallelism and ZeRO."""
    for choice, (name, schedule), pp in product((LLAMA, GPT2, CLASSIFYING), SCHEDULES.items(), (2, 4)):
        is_quick = (choice, pp) in ((LLAMA, 2), (GPT2, 4)) and name == "zbv"
        layout, name = Layout(pp=pp, microbatches=5, **schedule), f"equal bits {choice.model_type} {name}"
        row = ParityRow(name=name, choice=replace(choice, num_layers=9), layout=layout, exact=EQUAL_BITS)
        yield replace(row, num_steps=1, quick=True) if is_quick else row
    for choice, schedule in product((T5, TIED_T5, TIED_GPT2, TIED_BERT), SCHEDULES.values()):
        layers = 4 if choice.model_type == "t5" else 9  # encoder and decoder have four layers each
        layout = Layout(pp=4, microbatches=5, **schedule)
        # Gradients of several stages are summed in another order.
        yield ParityRow(choice=replace(choice, num_layers=layers), layout=layout, exact=EQUAL_SUMS)
    both = (dict(tp=2), dict(dp=2, zero=1))
    for choice, sizes, schedule in product((TIED_LLAMA, T5), both, SCHEDULES.values()):
        layout = Layout(pp=2, microbatches=4, **sizes, **schedule)
        yield ParityRow(choice=replace(choice, num_layers=4 if choice is T5 else 5), layout=layout)
    yield ParityRow(choice=LLAMA, layout=Layout(pp=2), name="equal bits", exact=EQUAL_BITS)


# Further layouts of a few models.

ALL_AXES = Layout(tp=2, pp=2, dp=2, zero=1)
ALL_OF_ZERO = Layout(dp=4, zero=2, zero_size=2, overlap_allgather=True, max_norm=0.1, precision="fp16")
TWO_LAYERS = replace(T5, num_layers=2)
FUSED_LOSS, OFFLOAD, REGATHER = ("enable_fused_loss",), ("activation_offload",), ("enable_sequence_regather",)
# Losses of several terms, and with an auxiliary one.
PRETRAINING, QUESTION = (ModelChoice(model_type="bert", head=head) for head in ("pretraining", "question"))
AUXILIARY = ModelChoice(model_type="mixtral", settings=(("output_router_logits", True),))
# A row is quick if no other has its layout or model: all axes at once, key-value heads of two ranks, two rings, options
# of ZeRO, models without a table, models with experts, the loss in chunks, modules that are
# recomputed by name, with inputs offloaded to the host, losses of several terms, sequences where a rank has an encoder
# alone.
QUICK_ROWS = (
    (TIED_LLAMA, ALL_AXES),
    (ModelChoice(model_type="qwen2"), Layout(tp=4)),
    (TIED_LLAMA, ALL_OF_ZERO),
    (LLAMA, Layout(sp=4, sequence="ring_attn", inner_ring=2)),
    (ModelChoice(model_type="exaone_moe"), Layout(tp=2, pp=2)),
    (TIED_LLAMA, Layout(tp=2, pp=2, options=FUSED_LOSS)),
    (TIED_GPT2, Layout(sp=2, sequence="all_to_all", options=FUSED_LOSS)),
    (LLAMA, Layout(tp=2, pp=2, recompute=1.0, recompute_modules=("mlp",), options=OFFLOAD)),
    (PRETRAINING, Layout(pp=2, dp=2, zero=2, precision="fp16", schedule="zbh1")),
    (AUXILIARY, Layout(tp=2, dp=2, zero=1)),
    (TWO_LAYERS, Layout(tp=2, pp=2, sequence="split_gather")),
)
LAYOUT_ROWS = (
    *product(
        (CLASSIFYING, MASKED, TIED_BERT, GPT2, TIED_GPT2, LLAMA), (Layout(pp=2, dp=2, zero=1), ALL_AXES)
    ),
    *product((PRETRAINING, QUESTION), (ALL_AXES, Layout(sp=2, dp=2, sequence="ring_attn"))),
    *((AUXILIARY, Layout(dp=2, zero=2, precision=precision)) for precision in ("fp16", "bf16")),
    (ModelChoice(model_type="minicpm3"), Layout(tp=2, pp=2)),
    *((ModelChoice(model_type=model_type), Layout(tp=4)) for model_type in ("mistral", "qwen3")),
    (TWO_LAYERS, Layout(tp=4)),
    # Smooth activations: with ReLU, a unit that switches sign by a rounding makes the gradients jump.
    (
        replace(TWO_LAYERS, tied=True, settings=(("feed_forward_proj", "gated-gelu"),)),
        Layout(tp=2, dp=2, zero=1),
    ),
    (replace(TWO_LAYERS, tied=True), Layout(tp=2, precision="bf16")),
    (ModelChoice(model_type="mt5", num_layers=2), Layout(tp=2)),
    (ModelChoice(model_type="umt5", tied=True, num_layers=2), Layout(tp=2)),
    (TIED_LLAMA, Layout(pp=4, microbatches=2)),
    (TIED_LLAMA, Layout(pp=2, microbatches=1)),
    (TIED_LLAMA, Layout(tp=2, dp=2, max_norm=0.1)),
    # ZeRO-2, where no rank has unsharded gradients, with schedules whose stages share weights.
    (TIED_LLAMA, Layout(dp=4, zero=2, max_norm=0.1)),
    (
        replace(TIED_LLAMA, num_layers=5),
        Layout(pp=2, dp=2, zero=2, microbatches=4, schedule="interleaved", chunks=2),
    ),
    (replace(TIED_GPT2, num_layers=5), Layout(pp=2, dp=2, zero=2, microbatches=4, schedule="zbv")),
    (GPT2, Layout(dp=4, zero=1, zero_size=2, precision="bf16", max_norm=0.1)),
    (LLAMA, Layout(dp=2, zero=1, zero_size=1)),
    (TIED_T5, Layout(pp=2, dp=2, zero=2, microbatches=4, overlap_allgather=True, precision="bf16")),
    (LLAMA, Layout(tp=2, pp=2, recompute=1.0, schedule="zbh1", precision="bf16")),
    (LLAMA, Layout(dp=2, zero=2, precision="fp16", max_norm=0.1, options=FUSED_LOSS)),
    (LLAMA, Layout(tp=2, dp=2, zero=1, precision="bf16", schedule="zbh1", options=FUSED_LOSS)),
    (ModelChoice(model_type="gptj"), Layout(tp=2, options=FUSED_LOSS)),  # its head has a bias
    (ModelChoice(model_type="mixtral"), Layout(tp=2, pp=2, sequence="split_gather", options=FUSED_LOSS)),
    (ModelChoice(model_type="arcee"), Layout(pp=2, schedule="zbv", options=FUSED_LOSS)),  # without a table
    *(
        (LLAMA, replace(layout, recompute=1.0, recompute_modules=("self_attn", "mlp"), options=options))
        for layout, options in (
            (Layout(tp=2, sequence="split_gather"), REGATHER),
            (Layout(sp=2, sequence="ring_attn"), OFFLOAD),
            (Layout(pp=2, dp=2, zero=2, schedule="zbv", precision="bf16"), OFFLOAD),
            (Layout(dp=2, wp=2), ()),
        )
    ),
    (BERT, Layout(tp=2, recompute=1.0, recompute_modules=("attention.output", "output"))),
    (T5, Layout(tp=2, pp=2, recompute=1.0, recompute_modules=("layer.1",), options=OFFLOAD)),
    (GPT2, Layout(pp=4, schedule="gpipe", recompute=1.0, options=OFFLOAD)),
    (TIED_LLAMA, Layout(sp=2, pp=2, sequence="all_to_all", recompute=1.0, options=OFFLOAD)),
    (ModelChoice(model_type="mixtral"), Layout(tp=2, recompute=1.0, recompute_modules=("mlp",))),
    (LoopChoice(model_type="granitemoe", settings=NARROW_EXPERTS), Layout(tp=4, precision="fp16")),
)


def layout_rows() -> Iterator[ParityRow]:
    """Yield further layouts of a few models."""
    for choice, layout in QUICK_ROWS:
        yield as_quick(ParityRow(choice=choice, layout=layout, missing=missing(choice.model_type)))
    for choice, layout in LAYOUT_ROWS:
        yield ParityRow(choice=choice, layout=layout)


# Compiled layers have one graph for the first shapes, one for all others and one without a mask; the models have four
# layers. More graphs are allowed for a layer with a graph break, or that is computed in two ways.
COMPILED = ("compile_layers",)
QUICKLY_COMPILED = Layout(tp=2, recompute=1.0, microbatches=1, options=COMPILED)
COMPILED_ROWS: tuple[tuple[ModelChoice, Layout, dict[str, Any]], ...] = (
    (TIED_LLAMA, Layout(tp=2, recompute=1.0, options=COMPILED), {"most_graphs": 3}),
    (LLAMA, Layout(tp=2, sequence="split_gather", options=COMPILED), {"most_graphs": 3}),
    (TIED_LLAMA, Layout(pp=2, dp=2, zero=1, options=COMPILED), {"most_graphs": 3}),
    (LLAMA, Layout(dp=2, zero=2, precision="bf16", options=COMPILED), {"most_graphs": 3}),
    (LLAMA, Layout(tp=2, recompute=1.0, options=(*COMPILED, "activation_offload")), {"most_graphs": 3}),
    (GPT2, Layout(tp=2, dp=2, zero=1, schedule="interleaved", options=COMPILED), {"most_graphs": 3}),
    (LLAMA, Layout(sp=2, sequence="all_to_all", recompute=0.5, options=COMPILED), {"may_break": True}),
    (LLAMA, Layout(sp=2, sequence="ring_attn", options=COMPILED), {"may_break": True}),
    (LLAMA, Layout(dp=2, wp=2, options=COMPILED), {"may_break": True}),
    (ModelChoice(model_type="mixtral"), Layout(tp=2, options=COMPILED), {"may_break": True}),
    (TWO_LAYERS, Layout(tp=2, pp=2, options=COMPILED), {}),
    (BERT, Layout(tp=2, sequence="split_gather", options=COMPILED), {}),
)


def compiled_rows() -> Iterator[ParityRow]:
    """Yield layers that are compiled one by one; of the quick row they are called with one shape."""
    within = partial(traced_layers, most_graphs=1)
    yield as_quick(ParityRow(choice=TIED_LLAMA, layout=QUICKLY_COMPILED, within=within))
    for choice, layout, expected in COMPILED_ROWS:
        within = partial(traced_layers, **expected)
        yield ParityRow(choice=choice, layout=layout, num_steps=2, within=within)


# Events of training: every cell has five steps, or three, the second of which overflows on one rank only.

SMALL = replace(LLAMA, num_layers=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Training settings that a cell adds to a ZeRO stage under a layout."""

    choice: ModelChoice = SMALL
    training: Training = OVERFLOW
    microbatches: int = 2
    max_norm: float = 0.0


TIED, OCCASIONAL = replace(SMALL, tied=True), Occasional(model_type="llama", num_layers=2)
CASES = {
    "plain": Case(microbatches=1),
    "accumulation": Case(microbatches=3),
    "clipping": Case(max_norm=0.1),
    "groups": Case(training=replace(OVERFLOW, vector_rate=LEARNING_RATE / 3)),
    # A first pipeline stage then has no trainable parameters.
    "lower half frozen": Case(training=replace(OVERFLOW, frozen="lower half")),
    "every second frozen": Case(choice=TIED, training=replace(OVERFLOW, frozen="every second")),
    "tied": Case(choice=TIED),
    # With two replicas the biases get gradients on the second only, the first only, none, none, the second only.
    "no gradient": Case(choice=OCCASIONAL, training=replace(OVERFLOW, extra_samples=(0, 1, 0, 0))),
    # The same with four replicas.
    "no gradient of four": Case(
        choice=replace(OCCASIONAL, tied=True),
        training=replace(OVERFLOW, extra_samples=(0, 1, 0, 0, 0, 0)),
        max_norm=0.1,
    ),
}
CELL_LAYOUTS = {
    "dp2": Layout(dp=2),
    "dp4": Layout(dp=4),
    "tp2·dp2": Layout(tp=2, dp=2),
    "pp2·dp2": Layout(pp=2, dp=2),
    "dp4 in twos": Layout(dp=4, zero_size=2),
}
CELLS = {
    "stage": (0, 1, 2),
    "layout": tuple(CELL_LAYOUTS),
    "case": tuple(CASES),
    "precision": ("fp32", "bf16", "fp16"),
}


def is_cell(cell: Row) -> bool:
    """Return False for ZeRO over groups of replicas without a ZeRO stage."""
    return bool(cell["stage"]) or cell["layout"] != "dp4 in twos"


def zero_rows() -> Iterator[ParityRow]:
    """Yield every stage, layout and case in float32; in 16 bits every pair; quick is every single value."""
    quick = covering(CELLS, is_cell, strength=1)
    in_float32 = covering({**CELLS, "precision": ("fp32",)}, is_cell, strength=4)
    for cell in [*quick, *in_float32, *covering(CELLS, is_cell)]:
        case, is_quick = CASES[cell["case"]], cell in quick
        layout = replace(CELL_LAYOUTS[cell["layout"]], zero=cell["stage"], precision=cell["precision"])
        layout = replace(layout, microbatches=case.microbatches, max_norm=case.max_norm)
        row = ParityRow(name=f"training {cell['case']}", choice=case.choice, layout=layout)
        yield replace(row, training=case.training, num_steps=3 if is_quick else 5, quick=is_quick)


# Realistic widths, and long runs.

LARGE = ModelChoice(  # 110 million parameters
    model_type="llama",
    num_layers=12,
    settings=(
        *(("vocab_size", 32000), ("hidden_size", 768), ("intermediate_size", 2048)),
        *(("num_attention_heads", 12), ("num_key_value_heads", 4)),
    ),
)


def parity_rows() -> Iterator[ParityRow]:
    """Yield every row."""
    yield from covering_rows()
    yield from layout_rows()
    yield from compiled_rows()
    yield from schedule_rows()
    yield from zero_rows()
    yield from variant_rows()
    yield from batch_rows()
    yield from image_rows()
    yield from flash_rows()
    yield from expert_rows()
    yield from owner_rows()
    yield from loss_rows()
    yield from router_loss_rows()
    for layout in (Layout(tp=2, dp=2, zero=1), Layout(pp=2, dp=2, zero=2)):
        yield ParityRow(name="a hundred million parameters", choice=LARGE, layout=layout)
