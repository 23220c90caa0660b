"""What every plugin offers the Booster, and the dataloaders of all of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from ..cluster.dataloader import shared_loader

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

    @abstractmethod
    def save_lora(self, model: nn.Module, folder: Path, *, use_safetensors: bool) -> None:
        """Write the adapters of a boosted model as peft does. Collective over the world."""

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
        return shared_loader(
            dataset,
            batch_size,
            rank=rank,
            size=size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            sampler_class=distributed_sampler_cls or DistributedSampler,
            collate_fn=collate_fn or default_collate,
            pin_memory=pin_memory,
            num_workers=num_workers,
            **kwargs,
        )


def require_process_group() -> None:
    """Refuse to go on where `launch_from_torch` was not called.

    Raises:
        RuntimeError: no process group was started.
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group is started: call echelon.launch_from_torch() before the plugin")
