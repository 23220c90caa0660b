"""Gradients from backward to the slice that this rank owns. What is done with them then is optimizer.py.

They are collected into buckets while backward runs, then summed over groups beside the data axis and averaged
over it, once. A backward that follows a reduction is reduced on its own and added to what was reduced before.
"""

from collections.abc import Callable, Sequence
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor

from .bucket import Bucket, Slot
from .parameter import ManagedParameter
from .partition import Partition


class Reducer:
    """When gradients are collected, reduced, kept and forgotten.

    Args:
        buckets: where they lie.
        partition: the data axis.
        device: where flags are exchanged.

    Attributes:
        slots: the places of all parameters.
        present: (len(slots),) float32, above 0 where any rank has a gradient; as of the last reduction.
        is_reduced: whether the buckets hold reduced gradients, this rank's slices of them.
        resumed_factor: what reduced gradients are multiplied with when a backward is about to add to them.
    """

    def __init__(self, buckets: Sequence[Bucket], *, partition: Partition, device: torch.device) -> None:
        self.slots = [slot for bucket in buckets for slot in bucket.slots]
        self.present = torch.zeros(len(self.slots), device=device)
        self.is_reduced = False
        self.resumed_factor = 1.0
        self._buckets = buckets
        self._partition = partition
        self._present_before: Tensor | None = None
        self._contributed = False
        # Weakly: the garbage collector does not see through the hooks of a tensor that lives elsewhere too, and
        # a cycle through one would keep all this memory and its process groups for ever.
        for slot in self.slots:
            slot.parameter.register_hook(_calling(WeakMethod(self._before_accumulation)))
            slot.parameter.register_post_accumulate_grad_hook(_calling(WeakMethod(slot.collect)))

    def forget(self, *, to_zeros: bool) -> None:
        """Drop all gradients; with `to_zeros`, parameters that have one get one of zeros."""
        self.is_reduced = False
        self._present_before = None
        for bucket in self._buckets:
            bucket.forget(to_zeros=to_zeros)
        for slot in self.slots:
            keep = to_zeros and slot.parameter.grad is not None
            slot.parameter.grad = slot.gradient if keep else None

    def reduce(self) -> None:
        """Reduce what was collected. Collective over the sum groups and the data axis."""
        for slot in self.slots:
            slot.collect()
            if slot.parameter.grad is None:
                slot.gradient.zero_()
        flags = [float(slot.parameter.grad is not None) for slot in self.slots]
        self._contributed = any(flags)
        self.present = torch.tensor(flags, device=self.present.device)
        sum_over_groups(self.slots, self.present)
        for bucket in self._buckets:
            bucket.reduce_()
        self._partition.maximum_(self.present)
        if self._present_before is not None:
            self.present = torch.maximum(self.present, self._present_before)
            self._present_before = None
        self.is_reduced = True
        self.resumed_factor = 1.0

    def _before_accumulation(self) -> None:
        if self.is_reduced:
            self._resume()

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


def _calling(method: WeakMethod[Callable[[], None]]) -> Callable[[Tensor], None]:
    """A tensor hook that calls the method while its object lives."""

    def call(_: Tensor) -> None:
        bound = method()
        if bound is not None:
            bound()

    return call
