"""Batches of replicas that together are those of one process, also at the end of an epoch.

[Note: short last batch] accelerate completes the last batch of an epoch by samples from its beginning, so that every
process gets as many. One process would have the short batch. Here these rows stay, and so do the shapes, but their
labels become ones that the loss ignores: the batch then counts what it counts in one process.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

IGNORED = -100
# Labels whose models clamp them to the length of the sequence, which they ignore.
_POSITIONS = ("start_positions", "end_positions")
PADDING = "echelon_padding"  # in a batch of a stream: the number of rows that complete it, in all replicas


class CompletedBatch(dict[str, Any]):
    """A batch whose last rows complete it, without labels that count; `num_real` rows are before them."""

    num_real = 0

    def real(self) -> dict[str, Any]:
        """Return the batch without the rows that complete it."""
        return {
            name: value[: self.num_real] if isinstance(value, Tensor) and value.dim() else value
            for name, value in self.items()
        }


def without_labels_from(batch: Mapping[str, Any], first: int, label_names: list[str]) -> CompletedBatch:
    """Return a batch whose rows from `first` on have labels that are ignored; see [Note: short last batch].

    Raises:
        ValueError: their labels are no integers, so that nothing in them can be ignored.
    """
    changed = CompletedBatch(batch)
    changed.num_real = first
    for name in {*label_names, "labels", "shift_labels"} & batch.keys():
        labels = batch[name]
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
            raise ValueError(
                f"the samples do not fill the last batch of all replicas, and {name} are no integers of which some "
                "could be ignored: set dataloader_drop_last=True, or give a number of samples that fills it"
            )
        value = torch.iinfo(labels.dtype).max if name in _POSITIONS else IGNORED
        changed[name] = torch.cat([labels[:first], torch.full_like(labels[first:], value)])
    return changed


def with_rows(batch: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a batch that copies of its first sample complete to a number of rows."""
    return {
        name: torch.cat([value, value[:1].expand(number - len(value), *value.shape[1:])])
        if isinstance(value, Tensor) and value.dim()
        else value
        for name, value in batch.items()
    }


class ReplicaStream(IterableDataset[Any]):
    """One replica's rows of a stream, of which all replicas together take consecutive samples.

    Every rank reads the complete stream. The last batch is completed by copies, and marked for `MarkPadding`.

    Args:
        dataset: yields samples.
        batch_size: of a replica.
        rank, size: index of the replica, and number of replicas.
        drop_last: leave out samples that fill no batch of all replicas.
    """

    def __init__(self, dataset: Any, batch_size: int, *, rank: int, size: int, drop_last: bool) -> None:
        self.dataset, self._batch_size, self._drop_last = dataset, batch_size, drop_last
        self._rank, self._size = rank, size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the data set, if it has epochs."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples, begin = iter(self.dataset), self._rank * self._batch_size
        while batch := list(islice(samples, self._batch_size * self._size)):
            missing = self._batch_size * self._size - len(batch)
            if missing and self._drop_last:
                return
            if missing:
                batch = [_Last(sample, missing) for sample in [*batch, *[batch[0]] * missing]]
            yield from batch[begin : begin + self._batch_size]


class _Last:
    """A sample of the last batch of all replicas, which `missing` copies complete."""

    def __init__(self, sample: Any, missing: int) -> None:
        self.sample, self.missing = sample, missing


class MarkPadding:
    """A collator that enters the number of completing rows of a `ReplicaStream` into the batch, as `PADDING`.

    Args:
        collate: the user's.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch."""
        missing = next((sample.missing for sample in samples if isinstance(sample, _Last)), 0)
        batch = self._collate([sample.sample if isinstance(sample, _Last) else sample for sample in samples])
        if missing:
            batch[PADDING] = missing
        return batch
