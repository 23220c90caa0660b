"""The writer of each tensor of a model, and bringing it the boxes of other ranks, one tensor at a time."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .box import Box
from .local import LocalTensor
from .tensor_file import Entry, order_in_file


class Offer(NamedTuple):
    """The boxes of a tensor that a rank can send."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


class Source(NamedTuple):
    """A box of a tensor that is written, and the rank that has it."""

    box: Box
    rank: int


class Written(NamedTuple):
    """A tensor that a rank writes."""

    entry: Entry
    sources: tuple[Source, ...]


class FilePlan(NamedTuple):
    """A file that a rank writes, and the tensors in it, in their order there."""

    name: str
    writer: int
    tensors: tuple[Written, ...]


def offers_of(local: Mapping[str, LocalTensor]) -> dict[str, Offer]:
    """The boxes that this rank can send, to be reported to the others."""
    return {
        name: Offer(each.shape, each.dtype, tuple(part.box for part in each.parts))
        for name, each in local.items()
        if each.counts
    }


def entries_of(offers: Sequence[Mapping[str, Offer]], order: Sequence[str]) -> list[Entry]:
    """All tensors that any rank offers, in the given order, and those that it does not name behind them.

    Raises:
        AssertionError: ranks differ in the shape or the format of one.
    """
    found: dict[str, Entry] = {}
    for listing in offers:
        for name, each in listing.items():
            entry = Entry(name, each.shape, each.dtype)
            if found.setdefault(name, entry) != entry:
                raise AssertionError(f"ranks have {found[name]} and {entry}")
    return [found.pop(name) for name in order if name in found] + list(found.values())


def split_into_files(entries: Sequence[Entry], max_bytes: float) -> list[list[Entry]]:
    """The tensors in files of at most so many bytes each, in their order; a larger one has a file of its own."""
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return files


def plan_files(files: Mapping[str, Sequence[Entry]], offers: Sequence[Mapping[str, Offer]]) -> list[FilePlan]:
    """Deal the files out to the ranks, evenly in bytes and where they are, and the sending of boxes too.

    The same on every rank that is given the same.

    Raises:
        AssertionError: no rank has some part of a tensor.
    """
    written, sent = [0] * len(offers), [0] * len(offers)
    plans = []
    for name, entries in files.items():
        local = [sum(_offered_bytes(entry, listing) for entry in entries) for listing in offers]
        writer = min(range(len(offers)), key=lambda rank: (written[rank], -local[rank], rank))
        written[writer] += sum(entry.nbytes for entry in entries)
        tensors = tuple(
            Written(entry, _sources(entry, offers, writer, sent)) for entry in order_in_file(entries)
        )
        plans.append(FilePlan(name, writer, tensors))
    return plans


def _offered_bytes(entry: Entry, listing: Mapping[str, Offer]) -> int:
    offer = listing.get(entry.name)
    return 0 if offer is None else sum(box.numel for box in offer.boxes) * entry.dtype.itemsize


def _sources(
    entry: Entry, offers: Sequence[Mapping[str, Offer]], writer: int, sent: list[int]
) -> tuple[Source, ...]:
    """The writer itself for each box that it has, else the rank that sends least."""
    owners: dict[Box, list[int]] = {}
    for rank, listing in enumerate(offers):
        for box in listing[entry.name].boxes if entry.name in listing else ():
            owners.setdefault(box, []).append(rank)
    covered, whole = sum(box.numel for box in owners), Box.whole(entry.shape).numel
    if covered != whole:
        raise AssertionError(f"{entry.name} has {whole} entries, and the ranks have {covered}")
    sources = []
    for box, ranks in owners.items():
        rank = writer if writer in ranks else min(ranks, key=lambda each: (sent[each], each))
        if rank != writer:
            sent[rank] += box.numel * entry.dtype.itemsize
        sources.append(Source(box, rank))
    return tuple(sources)


class Assembled(NamedTuple):
    """A whole tensor that this rank writes, the next of one of its files."""

    file: FilePlan
    name: str
    tensor: Tensor


def needed_parts(
    local: Mapping[str, LocalTensor], plans: Sequence[FilePlan], rank: int
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
        for name, each in local.items()
        if each.counts
        for part in each.parts
        if (name, part.box) in wanted
    }


def assemble(
    parts: Mapping[tuple[str, Box], Tensor], plans: Sequence[FilePlan], group: dist.ProcessGroup
) -> Iterator[Assembled]:
    """The tensors that this rank writes, on the CPU, file by file in their order.

    Collective over the group, one message per box that its writer lacks: every rank has to come to the end.
    Tensors of different writers are in flight at the same time: a rank has in memory one that it writes, and its boxes
    of one tensor of each other rank.

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
    """Send this rank's boxes of the tensors that others write now; returns the sends, and memory that they need."""
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
    """The whole tensor; without a copy where this rank has all of it."""
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
            whole[source.box.within(Box.whole(entry.shape))] = parts[entry.name, source.box].detach().cpu()
    for box, content, receive in arriving:
        assert receive is not None
        receive.wait()
        whole[box.within(Box.whole(entry.shape))] = content
    return whole


def _sendable(part: Tensor) -> Tensor:
    return _bytes(part.detach().cpu().contiguous())


def _bytes(content: Tensor) -> Tensor:
    """As bytes: gloo knows few formats."""
    return content.view(-1).view(torch.uint8)
