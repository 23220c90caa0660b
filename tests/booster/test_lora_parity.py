"""LoRA under every layout against one process: loss, every adapter's gradient, the norm and every weight."""

from dataclasses import replace
from itertools import product

import pytest

from echelon.verify.layout_choice import Layout
from echelon.verify.parity import parity

from ..compiled import traced_layers
from ..pool import Pool
from ..slow import slow_row
from .adapters import BERT, GPT2, LLAMA, Adapted

# Query, key and value in one projection, whose ranks have shards of the one key and value.
FALCON = Adapted(model_type="falcon", targets=("query_key_value", "dense"))
ALBERT = Adapted(model_type="albert", targets=("query", "key", "value", "dense", "ffn", "ffn_output"))
# Three heads over two ranks, so one padded head is added.
PADDED = Adapted(
    model_type="llama",
    num_layers=2,
    settings=(("hidden_size", 48), ("num_attention_heads", 3), ("num_key_value_heads", 3), ("head_dim", 16)),
)
# Adapters of the embedding, on the first stage, and of the head, on the last stage.
ENDS = Adapted(model_type="llama", num_layers=2, targets=("embed_tokens", "q_proj", "lm_head"))
# Only the last layer is trained, so outputs of the first stage do not require gradients.
LATE = Adapted(
    model_type="llama", num_layers=2, targets=("q_proj", "down_proj"), lora=(("layers_to_transform", [1]),)
)
MOE = Adapted(
    model_type="mixtral",
    num_layers=2,
    targets=("q_proj", "o_proj"),
    lora=(("use_rslora", True), ("rank_pattern", {"o_proj": 5})),
)
T5 = Adapted(model_type="t5", num_layers=2, targets=("q", "v", "o", "wi", "wo"))

LAYOUTS = (
    Layout(tp=2, dp=2, zero=1),
    Layout(pp=2),
    Layout(tp=2, pp=2),
    Layout(dp=2, zero=1),
    Layout(dp=2, zero=2),
    Layout(tp=2, precision="bf16"),
)


def departure(choice: Adapted, layout: Layout) -> str | None:
    return parity(choice, layout).departure


@pytest.mark.parametrize(
    ("choice", "layout"),
    [
        (LLAMA, Layout(tp=2)),
        (LLAMA, Layout(sp=2, sequence="all_to_all")),
        *(
            slow_row(choice, layout, id=f"{choice.model_type} {layout}")
            for choice, layout in (
                *product((LLAMA, GPT2, BERT), LAYOUTS),
                (LLAMA, Layout(tp=4)),
                (GPT2, Layout(tp=2)),
                (BERT, Layout(tp=2)),
                (FALCON, Layout(tp=2)),
                (ALBERT, Layout(tp=2)),
                (ALBERT, Layout(pp=2)),
                (PADDED, Layout(tp=2)),
                (MOE, Layout(tp=2)),
                (ENDS, Layout(pp=2)),
                (LATE, Layout(pp=2)),
                (LLAMA, Layout(tp=2, precision="fp16")),
                (replace(LLAMA, num_layers=4), Layout(pp=2, schedule="zbv")),
                (T5, Layout(tp=2)),
                (T5, Layout(pp=2)),
                (LLAMA, Layout(tp=2, pp=2, schedule="zbh1", recompute=1.0)),
                (LLAMA, Layout(tp=2, sequence="split_gather")),
                (LLAMA, Layout(tp=2, sequence="split_gather", options=("enable_sequence_regather",))),
                (LLAMA, Layout(tp=2, sequence="ring")),
                (GPT2, Layout(tp=2, sequence="split_gather")),
                (LLAMA, Layout(tp=2, sp=2, sequence="ring_attn")),
                (LLAMA, Layout(dp=2, wp=2)),
                (LLAMA, Layout(dp=2, zero=2, overlap_allgather=True)),
                (LLAMA, Layout(tp=2, options=("enable_jit_fused",))),
            )
        ),
    ],
)
def test_a_layout_has_the_numbers_of_one_process(pool: Pool, choice: Adapted, layout: Layout) -> None:
    assert set(pool.run(layout.world_size, departure, choice, layout, timeout=180.0)) == {None}


def compiled_departure(layout: Layout) -> str | None:
    """Compare compiled layers with adapters of a column-parallel and of a row-parallel layer."""
    choice = replace(LLAMA, targets=("q_proj", "down_proj"))
    # One graph more than without adapters: the input of the first layer requires no gradient.
    with traced_layers(most_graphs=4):
        return parity(choice, layout, num_steps=2).departure


@pytest.mark.slow  # the compiler starts on every rank
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, options=("compile_layers",)),
        Layout(dp=2, zero=2, precision="bf16", recompute=1.0, options=("compile_layers",)),
    ],
    ids=str,
)
def test_compiled_layers_have_the_numbers_of_one_process(pool: Pool, layout: Layout) -> None:
    assert set(pool.run(layout.world_size, compiled_departure, layout, timeout=600.0)) == {None}
