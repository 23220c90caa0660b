"""Placement of a parameter over the ranks of an axis: sharded, or replicated with partial gradients.

A parameter without a placement is replicated over all axes, and so is its gradient. The placement is an attribute of
the Parameter object, so a tied weight is sharded once, however many modules contain it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

_ATTRIBUTE = "_echelon_placement"
_MOST_RANKS = 64  # upper bound of the numbers of ranks that an error proposes


class Interval(NamedTuple):
    """Consecutive entries along the sharded dim: their start in the full tensor and in the shard, and their number."""

    whole: int
    shard: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Sharded along `dim` over the ranks of an axis.

    Args:
        size: number of ranks of the axis.
        dim: the sharded dim.
        blocks: lengths of the fused blocks along `dim` in the full tensor (q, k and v of one projection). Each block is
            sharded separately. They add up to the full length, without padding.
        padded: lengths of the blocks after zero padding at their ends, if their own lengths are not divisible.
        replicas: number of neighbouring ranks with the same shard (fewer key-value heads than ranks). The gradient of a
            shard is partial on each of them.
        stretches: number of equal sections of the full tensor, each with an equal share of `blocks`. A section is
            sharded over its own neighbouring ranks only (the heads that share a key-value head). 1 shards over all
            ranks.
        axis: mesh axis: "tp", or a part of "data" ("wp"), over which the parameter is gathered before each use.
    """

    size: int
    dim: int
    blocks: tuple[int, ...]
    padded: tuple[int, ...] | None = None
    replicas: int = 1
    stretches: int = 1
    axis: str = "tp"

    def __post_init__(self) -> None:
        if self.size % self.replicas:
            raise ValueError(f"replicas={self.replicas} does not divide size={self.size}")
        grown = [padded - own for padded, own in zip(self._padded_blocks(), self.blocks, strict=True)]
        if any(more < 0 for more in grown):
            raise ValueError(f"padded={self.padded} is shorter than blocks={self.blocks}")
        stretch = self._padded_blocks()[: len(self.blocks) // self.stretches]
        if stretch * self.stretches != self._padded_blocks() or (self.size // self.replicas) % self.stretches:
            raise ValueError(
                f"stretches={self.stretches} neither repeats blocks={self._padded_blocks()} nor divides the "
                f"{self.size // self.replicas} shards"
            )
        shards = self._shards_of_stretch
        for length in self._padded_blocks():
            if length % shards:
                fitting = [each for each in range(1, min(length, _MOST_RANKS) + 1) if length % each == 0]
                raise ValueError(
                    f"{length} entries along dim {self.dim} are not divisible by {shards} ranks: use a number of ranks "
                    f"that divides them, one of {fitting}"
                )

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """Copy this rank's shard from the full tensor."""
        if whole.shape[self.dim] != sum(self.blocks):
            raise AssertionError(f"length {whole.shape[self.dim]} of dim {self.dim}, blocks {self.blocks}")
        stretch, index = divmod(rank // self.replicas, self._shards_of_stretch)
        blocks = list(whole.split(list(self.blocks), self.dim))
        blocks = [
            self._pad(block, length) for block, length in zip(blocks, self._padded_blocks(), strict=True)
        ]
        count = len(blocks) // self.stretches
        own = blocks[stretch * count : (stretch + 1) * count]
        mine = [block.chunk(self._shards_of_stretch, self.dim)[index] for block in own]
        return mine[0].clone() if len(mine) == 1 else torch.cat(mine, self.dim)

    def whole(self, locals_: Sequence[Tensor]) -> Tensor:
        """The full tensor from the shards of all ranks of the axis, in their order, without padding."""
        shards, count = self._shards_of_stretch, len(self.blocks) // self.stretches
        lengths = [length // shards for length in self._padded_blocks()[:count]]
        split = [shard.split(lengths, self.dim) for shard in locals_[:: self.replicas]]
        blocks = [
            torch.cat([shard[index] for shard in split[first : first + shards]], self.dim)
            for first in range(0, len(split), shards)
            for index in range(count)
        ]
        real = [block.narrow(self.dim, 0, length) for block, length in zip(blocks, self.blocks, strict=True)]
        return torch.cat(real, self.dim)

    def intervals_of(self, rank: int) -> list[Interval]:
        """The intervals of the full tensor that a rank's shard consists of, in its order, without padding."""
        own, index = divmod(rank // self.replicas, self._shards_of_stretch)
        count = len(self.blocks) // self.stretches
        found, in_shard = [], 0
        for number, (length, padded) in enumerate(zip(self.blocks, self._padded_blocks(), strict=True)):
            share = padded // self._shards_of_stretch
            if number // count != own:
                continue
            real = min(length, (index + 1) * share) - index * share
            if real > 0:
                found.append(Interval(sum(self.blocks[:number]) + index * share, in_shard, real))
            in_shard += share
        return found

    @property
    def _shards_of_stretch(self) -> int:
        return self.size // self.replicas // self.stretches

    def _padded_blocks(self) -> tuple[int, ...]:
        return self.blocks if self.padded is None else self.padded

    def _pad(self, block: Tensor, length: int) -> Tensor:
        shape = list(block.shape)
        shape[self.dim] = length - shape[self.dim]
        return block if shape[self.dim] == 0 else torch.cat([block, block.new_zeros(shape)], self.dim)


@dataclass(frozen=True, kw_only=True)
class PartialGrad:
    """Replicated over the ranks of an axis, while each rank computes a partial gradient.

    For parameters that are applied to sharded activations: a per-head norm inside attention, a router.

    Args:
        size: number of ranks of the axis.
        axis: mesh axis.
    """

    size: int
    axis: str = "tp"


Placement = Shard | PartialGrad


def place(parameter: Parameter, placement: Placement, rank: int) -> None:
    """Set a parameter's placement and reduce it to this rank's shard, in the same Parameter object.

    A parameter that already has this placement (a tied one) is not changed.

    Raises:
        ValueError: it already has another placement, from a layer that it is tied to.
    """
    present = placement_of(parameter)
    if present is not None:
        if present != placement:
            raise ValueError(
                "a parameter is tied to one that is sharded in another way: untie it "
                f"(here {placement}, there {present})"
            )
        return
    if isinstance(placement, Shard):
        parameter.data = placement.local(parameter.data, rank)
    setattr(parameter, _ATTRIBUTE, placement)


def num_parts(parameter: Tensor) -> int:
    """The number of neighbouring ranks, along its placement's axis, with partial gradients of a parameter."""
    placement = placement_of(parameter)
    if isinstance(placement, PartialGrad):
        return placement.size
    return 1 if placement is None else placement.replicas


def is_primary(parameter: Tensor, rank: int, *, axis: str) -> bool:
    """Return True if this is the first rank along an axis with this parameter, or this shard of it."""
    placement = placement_of(parameter)
    if placement is not None and placement.axis == axis:
        return rank % num_parts(parameter) == 0
    return rank == 0


def placement_of(parameter: Tensor) -> Placement | None:
    """The placement of a parameter; None if it and its gradient are replicated."""
    return getattr(parameter, _ATTRIBUTE, None)
