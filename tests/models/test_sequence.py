"""Models whose sequences and weights are spread over ranks, in every mode and beside every axis, beside one process.

Rows run under `KEEP_MATRIX`, see tests/matrix.py. Most are `slow`.
"""

from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING

from echelon.shardformer import model_types
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool
from .test_sequence_modes import REFUSED

MODEL_TYPES = ("llama", "gpt2", "bert")
TENSOR_LAYOUTS = (
    Layout(tp=2),
    Layout(tp=4),
    Layout(tp=2, pp=2),
    Layout(tp=2, dp=2, zero=1),
)
SEQUENCE_LAYOUTS = (
    Layout(sp=2),
    Layout(sp=4),
    Layout(sp=2, tp=2),
    Layout(sp=2, pp=2),
    Layout(sp=2, dp=2, zero=1),
)
# Layouts that try one thing more each.
FURTHER = (
    Layout(tp=2, sequence="split_gather", options=("enable_sequence_regather",)),
    Layout(tp=2, sequence="split_gather", options=("enable_sequence_overlap",)),
    Layout(
        tp=2,
        pp=2,
        sequence="split_gather",
        schedule="zbh1",
        options=("enable_sequence_regather", "enable_sequence_overlap"),
    ),
    Layout(tp=2, sequence="ring", options=("enable_sequence_overlap",)),
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
    # Weights of linear layers shared out, beside whole sequences and spread ones.
    Layout(dp=2, wp=2),
    Layout(dp=4, wp=2, zero=1),
    Layout(dp=4, wp=2, zero=2, precision="bf16"),
    Layout(dp=2, wp=2, pp=2, schedule="zbh1", recompute=0.5, zero=1),
    Layout(sp=2, wp=2, sequence="all_to_all", max_norm=0.1),
    Layout(sp=2, dp=2, wp=4, sequence="all_to_all", zero=1),
    Layout(sp=4, wp=2, sequence="ring_attn", zero=1),
    Layout(sp=2, pp=2, wp=2, sequence="all_to_all", precision="fp16"),
)
# Where small models have fewer than four.
HEADS = {"whisper": 2}
QUICK = {
    ("llama", "tp2·pp2·split_gather·fp32"),
    ("gpt2", "tp2·ring·fp32"),
    ("bert", "tp2·sp2·all_to_all·fp32"),
    ("gpt2", "pp2·sp2·ring_attn·fp32"),
    ("llama", "dp2·sp2·ring_attn·zero1·fp32"),
    ("bert", "dp2·sp2·all_to_all·wp4·zero1·fp32"),
    ("gpt2", "dp2·wp2·fp32"),
    ("llama", "tp2·pp2·zbh1·split_gather·enable_sequence_regather·enable_sequence_overlap·fp32"),
}


def layouts() -> list[Layout]:
    return [
        *(replace(layout, sequence=mode) for mode in ("split_gather", "ring") for layout in TENSOR_LAYOUTS),
        *(
            replace(layout, sequence=mode)
            for mode in ("all_to_all", "ring_attn")
            for layout in SEQUENCE_LAYOUTS
        ),
    ]


def layouts_of(model_type: str) -> list[Layout]:
    """Three types in every layout, all others in those of the modes that they do not refuse."""
    usual = [
        each
        for each in layouts()
        if model_type not in REFUSED[str(each.sequence)] and each.tp <= HEADS.get(model_type, 4)
    ]
    return [*usual, *FURTHER] if model_type in MODEL_TYPES else usual


def rows() -> list[object]:
    others = [each for each in filter(CONFIG_MAPPING.__contains__, model_types()) if each not in MODEL_TYPES]
    return [
        pytest.param(
            ModelChoice(model_type=model_type),
            layout,
            id=f"{model_type}-{layout}",
            marks=() if (model_type, str(layout)) in QUICK else pytest.mark.slow,
        )
        for model_type in (*MODEL_TYPES, *others)
        for layout in layouts_of(model_type)
    ]


def test_every_quick_row_is_one() -> None:
    assert {(name, str(layout)) for name in MODEL_TYPES for layout in layouts_of(name)} >= QUICK


@pytest.mark.parametrize(("choice", "layout"), rows())
def test_a_model_trains_as_one_process_does(pool: Pool, choice: ModelChoice, layout: Layout) -> None:
    reports = pool.run(layout.world_size, parity, choice, layout, timeout=120.0)
    assert reports[0].departure is None
