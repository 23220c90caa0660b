"""Sums of partial gradients over groups beside the data axis. The mean over the data axis is partition.py."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .bucket import Slot
from .parameter import ManagedParameter


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
    """The groups over which gradients are summed, each with the indices of its parameters.

    Groups stand in the order of their ranks in the world, the same on all ranks: two ranks that share two
    groups cannot wait for each other.
    """
    members: dict[dist.ProcessGroup, list[int]] = {}
    for index, managed in enumerate(parameters):
        for group in managed.sum_groups:
            if group.size() > 1:
                members.setdefault(group, []).append(index)
    return sorted(members.items(), key=lambda item: dist.get_process_group_ranks(item[0]))
