"""Flat memory for parameters and gradients, and this rank's slice of it. Who reduces when is optimizer.py.

A bucket, for two ranks that share it out (| bounds a slice, . is padding):

    parameters   p0 p0 p0 . p1 p1 | p1 p2 p2 p2 . .     compute dtype; every parameter is a view into it
    gradients    g0 g0 g0 . g1 g1 | g1 g2 g2 g2 . .     float32; every gradient is a view into it
    masters      m0 m0 m0 . m1 m1                       float32, on the rank that owns the slice
    pieces       [m0 m0 m0] [m1 m1]                     1-D views of the masters: what the optimizer steps

In float32 the masters are the slice of the parameters itself. Padding is zero and stays so. With offload masters are
on the CPU under every precision, and so is a copy of the slice's gradients, made for each step.

[Note: passing gradients] At stage 2 the whole gradients have no memory of their own. A bucket borrows some when a
backward brings its first gradient, and gives it back once they were averaged into the slice, which adds them up
over backwards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from ..cluster.exchange import Waitable
from ..cluster.large_pages import large_pages
from .loan import Loans
from .offload import host_copy
from .parameter import ManagedParameter
from .partition import Partition
from .sharded_gradient import ShardedGradient

# In elements: 64 bytes of float32, 32 of a 16-bit format. Parameters and slices begin at multiples of it, so
# that no vector load of a kernel or a collective straddles two of them.
ALIGNMENT = 16


@dataclass(kw_only=True, eq=False)
class Slot:
    """One parameter's place in a bucket.

    Args:
        managed: whose place it is.
        start, stop: its elements in the whole buffers.
        weight, gradient: views of the whole buffers in the parameter's shape; there is no gradient while a bucket
            of passing gradients has none.
        piece: the part of it in this rank's slice of masters, None where the slice holds nothing of it.
        piece_start: where that begins among the parameter's entries.
        piece_gradient: the part of the slice's gradients that belongs to `piece`, where that is.
        version: the parameter's version counter when its master was last known to agree with it.
        has_passed: whether a gradient of it is in the slice and gone from the whole buffer.
    """

    managed: ManagedParameter
    start: int
    stop: int
    weight: Tensor
    gradient: Tensor | None
    piece: Parameter | None
    piece_start: int
    piece_gradient: Tensor | None
    version: int
    has_passed: bool = False

    @property
    def has_gradient(self) -> bool:
        """Whether a backward gave the parameter a gradient."""
        return self.whole_gradient is not None or self.has_passed

    @property
    def whole_gradient(self) -> Tensor | None:
        """The parameter's gradient, as long as it is whole on this rank."""
        gradient = self.parameter.grad
        return None if isinstance(gradient, ShardedGradient) else gradient

    @cached_property
    def sharded_gradient(self) -> ShardedGradient:
        """The parameter's `grad` once its gradient has passed."""
        return ShardedGradient(self.weight, self.managed.name)

    def view(self, flat: Tensor) -> Tensor:
        """Its part of a whole buffer, in its shape."""
        return _view(flat, self.weight, self.start)  # the parameter itself may be on its way

    @property
    def parameter(self) -> Parameter:
        """The model's parameter."""
        return self.managed.parameter

    def collect(self) -> None:
        """Make the parameter's gradient the view into the bucket, copying in one that lies elsewhere.

        Autograd makes a new tensor for the first gradient after `zero_grad`, and adds in place from then on.
        """
        gradient = self.whole_gradient
        if gradient is None or gradient is self.gradient:
            return
        assert self.gradient is not None  # borrowed before accumulation
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {self.managed.name} is {gradient.layout} and only dense ones can be "
                "reduced: build the embedding with sparse=False"
            )
        self.gradient.copy_(gradient.detach())
        self.parameter.grad = self.gradient

    @property
    def is_in_place(self) -> bool:
        """Whether the parameter still is the view into the bucket that it was made."""
        weight = self.parameter
        return weight.data_ptr() == self.weight.data_ptr() and weight.dtype == self.weight.dtype


class Bucket:
    """Parameters of one parameter group that are reduced and gathered together.

    Building it moves the parameters into flat memory of dtype `dtype`, and the masters are what they were
    before, unrounded. All ranks of the partition start from the values of its first. One broadcast.

    Args:
        members: the parameters, all on one device.
        group_index: the optimizer's parameter group.
        dtype: the format that the parameters compute in.
        partition: how the ranks of the data axis share it out.
        loans: where memory for whole gradients is borrowed; None keeps them.
        communication_dtype: the format in which gradients travel over the data axis.
        is_offloaded: whether masters, and gradients for the step, are on the CPU.
    """

    def __init__(
        self,
        members: Sequence[ManagedParameter],
        *,
        group_index: int,
        dtype: torch.dtype,
        partition: Partition,
        loans: Loans | None = None,
        communication_dtype: torch.dtype = torch.float32,
        is_offloaded: bool = False,
    ) -> None:
        self.group_index = group_index
        self.partition = partition
        self.is_offloaded = is_offloaded
        # Where nothing travels nothing is rounded.
        self._wire_dtype = communication_dtype if partition.group.size() > 1 else torch.float32
        # Between start and finish of an average: the gradients in that format, or themselves where they have it.
        self._travelling: Tensor | None = None
        self.needs_sum = any(managed.needs_sum for managed in members)
        self._loans = loans
        starts, length = _layout(members, partition.group.size())
        device = members[0].parameter.device
        values = _memory(length, torch.float32, device).zero_()
        self.gradients = _memory(length, torch.float32, device).zero_() if loans is None else None
        self.own_gradients = (
            _memory(partition.own(values).numel(), torch.float32, device).zero_()
            if self.gradients is None
            else partition.own(self.gradients)
        )
        for managed, start in zip(members, starts, strict=True):
            _view(values, managed.parameter, start).copy_(managed.parameter.detach())
        partition.broadcast_(values)
        self.parameters = values if dtype == torch.float32 else _memory(length, dtype, device).copy_(values)
        self.masters = partition.own(values)
        if is_offloaded:
            self.masters = host_copy(self.masters)
        elif self.has_masters:
            self.masters = _memory(self.masters.numel(), torch.float32, device).copy_(self.masters)
        else:
            self.masters = partition.own(self.parameters)
        # What the inner optimizer reads in a step.
        self.stepped_gradients = host_copy(self.own_gradients) if is_offloaded else self.own_gradients
        self._reduced_before: Tensor | None = None
        self._average: Waitable | None = None
        self._has_slice = False  # whether the slice of passing gradients holds any
        if loans is not None:
            loans.expect(length, device)
        self.slots = [self._slot(managed, start) for managed, start in zip(members, starts, strict=True)]
        ends = [0, *(slot.stop for slot in self.slots)]
        begins = [*(slot.start for slot in self.slots), length]
        self._padding = [gap for gap in zip(ends, begins, strict=True) if gap[0] < gap[1]]
        self.counted = list(self._runs(counts=True)) if partition.counts else []
        self.watched = list(self._runs(counts=False)) if partition.counts else []

    @property
    def has_masters(self) -> bool:
        """Whether masters have memory of their own."""
        return self.is_offloaded or self.parameters.dtype != torch.float32

    @property
    def passes(self) -> bool:
        """Whether whole gradients are borrowed memory: see [Note: passing gradients]."""
        return self._loans is not None

    @property
    def is_averaging(self) -> bool:
        """Whether gradients are on their way between ranks."""
        return self._average is not None

    @property
    def has_whole_gradients(self) -> bool:
        """Whether there are gradients that were not averaged yet, as far as this rank knows."""
        return self.gradients is not None or any(slot.whole_gradient is not None for slot in self.slots)

    def borrow(self) -> None:
        """Have memory for whole gradients, at stage 2 once those before have passed."""
        if self._loans is None:
            return
        if self._travelling is not None:
            self.finish_average()
        if self.gradients is None:
            self.gradients = self._loans.take(self.parameters.numel())
            for slot in self.slots:
                slot.gradient = slot.view(self.gradients)
            for start, stop in self._padding:  # of a bucket that had the memory before, anything
                self.gradients[start:stop].zero_()

    def collect(self) -> None:
        """Have every gradient in the buffer, zeros for a parameter that has none."""
        self.borrow()
        for slot in self.slots:
            slot.collect()
            if slot.whole_gradient is None:
                assert slot.gradient is not None  # borrowed
                slot.gradient.zero_()

    def start_average(self) -> None:
        """Begin to average the gradients over the data axis, into this rank's slice. One collective."""
        assert self.gradients is not None
        # `data` is the same memory with a write count of its own: see [Note: writes to unreduced gradients].
        self._travelling = self.gradients.data.to(self._wire_dtype)
        self._average = self.partition.average_(self._travelling)
        if self.passes:
            for slot in self.slots:
                slot.has_passed = slot.has_gradient
                shown = slot.sharded_gradient if slot.has_passed else None
                if slot.parameter.grad is not shown:
                    slot.parameter.grad = shown

    def finish_average(self) -> None:
        """Have the averages, once they were begun, together with those before them."""
        if self._average is not None:
            self._average.wait()
            self._average = None
        travelled, self._travelling = self._travelling, None
        if travelled is not None and travelled.dtype != torch.float32:
            assert self.gradients is not None
            self.partition.own(self.gradients).copy_(self.partition.own(travelled))
        if self._reduced_before is not None:
            self.own_gradients.add_(self._reduced_before)
            self._reduced_before = None
        if travelled is not None and self.passes:
            self._take_over()

    def _take_over(self) -> None:
        """Add the averages to the slice, and give the whole gradients' memory back."""
        assert self.gradients is not None and self._loans is not None
        averages = self.partition.own(self.gradients)
        if self._has_slice:
            self.own_gradients.add_(averages)
        else:
            self.own_gradients.copy_(averages)
        self._has_slice = True
        self._give_back()

    def _give_back(self) -> None:
        if self._loans is not None and self.gradients is not None:
            self._loans.give_back(self.gradients)
            self.gradients = None
            for slot in self.slots:
                slot.gradient = None

    def set_aside(self, factor: float) -> None:
        """Keep the reduced slice, times `factor`, to be added to the next reduction."""
        if self.passes:
            self.own_gradients.mul_(factor)
        else:
            self._reduced_before = self.own_gradients * factor

    def forget(self, *, to_zeros: bool) -> None:
        """Drop what was set aside or has passed; with `to_zeros`, gradients too."""
        self._reduced_before = None
        if self.passes:
            self.own_gradients.zero_()
            self._has_slice = False
            for slot in self.slots:
                slot.has_passed = to_zeros and slot.has_gradient
                slot.parameter.grad = None
            self._give_back()
        elif to_zeros and self.gradients is not None:
            self.gradients.zero_()

    def send_gradients(self) -> None:
        """Begin to bring the slice's gradients to where the inner optimizer steps; see `offload.wait_for_copies`."""
        if self.is_offloaded:
            self.stepped_gradients.copy_(self.own_gradients, non_blocking=True)

    def round_masters(self) -> None:
        """Bring the masters into this rank's slice of the parameters."""
        if self.has_masters:
            self.partition.own(self.parameters).copy_(self.masters, non_blocking=True)

    def refresh_(self) -> None:
        """Take over parameters that were written to; masters that still round to their parameter stay."""
        if self.has_masters:
            present = self.partition.own(self.parameters).to(self.masters.device)
            stays = self.masters.to(present.dtype) == present
            self.masters.copy_(torch.where(stays, self.masters, present.float()))
        self.note_versions()

    @property
    def was_written(self) -> bool:
        """Whether a parameter was written to in place since then (`load_state_dict` does it)."""
        return any(slot.parameter._version != slot.version for slot in self.slots)

    def note_versions(self) -> None:
        """Take the parameters as they are now for what the masters say."""
        for slot in self.slots:
            slot.version = slot.parameter._version

    def unflattened(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a whole buffer by parameter name, in the parameters' shapes."""
        return {slot.managed.name: slot.view(flat) for slot in self.slots}

    def describe(self) -> list[str]:
        """One line per parameter; equal lines mean equal slices of equal buffers."""
        where = (
            f"of group {self.group_index} in a bucket of {self.parameters.numel()} {self.parameters.dtype}, "
            f"slice {self.partition.index} of {self.partition.num_slices}"
        )
        return [
            f"{slot.managed.name} {tuple(slot.weight.shape)} at {slot.start} {where}" for slot in self.slots
        ]

    def _slot(self, managed: ManagedParameter, start: int) -> Slot:
        parameter, stop = managed.parameter, start + managed.parameter.numel()
        weight = _view(self.parameters, parameter, start)
        # None: any format is accumulated, here that of the activations into the bucket's float32.
        parameter.grad_dtype = None
        parameter.data = weight
        first = self.partition.index * self.masters.numel()
        begin, end = max(start, first), min(stop, first + self.masters.numel())
        owned = begin < end
        return Slot(
            managed=managed,
            start=start,
            stop=stop,
            weight=weight,
            gradient=None if self.gradients is None else _view(self.gradients, parameter, start),
            piece=Parameter(self.masters[begin - first : end - first]) if owned else None,
            piece_start=begin - start,
            piece_gradient=self.stepped_gradients[begin - first : end - first] if owned else None,
            version=parameter._version,
        )

    def _runs(self, *, counts: bool) -> Iterator[Tensor]:
        """Stretches of this rank's gradients whose parameters it counts, or does not."""
        first, length = self.partition.index * self.masters.numel(), self.masters.numel()
        owned = [slot for slot in self.slots if slot.piece is not None]
        for key, run in groupby(owned, key=lambda slot: slot.managed.counts):
            if key == counts:
                slots = list(run)
                begin, end = max(slots[0].start, first), min(slots[-1].stop, first + length)
                yield self.own_gradients[begin - first : end - first]


def _memory(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return large_pages(torch.empty(length, dtype=dtype, device=device))


def _layout(members: Sequence[ManagedParameter], num_ranks: int) -> tuple[list[int], int]:
    """Where each parameter begins, and the padded length of the bucket."""
    starts, end = [], 0
    for managed in members:
        starts.append(end)
        end = _round_up(end + managed.parameter.numel(), ALIGNMENT)
    return starts, _round_up(end, ALIGNMENT * num_ranks)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _view(flat: Tensor, like: Tensor, start: int) -> Tensor:
    return flat[start : start + like.numel()].view(like.shape)
