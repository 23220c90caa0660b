"""The comparison of these tests can fail: faults put in on purpose are found, and the parameter is named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from echelon.cluster.collectives import all_reduce
from echelon.cluster.placement import Shard, place, placement_of
from echelon.shardformer import table as table_module
from echelon.shardformer.layer import embedding, linear, loss, region
from echelon.shardformer.tables.encoder_decoders import T5

from ..pool import Pool
from . import compare
from .compare import batch_for, build, require_same_training


def same(x: Any, *_: object) -> Any:
    return x


def without_second_row(sums_2N: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """A sum that forgets the row of the label's logit."""
    return torch.stack([all_reduce(sums_2N[0], group), sums_2N[1]])


def train() -> None:
    model = build("LlamaForCausalLM", num_key_value_heads=2, tie_word_embeddings=False)
    require_same_training(model, batch_for(model))


def without_entry() -> None:
    with patch.object(region, "enter", same):
        train()


def without_exit() -> None:
    with patch.object(linear, "reduce_from", same):
        train()


def without_embedding_sum() -> None:
    with patch.object(embedding, "reduce_from", same):
        train()


def without_label() -> None:
    with patch.object(loss, "all_reduce", without_second_row):
        train()


def without_copies() -> None:
    """A key-value head that two ranks share is taken for one of their own."""

    def first_copy(parameter: torch.nn.Parameter, **kwargs: Any) -> Tensor:
        placement = placement_of(parameter)
        if isinstance(placement, Shard) and placement.copies > 1:
            assert parameter.grad is not None
            return placement.whole(compare.pieces(parameter.grad))
        return native(parameter, **kwargs)

    native = compare.whole_of
    model = build("LlamaForCausalLM", num_key_value_heads=1)
    with patch.object(compare, "whole_of", first_copy):
        require_same_training(model, batch_for(model))


def train_t5() -> None:
    model = build("T5ForConditionalGeneration")
    require_same_training(model, batch_for(model))


def without_second_entry() -> None:
    """Cross attention's part of the gradient of the encoder's states stays what each rank has of it."""
    table = replace(T5, second_input={})
    with patch.object(table_module, "_TABLES", {"t5": table}):
        train_t5()


def with_the_bias_of_other_heads() -> None:
    """Every rank computes with the position biases of the first rank's heads."""

    def first(parameter: torch.nn.Parameter, placement: Shard, rank: int) -> None:
        place(parameter, placement, 0)

    with patch.object(region, "place", first):
        train_t5()


def with_a_whole_bias() -> None:
    with patch.object(region.SplitParameter, "from_native_module", lambda module, group, **kwargs: module):
        train_t5()


@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        (without_entry, r"is not that of rank|departs"),
        (without_exit, r"the loss departs by"),
        (without_embedding_sum, r"the loss departs by"),
        (without_label, r"the loss departs by"),
        (without_copies, r"k_proj.weight departs"),
        (without_second_entry, r"is not that of rank|departs"),
        (with_the_bias_of_other_heads, r"the loss departs by"),
    ],
)
def test_a_fault_put_in_is_found(pool: Pool, mutation: Callable[[], None], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        pool.run(2, mutation)


def test_a_bias_left_whole_does_not_fit_the_heads_that_are_held(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="size of tensor"):
        pool.run(2, with_a_whole_bias)
