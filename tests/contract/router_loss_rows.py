"""Parity rows of mixtures with their auxiliary loss, which one process computes over all tokens of a microbatch."""

from collections.abc import Iterator

from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice

from .row import ParityRow

# A coefficient by which the auxiliary loss decides the routers' gradients.
SETTINGS = (("output_router_logits", True), ("router_aux_loss_coef", 0.5))
MIXTRAL, QWEN, GPT_OSS = (
    ModelChoice(model_type=each, settings=SETTINGS) for each in ("mixtral", "qwen3_moe", "gpt_oss")
)
LAYOUTS = (
    Layout(dp=2, zero=1, recompute=1.0),
    Layout(dp=2, ep=2, zero=2),
    Layout(dp=4, ep=2),
)
QUICK = ((MIXTRAL, Layout(dp=2, zero=2)),)


def router_loss_rows() -> Iterator[ParityRow]:
    """Yield every row."""
    for choice, layout in QUICK:
        yield _row(choice, layout, quick=True)
    for choice in (MIXTRAL, QWEN, GPT_OSS):
        for layout in LAYOUTS:
            yield _row(choice, layout)


def _row(choice: ModelChoice, layout: Layout, *, quick: bool = False) -> ParityRow:
    steps = 2 if quick else 3
    return ParityRow(
        choice=choice, layout=layout, num_steps=steps, quick=quick, name=f"{choice.model_type}-router-loss"
    )
