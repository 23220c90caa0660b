"""Flat memory for parameters and gradients, this rank's slice of it, and the state of the gradients.

A bucket sharded over two ranks (| bounds a slice, . is padding):

    parameters   p0 p0 p0 . p1 p1 | p1 p2 p2 p2 . .     compute dtype; every parameter is a view into it
    gradients    g0 g0 g0 . g1 g1 | g1 g2 g2 g2 . .     float32; every gradient is a view into it
    masters      m0 m0 m0 . m1 m1                       float32, on the rank that owns the slice
    pieces       [m0 m0 m0] [m1 m1]                     1-D views of the masters: what the optimizer steps

In float32 the masters are the slice of the parameters itself. Padding is zero and stays zero. With offload the masters
are on the CPU under every precision. So is a copy of the slice's gradients, made for each step. An optimizer that needs
full parameters steps them on their owners (owned.py); then the masters of a bucket are its slice of the parameters in
any format.

[Note: gradient sharding] At stage 2 unsharded gradients have no permanent memory. A bucket borrows a buffer when a
backward computes its first gradient. It returns the buffer once the gradients were averaged into the slice, which
accumulates over backwards. Usually two buffers exist: one bucket is in flight while the next one accumulates. There are
three where gradients of neighbouring buckets arrive interleaved.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from ..cluster.collectives import InFlight
from ..cluster.device import host_memory
from ..cluster.packing import packed
from ..cluster.placement import round_up
from .buffers import BufferPool
from .partition import ManagedParameter, Partition
from .slot import Slot, view_like

# In elements: 64 bytes of float32, 32 of a 16-bit format. Parameters and slices begin at multiples of it, so
# that no vector load of a kernel or a collective straddles two of them.
ALIGNMENT = 16


class GradientState(Enum):
    """State of a bucket's gradients: NONE → LOCAL → REDUCING → REDUCED, and back to LOCAL or NONE."""

    NONE = auto()  # dropped, and none accumulated since
    LOCAL = auto()  # local gradients accumulate; the next reduction adds the mean of earlier ones
    REDUCING = auto()  # their mean over the replicas is in flight
    REDUCED = auto()  # this rank's slice holds the mean


class Bucket:
    """Flat memory of parameters that are reduced and gathered together, its masters, and the state of its gradients.

    The constructor moves the parameters into flat memory of type `dtype`; the masters keep their unrounded values. All
    ranks of the partition start from the values of its first rank: one broadcast. Later only `start_reduction`
    communicates. The reducer sums over `sum_groups`, `ParameterGather` all-gathers parameters.

    Args:
        members: the parameters, all of one device, stage, partition and `sum_groups`; see `make_buckets`.
        group_index: the optimizer's parameter group.
        dtype: the format that the parameters compute in.
        partition: how the bucket is sharded over the replicas.
        pool: lends memory for unsharded gradients (stage 2); None keeps them allocated.
        communication_dtype: the format in which gradients are reduced over the data axis.
        is_offloaded: True to keep masters, and gradients for the step, on the CPU.
        is_full: True if the optimizer steps full parameters: as views of the masters where one rank has them all, else
            on their owners.

    Attributes:
        state: the state of the gradients.
        slots: one per member.
        parameters: the unsharded buffer of parameters.
        gradients: the unsharded float32 buffer of gradients; None while it is not borrowed.
        gradient_slice: this rank's slice of their mean, once REDUCED.
        masters: this rank's slice of the weights in float32.
        is_owned: True if owners keep the masters, and step them.
        unrounded: this rank's slice of the parameters in float32 as boost got them, until owners have taken it.
        stepped_gradients: `gradient_slice`, or with offload their copy on the CPU.
        counted, counted_elsewhere: ranges of `gradient_slice` that this rank, and other ranks, count in the norm.
    """

    def __init__(
        self,
        members: Sequence[ManagedParameter],
        *,
        group_index: int,
        dtype: torch.dtype,
        partition: Partition,
        pool: BufferPool | None = None,
        communication_dtype: torch.dtype = torch.float32,
        is_offloaded: bool = False,
        is_full: bool = False,
        is_owned: bool = False,
    ) -> None:
        self.state = GradientState.NONE
        self.group_index = group_index
        self.partition = partition
        self.is_full, self.is_owned = is_full, is_owned
        self.is_offloaded = is_offloaded and not is_owned
        self.sum_groups = members[0].sum_groups if members[0].needs_sum else ()
        self._pool = pool
        self._communication_dtype = communication_dtype
        self._average: InFlight[None] | None = None  # while REDUCING, where there are several replicas
        self._previous_slice: Tensor | None = None  # while LOCAL below stage 2: the mean of earlier gradients
        starts, length = _layout(members, partition.group.size())
        values = _flat_values(members, starts, length)
        partition.broadcast_(values)
        self._allocate(values, dtype)
        self.slots = [self._slot(managed, start) for managed, start in zip(members, starts, strict=True)]
        self._padding = _padding_ranges(self.slots, length)
        self.counted = list(self._ranges_of(primary=True)) if partition.is_counted else []
        self.counted_elsewhere = list(self._ranges_of(primary=False)) if partition.is_counted else []

    def _allocate(self, values: Tensor, dtype: torch.dtype) -> None:
        """Allocate the bucket's memory: see the attributes.

        Args:
            values: the unsharded parameters in float32; in float32 they become `parameters` themselves.
            dtype: the format of `parameters`.
        """
        local_slice = self.partition.local_slice(values)
        self.parameters = values if dtype == torch.float32 else values.to(dtype)
        self.gradients: Tensor | None = None
        if self._pool is not None:
            self._pool.reserve(len(values))
            self.gradient_slice = torch.zeros_like(local_slice)
        else:
            self.gradients = torch.zeros_like(values)
            self.gradient_slice = self.partition.local_slice(self.gradients)
        self.unrounded: Tensor | None = None
        if self.is_owned:
            self.unrounded = local_slice if dtype == torch.float32 else local_slice.clone()
        if self.is_offloaded:
            self.masters = host_copy(local_slice)
        else:
            self.masters = (
                local_slice.clone() if self.has_masters else self.partition.local_slice(self.parameters)
            )
        # Read by the inner optimizer in a step.
        self.stepped_gradients = host_copy(self.gradient_slice) if self.is_offloaded else self.gradient_slice

    @property
    def has_masters(self) -> bool:
        """Return True if masters have memory of their own."""
        return self.is_offloaded or (self.parameters.dtype != torch.float32 and not self.is_owned)

    @property
    def can_accumulate(self) -> bool:
        """Return True if the bucket accumulates local gradients and has memory for them."""
        return self.state is GradientState.LOCAL and self.gradients is not None

    @property
    def shards_gradients(self) -> bool:
        """Return True if unsharded gradients are in borrowed memory, see [Note: gradient sharding]."""
        return self._pool is not None

    def begin_accumulation(self, factor: float = 1.0) -> None:
        """Begin to accumulate local gradients (to LOCAL). The next reduction adds those reduced before, times `factor`.

        `factor` brings the earlier gradients to the scale of the new ones. In `parameter.grad` local gradients begin
        anew.
        """
        if self.state is GradientState.REDUCING:
            self.finish_reduction()
        if self.state is GradientState.REDUCED:
            if self.shards_gradients and factor != 1:
                self.gradient_slice.mul_(factor)
            elif not self.shards_gradients:
                self._previous_slice = self.gradient_slice * factor
            for slot in self.slots:
                if slot.unsharded_gradient is not None:  # the reduced one, to which autograd would add
                    slot.parameter.grad = None
        self.state = GradientState.LOCAL

    @property
    def holds_gradients(self) -> bool:
        """Return True if gradients were computed or assigned since the last `drop`, whose zeros do not count."""
        if self.state is not GradientState.NONE:
            return any(slot.has_gradient for slot in self.slots)
        # `drop` sets gradients of zeros as views into the bucket; an assigned gradient is another tensor.
        return any(
            slot.unsharded_gradient is not None and slot.unsharded_gradient is not slot.gradient
            for slot in self.slots
        )

    def scale_(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a factor while LOCAL: those that accumulate, and those reduced before."""
        reduced = self.gradient_slice if self.shards_gradients else self._previous_slice
        for gradients in (self.gradients, reduced):
            if gradients is not None:
                gradients.mul_(factor)

    def borrow_buffer(self) -> None:
        """Take a buffer for unsharded gradients from the pool, if the bucket has none. Gradients are uninitialized."""
        if self.gradients is not None:
            return
        assert self._pool is not None
        self.gradients = self._pool.take(len(self.parameters), torch.float32, self.parameters.device)
        for slot in self.slots:
            slot.gradient = slot.view(self.gradients)
        for start, stop in self._padding:  # has values of the bucket that used the buffer before
            self.gradients[start:stop].zero_()

    def collect(self) -> None:
        """Copy every `parameter.grad` into the buffer of gradients, and zeros for a parameter that has none."""
        self.borrow_buffer()
        for slot in self.slots:
            slot.collect()
            if slot.unsharded_gradient is None:
                assert slot.gradient is not None  # borrowed
                slot.gradient.zero_()

    def start_reduction(self) -> None:
        """Begin to average collected gradients into this rank's slice (to REDUCING).

        One collective over the replicas. At stage 2 `parameter.grad` becomes a placeholder.
        """
        assert self.gradients is not None
        for slot in self.slots:
            slot.was_reduced = slot.has_gradient
            if self.shards_gradients:
                slot.set_grad(slot.sharded_gradient if slot.was_reduced else None)
        # `data` is the same memory with a write count of its own: see [Note: writes to unreduced gradients].
        self._average = self.partition.average_(self.gradients.data, self._communication_dtype)
        self.state = GradientState.REDUCING

    def finish_reduction(self) -> None:
        """Wait for the averages, and add those of earlier reductions (from REDUCING to REDUCED).

        In any other state it does nothing.
        """
        if self.state is not GradientState.REDUCING:
            return
        assert self.gradients is not None
        average, self._average = self._average, None
        if average is not None:
            average.wait()
        if self.shards_gradients:
            self.gradient_slice.add_(self.partition.local_slice(self.gradients))
            self._return_buffer()
        elif self._previous_slice is not None:
            self.gradient_slice.add_(self._previous_slice)
            self._previous_slice = None
        for slot in self.slots:  # also of parameters that the last backward did not reach
            if slot.was_reduced and not self.shards_gradients:
                slot.set_grad(slot.gradient)
        self.state = GradientState.REDUCED

    def drop(self, *, to_zeros: bool) -> None:
        """Drop all gradients (to NONE). With `to_zeros`, parameters with a gradient get a gradient of zeros."""
        self.finish_reduction()
        self._previous_slice = None
        self.state = GradientState.NONE
        for slot in self.slots:
            becomes_zero = to_zeros and slot.has_gradient
            # Without memory for a gradient of zeros (stage 2) only this flag records that the parameter has one.
            slot.was_reduced = becomes_zero and self.shards_gradients
            slot.set_grad(slot.gradient if becomes_zero and not self.shards_gradients else None)
        if self.shards_gradients:
            self.gradient_slice.zero_()
            self._return_buffer()
        elif to_zeros and self.gradients is not None:
            self.gradients.zero_()

    def restore_reduced(self, gradient_slice: Tensor, were_reduced: Iterable[bool]) -> None:
        """Restore reduced gradients after a drop (from NONE to REDUCED). No communication.

        Args:
            gradient_slice: copied into the attribute of this name.
            were_reduced: by slot, `Slot.was_reduced`.
        """
        self.gradient_slice.copy_(gradient_slice)
        for slot, was_reduced in zip(self.slots, were_reduced, strict=True):
            slot.was_reduced = was_reduced
            view = slot.sharded_gradient if self.shards_gradients else slot.gradient
            slot.set_grad(view if was_reduced else None)
        self.state = GradientState.REDUCED

    def _return_buffer(self) -> None:
        """Return the unsharded gradients to the pool, if they came from there."""
        if self._pool is not None and self.gradients is not None:
            self._pool.give_back(self.gradients)
            self.gradients = None
            for slot in self.slots:
                slot.gradient = None

    def offload_gradients(self) -> None:
        """Begin to copy the slice's gradients to the device of the inner optimizer, see parameter_gather.py."""
        if self.is_offloaded:
            self.stepped_gradients.copy_(self.gradient_slice, non_blocking=True)

    def refresh_(self) -> None:
        """Copy parameters that were written to into the masters; keep masters that still round to their parameter."""
        if self.has_masters:
            parameters = self.partition.local_slice(self.parameters).to(self.masters.device)
            is_unchanged = self.masters.to(parameters.dtype) == parameters
            self.masters.copy_(torch.where(is_unchanged, self.masters, parameters.float()))
        self.note_versions()

    @property
    def was_written(self) -> bool:
        """Return True if `load_state_dict` or the like wrote to a parameter since masters agreed with it."""
        return any(slot.parameter._version != slot.version for slot in self.slots)

    def note_versions(self) -> None:
        """Record that the masters agree with the parameters as they are now."""
        for slot in self.slots:
            slot.version = slot.parameter._version

    def unflattened(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views into an unsharded buffer by parameter name, in the parameters' shapes."""
        return {slot.managed.name: slot.view(flat) for slot in self.slots}

    def describe(self) -> list[str]:
        """Return one line per parameter; equal lines mean equal slices of equal buffers."""
        where = (
            f"of group {self.group_index} in a bucket of {self.parameters.numel()} {self.parameters.dtype}, "
            f"slice {self.partition.index} of {self.partition.num_slices}"
        )
        return [
            f"{slot.managed.name} {tuple(slot.weight.shape)} at {slot.start} {where}" for slot in self.slots
        ]

    def _slot(self, managed: ManagedParameter, start: int) -> Slot:
        """Make a parameter a view of the flat memory from the element `start` on, and return its slot."""
        parameter, stop = managed.parameter, start + managed.parameter.numel()
        weight = view_like(self.parameters, parameter, start)
        # None lets autograd add gradients in the format of the activations to the bucket's float32 view.
        parameter.grad_dtype = None
        parameter.data = weight
        slice_start = self.partition.index * self.masters.numel()
        piece_begin, piece_end = max(start, slice_start), min(stop, slice_start + self.masters.numel())
        in_slice = slice(piece_begin - slice_start, max(piece_begin, piece_end) - slice_start)
        piece, piece_gradient = None, None
        if piece_begin < piece_end and not self.is_owned:
            shape = parameter.shape if self.is_full else (-1,)
            piece = Parameter(self.masters[in_slice].view(shape))
            piece_gradient = self.stepped_gradients[in_slice].view(shape)
        return Slot(
            managed=managed,
            start=start,
            stop=stop,
            weight=weight,
            gradient=None if self.gradients is None else view_like(self.gradients, parameter, start),
            in_slice=in_slice,
            piece=piece,
            piece_start=piece_begin - start,
            piece_gradient=piece_gradient,
            version=parameter._version,
        )

    def _ranges_of(self, *, primary: bool) -> Iterator[Tensor]:
        """Yield views of `gradient_slice`: runs of parameters whose primary rank this is, or those where it is not."""
        local = [slot for slot in self.slots if slot.in_slice.start < slot.in_slice.stop]
        for is_primary, run in groupby(local, key=lambda slot: slot.managed.is_primary):
            if is_primary == primary:
                slots = list(run)
                yield self.gradient_slice[slots[0].in_slice.start : slots[-1].in_slice.stop]


def gather_by_name(buckets: Iterable[Bucket], slice_of: Callable[[Bucket], Tensor]) -> dict[str, Tensor]:
    """All-gather slices of all buckets; return new tensors by parameter name. Collective over the data axis.

    Args:
        buckets: all buckets of a rank.
        slice_of: returns this rank's slice of a bucket, for example of gradients.
    """
    return {
        name: view
        for bucket in buckets
        for name, view in bucket.unflattened(bucket.partition.gathered(slice_of(bucket))).items()
    }


def round_masters(buckets: Sequence[Bucket]) -> None:
    """Copy the masters into this rank's slices of the parameters, with a few kernels for all buckets."""
    pairs = [
        (bucket.partition.local_slice(bucket.parameters), bucket.masters)
        for bucket in buckets
        if bucket.has_masters
    ]
    if pairs:
        slices, masters = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(slices, masters, non_blocking=True)


def make_buckets(
    groups: Sequence[Sequence[ManagedParameter]],
    *,
    partitions: Mapping[str | None, Partition],
    bucket_size: int,
    dtype: torch.dtype,
    pool: BufferPool | None = None,
    communication_dtype: torch.dtype = torch.float32,
    is_offloaded: bool = False,
    full_groups: Collection[int] = (),
    is_owned: bool = False,
) -> list[Bucket]:
    """Make buckets of at most `bucket_size` elements, or of one larger parameter. One broadcast per bucket.

    The parameters of a bucket have one parameter group, device, format, stage, partition and tuple of `sum_groups`.

    Args:
        groups: the parameters of each parameter group.
        partitions: by `ManagedParameter.sharded_over`.
        bucket_size: in elements.
        dtype: the format of parameters without one of their own.
        pool, communication_dtype, is_offloaded: see `Bucket`.
        full_groups: indices of the groups whose parameters are stepped in full.
        is_owned: True if owners step them; see `Bucket`.
    """
    buckets = []
    for index, group in enumerate(groups):
        by_key: dict[Hashable, list[ManagedParameter]] = {}  # those that may share a bucket
        for managed in group:
            # Sums over groups wait for the end of all backwards, and may join ranks of different stages.
            stage = None if managed.needs_sum else managed.stage
            sums = managed.sum_groups if managed.needs_sum else ()
            key = (managed.parameter.device, stage, sums, managed.sharded_over, managed.dtype)
            by_key.setdefault(key, []).append(managed)
        for members in by_key.values():
            for portion in packed(members, bucket_size, lambda managed: managed.parameter.numel()):
                bucket = Bucket(
                    portion,
                    group_index=index,
                    dtype=portion[0].dtype or dtype,
                    partition=partitions[portion[0].sharded_over],
                    pool=pool,
                    communication_dtype=communication_dtype,
                    is_offloaded=is_offloaded,
                    is_full=index in full_groups,
                    is_owned=is_owned and index in full_groups,
                )
                buckets.append(bucket)
    return buckets


def _layout(members: Sequence[ManagedParameter], num_ranks: int) -> tuple[list[int], int]:
    """Return the offset of each parameter, and the padded length of the bucket."""
    starts, end = [], 0
    for managed in members:
        starts.append(end)
        end = round_up(end + managed.parameter.numel(), ALIGNMENT)
    return starts, round_up(end, ALIGNMENT * num_ranks)


def _flat_values(members: Sequence[ManagedParameter], starts: Sequence[int], length: int) -> Tensor:
    """Return the float32 values of parameters at their offsets in one tensor; padding is zeros."""
    values = torch.zeros(length, dtype=torch.float32, device=members[0].parameter.device)
    for managed, start in zip(members, starts, strict=True):
        view_like(values, managed.parameter, start).copy_(managed.parameter.detach())
    return values


def _padding_ranges(slots: Sequence[Slot], length: int) -> list[tuple[int, int]]:
    """Return the ranges of a buffer between parameters and after the last one: its padding."""
    stops = [slot.stop for slot in slots]
    starts = [*(slot.start for slot in slots[1:]), length]
    return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]


def host_copy(values: Tensor) -> Tensor:
    """Return a copy in CPU memory, pinned where the values are on CUDA."""
    return host_memory(values.nbytes, values.device).view(values.dtype).view(values.shape).copy_(values)
