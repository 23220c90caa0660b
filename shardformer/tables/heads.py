"""Query, key and value heads in projections: their order, and how they are sharded, with padded heads if needed."""

from dataclasses import dataclass
from enum import Enum

import torch

from ...cluster.placement import Shard, round_up


class HeadOrder(Enum):
    """Order of heads in the outputs of one fused projection.

    BY_KIND: all query heads, then all keys, then all values.
    BY_GROUP: for each key-value head the query heads that share it, its key, its value. With equal numbers of query
        and key-value heads: query, key and value of each head.
    """

    BY_KIND = "all query heads, all keys, all values"
    BY_GROUP = "for each key-value head its query heads, its key, its value"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Sharding of the features of a projection; the fields have the meaning of those of `Shard`."""

    blocks: tuple[int, ...]
    padded: tuple[int, ...]
    stretches: int = 1
    replicas: int = 1

    def shard(self, *, size: int, dim: int) -> Shard:
        """Return the placement of a tensor with these features along `dim`."""
        padded = None if self.padded == self.blocks else self.padded
        return Shard(
            size=size,
            dim=dim,
            blocks=self.blocks,
            padded=padded,
            stretches=self.stretches,
            replicas=self.replicas,
        )


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention heads sharded over ranks.

    [Note: padded heads] If the ranks do not divide the number of heads, heads with zero weights are added, so that all
    ranks have equally many: key-value heads after the last one, and query heads after the last one of each group that
    shares a key-value head. Their outputs are dropped before the row-parallel layer that ends the region
    (`Linear1D_Row`), so their weights get zero gradients and stay zero.

    Args:
        query: number of query heads.
        key_value: number of key-value heads; divides `query`.
        ranks: number of ranks.
    """

    query: int
    key_value: int
    ranks: int

    @property
    def group(self) -> int:
        """Number of query heads that share a key-value head."""
        return self.query // self.key_value

    @property
    def padded_key_value(self) -> int:
        """Number of key-value heads, including padded heads: the ranks divide it, or it divides the ranks."""
        if self.key_value > self.ranks or self.group == 1:
            return round_up(self.key_value, self.ranks)
        return next(count for count in range(self.key_value, self.ranks + 1) if self.ranks % count == 0)

    @property
    def padded_group(self) -> int:
        """Number of query heads that share a key-value head, including padded heads; a multiple of `replicas`."""
        return round_up(self.group, self.replicas)

    @property
    def padded_query(self) -> int:
        """Number of query heads, including padded heads."""
        return self.padded_key_value * self.padded_group

    @property
    def replicas(self) -> int:
        """Number of neighbouring ranks that share a key-value head."""
        return max(self.ranks // self.padded_key_value, 1)

    def query_heads_of(self, rank: int) -> list[int]:
        """Return the indices of a rank's query heads; the index of a padded head is arbitrary."""
        # Shard the numbers 1, 2, …, one for each head; padded heads get 0.
        shard = self.query_cut(self.query).shard(size=self.ranks, dim=0)
        return (shard.local(torch.arange(1, self.query + 1), rank) - 1).clamp(min=0).tolist()

    def query_cut(self, features: int, *, num_blocks: int = 1) -> Cut:
        """Return how features that belong to query heads, equally many to each, are sharded by heads.

        Args:
            features: number of features, of all blocks.
            num_blocks: number of fused blocks (query, key, value) of equal size, each with features of all heads.
        """
        width = features // num_blocks // self.query
        if self.padded_group == self.group:
            blocks, padded = (self.query * width,), (self.padded_query * width,)
            return Cut(blocks=blocks * num_blocks, padded=padded * num_blocks)
        # Key-value heads are replicated: a stretch for each, of its queries, its key and its value.
        return Cut(
            blocks=self._repeat_by_key_value(self.group * width),
            padded=(self.padded_group * width,) * self.padded_key_value,
            stretches=self.padded_key_value,
        )

    def key_value_cut(self, features: int) -> Cut:
        """Return how features that belong to key-value heads, equally many to each, are sharded by heads."""
        width = features // self.key_value
        return Cut(blocks=(features,), padded=(self.padded_key_value * width,), replicas=self.replicas)

    def fused_cut(self, order: HeadOrder, features: int) -> Cut:
        """Return how the outputs of a fused projection of query, key and value are sharded by heads.

        Args:
            order: order of the heads in the outputs.
            features: number of outputs.

        Raises:
            ValueError: the features cannot be cut between these heads.
        """
        width = self._fitting_width(order, features)
        if order is HeadOrder.BY_KIND:
            return Cut(
                blocks=(self.query * width, *(self.key_value * width,) * 2),
                padded=(self.padded_query * width, *(self.padded_key_value * width,) * 2),
            )
        if self.replicas == 1:  # between key-value heads, each with its queries
            return Cut(blocks=(features,), padded=(features // self.key_value * self.padded_key_value,))
        # Key-value heads are replicated: a stretch for each, of its queries, its key and its value.
        return Cut(
            blocks=self._repeat_by_key_value(self.group * width, width, width),
            padded=(self.padded_group * width, width, width) * self.padded_key_value,
            stretches=self.padded_key_value,
        )

    def _fitting_width(self, order: HeadOrder, features: int) -> int:
        """Return the head width of a fused projection, which the ranks that share a key-value head must divide."""
        if features % (self.query + 2 * self.key_value):
            raise ValueError(
                f"{features} outputs are not {self.query} query heads and {self.key_value} key-value heads of one "
                "width: correct the table's order or numbers of heads"
            )
        width = features // (self.query + 2 * self.key_value)
        if width % self.replicas:
            raise ValueError(
                f"a key-value head of width {width} is not divisible by the {self.replicas} ranks that share "
                "it: use a smaller tp_size"
            )
        if order is HeadOrder.BY_KIND and self.padded_group != self.group:
            raise ValueError(
                f"the {self.group} query heads of a key-value head are not divisible by the {self.replicas} "
                "ranks that share it: use a smaller tp_size"
            )
        return width

    def _repeat_by_key_value(self, *lengths: int) -> tuple[int, ...]:
        """Return blocks of these lengths once for each key-value head; those of padded heads have length 0."""
        num_padded = self.padded_key_value - self.key_value
        return lengths * self.key_value + (0,) * (len(lengths) * num_padded)
