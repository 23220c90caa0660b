"""What every plugin offers the Booster, and the dataloaders of all of them."""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.held_model import HeldModel
from ..checkpoint.trained import Trained
from ..cluster.dataloader import SharedLoader, shared_loader
from ..cluster.given_loader import sharded_loader
from ..cluster.mesh import ParallelMesh

Returned = bool | Literal["all_ranks"]
Boosted = tuple[nn.Module, Optimizer | None, Callable | None, DataLoader | None, LRScheduler | None]

_LOG = logging.getLogger("echelon")


class Plugin(ABC):
    """One way of training over several processes. `Booster` calls it; scripts read its sizes.

    Attributes:
        mesh: all ranks.
        precision_option: the argument by which users choose the precision.
        has_default_precision: whether they left it to the device.
    """

    mesh: ParallelMesh
    precision_option = "precision"
    has_default_precision: bool
    _is_precision_announced = False

    @property
    @abstractmethod
    def precision(self) -> str:
        """The precision in which layers compute: "fp32", "bf16" or "fp16"."""

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
        return_outputs: Returned = False,
        *,
        average_loss: bool = True,
    ) -> dict[str, Any]:
        """One batch through the pipeline; see `HybridParallelPlugin.execute_pipeline`."""

    @abstractmethod
    def held_model(self, model: nn.Module) -> HeldModel:
        """What this rank holds of a boosted model, to be saved or loaded."""

    @abstractmethod
    def trained(self, optimizer: Optimizer) -> Trained:
        """What this rank steps by a boosted optimizer, to be saved or loaded."""

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The savers and loaders of all that this plugin boosts."""
        return Checkpoints(self.mesh)

    @property
    @abstractmethod
    def data_rank(self) -> tuple[int, int]:
        """This rank's place among those that get different batches, and how many there are."""

    def announce_precision(self) -> None:
        """Log a precision that was not given, and warn of fp16 on a CPU; on the first rank, at the first boost."""
        if self._is_precision_announced or self.mesh.global_rank:
            return
        self._is_precision_announced = True
        if self.has_default_precision:
            _LOG.warning(
                "%s=%r, since none was given: the default is fp32 on a CPU, bf16 on a GPU that computes in it, else "
                "fp16",
                self.precision_option,
                self.precision,
            )
        if self.precision == "fp16" and self.mesh.device.type == "cpu":
            warnings.warn(
                f"fp16 on a CPU is 10 to 20 times slower than fp32: give {self.precision_option}='fp32' or 'bf16'",
                stacklevel=3,
            )

    def shard_dataloader(self, dataloader: Any) -> Any:
        """Give each data-parallel rank its share of a plain DataLoader; `Booster.boost` calls it. Collective.

        Its batch size is that of each replica, as in `prepare_dataloader`; its sampler, generators, collator and
        workers are kept. See docs/checkpoints_data.md.

        Raises:
            ValueError: it cannot be sharded; on every rank.
        """
        rank, size = self.data_rank
        return sharded_loader(dataloader, rank=rank, size=size)

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
    ) -> SharedLoader:
        """A dataloader that gives each data-parallel rank its share, and equal batches within a replica.

        It tells its position in the data by `state_dict()`, and goes on at one after `load_state_dict()`, also with
        another number of replicas or another `batch_size`. The order of an epoch follows from the seed and the epoch
        alone: batches that are equally large over all replicas together hold the same samples whatever the layout.

        What a dataset or a collator draws from the generators of Python, NumPy and torch (masking, augmentation)
        follows from the seed, the epoch and the place of the batch in it, so it is the same on all ranks of a replica
        and after resuming, with and without workers.

        Args:
            dataset: a map-style dataset.
            batch_size: samples per data-parallel rank and step.
            shuffle: in an order that depends on `seed` and on the epoch: the one given to the sampler's `set_epoch`,
                or else the next one with each pass over the dataloader.
            drop_last: leave out samples that do not fill a batch on every rank. Otherwise the last batch is shorter,
                and the first samples are given again where the ranks do not divide what is left.
            distributed_sampler_cls: another sampler class, called as torch's DistributedSampler is. Then the position
                is known where it has `state_dict` and `load_state_dict`.
            kwargs: further arguments for the DataLoader, without `sampler`, `batch_sampler` and `generator`.

        Raises:
            ValueError: the dataset or the arguments cannot be dealt out; all faults are told.
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
            sampler_class=distributed_sampler_cls,
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
