"""Gradients from backward to the slice that this rank owns. What is done with them then is optimizer.py.

Collected into buckets while backward runs, they are summed over groups beside the data axis and averaged over it. A
backward that follows a reduction is reduced on its own and added to what was reduced before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from ..cluster.hooks import has_foreign_hooks, has_foreign_last_hooks, own
from .bucket import Bucket, Slot
from .launch_order import LaunchOrder
from .meeting import Meeting
from .parameter import ManagedParameter
from .partition import Partition
from .product import add_product
from .sums import sum_over_groups
from .writes import WriteWatch


class Reducer:
    """When gradients are collected, reduced, kept and forgotten.

    Args:
        buckets: where they lie.
        parameters: what they hold, in the order of the model.
        partition: the data axis, whole.
        device: where flags are exchanged.
        overlap: begin averages while backward runs.
        has_loss_scale: whether the losses of the optimizer's own backwards are scaled.

    Attributes:
        slots: the places of all parameters, in the order of the model: ranks that share some in other buckets go
            through them in one order.
        present: (len(slots),) float32, above 0 where any rank has a gradient; as of the last reduction.
        is_reduced: whether the buckets hold reduced gradients, this rank's slices of them.
        passes: whether gradients pass on to their slices in every backward (stage 2).
        resumed_factor: what reduced gradients are multiplied with when a backward is about to add to them.
        writes: who else wrote to gradients since the last backward or reduction.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[ManagedParameter],
        *,
        partition: Partition,
        device: torch.device,
        overlap: bool = True,
        has_loss_scale: bool = False,
    ) -> None:
        position = {managed.parameter: index for index, managed in enumerate(parameters)}
        self.slots = sorted(
            (slot for bucket in buckets for slot in bucket.slots), key=lambda slot: position[slot.parameter]
        )
        self.present = torch.zeros(len(self.slots), dtype=torch.float32, device=device)
        self.is_reduced = False
        self.resumed_factor = 1.0
        self.writes = WriteWatch(buckets, has_loss_scale=has_loss_scale)
        self._buckets = buckets
        self._partition = partition
        self._present_before: Tensor | None = None
        self._held_before: list[Slot] = []
        self._contributed = False
        self._meeting = Meeting(partition.group)
        self._order = LaunchOrder(
            buckets, position, max_passing=1 if overlap else 0, before_start=self._end_meeting
        )
        self._places = {slot.parameter: (slot, bucket) for bucket in buckets for slot in bucket.slots}
        self.passes = any(bucket.passes for bucket in buckets)
        self._launches = partition.group.size() > 1 and (overlap or self.passes)
        self._is_accumulating = False
        self._is_launching = False
        self._is_held_back = False
        # Weakly: the garbage collector does not see through the hooks of a tensor that lives elsewhere too, and
        # a cycle through one would keep all this memory and its process groups for ever.
        for bucket in buckets:
            for slot in bucket.slots:
                slot.parameter.register_hook(
                    _before(WeakMethod(self._before_accumulation), ref(bucket), ref(slot))
                )
                slot.parameter.register_post_accumulate_grad_hook(
                    _after(WeakMethod(self._after_accumulation), ref(slot))
                )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards inside add to the gradients, all of them; elsewhere one may be autograd.grad's."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before
            if not before:
                self.writes.note()

    @contextmanager
    def last_backward(self, parameters: Sequence[Parameter] | None = None) -> Iterator[None]:
        """What runs inside gives these parameters, or all, their last gradients before the next reduction.

        Starts averages, see [Note: reducing while backward runs]; inside `held_back` none. Every rank of the data axis
        calls for the same parameters in the same order. Within another such context it does nothing.
        """
        with self.accumulating():
            if not self.may_launch:
                yield
                return
            self._resume()  # the backward may reach none of the parameters
            self._order.expect([slot.parameter for slot in self.slots] if parameters is None else parameters)
            self._is_launching = True
            try:
                yield
            finally:
                self._is_launching = False
            self._end_meeting()
            self._order.close()
            if self.passes and any(bucket.partition.ends_together for bucket in self._buckets):
                self._order.finish()  # or a backward that only one rank calls would wait for the others

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Backwards inside start no average."""
        before, self._is_held_back = self._is_held_back, True
        try:
            yield
        finally:
            self._is_held_back = before

    @property
    def may_launch(self) -> bool:
        """Whether a backward that begins now starts averages."""
        return self._launches and not self._is_launching and not self._is_held_back

    def meet(self, call: str) -> None:
        """Make sure that all ranks are in the same call, with the same to reduce. All-gather of two integers.

        Where some rank has to reduce all have to: `torch.autograd.grad` on one looks like a backward.

        Raises:
            RuntimeError: they are not, or some forgot what others hold; on every rank.
        """
        self.begin_to_meet(call)
        self._end_meeting()

    def begin_to_meet(self, call: str) -> None:
        """`meet`, whose outcome is looked at before the first average begins, unless it may matter before."""
        held = 2 if self.is_reduced else int(self._present_before is not None)
        self._meeting.begin(call, held)
        if held:
            self._end_meeting()

    def _end_meeting(self) -> None:
        if self._meeting.end() - {2}:
            self._resume()

    def every_backward(self, parameters: Sequence[Parameter] | None = None) -> AbstractContextManager[None]:
        """The context of a backward that may not be the last for these parameters; None is all.

        At stage 2 their gradients are averaged nevertheless, so that no rank holds them whole.
        """
        if not self.passes:
            return self.accumulating()
        return self.last_backward(parameters)

    def takes(self, parameter: Parameter) -> bool:
        """Whether others may add to its gradient now, see cluster/gradient_owner.py."""
        return self._is_accumulating and parameter in self._places and not has_foreign_hooks(parameter)

    def add_rows(self, parameter: Parameter, rows_N: Tensor, values_NH: Tensor) -> None:
        """Add (N, H) values to rows of a parameter's gradient; more may come in the same backward."""
        gradient, is_first = self._to_add_to(parameter)
        if is_first:
            gradient.zero_()
        gradient.index_add_(0, rows_N, values_NH.to(gradient.dtype))

    def add_product(self, parameter: Parameter, left_RN: Tensor, right_NC: Tensor) -> None:
        """Add a product (R, C) to a parameter's gradient; more may come in the same backward."""
        gradient, is_first = self._to_add_to(parameter)
        add_product(gradient, left_RN, right_NC, is_first=is_first)

    def _to_add_to(self, parameter: Parameter) -> tuple[Tensor, bool]:
        """The gradient of a parameter in its bucket, and whether what is there is to be overwritten."""
        slot, bucket = self._places[parameter]
        self._make_room(bucket)
        slot.collect()
        assert slot.gradient is not None  # borrowed before accumulation
        is_first = slot.whole_gradient is None
        if is_first:
            parameter.grad = slot.gradient
        return slot.gradient, is_first

    def note(self, parameter: Parameter) -> None:
        """The parameter's gradient of a backward is complete, outside of autograd."""
        self._order.note(parameter)

    def require_untouched(self) -> None:
        """Raise RuntimeError where something else than a backward changed gradients that more are added to."""
        self.writes.require_no_writes()
        if not self.is_reduced:  # after a step the model's own zero_grad drops them
            self.writes.require_no_drops()

    @property
    def has_begun(self) -> bool:
        """Whether a `last_backward` began averages that `settle` has to end."""
        return self._order.has_started

    def settle(self) -> None:
        """Reduce what a `last_backward` began to average, or forget it if it was dropped."""
        if self._was_dropped():
            self.forget(to_zeros=False)
        else:
            self.reduce()

    def _was_dropped(self) -> bool:
        """Whether no rank of the data axis has a gradient. One all-reduce."""
        left = self.present.new_tensor([any(slot.parameter.grad is not None for slot in self.slots)])
        self._partition.maximum_(left)
        return not left.item()

    def forget(self, *, to_zeros: bool) -> None:
        """Drop all gradients; with `to_zeros`, parameters that have one get one of zeros."""
        self._order.reset()
        self.writes.forget()
        self.is_reduced = False
        self._present_before = None
        for bucket in self._buckets:
            bucket.forget(to_zeros=to_zeros)
        self._held_before = self._held_before if to_zeros else []
        self._show_again()
        for slot in self.slots:
            slot.parameter.grad = slot.gradient if to_zeros and slot.parameter.grad is not None else None

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what was collected. Collective over the sum groups and the data axis.

        Raises:
            RuntimeError: gradients were written to since the backward, see [Note: writes to unreduced gradients].
        """
        self.writes.require_none()
        self.writes.require_no_drops()
        self.writes.forget()
        waiting = self._left_over() if self.passes else self._order.waiting()
        for bucket in waiting:
            bucket.collect()
        flags = [float(slot.has_gradient) for slot in self.slots]
        self._contributed = any(flags)
        self.present = self.present.new_tensor(flags)
        sum_over_groups(self.slots, self.present)
        for bucket in waiting:
            bucket.start_average()
        for bucket in self._buckets:
            bucket.finish_average()
        self._order.reset()
        self._partition.maximum_(self.present)
        if self._present_before is not None:
            self.present = torch.maximum(self.present, self._present_before)
            self._present_before = None
        self._show_again()
        self.is_reduced = True
        self.resumed_factor = 1.0
        self.writes.note()

    def _show_again(self) -> None:
        """Give parameters the gradients that were reduced before, where no backward since then brought another."""
        for slot in self._held_before:
            if not self.passes and slot.parameter.grad is None:
                slot.parameter.grad = slot.gradient
        self._held_before = []

    def _left_over(self) -> list[Bucket]:
        """The buckets of which some rank of the data axis still has whole gradients. One all-reduce."""
        self._order.finish()
        buckets = self._order.waiting()
        left = [float(bucket.has_whole_gradients or bucket.needs_sum) for bucket in buckets]
        flags = self.present.new_tensor(left)
        self._partition.maximum_(flags)
        return [bucket for bucket, flag in zip(buckets, flags.tolist(), strict=True) if flag]

    def _before_accumulation(self, bucket: Bucket, slot: Slot, gradient: Tensor | None) -> None:
        """What autograd has for a parameter once all its uses are differentiated; None where rows were added."""
        if not self._is_accumulating:
            self.writes.take_in_plain_backward()
        if gradient is None:
            self._order.note(slot.parameter)
        else:
            self._make_room(bucket)
            if slot.has_passed:
                slot.parameter.grad = slot.whole_gradient  # autograd is about to add to it

    def _after_accumulation(self, slot: Slot) -> None:
        """A gradient was accumulated. Where a hook of somebody else may change it yet, its end is that of backward."""
        if not self._is_accumulating:
            self.writes.note_unscaled()
        slot.collect()
        if not has_foreign_last_hooks(slot.parameter):
            self._order.note(slot.parameter)

    def _make_room(self, bucket: Bucket) -> None:
        self._resume()
        if bucket.passes:
            bucket.borrow()
        elif bucket.is_averaging:
            raise RuntimeError(
                "a backward adds to gradients that are being averaged: call booster.backward instead of "
                "loss.backward(), accumulate over several calls of it or of execute_pipeline inside "
                "booster.no_sync(model, optimizer), all but the last, and checkpoint with use_reentrant=False"
            )

    def _resume(self) -> None:
        """Set reduced gradients aside, if there are, before a backward adds the first unreduced one."""
        if not self.is_reduced:
            return
        # The model's own zero_grad drops what this rank contributed.
        is_forgotten = self._contributed and not any(slot.parameter.grad is not None for slot in self.slots)
        for bucket in self._buckets:
            if is_forgotten:
                bucket.forget(to_zeros=False)
            else:
                bucket.set_aside(self.resumed_factor)
        if not is_forgotten:
            self._present_before = self.present
            self._held_before = [slot for slot in self.slots if slot.parameter.grad is not None]
        for slot in self.slots:
            if slot.whole_gradient is not None:
                slot.parameter.grad = None
        self.is_reduced = False


def _before(
    method: WeakMethod[Callable[[Bucket, Slot, Tensor | None], None]], bucket: ref[Bucket], slot: ref[Slot]
) -> Callable[[Tensor | None], None]:
    """A hook for what is about to be accumulated into a bucket, while the method's object lives."""

    def call(gradient: Tensor | None) -> None:
        bound, found, place = method(), bucket(), slot()
        if bound is not None and found is not None and place is not None:
            bound(found, place, gradient)

    return own(call)


def _after(method: WeakMethod[Callable[[Slot], None]], slot: ref[Slot]) -> Callable[[Parameter], None]:
    """A hook for a gradient that was accumulated, while the method's object lives."""

    def call(_: Parameter) -> None:
        bound, place = method(), slot()
        if bound is not None and place is not None:
            bound(place)

    return own(call)
