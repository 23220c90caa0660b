"""Who writes which tensor of a model, and who sends it the boxes of it. Sending them is exchange.py."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from .box import Box
from .held import HeldTensor
from .tensor_file import Entry, order_in_file


class Holding(NamedTuple):
    """What a rank can send of a tensor."""

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


def holdings_of(held: Mapping[str, HeldTensor]) -> dict[str, Holding]:
    """What this rank can send, to be told to the others."""
    return {
        name: Holding(each.shape, each.dtype, tuple(part.box for part in each.parts))
        for name, each in held.items()
        if each.counts
    }


def entries_of(holdings: Sequence[Mapping[str, Holding]], order: Sequence[str]) -> list[Entry]:
    """All tensors that any rank holds, in the given order, and those that it does not name behind them.

    Raises:
        AssertionError: ranks differ in the shape or the format of one.
    """
    found: dict[str, Entry] = {}
    for listing in holdings:
        for name, each in listing.items():
            entry = Entry(name, each.shape, each.dtype)
            if found.setdefault(name, entry) != entry:
                raise AssertionError(f"ranks hold {found[name]} and {entry}")
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


def plan_files(
    files: Mapping[str, Sequence[Entry]], holdings: Sequence[Mapping[str, Holding]]
) -> list[FilePlan]:
    """Deal the files out to the ranks, evenly in bytes and where they are held, and the sending of boxes too.

    The same on every rank that is given the same.

    Raises:
        AssertionError: nobody holds some part of a tensor.
    """
    written, sent = [0] * len(holdings), [0] * len(holdings)
    plans = []
    for name, entries in files.items():
        local = [sum(_held_bytes(entry, listing) for entry in entries) for listing in holdings]
        writer = min(range(len(holdings)), key=lambda rank: (written[rank], -local[rank], rank))
        written[writer] += sum(entry.nbytes for entry in entries)
        tensors = tuple(
            Written(entry, _sources(entry, holdings, writer, sent)) for entry in order_in_file(entries)
        )
        plans.append(FilePlan(name, writer, tensors))
    return plans


def _held_bytes(entry: Entry, listing: Mapping[str, Holding]) -> int:
    holding = listing.get(entry.name)
    return 0 if holding is None else sum(box.numel for box in holding.boxes) * entry.dtype.itemsize


def _sources(
    entry: Entry, holdings: Sequence[Mapping[str, Holding]], writer: int, sent: list[int]
) -> tuple[Source, ...]:
    """For each box the writer itself where it holds it, else whoever sends least so far."""
    holders: dict[Box, list[int]] = {}
    for rank, listing in enumerate(holdings):
        for box in listing[entry.name].boxes if entry.name in listing else ():
            holders.setdefault(box, []).append(rank)
    covered, whole = sum(box.numel for box in holders), Box.whole(entry.shape).numel
    if covered != whole:
        raise AssertionError(f"{entry.name} has {whole} entries, and the ranks hold {covered}")
    sources = []
    for box, ranks in holders.items():
        rank = writer if writer in ranks else min(ranks, key=lambda each: (sent[each], each))
        if rank != writer:
            sent[rank] += box.numel * entry.dtype.itemsize
        sources.append(Source(box, rank))
    return tuple(sources)
