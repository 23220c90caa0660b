"""Parity rows of mixtures with their auxiliary loss, which one process computes over all tokens of a microbatch."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from .expert_rows import MISSING, by_sgd
from .row import ParityRow, as_quick

# A coefficient by which the auxiliary loss decides the routers' gradients.
SETTINGS = (("output_router_logits", True), ("router_aux_loss_coef", 0.5))
MIXTRAL, QWEN, GPT_OSS = (
    ModelChoice(model_type=model_type, settings=SETTINGS)
    for model_type in ("mixtral", "qwen3_moe", "gpt_oss")
)
LAYOUTS = (
    Layout(dp=2, zero=1, recompute=1.0),
    Layout(dp=2, ep=2, zero=2),
    Layout(dp=4, ep=2),
    Layout(pp=2, schedule="interleaved", chunks=2),
    Layout(pp=2, dp=2, ep=2),
    Layout(pp=2, dp=2, zero=2, schedule="zbv", recompute=0.5),
    Layout(pp=4, schedule="zbh1"),
    Layout(pp=2, dp=2, zero=1, precision="bf16"),
    Layout(sp=2, dp=2, ep=4, sequence="all_to_all", zero=2),
)
# Not for gpt_oss, which has neither a plan of tensor parallelism nor attention that a ring can compute.
FURTHER = (
    Layout(sp=2, ep=2, sequence="ring_attn"),
    Layout(tp=2, dp=2, ep=2, sequence="split_gather", recompute=1.0),
    Layout(tp=2, pp=2, sequence="split_gather"),
    Layout(pp=2, sp=2, sequence="ring_attn", schedule="zbv"),
    Layout(tp=2, pp=2, precision="fp16"),
)
# A loss of the encoder and one of the decoder; experts of rank 1 get no tokens.
NLLB = ModelChoice(model_type="nllb-moe", settings=SETTINGS)
NLLB_LAYOUTS = (Layout(dp=2), Layout(dp=2, ep=2, zero=2), Layout(dp=4, ep=2, zero=1, recompute=1.0))
QUICK = (
    (MIXTRAL, Layout(dp=2, zero=2)),
    (QWEN, Layout(pp=2, dp=2, ep=2, schedule="zbh1")),
    (MIXTRAL, Layout(pp=2, sp=2, sequence="all_to_all")),
)


def router_loss_rows() -> Iterator[ParityRow]:
    """Yield every row."""
    for choice, layout in QUICK:
        yield as_quick(_row(choice, layout))
    for choice in (MIXTRAL, QWEN, GPT_OSS):
        for layout in (*LAYOUTS, *(FURTHER if choice is not GPT_OSS else ())):
            yield _row(choice, layout)
    for layout, (name, within) in product(NLLB_LAYOUTS, (("", nullcontext), ("sgd ", by_sgd))):
        row = replace(_row(NLLB, layout), within=within, missing=MISSING)
        yield replace(row, name=f"{name}{row.name}")


def _row(choice: ModelChoice, layout: Layout) -> ParityRow:
    return ParityRow(choice=choice, layout=layout, name=f"{choice.model_type}-router-loss")
