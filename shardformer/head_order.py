"""How the heads of query, key and value lie in a projection that fuses them, and how it is cut between heads."""

from dataclasses import dataclass
from enum import Enum


class HeadOrder(Enum):
    """The order of heads among the outputs of one projection.

    BY_KIND: all query heads, then all keys, then all values.
    BY_GROUP: for each key-value head the query heads that share it, its key, its value. With as many of the one as of
        the other: query, key and value of each head.
    """

    BY_KIND = "all query heads, all keys, all values"
    BY_GROUP = "for each key-value head its query heads, its key, its value"


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of an attention that are spread over ranks.

    Args:
        query: how many query heads there are.
        key_value: how many key-value heads; `query` is a multiple.
        ranks: over how many ranks; divides `query`, and divides `key_value` or is a multiple of it.
    """

    query: int
    key_value: int
    ranks: int

    @property
    def copies(self) -> int:
        """How many neighbouring ranks share a key-value head."""
        return max(self.ranks // self.key_value, 1)

    def width(self, outputs: int) -> int:
        """The width of a head, from the outputs of a projection of all of them."""
        return outputs // (self.query + 2 * self.key_value)

    def block_sizes(self, order: HeadOrder, outputs: int) -> tuple[int, ...]:
        """The lengths of the blocks that are cut on their own, see `Shard`."""
        width = self.width(outputs)
        if order is HeadOrder.BY_KIND:
            return (self.query * width, self.key_value * width, self.key_value * width)
        if self.copies == 1:
            return (outputs,)  # between key-value heads
        return (self.query // self.key_value * width, width, width) * self.key_value

    def stretches(self, order: HeadOrder) -> int:
        """How many stretches are cut each over its own ranks."""
        return self.key_value if order is HeadOrder.BY_GROUP and self.copies > 1 else 1

    def faults(self, place: str, outputs: int) -> list[str]:
        """Why a projection of all heads cannot be cut so; empty when it can."""
        if outputs % (self.query + 2 * self.key_value):
            return [
                f"{place} has {outputs} outputs, which are not {self.query} query heads and {self.key_value} "
                "key-value heads of one width"
            ]
        if self.width(outputs) % self.copies:
            return [
                f"{place}: {self.copies} ranks would share a key-value head of width {self.width(outputs)}, which is "
                f"not divisible by {self.copies}: use a smaller tp_size"
            ]
        return []
