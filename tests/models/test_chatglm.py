"""Refusals of the table of `model_type="chatglm"`, whose code comes with its checkpoints (chatglm.py)."""

import torch

from echelon.shardformer import table_for
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.table_policy import TablePolicy

from .chatglm import ChatGLMConfig, ChatGLMForConditionalGeneration


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
