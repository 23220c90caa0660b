"""A data set dealt out over the data axis, with batches that are equal on all ranks of a replica."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler


def shared_loader(
    dataset: Dataset,
    batch_size: int,
    *,
    rank: int,
    size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    collate_fn: Callable,
    sampler_class: type[DistributedSampler] = DistributedSampler,
    **kwargs: Any,
) -> DataLoader:
    """A dataloader of one rank's share of a data set. Whatever it draws follows from the seed and that rank.

    Args:
        dataset: a map-style dataset.
        batch_size: samples of this rank in a batch.
        rank, size: of the data axis.
        shuffle: in an order that depends on `seed` and on the sampler's `set_epoch`.
        sampler_class: called as torch's DistributedSampler is.
        kwargs: further arguments for the DataLoader.
    """
    sampler = sampler_class(
        dataset, num_replicas=size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        collate_fn=SeededCollate(collate_fn, seed=seed, rank=rank),
        generator=torch.Generator().manual_seed(seed + rank),
        **kwargs,
    )


class SeededCollate:
    """A collator whose randomness depends on the seed, the data-parallel rank and the batch's number alone."""

    def __init__(self, collate: Callable, *, seed: int, rank: int) -> None:
        self._collate = collate
        self._seed = seed
        self._rank = rank
        self._num_batches = 0

    def __call__(self, samples: list) -> Any:
        worker = get_worker_info()
        # A worker starts anew each epoch, from a base seed that the loader draws from its generator.
        epoch = 0 if worker is None else worker.seed - worker.id
        drawn = np.random.SeedSequence(
            (self._seed, self._rank, self._num_batches, 0 if worker is None else worker.id, epoch)
        )
        self._num_batches += 1
        seed = int(drawn.generate_state(1)[0])
        python, numpy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
                return self._collate(samples)
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
