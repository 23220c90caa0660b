"""Steps of full parameters on one owner rank each, for optimizers that need more than a slice (Muon, Adafactor, LAMB).

    reduced slices    g0 g0 | g0 g1    of all ranks of a team: what bucket.py and reducer.py leave
      all-to-all                       float32, once per step
    owners            [g0]    [g1]     full gradients beside full float32 masters and states: the inner optimizer steps
      all-to-all                       in the format of the parameters
    slices            p0 p0 | p0 p1    all-gathered by parameter_gather.py as for any other optimizer

[Note: teams] A team is the smallest set of ranks with all entries of every parameter of a pipeline stage: neighbors on
the data axis as many as ZeRO, experts or weights are sharded over, times the tensor axis. Every team updates all
parameters, as every group of `zero_size` ranks does. In a team of one rank the pieces are views of its masters, and
nothing is sent. A piece that several ranks of a team have is sent by one of them, and returned to all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import lcm, prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.nn import Parameter

from ..cluster.box import Box, flat_boxes, global_shape, overlaps
from ..cluster.collectives import exchange_rows
from ..cluster.layout import MeshLayout
from ..cluster.mesh import ParallelMesh
from ..cluster.placement import shards_of
from .bucket import Bucket, host_copy
from .partition import Partition
from .slot import Slot


class PlacedBox(NamedTuple):
    """A box of a full parameter's entries, and their place in the bucket's slice of some rank.

    Args:
        slot: the parameter.
        bucket: its bucket.
        box: the box of the full parameter.
        start: offset in the bucket's slice of the flat box that has the entries.
        size: shape of that flat box.
        inside: selects the entries from it; other entries are padding.
    """

    slot: Slot
    bucket: Bucket
    box: Box
    start: int
    size: tuple[int, ...]
    inside: tuple[slice, ...]

    def view_in_slice(self, flat: Tensor) -> Tensor:
        """Return the view of these entries in a slice of the bucket."""
        return flat[self.start : self.start + prod(self.size)].view(self.size)[self.inside]

    def view_in_full(self, full: Tensor) -> Tensor:
        """Return the view of these entries in a tensor of the full parameter's shape."""
        return full[self.box.within(Box.full(full.shape))]


@dataclass(frozen=True)
class _Exchange:
    """The boxes that this rank exchanges with every rank of the team, in the same order on both sides.

    Args:
        slices: by rank of the team, boxes in this rank's slices of parameters that the other rank owns.
        owned: by rank of the team, boxes of parameters that this rank owns in the other rank's slices.
    """

    slices: list[list[PlacedBox]]
    owned: list[list[PlacedBox]]

    @cached_property
    def in_slices(self) -> list[int]:
        """Return the number of entries of `slices`, by rank."""
        return _num_entries(self.slices)

    @cached_property
    def in_owned(self) -> list[int]:
        """Return the number of entries of `owned`, by rank."""
        return _num_entries(self.owned)


class OwnedParameters:
    """The parameters that ranks of this team step in full, and the exchanges between their slices and owners.

    The constructor moves the unrounded values of the parameters into float32 masters, which become the `piece` of
    their slots on the owners. Ranks choose equal owners without communication. Collective over the team.

    Args:
        buckets: all buckets, of which those with `is_owned` take part.
        mesh: the ranks.
        team: the group of the team; None for a team of one rank, which owns nothing here: its slices are full.
        device: the device on which the inner optimizer steps. If it is the CPU beside a GPU, the parameters of `slots`
            get a buffer there for their gradients.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        mesh: ParallelMesh,
        team: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.buckets = [bucket for bucket in buckets if bucket.is_owned]
        self.slots: list[Slot] = []  # of the parameters that this rank owns
        if not self.buckets:
            return
        assert team is not None  # without a team no bucket is owned
        self._team, self._device, self._step_device = team, mesh.device, device
        # One exchange has one format: the widest of the parameters.
        self._dtype = reduce(torch.promote_types, (bucket.parameters.dtype for bucket in self.buckets))
        layouts = [mesh.layout.at(rank) for rank in get_process_group_ranks(team)]
        self._plan(layouts)
        for slot, values in self._gather_full(_unrounded).items():
            slot.piece = Parameter(values if device == values.device else host_copy(values))
            if device != values.device:
                self._host_gradients[slot] = host_copy(values)
        for bucket in self.buckets:
            bucket.unrounded = None

    def _plan(self, layouts: Sequence[MeshLayout]) -> None:
        """Choose the owner of every parameter, and the boxes that this rank exchanges with each rank of its team.

        Sets `slots`, `_shapes`, `_host_gradients`, `_to_owners` and `_to_slices`. No communication.

        Args:
            layouts: the coordinates of the ranks of the team, in order.
        """
        team_rank, tp = self._team.rank(), layouts[0].size("tp")
        pairs = [(bucket, slot) for bucket in self.buckets for slot in bucket.slots]
        shapes = {
            slot: global_shape(slot.weight.shape, shards_of(slot.parameter, layouts[0])) for _, slot in pairs
        }
        owners = assign_owners([prod(shapes[slot]) for _, slot in pairs], len(layouts))
        self._shapes: dict[Slot, tuple[int, ...]] = {}  # full shapes of this rank's `slots`
        self._host_gradients: dict[Slot, Tensor] = {}  # of `slots` that are stepped on the CPU
        self._to_owners = _Exchange([[] for _ in layouts], [[] for _ in layouts])
        self._to_slices = _Exchange([[] for _ in layouts], [[] for _ in layouts])
        for (bucket, slot), owner in zip(pairs, owners, strict=True):
            if owner == team_rank:
                self.slots.append(slot)
                self._shapes[slot] = shapes[slot]
            for replicas in _ranks_by_boxes(bucket, slot, layouts):
                # Prefer a sender of the owner's tensor rank, and of these the nearest.
                sender = min(replicas, key=lambda rank: (rank % tp != owner % tp, abs(rank - owner), rank))
                _add(self._to_owners, team_rank, sender, owner, replicas[sender])
                for holder, boxes in replicas.items():
                    _add(self._to_slices, team_rank, holder, owner, boxes)

    @property
    def write_flags(self) -> list[float]:
        """Return [1.0] if something other than a step wrote to a parameter here, else [0.0]; [] if none is owned.

        Ranks add these up, because all have to call `refresh` if one has to.
        """
        return [float(any(bucket.was_written for bucket in self.buckets))] if self.buckets else []

    @property
    def master_bytes(self) -> int:
        """The bytes of this rank's full masters."""
        return sum(4 * prod(self._shapes[slot]) for slot in self.slots)

    def describe(self) -> list[str]:
        """Return one line per parameter that this rank owns."""
        return [f"{slot.managed.name} {self._shapes[slot]} in full" for slot in self.slots]

    def collect_gradients(self) -> None:
        """Gather the full reduced gradients at the owners. One all-to-all over the team."""
        if not self.buckets:
            return
        for slot, gradient in self._gather_full(lambda bucket: bucket.gradient_slice).items():
            host = self._host_gradients.get(slot)
            slot.piece_gradient = gradient if host is None else host.copy_(gradient, non_blocking=True)

    def scatter_masters(self) -> None:
        """Copy the owners' masters into all ranks' slices of the parameters, and drop the masters' gradients.

        One all-to-all over the team.
        """
        if self.buckets:
            self._scatter_into(lambda bucket: bucket.masters, self._dtype)
        for slot in self.slots:
            assert slot.piece is not None
            slot.piece.grad = slot.piece_gradient = None

    def slices(self) -> dict[Bucket, Tensor]:
        """Return this rank's slices of the float32 masters. One all-to-all over the team."""
        slices = {bucket: torch.zeros_like(bucket.masters, dtype=torch.float32) for bucket in self.buckets}
        if slices:
            self._scatter_into(lambda bucket: slices[bucket], torch.float32)
        return slices

    def refresh(self) -> None:
        """Update the masters from parameters that were written to; keep those that still round to their parameter.

        One all-to-all over the team.
        """
        if not self.buckets:
            return
        slices = {bucket: bucket.masters.to(self._dtype) for bucket in self.buckets}
        for slot, weight in self._gather_full(slices.__getitem__).items():
            assert slot.piece is not None
            weight = weight.to(slot.piece.device)
            is_unchanged = slot.piece.to(slot.weight.dtype) == weight
            slot.piece.copy_(torch.where(is_unchanged, slot.piece, weight.float()))

    def _gather_full(self, slice_of: Callable[[Bucket], Tensor]) -> dict[Slot, Tensor]:
        """Assemble full tensors of the parameters that this rank owns. One all-to-all over the team.

        Args:
            slice_of: returns what this rank sends: its slice of a bucket, of gradients or of parameters.

        Returns:
            A new tensor for each slot that this rank owns, in the full parameter's shape.
        """
        exchange = self._to_owners
        sent = [
            placed.view_in_slice(slice_of(placed.bucket)).reshape(-1)
            for boxes in exchange.slices
            for placed in boxes
        ]
        like = slice_of(self.buckets[0])
        full = {slot: like.new_empty(self._shapes[slot]) for slot in self.slots}
        received = exchange_rows(_concatenate(sent, like), exchange.in_slices, exchange.in_owned, self._team)
        targets = [
            (placed.view_in_full(full[placed.slot]), placed) for boxes in exchange.owned for placed in boxes
        ]
        _copy(targets, received)
        return full

    @torch.no_grad()
    def _scatter_into(self, slice_of: Callable[[Bucket], Tensor], dtype: torch.dtype) -> None:
        """Copy the masters of all owners into slices of every rank. One all-to-all over the team.

        Args:
            slice_of: returns the slice of a bucket on this rank that is written to.
            dtype: the format in which masters are sent.
        """
        exchange = self._to_slices
        rows = [_master_box(placed).reshape(-1) for boxes in exchange.owned for placed in boxes]
        sent = _concatenate(rows, torch.empty(0, dtype=torch.float32, device=self._step_device))
        sent = sent.to(self._device, dtype, non_blocking=True)
        received = exchange_rows(sent, exchange.in_owned, exchange.in_slices, self._team)
        targets = [
            (placed.view_in_slice(slice_of(placed.bucket)), placed)
            for boxes in exchange.slices
            for placed in boxes
        ]
        _copy(targets, received)


def team_of(mesh: ParallelMesh, partitions: Sequence[Partition]) -> ProcessGroup | None:
    """Return the group of this rank's team, see [Note: teams]; None for a team of one rank.

    Collective over the world the first time.

    Args:
        mesh: all ranks.
        partitions: of all buckets, also of those over a sub-axis.
    """
    size = lcm(*(partition.span for partition in partitions)) * mesh.size("tp")
    if size == 1:
        return None
    return mesh.subgroup(
        "stage", [range(first, first + size) for first in range(0, mesh.size("stage"), size)]
    )


def assign_owners(sizes: Sequence[int], num_owners: int) -> list[int]:
    """Return an owner for each parameter, so that owners have about equally many entries.

    The largest parameters first, each to the owner with the fewest entries so far; equal on all ranks.

    Args:
        sizes: the number of entries of each parameter.
        num_owners: the number of ranks of the team.
    """
    load, owners = [0] * num_owners, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owners[index] = load.index(min(load))
        load[owners[index]] += sizes[index]
    return owners


def _ranks_by_boxes(
    bucket: Bucket, slot: Slot, layouts: Sequence[MeshLayout]
) -> Iterable[dict[int, list[PlacedBox]]]:
    """Group the team's ranks that have the same boxes of a parameter; ranks with none are left out.

    Returns:
        For each group: by rank of the team, the boxes, placed in this rank's slice.
    """
    groups: dict[tuple[Box, ...], dict[int, list[PlacedBox]]] = {}
    for rank, layout in enumerate(layouts):
        if boxes := list(_placed_boxes(bucket, slot, layout)):
            groups.setdefault(tuple(placed.box for placed in boxes), {})[rank] = boxes
    return groups.values()


def _placed_boxes(bucket: Bucket, slot: Slot, layout: MeshLayout) -> Iterator[PlacedBox]:
    """Yield the boxes of a full parameter that the rank with this layout has in its slice of the bucket."""
    length = bucket.masters.numel()
    slice_start = bucket.partition.slice_index_of(layout.coordinate("data")) * length
    begin, end = max(slot.start, slice_start), min(slot.stop, slice_start + length)
    if begin >= end:
        return
    shards = shards_of(slot.parameter, layout)
    offset = begin - slice_start  # of the flat box in the slice
    for flat in flat_boxes(begin - slot.start, end - slot.start, slot.weight.shape):
        for cut in overlaps(flat, shards):
            yield PlacedBox(slot, bucket, cut.full, offset, flat.size, cut.shard.within(flat))
        offset += flat.numel


def _add(exchange: _Exchange, team_rank: int, holder: int, owner: int, boxes: list[PlacedBox]) -> None:
    """Add boxes to this rank's side of an exchange, if it is the owner or the holder.

    Args:
        exchange: changed.
        team_rank: this rank.
        holder: the rank that has the boxes in its slices.
        owner: the rank that owns the parameter.
        boxes: of one parameter.
    """
    if holder == team_rank:
        exchange.slices[owner] += boxes
    if owner == team_rank:
        exchange.owned[holder] += boxes


def _unrounded(bucket: Bucket) -> Tensor:
    assert bucket.unrounded is not None
    return bucket.unrounded


def _master_box(placed: PlacedBox) -> Tensor:
    assert placed.slot.piece is not None
    return placed.view_in_full(placed.slot.piece)


def _num_entries(boxes_by_rank: list[list[PlacedBox]]) -> list[int]:
    return [sum(placed.box.numel for placed in boxes) for boxes in boxes_by_rank]


def _concatenate(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(rows) if rows else like.new_empty(0)


def _copy(pairs: list[tuple[Tensor, PlacedBox]], received: Tensor) -> None:
    """Copy received entries into views, each of the size of its box, with a few kernels for all."""
    if pairs:
        rows = received.split([placed.box.numel for _, placed in pairs])
        boxes = [row.view(placed.box.size) for row, (_, placed) in zip(rows, pairs, strict=True)]
        torch._foreach_copy_([view for view, _ in pairs], boxes)
