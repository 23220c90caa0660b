"""Sharding of heads over ranks, and the places of padded heads. No processes: the ranks are numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from echelon.pipeline.stage_plan import StagePlan
from echelon.shardformer.layer_split import heads_of
from echelon.shardformer.tables.heads import Cut, HeadOrder, Heads
from echelon.shardformer.tables.table import Table


@pytest.mark.parametrize(
    ("query", "key_value", "ranks", "padded"),
    [
        (8, 8, 4, (8, 8)),
        (8, 2, 4, (8, 2)),
        (3, 3, 2, (4, 4)),
        (3, 3, 4, (4, 4)),
        (3, 3, 6, (6, 6)),  # without groups a rank may have only padded heads: key heads are not replicated
        (6, 3, 2, (8, 4)),
        (6, 3, 4, (8, 4)),
        (6, 3, 8, (8, 4)),
        (6, 2, 4, (8, 2)),
        (71, 1, 8, (72, 1)),
        (9, 3, 12, (12, 3)),
    ],
)
def test_the_fewest_padded_heads_make_all_ranks_equal(
    query: int, key_value: int, ranks: int, padded: tuple[int, int]
) -> None:
    heads = Heads(query=query, key_value=key_value, ranks=ranks)
    assert (heads.padded_query, heads.padded_key_value) == padded


@pytest.mark.parametrize(
    ("query", "key_value", "ranks"), [(6, 2, 4), (6, 3, 8), (12, 3, 2), (71, 1, 8), (5, 5, 3)]
)
def test_every_query_head_is_on_one_rank_with_its_key(query: int, key_value: int, ranks: int) -> None:
    heads = Heads(query=query, key_value=key_value, ranks=ranks)
    queries, keys = heads.query_cut(query), heads.key_value_cut(key_value)

    def number(cut: Cut, count: int, rank: int) -> list[int]:
        """Return the heads of a rank, counted from 1; 0 for a padded head."""
        return cut.shard(size=ranks, dim=0).local(torch.arange(1, count + 1), rank).tolist()

    local = []
    for rank in range(ranks):
        key_heads = number(keys, key_value, rank)
        query_heads = number(queries, query, rank)
        assert len(query_heads) * ranks == heads.padded_query
        per_key = len(query_heads) // len(key_heads)
        for place, head in enumerate(query_heads):
            if head:
                assert key_heads[place // per_key] - 1 == (head - 1) // heads.group
        local += [head for head in query_heads if head]
        assert heads.query_heads_of(rank) == [max(head - 1, 0) for head in query_heads]
    assert local == list(range(1, query + 1))


def test_each_block_of_a_fused_projection_is_padded() -> None:
    grouped = Heads(query=6, key_value=2, ranks=4).fused_cut(HeadOrder.BY_GROUP, 10 * 8)
    assert (grouped.blocks, grouped.padded, grouped.stretches) == ((24, 8, 8) * 2, (32, 8, 8) * 2, 2)
    by_kind = Heads(query=6, key_value=3, ranks=2).fused_cut(HeadOrder.BY_KIND, 12 * 8)
    assert (by_kind.blocks, by_kind.padded) == ((48, 24, 24), (64, 32, 32))
    between = Heads(query=3, key_value=3, ranks=2).fused_cut(HeadOrder.BY_GROUP, 9 * 8)
    assert (between.blocks, between.padded) == ((72,), (96,))


class Attention(nn.Module):
    """A layer's own numbers of heads, which differ from the config's."""

    num_queries, num_keys = 12, 6


CONFIG = SimpleNamespace(num_attention_heads=8, num_key_value_heads=4)
QUERY_HEADS: dict[str, Any] = {"query_heads": "attn.num_queries"}
GROUPED: dict[str, Any] = {"key_value": ("attn.k",)}


@pytest.mark.parametrize(
    ("named", "query", "key_value"),
    [
        ({}, 8, 8),  # the table gives key-value heads no sharding of their own
        (QUERY_HEADS, 12, 12),
        (GROUPED, 8, 4),
        (GROUPED | QUERY_HEADS, 12, 4),
        (GROUPED | {"key_value_heads": "attn.num_keys"}, 8, 6),
        (GROUPED | QUERY_HEADS | {"key_value_heads": "attn.num_keys"}, 12, 6),
    ],
)
def test_numbers_of_heads_are_of_the_layer_if_a_table_names_them_else_of_the_config(
    named: dict[str, Any], query: int, key_value: int
) -> None:
    table = Table(
        stage=StagePlan(layers="layers", entry=()),
        regions=("attn",),
        column=("attn.q", "attn.k"),
        row=("attn.o",),
        attention={"attn": "attn.o"},
        **named,
    )
    layer = nn.ModuleDict({"attn": Attention()})
    assert heads_of(CONFIG, layer, table, 2) == Heads(query=query, key_value=key_value, ranks=2)
