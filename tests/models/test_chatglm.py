"""The table of `model_type="chatglm"`, whose code comes with its checkpoints, on the model of chatglm.py."""

import pytest
import torch

from echelon.shardformer import table_for
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.table_policy import TablePolicy
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import Report, parity

from ..pool import Pool
from .chatglm import ChatGLMConfig, ChatGLMForConditionalGeneration, register_chatglm

# Two key-value groups: on four ranks two share one.
LAYOUTS = (Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(tp=2, dp=2, zero=1), Layout(tp=4))
QUICK = (("causal", "tp2·pp2·fp32"), ("classification", "tp4·fp32"))


def registered_parity(choice: ModelChoice, layout: Layout) -> Report:
    register_chatglm()
    return parity(choice, layout)


ROWS = [
    pytest.param(
        ModelChoice(model_type="chatglm", head=head),
        layout,
        id=f"{head}-{layout}",
        marks=[pytest.mark.slow] * ((head, str(layout)) not in QUICK),
    )
    for head in ("causal", "classification")
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("choice", "layout"), ROWS)
def test_chatglm_trains_as_one_process_does(pool: Pool, choice: ModelChoice, layout: Layout) -> None:
    assert pool.run(layout.world_size, registered_parity, choice, layout, timeout=120.0)[0].departure is None


def faults(tp_size: int, **settings: object) -> list[str]:
    """What the table says of a small model with these settings."""
    table = table_for("chatglm")
    assert table is not None
    with torch.device("meta"):
        model = ChatGLMForConditionalGeneration(ChatGLMConfig(**settings))
    return split_errors(model, TablePolicy(table), tp_size=tp_size)


def test_heads_that_are_not_grouped_are_refused() -> None:
    found = faults(2, multi_query_attention=False)
    assert found[0].startswith("multi_query_attention=False in the model's config does not go with tensor")
    assert "no attribute" in found[1]


def test_groups_that_do_not_go_over_the_ranks_are_refused() -> None:
    (found,) = faults(2, num_attention_heads=6, multi_query_group_num=3)
    assert "num_multi_query_groups_per_partition=3 neither divides tp_size=2 nor is divided by it" in found


def test_a_shared_head_whose_width_does_not_divide_is_refused() -> None:
    (found, *_) = faults(4, kv_channels=6, multi_query_group_num=1)
    assert "4 ranks would share a key-value head of width 6, which is not divisible by 4" in found
