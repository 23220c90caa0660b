"""The boxes of tensors that other ranks hold, brought to the ranks that write them, one tensor at a time."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .box import Box
from .held import HeldTensor
from .plan import FilePlan, Written


class Assembled(NamedTuple):
    """A whole tensor that this rank writes, the next of one of its files."""

    file: FilePlan
    name: str
    tensor: Tensor


def needed_parts(
    held: Mapping[str, HeldTensor], plans: Sequence[FilePlan], rank: int
) -> dict[tuple[str, Box], Tensor]:
    """This rank's memory of the boxes that it sends or writes, as it is now."""
    wanted = {
        (written.entry.name, source.box)
        for plan in plans
        for written in plan.tensors
        for source in written.sources
        if source.rank == rank
    }
    return {
        (name, part.box): part.local
        for name, each in held.items()
        if each.counts
        for part in each.parts
        if (name, part.box) in wanted
    }


def assemble(
    parts: Mapping[tuple[str, Box], Tensor], plans: Sequence[FilePlan], group: dist.ProcessGroup
) -> Iterator[Assembled]:
    """The tensors that this rank writes, on the CPU, file by file in their order.

    Collective over the group, one message per box that its writer does not hold: every rank has to come to the end.
    Tensors of different writers travel at the same time; a rank has one that it writes in memory, and of one tensor
    of each other rank what it sends.

    Args:
        parts: of `needed_parts`.
        plans: equal on all ranks.
        group: of the CPU (gloo).
    """
    rank = group.rank()
    queues: list[list[tuple[FilePlan, Written]]] = [[] for _ in range(group.size())]
    for plan in plans:
        queues[plan.writer] += [(plan, written) for written in plan.tensors]
    for round_ in zip_longest(*queues):
        sends, kept = _begin_sends([each and each[1] for each in round_], parts, group)
        if (own := round_[rank]) is not None:
            plan, written = own
            yield Assembled(plan, written.entry.name, _received(written, parts, group))
        for send in sends:
            send.wait()
        kept.clear()


def _begin_sends(
    round_: Sequence[Written | None],
    parts: Mapping[tuple[str, Box], Tensor],
    group: dist.ProcessGroup,
) -> tuple[list[dist.Work], list[Tensor]]:
    """Send what this rank has of the tensors that others write now; and the memory that has to live until then."""
    sends, kept = [], []
    for writer, written in enumerate(round_):
        if writer == group.rank() or written is None:
            continue
        for tag, source in enumerate(written.sources):
            if source.rank == group.rank():
                content = _sendable(parts[written.entry.name, source.box])
                send = dist.isend(content, group=group, group_dst=writer, tag=tag)
                assert send is not None  # this rank is in the group
                sends.append(send)
                kept.append(content)
    return sends, kept


def _received(written: Written, parts: Mapping[tuple[str, Box], Tensor], group: dist.ProcessGroup) -> Tensor:
    """The whole tensor; without a copy where this rank holds all of it."""
    entry = written.entry
    if [source.rank for source in written.sources] == [group.rank()]:
        return parts[entry.name, written.sources[0].box].detach().cpu()
    whole = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    arriving = []
    for tag, source in enumerate(written.sources):
        if source.rank != group.rank():
            content = torch.empty(source.box.size, dtype=entry.dtype, device="cpu")
            receive = dist.irecv(_bytes(content), group=group, group_src=source.rank, tag=tag)
            arriving.append((source.box, content, receive))
    for source in written.sources:
        if source.rank == group.rank():
            whole[_slices(source.box, entry.shape)] = parts[entry.name, source.box].detach().cpu()
    for box, content, receive in arriving:
        assert receive is not None
        receive.wait()
        whole[_slices(box, entry.shape)] = content
    return whole


def _slices(box: Box, shape: tuple[int, ...]) -> tuple[slice, ...]:
    return box.within(Box.whole(shape))


def _sendable(part: Tensor) -> Tensor:
    return _bytes(part.detach().cpu().contiguous())


def _bytes(content: Tensor) -> Tensor:
    """As bytes: gloo knows few formats."""
    return content.view(-1).view(torch.uint8)
