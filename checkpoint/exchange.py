"""Assign a model's tensors to ranks that write them, and send their boxes to the writers, one tensor at a time."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.box import Box
from .local_tensors import LocalTensor
from .tensor_file import Entry, order_in_file

LocalBoxes = Mapping[tuple[str, Box], Tensor]  # this rank's memory, by tensor and box


class Offer(NamedTuple):
    """The boxes of a tensor that a rank can send, with the global shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


class Written(NamedTuple):
    """A tensor to write: its entry, and for each of its boxes the rank that provides it."""

    entry: Entry
    sources: Mapping[Box, int]


class FilePlan(NamedTuple):
    """A file, the rank that writes it, and its tensors in the order of the file."""

    name: str
    writer: int
    tensors: tuple[Written, ...]


def offers_of(local: Mapping[str, LocalTensor]) -> dict[str, Offer]:
    """Return the boxes that this rank can send, to report them to the other ranks."""
    return {
        name: Offer(tensor.shape, tensor.dtype, tuple(piece.box for piece in tensor.boxes))
        for name, tensor in local.items()
        if tensor.may_save
    }


def entries_of(offers: Sequence[Mapping[str, Offer]], order: Sequence[str]) -> list[Entry]:
    """Return all tensors that any rank offers, in the given order; tensors without a place in it follow.

    Raises:
        AssertionError: ranks differ in the shape or dtype of a tensor.
    """
    entries: dict[str, Entry] = {}
    for listing in offers:
        for name, offer in listing.items():
            entry = Entry(name, offer.shape, offer.dtype)
            if entries.setdefault(name, entry) != entry:
                raise AssertionError(f"ranks have {entries[name]} and {entry}")
    return [entries.pop(name) for name in order if name in entries] + list(entries.values())


def plan_files(files: Mapping[str, Sequence[Entry]], offers: Sequence[Mapping[str, Offer]]) -> list[FilePlan]:
    """Assign each file to a writing rank and each box to a sending rank.

    Both are balanced by bytes; between equal ranks, the one that has most of a file's bytes writes it. The plan is
    deterministic: equal arguments give equal plans on all ranks.

    Raises:
        AssertionError: no rank has some part of a tensor.
    """
    # Bytes by rank: written to files, sent to the writers, and (per file) present on the rank.
    written, sent = [0] * len(offers), [0] * len(offers)
    plans = []
    for name, entries in files.items():
        owners = {entry: _owners(entry, offers) for entry in entries}
        present = [0] * len(offers)
        for entry in entries:
            for box, ranks in owners[entry].items():
                for rank in ranks:
                    present[rank] += box.numel * entry.dtype.itemsize
        writer = min(range(len(offers)), key=lambda rank: (written[rank], -present[rank], rank))
        written[writer] += sum(entry.nbytes for entry in entries)
        tensors = []
        for entry in order_in_file(entries):
            sources = {}
            for box, ranks in owners[entry].items():
                # The writer itself if it has the box, else the rank that sends least so far.
                rank = writer if writer in ranks else min(ranks, key=lambda rank: (sent[rank], rank))
                sources[box] = rank
                sent[rank] += box.numel * entry.dtype.itemsize * (rank != writer)
            tensors.append(Written(entry, sources))
        plans.append(FilePlan(name, writer, tuple(tensors)))
    return plans


def _owners(entry: Entry, offers: Sequence[Mapping[str, Offer]]) -> dict[Box, list[int]]:
    """Return the ranks that have each box of a tensor."""
    owners: dict[Box, list[int]] = {}
    for rank, listing in enumerate(offers):
        for box in listing[entry.name].boxes if entry.name in listing else ():
            owners.setdefault(box, []).append(rank)
    covered, full = sum(box.numel for box in owners), Box.full(entry.shape).numel
    if covered != full:
        raise AssertionError(f"{entry.name} has {full} entries, and the ranks have {covered}")
    return owners


def needed_boxes(local: Mapping[str, LocalTensor], plans: Sequence[FilePlan], rank: int) -> LocalBoxes:
    """Return this rank's memory of the boxes that it sends or writes."""
    memory = {
        (name, piece.box): piece.local
        for name, tensor in local.items()
        if tensor.may_save
        for piece in tensor.boxes
    }
    return {
        (written.entry.name, box): memory[written.entry.name, box]
        for plan in plans
        for written in plan.tensors
        for box, source in written.sources.items()
        if source == rank
    }


def assemble(
    boxes: LocalBoxes, plans: Sequence[FilePlan], group: dist.ProcessGroup
) -> Iterator[tuple[FilePlan, Entry, Tensor]]:
    """Yield the unsharded tensors that this rank writes, on the CPU, file by file.

    Collective over the group, with one message per box that its writer lacks. Every rank must exhaust the iterator.
    One tensor per writer is in flight at a time. A rank has in memory one tensor that it writes, and its boxes of one
    tensor of each other rank.

    Args:
        boxes: result of `needed_boxes`.
        plans: equal on all ranks.
        group: all ranks, on the CPU backend (gloo).
    """
    queues: list[list[tuple[FilePlan, Written]]] = [[] for _ in range(group.size())]
    for plan in plans:
        queues[plan.writer] += [(plan, written) for written in plan.tensors]
    for next_by_writer in zip_longest(*queues):
        sends = _begin_sends(next_by_writer, boxes, group)
        if (planned := next_by_writer[group.rank()]) is not None:
            plan, written = planned
            yield plan, written.entry, _received(written, boxes, group)
        for _, send in sends:
            assert send is not None  # this rank is in the group
            send.wait()
        del sends


def _begin_sends(
    next_by_writer: Sequence[tuple[FilePlan, Written] | None], boxes: LocalBoxes, group: dist.ProcessGroup
) -> list[tuple[Tensor, dist.Work | None]]:
    """Begin to send this rank's boxes of the tensors that other ranks write next.

    Args:
        next_by_writer: by rank, the next tensor that it writes; None once it has written all.
        boxes, group: see `assemble`.

    Returns:
        The sends with their memory, which must stay until they are complete.
    """
    sends = []
    for writer, planned in enumerate(next_by_writer):
        if planned is None or writer == group.rank():
            continue
        _, written = planned
        for tag, (box, source) in enumerate(written.sources.items()):
            if source == group.rank():
                content = _bytes(boxes[written.entry.name, box].detach().cpu().contiguous())
                sends.append((content, dist.isend(content, group=group, group_dst=writer, tag=tag)))
    return sends


def _received(written: Written, boxes: LocalBoxes, group: dist.ProcessGroup) -> Tensor:
    """Return the unsharded tensor; without a copy if this rank has all of it."""
    entry, rank = written.entry, group.rank()
    if list(written.sources.values()) == [rank]:
        return boxes[entry.name, next(iter(written.sources))].detach().cpu()
    unsharded = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    arriving = []
    for tag, (box, source) in enumerate(written.sources.items()):
        if source != rank:
            content = torch.empty(box.size, dtype=entry.dtype, device="cpu")
            receive = dist.irecv(_bytes(content), group=group, group_src=source, tag=tag)
            arriving.append((box, content, receive))
        else:
            unsharded[box.within(Box.full(entry.shape))] = boxes[entry.name, box].detach().cpu()
    for box, content, receive in arriving:
        assert receive is not None
        receive.wait()
        unsharded[box.within(Box.full(entry.shape))] = content
    return unsharded


def _bytes(content: Tensor) -> Tensor:
    """Return a view as bytes: gloo supports few dtypes."""
    return content.view(-1).view(torch.uint8)
