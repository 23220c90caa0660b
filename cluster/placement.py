"""Placements of a parameter, one per axis: sharded, or replicated with partial or with equal gradients.

The placements are an attribute of the Parameter object, so a tied weight is sharded once, however many modules contain
it.

[Note: placements per axis] The placements are ordered, outermost first, as they were placed. The first one shards the
full tensor, the next one its shard, and so on. So two axes may shard the same dim: the `blocks` of the inner one are
lengths in a shard of the outer one, padding included. Over the axes of `LAYER_AXES` every parameter of a sharded model
has a placement. Over the data axes one without a placement is replicated, and its gradient is averaged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .layout import LAYER_AXES, MeshLayout

_ATTRIBUTE = "_echelon_placements"
_MOST_RANKS = 64  # upper bound of the numbers of ranks that an error proposes


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


class Interval(NamedTuple):
    """Consecutive entries along the sharded dim: their start in the full tensor and in the shard, and their number."""

    full: int
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
        axis: mesh axis: one of `LAYER_AXES`, or a sub-axis of "data", over which backward leaves the gradient's mean or
            sum (`SUMMED`).
        owner: the rank that has the full tensor, while all others have no entries; None shards it evenly.
    """

    size: int
    dim: int
    blocks: tuple[int, ...]
    padded: tuple[int, ...] | None = None
    replicas: int = 1
    stretches: int = 1
    axis: str = "tp"
    owner: int | None = None

    def __post_init__(self) -> None:
        if self.size % self.replicas:
            raise ValueError(f"replicas={self.replicas} does not divide size={self.size}")
        if any(padded < length for padded, length in zip(self._padded_blocks(), self.blocks, strict=True)):
            raise ValueError(f"padded={self.padded} is shorter than blocks={self.blocks}")
        stretch = self._padded_blocks()[: len(self.blocks) // self.stretches]
        if stretch * self.stretches != self._padded_blocks():
            raise ValueError(
                f"stretches={self.stretches}: blocks={self._padded_blocks()} are not as many equal parts"
            )
        if (self.size // self.replicas) % self.stretches:
            raise ValueError(
                f"stretches={self.stretches} does not divide the {self.size // self.replicas} shards"
            )
        shards = self._shards_of_stretch
        for length in self._padded_blocks() if self.owner is None else ():
            if length % shards:
                fitting = [size for size in range(1, min(length, _MOST_RANKS) + 1) if length % size == 0]
                raise ValueError(
                    f"{length} entries along dim {self.dim} are not divisible by {shards} ranks: use a number of ranks "
                    f"that divides them, one of {fitting}"
                )

    def local(self, tensor: Tensor, rank: int) -> Tensor:
        """Copy this rank's shard from the full tensor."""
        if tensor.shape[self.dim] != sum(self.blocks):
            raise AssertionError(f"length {tensor.shape[self.dim]} of dim {self.dim}, blocks {self.blocks}")
        if self.owner is not None:
            return tensor.narrow(self.dim, 0, tensor.shape[self.dim] if rank == self.owner else 0).clone()
        stretch, index = divmod(rank // self.replicas, self._shards_of_stretch)
        blocks = list(tensor.split(list(self.blocks), self.dim))
        blocks = [
            self._pad(block, length) for block, length in zip(blocks, self._padded_blocks(), strict=True)
        ]
        count = len(blocks) // self.stretches
        stretch_blocks = blocks[stretch * count : (stretch + 1) * count]
        chunks = [block.chunk(self._shards_of_stretch, self.dim)[index] for block in stretch_blocks]
        return chunks[0].clone() if len(chunks) == 1 else torch.cat(chunks, self.dim)

    def full(self, locals_: Sequence[Tensor]) -> Tensor:
        """The full tensor from the shards of all ranks of the axis, in their order, without padding."""
        if self.owner is not None:
            return locals_[self.owner]
        shards, count = self._shards_of_stretch, len(self.blocks) // self.stretches
        lengths = [length // shards for length in self._padded_blocks()[:count]]
        split = [shard.split(lengths, self.dim) for shard in locals_[:: self.replicas]]
        blocks = [
            torch.cat([shard[index] for shard in split[first : first + shards]], self.dim)
            for first in range(0, len(split), shards)
            for index in range(count)
        ]
        unpadded = [
            block.narrow(self.dim, 0, length) for block, length in zip(blocks, self.blocks, strict=True)
        ]
        return torch.cat(unpadded, self.dim)

    def intervals_of(self, rank: int) -> list[Interval]:
        """The intervals of the full tensor that a rank's shard consists of, in its order, without padding."""
        if self.owner is not None:
            return [Interval(0, 0, sum(self.blocks))] if rank == self.owner else []
        stretch, index = divmod(rank // self.replicas, self._shards_of_stretch)
        count = len(self.blocks) // self.stretches
        intervals, in_shard = [], 0
        for number, (length, padded) in enumerate(zip(self.blocks, self._padded_blocks(), strict=True)):
            share = padded // self._shards_of_stretch
            if number // count != stretch:
                continue
            without_padding = min(length, (index + 1) * share) - index * share
            if without_padding > 0:
                start = sum(self.blocks[:number]) + index * share
                intervals.append(Interval(start, in_shard, without_padding))
            in_shard += share
        return intervals

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


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """Replicated over the ranks of an axis, and so is its gradient.

    Args:
        size: number of ranks of the axis.
        axis: mesh axis.
    """

    size: int
    axis: str = "tp"


Placement = Shard | PartialGrad | Replicated
ReplicaKind = type[PartialGrad] | type[Replicated]


class TiedOtherwise(ValueError):
    """A tied parameter has a placement on an axis already, and a second layer gives it another one.

    Args:
        parameter: the parameter.
        here, there: the second placement and the first.
    """

    def __init__(self, parameter: Parameter, here: Placement, there: Placement) -> None:
        self.parameter, self._here, self._there = parameter, here, there
        super().__init__(self.naming("another layer"))

    def naming(self, other: str) -> str:
        """Return the text of the error, with the name of the first layer."""
        here, there = _differences(self._here, self._there)
        return (
            f"shares a parameter with {other}, where it is {there}, and here {here}: give it a copy of its own "
            f"(torch.nn.Parameter(weight.detach().clone())), or use {self._here.axis}_size=1"
        )


def _differences(*placements: Placement) -> list[str]:
    """Describe two placements by what differs between them."""
    texts = [
        f"sharded along dim {placement.dim}"
        if isinstance(placement, Shard)
        else f"replicated, with {'partial' if isinstance(placement, PartialGrad) else 'equal'} gradients"
        for placement in placements
    ]
    if len(set(texts)) > 1:
        return texts
    names = [
        field.name
        for field in fields(placements[0])
        if len({getattr(placement, field.name) for placement in placements}) > 1
    ]
    return [
        f"{text} with {', '.join(f'{name}={getattr(placement, name)}' for name in names)}"
        for text, placement in zip(texts, placements, strict=True)
    ]


class PlacedShard(NamedTuple):
    """One sharding of a tensor, and this rank's coordinate on its axis."""

    shard: Shard
    rank: int


def place(parameter: Parameter, placement: Placement, rank: int) -> None:
    """Set a parameter's placement on an axis, inside those on other axes, and reduce it to this rank's shard.

    The Parameter object stays the same. One that already has this placement (a tied one) is not changed.

    Raises:
        TiedOtherwise: it already has another placement on the axis, from a layer that it is tied to.
    """
    present = placements_of(parameter)
    if (other := present.get(placement.axis)) is not None:
        if other != placement:
            raise TiedOtherwise(parameter, placement, other)
        return
    if isinstance(placement, Shard):
        parameter.data = placement.local(parameter.data, rank)
    setattr(parameter, _ATTRIBUTE, {**present, placement.axis: placement})


def placements_of(tensor: Tensor) -> dict[str, Placement]:
    """The placements of a parameter by axis, outermost first; empty for any other tensor."""
    placements: dict[str, Placement] = getattr(tensor, _ATTRIBUTE, {})
    return placements


def placement_on(tensor: Tensor, axis: str) -> Placement | None:
    """The placement of a parameter on an axis; None if nothing placed it there."""
    return placements_of(tensor).get(axis)


def shard_on(tensor: Tensor, axis: str) -> Shard | None:
    """The sharding of a parameter over an axis; None if it is replicated there."""
    placement = placement_on(tensor, axis)
    return placement if isinstance(placement, Shard) else None


def is_sharded(tensor: Tensor) -> bool:
    """Return True if a rank has only a shard of a tensor."""
    placements = placements_of(tensor).values()
    return any(isinstance(placement, Shard) and placement.size > 1 for placement in placements)


def shards_of(tensor: Tensor, layout: MeshLayout) -> tuple[PlacedShard, ...]:
    """The shardings of a tensor, outermost first, as the rank of a layout has them; none for a replicated one."""
    return tuple(
        PlacedShard(placement, layout.coordinate(axis))
        for axis, placement in placements_of(tensor).items()
        if isinstance(placement, Shard)
    )


def shape_of_owner(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor on the rank that owns it, equal on all ranks; of a tensor without an owner, its shape."""
    shape = list(tensor.shape)
    for placement in placements_of(tensor).values():
        if isinstance(placement, Shard) and placement.owner is not None:
            shape[placement.dim] = sum(placement.blocks)
    return tuple(shape)


def num_summands(parameter: Tensor, axis: str) -> int:
    """The number of neighbouring ranks on an axis whose gradients of a parameter, or of its shard, are summed."""
    placement = placement_on(parameter, axis)
    return 1 if placement is None or isinstance(placement, Replicated) else _num_replicas(placement)


def is_primary(parameter: Tensor, coordinate: Callable[[str], int]) -> bool:
    """Return True on one of the ranks with the same shard of a parameter. Replicas along "data" are not considered.

    Args:
        parameter: the parameter.
        coordinate: returns this rank's coordinate on an axis.
    """
    placements = placements_of(parameter)
    return all(
        coordinate(axis) % _num_replicas(placement) == 0 for axis, placement in placements.items()
    ) and all(coordinate(axis) == 0 for axis in LAYER_AXES if axis not in placements)


def _num_replicas(placement: Placement) -> int:
    """The number of neighbouring ranks of the axis with the same values."""
    return placement.replicas if isinstance(placement, Shard) else placement.size
