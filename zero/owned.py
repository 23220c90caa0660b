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

from ..cluster.box import Box, cuts_of, flat_boxes, whole_shape
from ..cluster.collectives import exchange_rows
from ..cluster.layout import MeshLayout
from ..cluster.mesh import ParallelMesh
from ..cluster.placement import shards_of
from .bucket import Bucket, host_copy
from .partition import Partition
from .slot import Slot


class PlacedBox(NamedTuple):
    """A box of a full parameter in the slice of a rank.

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
        return full[self.box.within(Box.whole(full.shape))]


@dataclass(frozen=True)
class _Route:
    """The parts that this rank exchanges with every rank of the team, in the same order on both sides."""

    slices: list[list[PlacedBox]]  # in its own slices
    owned: list[list[PlacedBox]]  # of the parameters that it owns

    @cached_property
    def in_slices(self) -> list[int]:
        """Return the number of entries of `slices`, by rank."""
        return _lengths(self.slices)

    @cached_property
    def in_owned(self) -> list[int]:
        """Return the number of entries of `owned`, by rank."""
        return _lengths(self.owned)


class OwnedParameters:
    """The parameters that ranks of this team step in full, and the exchanges between their slices and owners.

    The constructor moves the unrounded values of the parameters into float32 masters, which become the `piece` of
    their slots on the owners. Ranks choose equal owners without communication. Collective over the team.

    Args:
        buckets: all buckets, of which those with `is_owned` take part.
        mesh: the ranks.
        team: the group of the team; None for a team of one rank.
        device: the device on which the inner optimizer steps.
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
        self.slots: list[Slot] = []  # those that this rank owns
        if not self.buckets:
            return
        assert team is not None
        self._team, self._device, self._step_device = team, mesh.device, device
        # One exchange has one format: the widest of the parameters.
        self._dtype = reduce(torch.promote_types, (bucket.parameters.dtype for bucket in self.buckets))
        places = [mesh.layout.at(rank) for rank in get_process_group_ranks(team)]
        self._plan(places)
        for slot, values in self._gather_full(_unrounded).items():
            slot.piece = Parameter(values if device == values.device else host_copy(values))
            if device != values.device:
                self._host_gradients[slot] = host_copy(values)
        for bucket in self.buckets:
            bucket.unrounded = None

    def _plan(self, places: Sequence[MeshLayout]) -> None:
        """Choose the owners, and list the boxes that this rank exchanges with every rank of its team.

        Args:
            places: the coordinates of the ranks of the team, in order.
        """
        team_rank, tp = self._team.rank(), places[0].size("tp")
        pairs = [(bucket, slot) for bucket in self.buckets for slot in bucket.slots]
        shapes = {
            slot: whole_shape(slot.weight.shape, shards_of(slot.parameter, places[0])) for _, slot in pairs
        }
        owners = assign_owners([prod(shapes[slot]) for _, slot in pairs], len(places))
        self._shapes: dict[Slot, tuple[int, ...]] = {}  # full shapes of this rank's `slots`
        self._host_gradients: dict[Slot, Tensor] = {}  # of `slots` that are stepped on the CPU
        self._to_owners = _Route([[] for _ in places], [[] for _ in places])
        self._to_slices = _Route([[] for _ in places], [[] for _ in places])
        for (bucket, slot), owner in zip(pairs, owners, strict=True):
            if owner == team_rank:
                self.slots.append(slot)
                self._shapes[slot] = shapes[slot]
            for replicas in _ranks_by_boxes(bucket, slot, places):
                # Prefer a sender of the owner's tensor rank, and of these the nearest.
                sender = min(replicas, key=lambda rank: (rank % tp != owner % tp, abs(rank - owner), rank))
                _add(self._to_owners, team_rank, sender, owner, replicas[sender])
                for holder, parts in replicas.items():
                    _add(self._to_slices, team_rank, holder, owner, parts)

    @property
    def flags(self) -> list[float]:
        """Return a number above 0 if something else than a step wrote to a parameter on this rank; empty without any.

        Ranks have to refresh together.
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
        """Copy the masters into the slices of the parameters. One all-to-all over the team. Drop the gradients."""
        if self.buckets:
            self._scatter_masters(lambda bucket: bucket.masters, self._dtype)
        for slot in self.slots:
            assert slot.piece is not None
            slot.piece.grad = slot.piece_gradient = None

    def slices(self) -> dict[Bucket, Tensor]:
        """Return this rank's slices of the float32 masters. One all-to-all over the team."""
        slices = {bucket: torch.zeros_like(bucket.masters, dtype=torch.float32) for bucket in self.buckets}
        if slices:
            self._scatter_masters(lambda bucket: slices[bucket], torch.float32)
        return slices

    def refresh(self) -> None:
        """Update the masters from parameters that were written to; keep those that still round to their parameter.

        One all-to-all over the team.
        """
        if not self.buckets:
            return
        for slot, present in self._gather_full(lambda bucket: bucket.masters.to(self._dtype)).items():
            assert slot.piece is not None
            present = present.to(slot.piece.device)
            stays = slot.piece.to(slot.weight.dtype) == present
            slot.piece.copy_(torch.where(stays, slot.piece, present.float()))

    def _gather_full(self, slice_of: Callable[[Bucket], Tensor]) -> dict[Slot, Tensor]:
        """Return the full tensors of owned parameters, from the slices of all ranks. One all-to-all over the team.

        Args:
            slice_of: returns this rank's slice of a bucket, of gradients or of masters.
        """
        route = self._to_owners
        sent = [
            part.view_in_slice(slice_of(part.bucket)).reshape(-1) for parts in route.slices for part in parts
        ]
        like = slice_of(self.buckets[0])
        full = {slot: like.new_empty(self._shapes[slot]) for slot in self.slots}
        arrived = exchange_rows(_concatenate(sent, like), route.in_slices, route.in_owned, self._team)
        targets = [(part.view_in_full(full[part.slot]), part) for parts in route.owned for part in parts]
        _copy(targets, arrived)
        return full

    @torch.no_grad()
    def _scatter_masters(self, slice_of: Callable[[Bucket], Tensor], dtype: torch.dtype) -> None:
        """Copy the masters of all owners into this rank's slices of this format. One all-to-all over the team."""
        route = self._to_slices
        rows = [_master_box(part).reshape(-1) for parts in route.owned for part in parts]
        sent = _concatenate(rows, torch.empty(0, dtype=torch.float32, device=self._step_device))
        sent = sent.to(self._device, dtype, non_blocking=True)
        arrived = exchange_rows(sent, route.in_owned, route.in_slices, self._team)
        targets = [
            (part.view_in_slice(slice_of(part.bucket)), part) for parts in route.slices for part in parts
        ]
        _copy(targets, arrived)


def team_of(mesh: ParallelMesh, partitions: Sequence[Partition]) -> ProcessGroup | None:
    """Return the group of this rank's team; None for a team of one rank. Collective over the world the first time."""
    size = lcm(*(partition.span for partition in partitions)) * mesh.size("tp")
    if size == 1:
        return None
    return mesh.subgroup(
        "stage", [range(first, first + size) for first in range(0, mesh.size("stage"), size)]
    )


def assign_owners(sizes: Sequence[int], num_owners: int) -> list[int]:
    """Return an owner for each parameter: the largest first, each to the owner with the fewest entries so far."""
    load, owners = [0] * num_owners, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owners[index] = load.index(min(load))
        load[owners[index]] += sizes[index]
    return owners


def _ranks_by_boxes(
    bucket: Bucket, slot: Slot, places: Sequence[MeshLayout]
) -> Iterable[dict[int, list[PlacedBox]]]:
    """Group the team's ranks by the boxes of a parameter that they have; ranks with none are left out.

    Returns:
        For each group, its boxes by rank of the team.
    """
    replicas: dict[tuple[Box, ...], dict[int, list[PlacedBox]]] = {}
    for rank, place in enumerate(places):
        if parts := list(_placed_boxes(bucket, slot, place)):
            replicas.setdefault(tuple(part.box for part in parts), {})[rank] = parts
    return replicas.values()


def _placed_boxes(bucket: Bucket, slot: Slot, place: MeshLayout) -> Iterator[PlacedBox]:
    """Yield the boxes of a parameter that are in the bucket's slice of the rank at a place."""
    length = bucket.masters.numel()
    slice_start = bucket.partition.slice_index_of(place.coordinate("data")) * length
    begin, end = max(slot.start, slice_start), min(slot.stop, slice_start + length)
    shards = shards_of(slot.parameter, place)
    for flat in flat_boxes(begin - slot.start, end - slot.start, slot.weight.shape) if begin < end else ():
        for cut in cuts_of(flat, shards):
            yield PlacedBox(slot, bucket, cut.whole, begin - slice_start, flat.size, cut.shard.within(flat))
        begin += flat.numel


def _add(route: _Route, team_rank: int, holder: int, owner: int, parts: list[PlacedBox]) -> None:
    """Add parts that travel between a holder and an owner to the route of this rank, if it is one of them."""
    if holder == team_rank:
        route.slices[owner] += parts
    if owner == team_rank:
        route.owned[holder] += parts


def _unrounded(bucket: Bucket) -> Tensor:
    assert bucket.unrounded is not None
    return bucket.unrounded


def _master_box(part: PlacedBox) -> Tensor:
    assert part.slot.piece is not None
    return part.view_in_full(part.slot.piece)


def _lengths(of_ranks: list[list[PlacedBox]]) -> list[int]:
    return [sum(part.box.numel for part in parts) for parts in of_ranks]


def _concatenate(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(rows) if rows else like.new_empty(0)


def _copy(pairs: list[tuple[Tensor, PlacedBox]], arrived: Tensor) -> None:
    """Copy arrived entries into views, with a few kernels."""
    if pairs:
        rows = arrived.split([part.box.numel for _, part in pairs])
        boxes = [row.view(part.box.size) for row, (_, part) in zip(rows, pairs, strict=True)]
        torch._foreach_copy_([view for view, _ in pairs], boxes)
