"""Gradients from backward to the slice that this rank owns. What is done with them then is optimizer.py.

They are collected into buckets while backward runs, then summed over groups beside the data axis and averaged
over it, once. A backward that follows a reduction is reduced on its own and added to what was reduced before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ..cluster.hooks import has_foreign_hooks, own
from .bucket import Bucket, Slot
from .launch_order import LaunchOrder
from .parameter import ManagedParameter
from .partition import Partition


class Reducer:
    """When gradients are collected, reduced, kept and forgotten.

    Args:
        buckets: where they lie.
        parameters: what they hold, in the order of the model.
        partition: the data axis.
        device: where flags are exchanged.

    Attributes:
        slots: the places of all parameters.
        present: (len(slots),) float32, above 0 where any rank has a gradient; as of the last reduction.
        is_reduced: whether the buckets hold reduced gradients, this rank's slices of them.
        resumed_factor: what reduced gradients are multiplied with when a backward is about to add to them.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[ManagedParameter],
        *,
        partition: Partition,
        device: torch.device,
    ) -> None:
        self.slots = [slot for bucket in buckets for slot in bucket.slots]
        self.present = torch.zeros(len(self.slots), device=device)
        self.is_reduced = False
        self.resumed_factor = 1.0
        self._buckets = buckets
        self._partition = partition
        self._present_before: Tensor | None = None
        self._contributed = False
        self._order = LaunchOrder(buckets, parameters)
        self._places = {slot.parameter: (slot, bucket) for bucket in buckets for slot in bucket.slots}
        self._is_accumulating = False
        # Weakly: the garbage collector does not see through the hooks of a tensor that lives elsewhere too, and
        # a cycle through one would keep all this memory and its process groups for ever.
        for bucket in buckets:
            for slot in bucket.slots:
                slot.parameter.register_hook(_before(WeakMethod(self._before_accumulation), ref(bucket)))
                slot.parameter.register_post_accumulate_grad_hook(
                    _after(WeakMethod(slot.collect), WeakMethod(self._order.note))
                )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards inside add to the gradients, all of them; elsewhere one may be autograd.grad's."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    @contextmanager
    def last_backward(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        """What runs inside gives these parameters their last gradients before the next reduction.

        Starts averages over the data axis, see [Note: reducing while backward runs]. Every rank of that axis
        calls for the same parameters in the same order.
        """
        reduces = self._partition.group.size() > 1
        self._order.expect(parameters if reduces else ())
        with self.accumulating():
            yield
        for parameter in parameters if reduces else ():  # what got none now will get none
            self._order.note(parameter)

    def takes_rows(self, parameter: Parameter) -> bool:
        """Whether rows may be added to its gradient now, see embedding.py."""
        return self._is_accumulating and parameter in self._places and not has_foreign_hooks(parameter)

    def add_rows(self, parameter: Parameter, rows_N: Tensor, values_NH: Tensor) -> None:
        """Add (N, H) values to rows of a parameter's gradient, which then counts as accumulated."""
        slot, bucket = self._places[parameter]
        self._before_accumulation(bucket)
        slot.collect()
        if parameter.grad is None:
            slot.gradient.zero_()
            parameter.grad = slot.gradient
        slot.gradient.index_add_(0, rows_N, values_NH.to(slot.gradient.dtype))
        self._order.note(parameter)

    @property
    def has_started(self) -> bool:
        """Whether gradients are being reduced, and nothing may be added to them."""
        return self._order.has_started

    def was_dropped(self) -> bool:
        """Whether no rank of the data axis has a gradient. One all-reduce."""
        left = torch.tensor([float(any(slot.parameter.grad is not None for slot in self.slots))])
        left = left.to(self.present.device)
        self._partition.maximum_(left)
        return not left.item()

    def forget(self, *, to_zeros: bool) -> None:
        """Drop all gradients; with `to_zeros`, parameters that have one get one of zeros."""
        self._order.reset()
        self.is_reduced = False
        self._present_before = None
        for bucket in self._buckets:
            bucket.forget(to_zeros=to_zeros)
        for slot in self.slots:
            keep = to_zeros and slot.parameter.grad is not None
            slot.parameter.grad = slot.gradient if keep else None

    def reduce(self) -> None:
        """Reduce what was collected. Collective over the sum groups and the data axis."""
        waiting = self._order.waiting()
        for bucket in waiting:
            bucket.collect()
        flags = [float(slot.parameter.grad is not None) for slot in self.slots]
        self._contributed = any(flags)
        self.present = torch.tensor(flags, device=self.present.device)
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
        self.is_reduced = True
        self.resumed_factor = 1.0

    def _before_accumulation(self, bucket: Bucket) -> None:
        if self.is_reduced:
            self._resume()
        elif bucket.is_averaging:
            raise RuntimeError(
                "a backward adds to gradients that execute_pipeline has begun to reduce: accumulate over several "
                "calls inside booster.no_sync(model, optimizer), all but the last"
            )

    def _resume(self) -> None:
        """Set reduced gradients aside, before a backward adds the first unreduced one."""
        # The model's own zero_grad drops what this rank contributed.
        is_forgotten = self._contributed and all(slot.parameter.grad is None for slot in self.slots)
        if not is_forgotten:
            for bucket in self._buckets:
                bucket.set_aside(self.resumed_factor)
            self._present_before = self.present
        for slot in self.slots:
            slot.parameter.grad = None
        self.is_reduced = False


def sum_over_groups(slots: Sequence[Slot], present: Tensor) -> None:
    """Sum every gradient over each of its parameter's `sum_groups`, in place. One all-reduce per group.

    Args:
        slots: the parameters of this rank.
        present: (len(slots),) float32, 1 where this rank has a gradient; made 1 where any rank of a sum has.
    """
    for group, indices in sharing([slot.managed for slot in slots]):
        flat = torch.cat([present[indices], *(slots[index].gradient.view(-1) for index in indices)])
        dist.all_reduce(flat, group=group)
        flags, *sums = flat.split([len(indices), *(slots[index].gradient.numel() for index in indices)])
        present[indices] = flags.clamp(max=1)
        for index, total in zip(indices, sums, strict=True):
            slots[index].gradient.view(-1).copy_(total)


def sharing(parameters: Sequence[ManagedParameter]) -> list[tuple[dist.ProcessGroup, list[int]]]:
    """The sums to be made, in order: over which group, and the indices of its parameters.

    First come the first groups of all parameters, then the second ones: a rank must not pass on a gradient over
    its second group before it is complete over its first. Among those, groups stand in the order of their ranks
    in the world, the same on all ranks: two ranks that share two groups cannot wait for each other.
    """
    members: dict[tuple[int, dist.ProcessGroup], list[int]] = {}
    for index, managed in enumerate(parameters):
        for position, group in enumerate(managed.sum_groups):
            if group.size() > 1:
                members.setdefault((position, group), []).append(index)
    ordered = sorted(members.items(), key=lambda item: (item[0][0], dist.get_process_group_ranks(item[0][1])))
    return [(group, indices) for (_, group), indices in ordered]


def _before(
    method: WeakMethod[Callable[[Bucket], None]], bucket: ref[Bucket]
) -> Callable[[Tensor | None], None]:
    """A hook for what is about to be accumulated into a bucket, while the method's object lives."""

    def call(gradient: Tensor | None) -> None:  # None where rows were added, or nothing
        bound, found = method(), bucket()
        if gradient is not None and bound is not None and found is not None:
            bound(found)

    return own(call)


def _after(
    collect: WeakMethod[Callable[[], None]], note: WeakMethod[Callable[[Parameter], None]]
) -> Callable[[Parameter], None]:
    """A hook for a gradient that was accumulated, while the methods' objects live."""

    def call(parameter: Parameter) -> None:
        bound_collect, bound_note = collect(), note()
        if bound_collect is not None and bound_note is not None:
            bound_collect()
            bound_note(parameter)

    return own(call)
