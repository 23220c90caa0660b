"""Sums of gradients over groups beside the data axis: of tied copies across stages, of parts of a whole."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .bucket import Slot
from .parameter import ManagedParameter
from .partition import require_agreement


def sum_over_groups(slots: Sequence[Slot], present: Tensor) -> None:
    """Sum every gradient over each of its parameter's `sum_groups`, in place. One all-reduce per group.

    Args:
        slots: the parameters of this rank.
        present: (len(slots),) float32, 1 where this rank has a gradient; made 1 where any rank of a sum has.
    """
    for group, indices in sharing([slot.managed for slot in slots]):
        gradients = [gradient for index in indices if (gradient := slots[index].gradient) is not None]
        assert len(gradients) == len(indices)
        flat = torch.cat([present[indices], *(gradient.view(-1) for gradient in gradients)])
        dist.all_reduce(flat, group=group)
        flags, *sums = flat.split([len(indices), *(gradient.numel() for gradient in gradients)])
        present[indices] = flags.clamp(max=1)
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.view(-1).copy_(total)


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


def require_one_layout(
    groups: Sequence[Sequence[ManagedParameter]], *, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Ranks of the data axis, and of a sum group, must mean the same parameters. Small all-reduces.

    Args:
        groups: the trained parameters by parameter group.
        group: the data axis.
        device: where numbers are exchanged.

    Raises:
        ValueError: they do not; on every rank.
    """
    require_agreement(
        [
            f"{managed.name} {tuple(managed.parameter.shape)} of group {index}, counts={managed.counts}"
            for index, members in enumerate(groups)
            for managed in members
        ],
        group=group,
        device=device,
        what="the trainable parameters of the optimizer",
    )
    flat = [managed for members in groups for managed in members]
    for summing, indices in sharing(flat):
        require_agreement(
            [str(tuple(flat[index].parameter.shape)) for index in indices],
            group=summing,
            device=device,
            what="the shapes of parameters whose gradients are summed",
        )
