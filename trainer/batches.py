"""Batches of replicas that together are those of one process, also at the end of an epoch.

[Note: short last batch] One process has a short last batch. It is sharded over the replicas: one has fewer samples, or
none, and then takes samples of others. A batch of fewer samples than microbatches gets copies, so that every pipeline
runs. The microbatches of copies and of others' samples count nothing (`Uncounted`), and neither do their labels. Copies
are made behind the collator, which may draw random numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..data.loader import WORKER_SETTINGS

IGNORED = -100
# Labels whose models clamp them to the length of the sequence, which they ignore.
_POSITIONS = ("start_positions", "end_positions")
SAMPLES = "echelon_samples"  # in a batch of a stream: its `BatchSamples`


class BatchSamples(NamedTuple):
    """Numbers of samples in a replica's last batch.

    Args:
        counted: of this replica alone.
        taken: with copies, or samples of other replicas.
        total: counted of all replicas.
        full: of this replica in other batches.
    """

    counted: int
    taken: int
    total: int
    full: int


def shard_samples(
    samples: list[Any], full: int, rank: int, size: int, least: int
) -> tuple[list[Any], BatchSamples]:
    """Return a replica's samples of a batch of all replicas, and their numbers; see [Note: short last batch].

    Args:
        samples: of all replicas.
        full: of a replica in other batches.
        rank, size: index of the replica, and number of replicas.
        least: that a replica needs.
    """
    counted = samples[rank * full : (rank + 1) * full]
    taken = counted or list(islice(cycle(samples), least))
    return taken, BatchSamples(len(counted), max(len(taken), least), len(samples), full)


class CompletedBatch(dict[str, Any]):
    """A last batch. The rows of copies have no labels that count.

    Attributes:
        samples: its numbers of samples.
    """

    samples: BatchSamples | None = None

    def real(self) -> dict[str, Any]:
        """Return the batch without copies."""
        if self.samples is None or self.samples.counted == self.samples.taken:
            return self
        number = rows(self) or 0
        end = number * self.samples.counted // self.samples.taken
        return {
            name: value[:end] if _has_rows(value, number) or _is_list_of(value, number) else value
            for name, value in self.items()
        }


def samples_of(batch: Any) -> BatchSamples | None:
    """Return the numbers of samples of a last batch; None for all others."""
    return batch.samples if isinstance(batch, CompletedBatch) else None


def completed(batch: Mapping[str, Any], samples: BatchSamples, label_names: list[str]) -> CompletedBatch:
    """Return a last batch with its numbers of samples; integer labels of copies become ones that are ignored."""
    missing = samples.taken - (samples.counted or samples.taken)
    changed = CompletedBatch(_with_copies(batch, samples.counted, missing) if missing else batch)
    changed.samples = samples
    if samples.counted == samples.taken:
        return changed
    for name in {*label_names, "labels", "shift_labels"} & batch.keys():
        labels = changed[name]
        if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim():
            end = len(labels) * samples.counted // samples.taken
            value = torch.iinfo(labels.dtype).max if name in _POSITIONS else IGNORED
            changed[name] = torch.cat([labels[:end], torch.full_like(labels[end:], value)])
    return changed


def _with_copies(batch: Mapping[str, Any], number: int, missing: int) -> dict[str, Any]:
    """Return a batch of `number` samples with `missing` copies of its first one."""

    def extended(value: Any) -> Any:
        if _has_rows(value, number):
            return torch.cat([value, value[:1].expand(missing, *value.shape[1:])])
        return [*value, *value[:1] * missing] if _is_list_of(value, number) else value

    return {name: extended(value) for name, value in batch.items()}


def rows(batch: Mapping[str, Any]) -> int | None:
    """Return the rows of a batch's first tensor; None if it has none."""
    return next(
        (len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0), None
    )


def _has_rows(value: Any, number: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == number


def _is_list_of(value: Any, number: int) -> bool:
    return isinstance(value, list) and len(value) == number


class ReplicaBatches(BatchSampler):
    """One replica's batches of a batch sampler, of which all replicas together take consecutive ones.

    Args:
        batch_sampler: of all replicas, in batches of one replica.
        rank, size: index of the replica, and number of replicas.
        least: samples that a replica needs, see [Note: short last batch].

    Attributes:
        last: the samples of the last batch, once it is made.
        sampler: of the batch sampler; accelerate replaces it in both.
    """

    def __init__(self, batch_sampler: Any, *, rank: int, size: int, least: int) -> None:
        self.batch_sampler = batch_sampler
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self._rank, self._size, self._least = rank, size, least
        self.last: BatchSamples | None = None

    def __len__(self) -> int:
        full, rest = divmod(len(self.batch_sampler), self._size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        self.last, batches = None, iter(self.batch_sampler)
        following = list(islice(batches, self._size))
        while group := following:
            following = list(islice(batches, self._size))
            samples, full = list(chain(*group)), self.batch_size or len(group[0])
            if following and self._size > 1 and len(samples) != full * self._size:
                raise _unequal(self.batch_sampler)
            if self.drop_last and len(group) < self._size:
                return
            least = 0 if following else self._least
            batch, numbers = shard_samples(samples, full, self._rank, self._size, least)
            self.last = None if following else numbers
            yield batch


def _unequal(batch_sampler: Any) -> ValueError:
    return ValueError(
        f"the batches of a {type(batch_sampler).__name__} have no fixed size that replicas could share: give a batch "
        "sampler with the attribute batch_size whose batches have it, or use one replica (tp_size, pp_size)"
    )


class ReplicaStream(IterableDataset[Any]):
    """One replica's rows of a stream, of which all replicas together take consecutive samples.

    Every rank reads the complete stream. The samples of the last batch are marked for `MarkSamples`.

    Args:
        dataset: yields samples.
        batch_size: of a replica.
        rank, size: index of the replica, and number of replicas.
        drop_last: leave out samples that fill no batch of all replicas.
        least: samples that a replica needs, see [Note: short last batch].
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, rank: int, size: int, drop_last: bool, least: int = 1
    ) -> None:
        self.dataset, self._batch_size, self._drop_last = dataset, batch_size, drop_last
        self._rank, self._size, self._least = rank, size, least

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the data set, if it has epochs."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples, total = iter(self.dataset), self._batch_size * self._size
        while batch := list(islice(samples, total)):
            if len(batch) < total and self._drop_last:
                return
            taken, numbers = shard_samples(batch, self._batch_size, self._rank, self._size, self._least)
            yield from taken if len(batch) == total else [_Last(sample, numbers) for sample in taken]


class _Last(NamedTuple):
    """A sample of the last batch of all replicas, with their numbers."""

    sample: Any
    numbers: BatchSamples


class MarkSamples:
    """A collator that enters the numbers of samples of a `ReplicaStream`'s last batch into it, as `SAMPLES`.

    Args:
        collate: the user's.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch."""
        numbers = next((sample.numbers for sample in samples if isinstance(sample, _Last)), None)
        batch = self._collate([sample.sample if isinstance(sample, _Last) else sample for sample in samples])
        if numbers is not None:
            batch[SAMPLES] = numbers
        return batch


def loader_of_replica(data_loader: DataLoader[Any], *, rank: int, size: int, least: int) -> DataLoader[Any]:
    """Return a dataloader of a replica's rows, in batches of the same size as those of `data_loader`.

    Args:
        rank, size, least: see `ReplicaBatches`.

    Raises:
        ValueError: there are several replicas, and batches of no fixed size.
    """
    dataset, collate = data_loader.dataset, data_loader.collate_fn
    kept = {name: getattr(data_loader, name) for name in ("worker_init_fn", "generator", *WORKER_SETTINGS)}
    if isinstance(dataset, IterableDataset):
        batch_size, drop_last = data_loader.batch_size, data_loader.drop_last
        assert batch_size is not None
        stream = ReplicaStream(dataset, batch_size, rank=rank, size=size, drop_last=drop_last, least=least)
        return DataLoader(stream, batch_size, collate_fn=MarkSamples(collate), **kept)
    takes_lists = isinstance(data_loader.sampler, BatchSampler)  # of a data set that makes batches itself
    batch_sampler = data_loader.sampler if takes_lists else data_loader.batch_sampler
    if size == 1 and batch_sampler is None:  # the data set's samples are batches
        return data_loader
    if size > 1 and getattr(batch_sampler, "batch_size", None) is None:
        raise _unequal(batch_sampler or dataset)
    batches = ReplicaBatches(batch_sampler, rank=rank, size=size, least=least)
    if takes_lists:
        return DataLoader(dataset, batch_size=None, sampler=batches, collate_fn=collate, **kept)
    return DataLoader(dataset, batch_sampler=batches, collate_fn=collate, **kept)


def replica_batches(loader: Any) -> ReplicaBatches | None:
    """Return the sampler that `loader_of_replica` has made, below others that skip batches; None for a stream."""
    sampler = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while not isinstance(sampler, ReplicaBatches | None):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler
