"""Faults put into what the tables of decoders need are found by the parity check."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from echelon.cluster.collectives import gather_from, gather_to
from echelon.shardformer import table as table_module
from echelon.shardformer.head_order import Cut, HeadOrder, Heads
from echelon.shardformer.layer import key_value, linear, region
from echelon.shardformer.table import Table
from echelon.shardformer.tables.decoders import PHI3
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool


def departure(model_type: str, tp: int = 2, **settings: object) -> str | None:
    choice = ModelChoice(model_type=model_type, num_layers=2, settings=tuple(settings.items()))
    return parity(choice, Layout(tp=tp), num_steps=1).departure


def with_table(model_type: str, table: Table, tp: int = 2, **settings: object) -> str | None:
    with patch.object(table_module, "_TABLES", {model_type: table}):
        return departure(model_type, tp, **settings)


def first_heads(x: Tensor, dim: int, num_heads: int, held: Sequence[int]) -> Tensor:
    return x.unflatten(dim, (-1, num_heads)).narrow(dim + 1, 0, len(held)).flatten(dim, dim + 1)


def slopes_of_other_heads() -> str | None:
    with patch.object(region, "own_heads", first_heads):
        return departure("bloom")


def slopes_of_other_samples() -> str | None:
    """The first dimension is taken for heads alone, and not for heads within samples."""

    def outermost(x: Tensor, dim: int, num_heads: int, held: Sequence[int]) -> Tensor:
        return x.chunk(num_heads // len(held), dim)[held[0] // len(held)]

    with patch.object(region, "own_heads", outermost):
        return departure("bloom")


def shared_keys_without_the_others_gradients() -> str | None:
    with patch.object(key_value, "gather_to", gather_from):
        return departure("falcon")


def keys_of_the_first_group() -> str | None:
    """Every rank attends with the first key-value head, on each rank that shares one."""

    class First:
        def __init__(self, group: dist.ProcessGroup) -> None:
            self.group = group

        def size(self) -> int:
            return self.group.size()

        def rank(self) -> int:
            return 0

    def first(self: Any, x: Tensor) -> Tensor:
        group, self.group = self.group, First(self.group)
        with patch.object(key_value, "gather_to", lambda parts, own, dim: gather_to(parts, own.group, dim)):
            out = native(self, x)
        self.group = group
        return out

    native = key_value.SharedKeyValueLinear1D_Col.forward
    with patch.object(key_value.SharedKeyValueLinear1D_Col, "forward", first):
        return departure("phi3", tp=4, num_key_value_heads=2)


def groups_cut_over_all_ranks() -> str | None:
    cut = Heads.fused_cut
    with patch.object(Heads, "fused_cut", lambda *given: replace(cut(*given), stretches=1)):
        return departure("falcon", tp=4, new_decoder_architecture=True, num_kv_heads=2)


def heads_in_another_order() -> str | None:
    order = {**PHI3.fused, "self_attn.qkv_proj": HeadOrder.BY_GROUP}
    return with_table("phi3", replace(PHI3, fused=order), num_key_value_heads=2)


def gate_and_up_in_one_block() -> str | None:
    return with_table("phi3", replace(PHI3, fused={**PHI3.fused, "mlp.gate_up_proj": 1}))


def a_column_that_is_a_region_without_its_entry() -> str | None:
    with patch.object(region, "enter", lambda xs, *_: xs):
        return departure("opt")


SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "head_dim": 8}


def added_heads_that_learn() -> str | None:
    forward = linear.Linear1D_Row.forward

    def keep_all(self: Any, x: Tensor) -> Tensor:
        self._is_real = None
        return forward(self, x)

    with patch.object(linear.Linear1D_Row, "forward", keep_all):
        return departure("llama", tp=4, **SIX_HEADS)


def heads_added_behind_all_instead_of_behind_each_group() -> str | None:
    def at_the_end(self: Heads, features: int, *, num_blocks: int = 1) -> Cut:
        return Cut(blocks=(features,), padded=(features // self.query * self.padded_query,))

    with patch.object(Heads, "query_cut", at_the_end):
        return departure("llama", tp=4, **SIX_HEADS)


@pytest.mark.parametrize(
    ("ranks", "mutation"),
    [
        (2, slopes_of_other_heads),
        (2, slopes_of_other_samples),
        (2, shared_keys_without_the_others_gradients),
        (4, keys_of_the_first_group),
        (2, heads_in_another_order),
        (2, gate_and_up_in_one_block),
        (2, a_column_that_is_a_region_without_its_entry),
        (4, added_heads_that_learn),
        (4, heads_added_behind_all_instead_of_behind_each_group),
    ],
)
def test_a_fault_put_in_is_found(pool: Pool, ranks: int, mutation: Callable[[], str | None]) -> None:
    found = pool.run(ranks, mutation, timeout=120.0)[0]
    assert found is not None and found.startswith("step 1: ")


def test_groups_cut_over_all_ranks_do_not_fit_the_heads_that_are_held(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        pool.run(4, groups_cut_over_all_ranks, timeout=120.0)
