"""Predictions are gathered without the copies that complete a batch."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler

from echelon.trainer.batches import (
    BatchSamples,
    CompletedBatch,
    ReplicaBatches,
    ReplicaStream,
    completed,
    loader_of_replica,
)
from echelon.trainer.internals import ReplicaAccelerator

STREAM = ReplicaStream([], 8, rank=0, size=1, drop_last=False)
SHORT = BatchSamples(counted=2, taken=4, total=2, full=8)


def accelerator(computed: BatchSamples | None, loader: object = None) -> ReplicaAccelerator:
    """Return the accelerator of a replica that computes a batch."""
    bare = ReplicaAccelerator.__new__(ReplicaAccelerator)
    bare.mesh = SimpleNamespace(size=lambda *_: 1)  # type: ignore[assignment]
    bare.boosted = SimpleNamespace(samples=computed)  # type: ignore[assignment]
    bare.gradient_state = SimpleNamespace(active_dataloader=loader)
    return bare


@pytest.mark.parametrize(
    ("computed", "rows", "of_samples", "gathered"),
    [
        (None, 8, 8, 8),
        (SHORT, 4, 2, 2),
        (SHORT, 8, 2, 8),  # the loss, repeated for every sample of a full batch
        (SHORT, 5, 5, 5),  # of no samples
    ],
)
def test_copies_that_complete_a_batch_are_left_out(
    computed: BatchSamples | None, rows: int, of_samples: int, gathered: int
) -> None:
    assert len(accelerator(computed).gather_for_metrics(torch.zeros(rows, 3))) == of_samples
    assert len(accelerator(computed).gather(torch.zeros(rows, 3))) == gathered


@pytest.mark.parametrize(
    ("dataset", "at_end", "expected"),
    [
        (STREAM, False, SHORT),  # the short last batch of a worker, before those of the others
        ([], False, None),
        ([], True, SHORT),
    ],
)
def test_the_last_batch_is_known_below_samplers_that_skip_batches(
    dataset: object, at_end: bool, expected: BatchSamples | None
) -> None:
    sampler = ReplicaBatches([], rank=0, size=1, least=1)
    sampler.last = SHORT
    skipping = SimpleNamespace(batch_sampler=sampler)
    loader = SimpleNamespace(dataset=dataset, end_of_dataloader=at_end, sampler=None, batch_sampler=skipping)
    bare = accelerator(None, loader)
    bare.of_stream = SHORT
    assert bare.samples_of_last() == expected


def batches(
    number: int, rank: int, *, least: int = 1, drop_last: bool = False
) -> tuple[list[list[int]], object]:
    inner = BatchSampler(SequentialSampler(range(number)), 3, drop_last)
    sampler = ReplicaBatches(inner, rank=rank, size=2, least=least)
    taken = list(sampler)
    assert len(taken) == len(sampler)
    return taken, sampler.last


def test_replicas_share_a_short_last_batch_out() -> None:
    assert batches(11, 0) == ([[0, 1, 2], [6, 7, 8]], (3, 3, 5, 3))
    assert batches(11, 1) == ([[3, 4, 5], [9, 10]], (2, 2, 5, 3))
    assert batches(8, 1, least=2) == ([[3, 4, 5], [6, 7]], (0, 2, 2, 3))  # copies
    assert batches(7, 0, least=2) == ([[0, 1, 2], [6]], (1, 2, 1, 3))  # and a copy, behind the collator
    assert batches(11, 1, drop_last=True) == ([[3, 4, 5]], None)


def test_labels_of_copies_are_ignored_and_those_that_are_no_integers_are_kept() -> None:
    batch = dict(
        labels=torch.arange(2), start_positions=torch.arange(2), targets=torch.ones(2), boxes=[{}, {}]
    )
    changed = completed(batch, SHORT, ["labels", "start_positions", "targets"])
    assert changed["labels"].tolist() == [0, 1, -100, -100]
    assert changed["start_positions"].tolist() == [0, 1, 2**63 - 1, 2**63 - 1]
    assert changed["targets"].tolist() == [1.0] * 4 and changed["boxes"] == [{}] * 4
    assert {name: len(value) for name, value in changed.real().items()} == dict.fromkeys(batch, 2)
    assert CompletedBatch(batch).real() == batch


def test_a_dataloader_without_batches_of_a_size_is_refused_for_several_replicas() -> None:
    bucketed = DataLoader(range(9), batch_sampler=[[0, 1, 2], [3], [4, 5]])  # type: ignore[arg-type]
    one = loader_of_replica(bucketed, rank=0, size=1, least=2)
    assert [len(batch) for batch in one] == [3, 1, 2]
    with pytest.raises(ValueError, match="batches of a list have no fixed size"):
        loader_of_replica(bucketed, rank=0, size=2, least=1)

    class Bucketed(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0, 1, 2], [3], [4], [5])

    sampler = Bucketed(SequentialSampler(range(9)), 3, False)
    with pytest.raises(ValueError, match="batches of a Bucketed have no fixed size"):
        list(ReplicaBatches(sampler, rank=0, size=2, least=1))


def test_the_samplers_number_of_samples_counts_not_the_data_sets() -> None:
    loader = DataLoader(range(40), 3, sampler=SubsetRandomSampler(range(5)))  # type: ignore[arg-type]
    halves = [loader_of_replica(loader, rank=rank, size=2, least=1) for rank in (0, 1)]
    assert [[len(batch) for batch in half] for half in halves] == [[3], [2]]
