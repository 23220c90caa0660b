"""What every plugin offers the Booster, and the dataloaders of all of them."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data.distributed import DistributedSampler

Boosted = tuple[nn.Module, Optimizer | None, Callable | None, DataLoader | None, LRScheduler | None]


class Plugin(ABC):
    """One way of training over several processes. `Booster` calls it; scripts read its sizes."""

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        """Wrap what is given, in the same order. Collective over the world."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Compute gradients of a loss, scaled as the precision needs."""

    @abstractmethod
    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them over the data-parallel ranks."""

    @abstractmethod
    def execute_pipeline(
        self,
        data_iter: Iterator,
        model: nn.Module,
        criterion: Callable | None = None,
        optimizer: Any = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """One batch through the pipeline; see `HybridParallelPlugin.execute_pipeline`."""

    @abstractmethod
    def save_model(self, model: nn.Module, path: Path, *, use_safetensors: bool) -> None:
        """Write the whole model to one file. Collective over the world."""

    @abstractmethod
    def load_model(self, model: nn.Module, path: Path) -> None:
        """Read a whole model's file into this rank's part. Every rank calls."""

    @property
    @abstractmethod
    def data_rank(self) -> tuple[int, int]:
        """This rank's place among those that get different batches, and how many there are."""

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type[DistributedSampler] | None = None,
        collate_fn: Callable | None = None,
        **kwargs: Any,
    ) -> DataLoader:
        """A dataloader that gives each data-parallel rank its share, and equal batches within a replica.

        Randomness in the collator (masking, augmentation) is drawn from (seed, data-parallel rank, batch), so
        it is the same on all tensor and pipeline ranks whatever else they draw.

        Args:
            dataset: a map-style dataset.
            batch_size: samples per data-parallel rank and step.
            shuffle: in an order that depends on `seed` and on the sampler's `set_epoch`.
            distributed_sampler_cls: another sampler class, called as torch's DistributedSampler is.
            kwargs: further arguments for the DataLoader.
        """
        rank, size = self.data_rank
        sampler_class = distributed_sampler_cls or DistributedSampler
        sampler = sampler_class(
            dataset, num_replicas=size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            collate_fn=SeededCollate(collate_fn or default_collate, seed=seed, rank=rank),
            generator=torch.Generator().manual_seed(seed + rank),
            **kwargs,
        )


def require_process_group() -> None:
    """Refuse to go on where `launch_from_torch` was not called.

    Raises:
        RuntimeError: no process group was started.
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group is started: call echelon.launch_from_torch() before the plugin")


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
