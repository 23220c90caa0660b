"""Reduction of gradients: from backward to this rank's slice of the mean.

Gradients are collected into buckets during backward, summed over groups other than the data axis, and averaged over the
data axis. Gradients of a backward after a reduction are reduced separately and added to the reduced ones.

[Note: reducing while backward runs] `Reducer.last_backward` declares a backward to be the last that adds to some
parameters. The average of a bucket begins when all its parameters have their last gradient, while backward goes on.
Buckets begin in the order of a backward, the same on every rank, as NCCL requires: a bucket that is complete early
waits for those before it. Gradients that are first summed over other groups (tied parameters) are left to
`Reducer.reduce`. At stage 2 every backward is the last in this sense: each begins averages.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from ..cluster.device import numbers_on
from ..cluster.hooks import has_foreign_last_hooks, mark_internal
from .bucket import Bucket, GradientState
from .partition import ManagedParameter
from .precision import DynamicScaler
from .slot import Slot
from .writes import WriteWatch


class _Backward(Enum):
    """The kind of backward that may run now."""

    OUTSIDE = auto()  # none of the optimizer's own; a plain loss.backward() or autograd.grad may run
    ACCUMULATING = auto()  # accumulates gradients
    LAUNCHING = auto()  # accumulates gradients and begins averages


class Reducer:
    """Reduces gradients from backward into this rank's slices of the mean, and tracks their state.

    Hooks collect them into buckets. Within `last_backward` each complete bucket begins its average over the data axis.
    `reduce` sums the others over their `sum_groups`, averages what is left, and exchanges which parameters have a
    gradient: one all-reduce over the data axis.

    Args:
        buckets: memory of the gradients.
        parameters: the parameters of the buckets, in the order of the model.
        group: all ranks of the data axis.
        device: the device on which flags are exchanged.
        overlap: begin averages while backward runs.
        scaler: scales the losses of the optimizer's own backwards.
        before_plain_backward: called where a backward begins that the optimizer does not run.

    Attributes:
        slots: the slots of all parameters, in the order of the model. Ranks that share some of them in different
            buckets thus communicate in one order.
        is_reduced: True from a reduction until the next backward or drop.
        has_gradients: (len(slots),) float32, above 0 where any rank has a gradient, as of the last reduction.
        unscale_factor: removes the loss scale from reduced gradients; applied by `unscale_`.
        shards_gradients: True if every backward averages its gradients into the ranks' slices (stage 2).
        writes: detects foreign writes to gradients since the last backward or reduction.
        num_contexts: number of contexts of backwards that were entered until now.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[ManagedParameter],
        *,
        group: ProcessGroup,
        device: torch.device,
        overlap: bool = True,
        scaler: DynamicScaler | None = None,
        before_plain_backward: Callable[[], None],
    ) -> None:
        position = {managed.parameter: index for index, managed in enumerate(parameters)}
        self.slots = sorted(
            (slot for bucket in buckets for slot in bucket.slots), key=lambda slot: position[slot.parameter]
        )
        self.is_reduced = False
        self.has_gradients = torch.empty(0)
        self.unscale_factor = 1.0
        self.shards_gradients = any(bucket.shards_gradients for bucket in buckets)
        self.writes = WriteWatch(buckets, has_loss_scale=scaler is not None)
        self.num_contexts = 0
        self._zeroed_slots: list[
            Slot
        ] = []  # had a gradient of zeros after the last drop; empty after a reduction
        self._before_plain_backward = before_plain_backward
        self._group, self._device, self._scaler = group, device, scaler
        # The last gradient of a bucket is that of its first parameter in the model: backward reaches it last.
        self._buckets = sorted(
            buckets,
            key=lambda bucket: (
                bool(bucket.sum_groups),
                -min(position[slot.parameter] for slot in bucket.slots),
            ),
        )
        self._places = [(slot, bucket) for bucket in buckets for slot in bucket.slots]
        self._launches = group.size() > 1 and (overlap or self.shards_gradients)
        self._max_in_flight = 1 if overlap else 0  # at stage 2, while another bucket accumulates
        self._backward = _Backward.OUTSIDE
        self._is_held_back = False
        # In the running backward: buckets not launched yet, and their slots still without their last gradient.
        self._awaited: dict[Bucket, set[Slot]] = {}
        self._in_flight: deque[Bucket] = deque()
        # Weakly: the garbage collector cannot follow the hooks of a tensor that is referenced elsewhere, too. A cycle
        # through such a hook would never free this memory and its process groups.
        for place, (slot, _) in enumerate(self._places):
            before = _weakly(Reducer._before_accumulation, ref(self), place)
            after = _weakly(Reducer._after_accumulation, ref(self), place)
            slot.parameter.register_hook(before)
            slot.parameter.register_post_accumulate_grad_hook(after)

    # Contexts of backwards

    def accumulating(self) -> AbstractContextManager[None]:
        """Mark all backwards inside as accumulating; outside, a backward may belong to autograd.grad."""
        is_launching = self._backward is _Backward.LAUNCHING
        return self._running(_Backward.LAUNCHING if is_launching else _Backward.ACCUMULATING)

    @contextmanager
    def last_backward(self, parameters: Sequence[Parameter] | None = None) -> Iterator[None]:
        """Mark the backward inside as the last for these parameters, or for all, before the next reduction.

        Begins averages, see [Note: reducing while backward runs], except inside `held_back`. Every rank of the data
        axis enters it for the same parameters in the same order. Inside another such context it does nothing.
        """
        if not self.may_launch:
            with self.accumulating():
                yield
            return
        if self.is_reduced:
            self.open()
        expected = None if parameters is None else set(parameters)
        for bucket in self._buckets:
            is_expected = expected is None or all(slot.parameter in expected for slot in bucket.slots)
            if not bucket.sum_groups and is_expected:
                bucket.open()
                self._awaited[bucket] = set(bucket.slots)
        with self.accumulating():
            with self._running(_Backward.LAUNCHING):
                yield
            for bucket in [*self._awaited]:  # parameters without a gradient will get none
                self._launch(bucket)
            if self.shards_gradients and any(bucket.partition.ends_together for bucket in self._buckets):
                self._wait_for_averages()  # otherwise a backward that only one rank calls would wait for the others

    def every_backward(self, parameters: Sequence[Parameter] | None = None) -> AbstractContextManager[None]:
        """Return the context of a backward that may not be the last for these parameters; None means all.

        At stage 2 their gradients are averaged nevertheless, so that they stay sharded.
        """
        return self.last_backward(parameters) if self.shards_gradients else self.accumulating()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Begin no average in backwards inside. All ranks of the data axis must enter it."""
        before, self._is_held_back = self._is_held_back, True
        try:
            self.open()
            yield
        finally:
            self._is_held_back = before

    @property
    def may_launch(self) -> bool:
        """Return True if a backward that starts now begins averages."""
        return self._launches and self._backward is not _Backward.LAUNCHING and not self._is_held_back

    @contextmanager
    def _running(self, backward: _Backward) -> Iterator[None]:
        """Mark a backward of this kind as running in this context."""
        self.num_contexts += 1
        before, self._backward = self._backward, backward
        try:
            yield
        finally:
            self._backward = before
            if before is _Backward.OUTSIDE:
                self.writes.accept()

    # Reduction

    @property
    def loss_scale(self) -> float:
        """Return the loss scale of the optimizer's own backwards."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def open(self) -> None:
        """Begin to accumulate gradients of further backwards; reduced gradients are kept, and added again.

        Gradients that the model's own `zero_grad` dropped after a step are forgotten. All ranks must call it.

        Raises:
            RuntimeError: gradients were written to by something other than a backward.
        """
        self.require_untouched()
        if self.is_reduced and self.writes.were_dropped:
            self.drop(to_zeros=False)
        factor = self.loss_scale * self.unscale_factor if self.is_reduced else 1.0
        self.is_reduced = False
        for bucket in self._buckets:
            bucket.open(factor)
        self._in_flight.clear()
        self.writes.accept_again()

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients that are not reduced yet. Collective over the sum groups and the data axis.

        Raises:
            RuntimeError: gradients were written to since the backward, see [Note: writes to unreduced gradients].
        """
        self.writes.require_scaled()
        self.require_untouched()
        self.writes.forget()
        not_reduced = (GradientState.NONE, GradientState.LOCAL)
        waiting = [bucket for bucket in self._buckets if bucket.state in not_reduced]
        for bucket in waiting:
            if bucket.sum_groups:
                bucket.collect()
        flags = [float(slot.has_gradient) for slot in self.slots]
        has_gradients = numbers_on(self._device, flags, torch.float32)
        _sum_over_groups(self.slots, waiting, has_gradients)
        for bucket in waiting:
            self._launch(bucket)
        self._wait_for_averages()
        if self.slots and self._group.size() > 1:
            dist.all_reduce(has_gradients, op=dist.ReduceOp.MAX, group=self._group)
        self.is_reduced, self.has_gradients, self._zeroed_slots = True, has_gradients, []
        self.unscale_factor = 1 / self.loss_scale
        self.writes.accept()

    @torch.no_grad()
    def take_reduced(self) -> tuple[list[Tensor], list[list[bool]]]:
        """Return copies of the reduced slices, with the loss scale, and begin to accumulate from zeros.

        Also returns for every bucket and slot whether this rank gave a gradient.
        """
        flags = [[slot.was_reduced for slot in bucket.slots] for bucket in self._buckets]
        slices = [bucket.own_gradients for bucket in self._buckets]
        copies = [slice_ * (self.loss_scale * self.unscale_factor) for slice_ in slices]
        for slice_ in slices:
            slice_.zero_()
        self.writes.accept()
        self.open()
        return copies, flags

    @torch.no_grad()
    def put_back(self, slices: Sequence[Tensor], were_reduced: Sequence[Sequence[bool]]) -> None:
        """Replace all gradients by what `take_reduced` returned, as reduced ones. No communication."""
        self.drop(to_zeros=False)
        for bucket, slice_, flags in zip(self._buckets, slices, were_reduced, strict=True):
            bucket.put_back(slice_, flags)
        self.is_reduced, self.unscale_factor = True, 1 / self.loss_scale
        self.writes.accept()

    def add(self, slices: Sequence[Tensor], factor: float | Tensor) -> None:
        """Add slices from `take_reduced`, times a factor, to the reduced ones."""
        for bucket, added in zip(self._buckets, slices, strict=True):
            bucket.own_gradients.add_(added * factor)
        self.writes.accept()

    @torch.no_grad()
    def scale_(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a factor, reduced or not, and begin to accumulate further ones."""
        self.open()
        for bucket in self._buckets:
            bucket.scale_(factor)
        self.writes.accept_again()

    @property
    def holds_gradients(self) -> bool:
        """Return True if gradients were computed or assigned since the last drop, by the model's `zero_grad` too."""
        if self.is_reduced and self.writes.were_dropped:
            return False
        return any(bucket.holds_gradients for bucket in self._buckets)

    def multiply(self, factor: float) -> None:
        """Multiply the true gradients by a factor, applied to the slices by the next `unscale_`."""
        self.unscale_factor *= factor

    def unscale_(self, coefficient: float = 1.0) -> None:
        """Unscale the reduced gradients in this rank's slices and multiply them by a coefficient."""
        if self.unscale_factor * coefficient != 1.0 and self._buckets:
            slices = [bucket.own_gradients for bucket in self._buckets]
            torch._foreach_mul_(slices, self.unscale_factor * coefficient)
            self.writes.accept()
        self.unscale_factor = 1.0

    def drop(self, *, to_zeros: bool) -> None:
        """Drop all gradients, and averages in flight; with `to_zeros`, parameters with one get a gradient of zeros."""
        self._awaited.clear()
        self._wait_for_averages()
        self.writes.forget()
        self.is_reduced = False
        for bucket in self._buckets:
            bucket.drop(to_zeros=to_zeros)
        self._zeroed_slots = [slot for slot in self.slots if slot.has_gradient] if to_zeros else []

    def drop_since_zeros(self) -> None:
        """Drop all gradients that were not reduced; those that the last drop set to zeros are zeros again."""
        zeros = self._zeroed_slots
        self.drop(to_zeros=False)
        for slot in zeros:
            slot.was_reduced = True
        self.drop(to_zeros=True)

    def require_untouched(self) -> None:
        """Raise RuntimeError if something other than a backward changed gradients before further accumulation."""
        self.writes.require_no_writes()
        if not self.is_reduced:  # after a step the model's own zero_grad drops them
            self.writes.require_kept(reduced=False)

    def require_unchanged(self) -> None:
        """Raise RuntimeError if reduced gradients were changed in a way that the step would not use."""
        self.writes.require_scaled()
        self.writes.require_no_writes()
        self.writes.require_kept(reduced=True)

    def _complete(self, slot: Slot, bucket: Bucket) -> None:
        """Launch the buckets that were waiting for the last gradient of this slot in a backward."""
        if bucket not in self._awaited:
            return
        self._awaited[bucket].discard(slot)
        while self._awaited:
            following, awaited_slots = next(iter(self._awaited.items()))
            if awaited_slots:
                return
            self._launch(following)

    def _launch(self, bucket: Bucket) -> None:
        """Begin to average a bucket. Every rank of the data axis launches the same buckets in the same order."""
        self._awaited.pop(bucket, None)
        if not bucket.sum_groups:  # they are collected before they are summed
            bucket.collect()
        bucket.start_reduction()
        self._in_flight.append(bucket)
        if self.shards_gradients:
            self._wait_for_averages(self._max_in_flight)

    def _wait_for_averages(self, num_left: int = 0) -> None:
        """Wait for the averages of launched buckets, oldest first, until `num_left` are in flight."""
        while len(self._in_flight) > num_left:
            self._in_flight.popleft().finish_reduction()

    def _make_room(self, bucket: Bucket) -> None:
        """Prepare a bucket for a gradient."""
        if bucket.state is GradientState.REDUCING and not bucket.shards_gradients:
            raise RuntimeError(
                "a backward adds to gradients that are being averaged: call booster.backward instead of "
                "loss.backward(), accumulate over several calls of it or of execute_pipeline inside "
                "booster.no_sync(model, optimizer), all but the last, and checkpoint with use_reentrant=False"
            )
        if self.is_reduced:
            self.open()
        bucket.open()
        bucket.borrow()

    def _before_accumulation(self, place: int, gradient: Tensor | None) -> None:
        """Hook before a parameter's complete gradient is accumulated; `gradient` is None where it is deferred."""
        slot, bucket = self._places[place]
        if self._backward is _Backward.OUTSIDE:
            if not _accumulates(slot.parameter):
                return
            if self.writes.begin_plain_backward():
                self._before_plain_backward()
                self.open()
        if gradient is None:
            self._complete(slot, bucket)
            return
        if self.is_reduced or not bucket.has_room:
            self._make_room(bucket)
        if self.shards_gradients:
            slot.show(slot.local_gradient)  # autograd is about to add to it

    def _after_accumulation(self, place: int, parameter: Parameter) -> None:
        """Hook after a gradient was accumulated. If a foreign hook may still change it, the end of backward counts."""
        slot, bucket = self._places[place]
        if self._backward is _Backward.OUTSIDE:
            self.writes.record_unscaled()
        slot.collect()
        if self._awaited and not has_foreign_last_hooks(parameter):
            self._complete(slot, bucket)


def sums_in_order(parameters: Sequence[ManagedParameter]) -> list[tuple[int, ProcessGroup, list[int]]]:
    """Return the sums over groups in order: the group's place in `sum_groups`, the group, the parameters' indices.

    The first groups of all parameters come before the second ones: a gradient must be summed over its first group
    before it is sent over its second. Groups of one place are ordered by their global ranks, equally on all ranks, so
    that two ranks that share two groups cannot deadlock.
    """
    members: dict[tuple[int, ProcessGroup], list[int]] = {}
    for index, managed in enumerate(parameters):
        for position, group in enumerate(managed.sum_groups):
            if group.size() > 1:
                members.setdefault((position, group), []).append(index)

    def order(key: tuple[int, ProcessGroup]) -> tuple[int, list[int]]:
        position, group = key
        return position, dist.get_process_group_ranks(group)

    return [(position, group, members[position, group]) for position, group in sorted(members, key=order)]


def _sum_over_groups(slots: Sequence[Slot], buckets: Sequence[Bucket], has_gradients: Tensor) -> None:
    """Sum gradients over the `sum_groups` of their parameters, in place.

    One all-reduce per bucket and group, and one of flags per group.

    Args:
        slots: the slots of this rank's parameters.
        buckets: the buckets to reduce, in the order of backward.
        has_gradients: (len(slots),) float32, 1 where this rank has a gradient; set to 1 where any rank of a sum has.
    """
    for position, group, indices in sums_in_order([slot.managed for slot in slots]):
        places = numbers_on(has_gradients.device, indices, torch.long)  # a list would be copied synchronously
        own_flags = has_gradients[places]
        dist.all_reduce(own_flags, op=dist.ReduceOp.MAX, group=group)
        has_gradients[places] = own_flags
        for bucket in buckets:
            if bucket.sum_groups[position : position + 1] == (group,):
                assert bucket.gradients is not None  # collected
                dist.all_reduce(bucket.gradients, group=group)


def _accumulates(parameter: Parameter) -> bool:
    """Return True if the running backward accumulates the parameter's gradient; that of autograd.grad does not."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:  # refused for leaves under autograd.grad
        return False


def _weakly(method: Callable[..., None], reference: ref, place: int) -> Callable[[Any], None]:
    """Return a hook that calls a method with a place and the hook's argument, while the method's object exists."""

    def call(argument: Any) -> None:
        if (owner := reference()) is not None:
            method(owner, place, argument)

    return mark_internal(call)
