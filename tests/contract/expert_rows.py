"""Parity rows of experts that are distributed over ranks (ep_size)."""

from collections.abc import Iterator

from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice

from .models import LoopChoice
from .row import ParityRow

MIXTRAL, QWEN, GPT_OSS, DEEPSEEK = (
    ModelChoice(model_type=each) for each in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
)
LAYOUTS = (
    Layout(dp=2, ep=2),
    Layout(dp=4, ep=4),
    Layout(dp=2, ep=2, pp=2),
    Layout(dp=2, ep=2, pp=2, schedule="interleaved", chunks=2),
    Layout(dp=2, ep=2, pp=2, schedule="zbv", recompute=0.5),
    Layout(dp=4, ep=2, zero=1),
    Layout(dp=2, ep=2, zero=2, precision="bf16"),
)
# gpt_oss has no plan for tensor parallelism, and sinks of attention, which rings do not have.
NOT_OF_GPT_OSS = (
    Layout(sp=2, ep=2, sequence="ring_attn"),
    Layout(dp=2, ep=2, tp=2),
    Layout(dp=2, ep=2, tp=2, sequence="split_gather", recompute=1.0),
    Layout(sp=2, ep=2, tp=2, sequence="all_to_all", zero=1),
)
QUICK = (
    (MIXTRAL, Layout(dp=4, ep=2, zero=1, recompute=1.0)),
    (QWEN, Layout(dp=2, ep=2, tp=2, sequence="split_gather")),
    (GPT_OSS, Layout(dp=2, ep=2, pp=2, schedule="zbv")),
    (DEEPSEEK, Layout(sp=2, dp=2, ep=4, sequence="all_to_all", zero=2)),
    (MIXTRAL, Layout(dp=2, ep=2, precision="fp16", max_norm=0.1)),
)


def expert_rows() -> Iterator[ParityRow]:
    """Yield every row."""
    for choice, layout in QUICK:
        yield ParityRow(choice=choice, layout=layout, num_steps=2, quick=True)
    for choice in (MIXTRAL, QWEN, GPT_OSS):
        for layout in (*LAYOUTS, *(NOT_OF_GPT_OSS if choice is not GPT_OSS else ())):
            yield ParityRow(choice=choice, layout=layout)
    yield ParityRow(choice=MIXTRAL, layout=Layout(dp=4, wp=2, ep=4))
    yield ParityRow(
        choice=LoopChoice(model_type="mixtral"),
        layout=Layout(dp=2, ep=2, recompute=1.0),
        name="eager experts",
    )
