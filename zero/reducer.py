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
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from ..cluster.device import numbers_on
from ..cluster.hooks import accumulates, has_foreign_last_hooks, mark_internal
from .bucket import Bucket, GradientState
from .partition import ManagedParameter
from .precision import DynamicScaler
from .slot import Slot
from .writes import WriteWatch


class _Backward(Enum):
    """The kind of backward that may run now."""

    OUTSIDE = auto()  # none that the optimizer runs; a plain loss.backward() or autograd.grad may run
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
        # Those that had a gradient of zeros after the last drop; empty after a reduction.
        self._zeroed_slots: list[Slot] = []
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
        self._slots_and_buckets = [(slot, bucket) for bucket in buckets for slot in bucket.slots]
        self._launches = group.size() > 1 and (overlap or self.shards_gradients)
        self._max_in_flight = 1 if overlap else 0  # at stage 2, while another bucket accumulates
        self._backward = _Backward.OUTSIDE
        self._postpones_averages = False
        # In the running backward: buckets not launched yet, and their slots still without their last gradient.
        self._slots_awaited: dict[Bucket, set[Slot]] = {}
        self._in_flight: deque[Bucket] = deque()
        # Weakly: the garbage collector cannot follow the hooks of a tensor that is referenced elsewhere, too. A cycle
        # through such a hook would never free this memory and its process groups.
        for index, (slot, _) in enumerate(self._slots_and_buckets):
            before = _weak_hook(Reducer._before_accumulation, ref(self), index)
            after = _weak_hook(Reducer._after_accumulation, ref(self), index)
            slot.parameter.register_hook(before)
            slot.parameter.register_post_accumulate_grad_hook(after)

    # Contexts of backwards

    def accumulating(self) -> AbstractContextManager[None]:
        """Return the context of backwards that accumulate gradients, and are not the last before a reduction.

        Outside of such a context, a backward may belong to autograd.grad. Within `last_backward`, averages begin too.
        """
        is_launching = self._backward is _Backward.LAUNCHING
        return self._running(_Backward.LAUNCHING if is_launching else _Backward.ACCUMULATING)

    @contextmanager
    def last_backward(self, parameters: Sequence[Parameter] | None = None) -> Iterator[None]:
        """Mark the backward inside as the last for these parameters, or for all, before the next reduction.

        Begins averages, see [Note: reducing while backward runs], except inside `postponing_averages`. Every rank of
        the data axis enters it for the same parameters in the same order. Inside another such context it does nothing.

        Args:
            parameters: those of a pipeline stage; None means all.
        """
        if not self.may_launch:
            with self.accumulating():
                yield
            return
        if self.is_reduced:
            self.begin_accumulation()
        in_backward = None if parameters is None else set(parameters)
        for bucket in self._buckets:
            is_covered = in_backward is None or all(slot.parameter in in_backward for slot in bucket.slots)
            if not bucket.sum_groups and is_covered:
                bucket.begin_accumulation()
                self._slots_awaited[bucket] = set(bucket.slots)
        with self.accumulating():  # includes the launches below in the writes that it accepts at its end
            with self._running(_Backward.LAUNCHING):
                yield
            for bucket in [*self._slots_awaited]:  # parameters without a gradient will get none
                self._launch(bucket)
            if self.shards_gradients and any(
                bucket.partition.needs_all_ranks_to_wait for bucket in self._buckets
            ):
                self._wait_for_averages()  # otherwise a backward that only one rank calls would wait for the others

    def every_backward(self, parameters: Sequence[Parameter] | None = None) -> AbstractContextManager[None]:
        """Return the context of a backward that may not be the last for these parameters; None means all.

        At stage 2 their gradients are averaged nevertheless, so that they stay sharded.
        """
        return self.last_backward(parameters) if self.shards_gradients else self.accumulating()

    @contextmanager
    def postponing_averages(self) -> Iterator[None]:
        """Let backwards inside begin no averages, but only accumulate. All ranks of the data axis must enter it."""
        previous, self._postpones_averages = self._postpones_averages, True
        try:
            self.begin_accumulation()
            yield
        finally:
            self._postpones_averages = previous

    @property
    def may_launch(self) -> bool:
        """Return True if a backward that starts now begins averages."""
        return self._launches and self._backward is not _Backward.LAUNCHING and not self._postpones_averages

    @contextmanager
    def _running(self, backward: _Backward) -> Iterator[None]:
        """Set the kind of the running backward in this context; the outermost one accepts its writes at the end."""
        self.num_contexts += 1
        outer, self._backward = self._backward, backward
        try:
            yield
        finally:
            self._backward = outer
            if outer is _Backward.OUTSIDE:
                self.writes.accept()

    # Reduction

    @property
    def loss_scale(self) -> float:
        """Return the loss scale of the optimizer's own backwards."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def begin_accumulation(self) -> None:
        """Begin to accumulate gradients of further backwards; the next reduction adds those reduced before.

        Reduced gradients that the model's own `zero_grad` dropped are not added. All ranks must call it.

        Raises:
            RuntimeError: gradients were written to by something other than a backward.
        """
        self.require_untouched()
        if self.is_reduced and self.writes.were_dropped:
            self.drop(to_zeros=False)
        factor = self.loss_scale * self.unscale_factor if self.is_reduced else 1.0
        self.is_reduced = False
        for bucket in self._buckets:
            bucket.begin_accumulation(factor)
        self._in_flight.clear()
        self.writes.accept_if_watching()

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients that are not reduced yet. Collective over the sum groups and the data axis.

        Raises:
            RuntimeError: gradients were written to since the backward, see [Note: writes to unreduced gradients].
        """
        self.writes.require_scaled()
        self.require_untouched()
        self.writes.forget()
        states = (GradientState.NONE, GradientState.LOCAL)
        not_reduced = [bucket for bucket in self._buckets if bucket.state in states]
        for bucket in not_reduced:
            if bucket.sum_groups:
                bucket.collect()
        flags = [float(slot.has_gradient) for slot in self.slots]
        has_gradients = numbers_on(self._device, flags, torch.float32)
        _sum_over_groups(self.slots, not_reduced, has_gradients)
        for bucket in not_reduced:
            self._launch(bucket)
        self._wait_for_averages()
        if self.slots and self._group.size() > 1:
            dist.all_reduce(has_gradients, op=dist.ReduceOp.MAX, group=self._group)
        self.is_reduced, self.has_gradients, self._zeroed_slots = True, has_gradients, []
        self.unscale_factor = 1 / self.loss_scale
        self.writes.accept()

    @torch.no_grad()
    def take_reduced(self) -> tuple[list[Tensor], list[list[bool]]]:
        """Copy the reduced gradients, set them to zeros, and begin to accumulate further ones.

        Returns:
            The slices by bucket, multiplied by the loss scale; and by bucket and slot `Slot.was_reduced`.
        """
        flags = [[slot.was_reduced for slot in bucket.slots] for bucket in self._buckets]
        slices = [bucket.gradient_slice for bucket in self._buckets]
        copies = [slice_ * (self.loss_scale * self.unscale_factor) for slice_ in slices]
        for slice_ in slices:
            slice_.zero_()
        self.writes.accept()
        self.begin_accumulation()
        return copies, flags

    @torch.no_grad()
    def restore_reduced(self, slices: Sequence[Tensor], were_reduced: Sequence[Sequence[bool]]) -> None:
        """Replace all gradients by the reduced ones that `take_reduced` returned. No communication."""
        self.drop(to_zeros=False)
        for bucket, slice_, flags in zip(self._buckets, slices, were_reduced, strict=True):
            bucket.restore_reduced(slice_, flags)
        self.is_reduced, self.unscale_factor = True, 1 / self.loss_scale
        self.writes.accept()

    def add_reduced(self, slices: Sequence[Tensor], factor: float | Tensor) -> None:
        """Add slices from `take_reduced`, times a factor, to the reduced gradients."""
        for bucket, slice_ in zip(self._buckets, slices, strict=True):
            bucket.gradient_slice.add_(slice_ * factor)
        self.writes.accept()

    @torch.no_grad()
    def scale_(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a factor, reduced or not, and begin to accumulate further ones."""
        self.begin_accumulation()
        for bucket in self._buckets:
            bucket.scale_(factor)
        self.writes.accept_if_watching()

    @property
    def holds_gradients(self) -> bool:
        """Return True if gradients were computed or assigned since the optimizer's or the model's last `zero_grad`."""
        if self.is_reduced and self.writes.were_dropped:
            return False
        return any(bucket.holds_gradients for bucket in self._buckets)

    def multiply_unscale_factor(self, factor: float) -> None:
        """Include a factor in `unscale_factor`, by which the next `unscale_` multiplies the reduced gradients."""
        self.unscale_factor *= factor

    def unscale_(self, coefficient: float = 1.0) -> None:
        """Unscale the reduced gradients in this rank's slices and multiply them by a coefficient."""
        if self.unscale_factor * coefficient != 1.0 and self._buckets:
            slices = [bucket.gradient_slice for bucket in self._buckets]
            torch._foreach_mul_(slices, self.unscale_factor * coefficient)
            self.writes.accept()
        self.unscale_factor = 1.0

    def drop(self, *, to_zeros: bool) -> None:
        """Drop all gradients, and averages in flight; with `to_zeros`, parameters with one get a gradient of zeros."""
        self._slots_awaited.clear()
        self._wait_for_averages()
        self.writes.forget()
        self.is_reduced = False
        for bucket in self._buckets:
            bucket.drop(to_zeros=to_zeros)
        self._zeroed_slots = [slot for slot in self.slots if slot.has_gradient] if to_zeros else []

    def drop_since_zeros(self) -> None:
        """Return to the state after the last drop: gradients of zeros where it left them, and no others."""
        zeroed_slots = self._zeroed_slots
        self.drop(to_zeros=False)
        for slot in zeroed_slots:
            slot.was_reduced = True  # counts as a gradient, which the next drop sets to zeros
        self.drop(to_zeros=True)

    def require_untouched(self) -> None:
        """Raise RuntimeError if something other than a backward wrote to gradients that are not reduced yet.

        Sharded gradients must not be dropped or replaced either, see `WriteWatch.require_kept`.
        """
        self.writes.require_no_writes()
        if not self.is_reduced:  # after a step the model's own zero_grad drops them
            self.writes.require_kept(reduced=False)

    def require_unchanged(self) -> None:
        """Raise RuntimeError if reduced gradients were changed in a way that the step would not use."""
        self.writes.require_scaled()
        self.writes.require_no_writes()
        self.writes.require_kept(reduced=True)

    def _record_last_gradient(self, slot: Slot, bucket: Bucket) -> None:
        """Record that a backward computed the last gradient of a slot; launch the buckets that are complete now.

        Buckets are launched in the order of `_slots_awaited`, equal on all ranks: an incomplete one delays the next.
        """
        if bucket not in self._slots_awaited:
            return
        self._slots_awaited[bucket].discard(slot)
        while self._slots_awaited:
            next_bucket, missing_slots = next(iter(self._slots_awaited.items()))
            if missing_slots:
                return
            self._launch(next_bucket)

    def _launch(self, bucket: Bucket) -> None:
        """Begin to average a bucket. Every rank of the data axis launches the same buckets in the same order."""
        self._slots_awaited.pop(bucket, None)
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

    def _prepare_for_gradient(self, bucket: Bucket) -> None:
        """Let a bucket accumulate, with memory for gradients, before a backward computes the first one in it.

        Raises:
            RuntimeError: its gradients are being averaged.
        """
        self._require_not_averaging(bucket)
        if self.is_reduced:
            self.begin_accumulation()
        bucket.begin_accumulation()
        bucket.borrow_buffer()

    @staticmethod
    def _require_not_averaging(bucket: Bucket) -> None:
        """Raise RuntimeError if the bucket's gradients are being averaged, so that none may be added."""
        if bucket.state is GradientState.REDUCING and not bucket.shards_gradients:
            raise RuntimeError(
                "a backward adds to gradients that are being averaged: call booster.backward instead of "
                "loss.backward(), accumulate over several calls of it or of execute_pipeline inside "
                "booster.no_sync(model, optimizer), all but the last, and checkpoint with use_reentrant=False"
            )

    def _before_accumulation(self, index: int, gradient: Tensor | None) -> None:
        """Prepare a bucket for a gradient that autograd will add to `parameter.grad`: a hook of the parameter.

        autograd.grad runs this hook too, without adding a gradient.

        Args:
            index: of the parameter in `_slots_and_buckets`.
            gradient: None if autograd adds none: it is deferred (zbh1, zbv), or was added by its product.
        """
        slot, bucket = self._slots_and_buckets[index]
        if self._backward is _Backward.OUTSIDE:
            if not accumulates(slot.parameter):
                return
            self._enter_plain_backward()
        if gradient is None:  # nothing to prepare for
            self._require_not_averaging(bucket)
            self._record_last_gradient(slot, bucket)
            return
        if self.is_reduced or not bucket.can_accumulate:
            self._prepare_for_gradient(bucket)
        if self.shards_gradients:
            slot.set_grad(slot.unsharded_gradient)  # autograd cannot add to a placeholder

    def _enter_plain_backward(self) -> None:
        """Begin to accumulate before the first gradient of a backward that the optimizer does not run."""
        if self.writes.begin_plain_backward():
            self._before_plain_backward()
            self.begin_accumulation()

    def _after_accumulation(self, index: int, parameter: Parameter) -> None:
        """Collect a gradient that autograd has added, and launch complete buckets: a hook of the parameter.

        If a hook of the user runs later and may change the gradient, its bucket is launched at the end of backward.
        """
        slot, bucket = self._slots_and_buckets[index]
        if self._backward is _Backward.OUTSIDE:
            self.writes.record_unscaled()
        if parameter.grad is not slot.gradient:
            slot.collect()
        if self._slots_awaited and not has_foreign_last_hooks(parameter):
            self._record_last_gradient(slot, bucket)


def sums_in_order(parameters: Sequence[ManagedParameter]) -> list[tuple[int, ProcessGroup, list[int]]]:
    """Return the sums of gradients over groups, in the order in which all ranks make them.

    The first groups of all parameters come before the second ones: a gradient must be summed over its first group
    before it is sent over its second. Groups of one position are ordered by their global ranks, equally on all ranks,
    so that two ranks that share two groups cannot deadlock.

    Returns:
        For each sum the position of the group in `sum_groups`, the group, and the indices of its parameters.
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
        index = numbers_on(has_gradients.device, indices, torch.long)  # a list would be copied synchronously
        flags = has_gradients[index]
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        has_gradients[index] = flags
        for bucket in buckets:
            if bucket.sum_groups[position : position + 1] == (group,):
                assert bucket.gradients is not None  # collected
                dist.all_reduce(bucket.gradients, group=group)


def _weak_hook(method: Callable[..., None], reference: ref, index: int) -> Callable[[Any], None]:
    """Return a hook that calls a method with `index` and the hook's argument, and does not keep its object alive.

    Args:
        method: a method of a class, not bound.
        reference: to the object; once it is gone, the hook does nothing.
        index: the first argument of the method.
    """

    def call(argument: Any) -> None:
        if (owner := reference()) is not None:
            method(owner, index, argument)

    return mark_internal(call)
