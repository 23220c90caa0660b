"""Batches as a data set of their own, each made from what was drawn for it alone. Who draws is sampler.py."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from .random import generators_put_back, seed_torch


class Draw(NamedTuple):
    """What a batch is made from.

    Args:
        number: of the batch in its pass over the data.
        indices: of its samples.
        entropy: whole numbers that its random numbers follow from.
    """

    number: int
    indices: list[int]
    entropy: tuple[int, ...]


class Dealt(NamedTuple):
    """A pass over the data that has begun.

    Args:
        epoch: that it is of.
        num_batches: that it gives; None where nobody knows.
        draws: what each batch is made from, and the position in the data once that batch is taken.
    """

    epoch: int
    num_batches: int | None
    draws: Iterator[tuple[Draw, Any]]


class BatchDataset(Dataset[tuple[int, Any]]):
    """The batches of a data set by their draws, so that the one who makes a batch knows its place, in any process."""

    def __init__(self, dataset: Any, collate: Callable[[list], Any]) -> None:
        self.dataset = dataset
        self._collate = collate

    def __getitem__(self, draw: Draw) -> tuple[int, Any]:
        """The batch and its number. The generators of this process stand as they stood."""
        with seeded(draw.entropy):
            return draw.number, self._collate(_samples(self.dataset, draw.indices))


def unchanged(batch: Any) -> Any:
    """The batch. A collator for a DataLoader whose data set gives batches; workers can be sent it by name."""
    return batch


class WorkerStart:
    """What each worker process begins with: the data set that it tells of is the user's own."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is None:
            raise AssertionError(f"worker {worker} starts outside of a worker process")
        # torch forbids plain assignment; scripts open files through get_worker_info().dataset here.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self._then is not None:
            self._then(worker)


@contextmanager
def seeded(entropy: Sequence[int]) -> Iterator[None]:
    """Let Python, NumPy and torch's CPU draw what follows from some numbers alone, and go on afterwards as before."""
    seed, cpu = derived_seed(*entropy), torch.device("cpu")
    with generators_put_back(cpu):
        random.seed(seed)
        np.random.seed(seed)
        seed_torch(seed, cpu)
        yield


def derived_seed(*entropy: int) -> int:
    """A seed of 32 bits that differs with each of these whole numbers and with their order."""
    return int(np.random.SeedSequence([number % 2**64 for number in entropy]).generate_state(1)[0])


def _samples(dataset: Any, indices: list[int]) -> list[Any]:
    """Samples of a data set, all at once where it can give them so, as torch's DataLoader reads them."""
    several = getattr(dataset, "__getitems__", None)
    return several(indices) if several else [dataset[index] for index in indices]
