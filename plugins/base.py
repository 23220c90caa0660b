"""The interface of a plugin, the base class of boosted models, and the checks that all plugins share."""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import cached_property
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.local import Adapter, LocalModel
from ..checkpoint.optimizer import Trained
from ..cluster.device import default_device, is_cuda
from ..cluster.failures import naming_failures
from ..cluster.mesh import ParallelMesh
from ..data.given import shard_given_loader
from ..data.loader import ShardedLoader, sharded_loader
from ..zero.optimizer import ShardedOptimizer
from ..zero.precision import default_precision
from .scaled_optimizer import ScaledOptimizer

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Returned = bool | Literal["all_ranks"]
Boosted = tuple[nn.Module, Optimizer | None, Callable | None, DataLoader | None, LRScheduler | None]

_LOG = logging.getLogger("echelon")


class Plugin(ABC):
    """Strategy of training over several processes. `Booster` calls it; scripts read its sizes.

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

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        """Wrap model and optimizer; the others are returned as they are. Collective over the world.

        Every rank gives an equal model. One that was built lazily is materialized. See `Booster.boost`.

        Raises:
            ValueError: model or optimizer cannot be wrapped; all reasons at once.
        """
        return *self._wrap(model, optimizer), criterion, dataloader, lr_scheduler

    @abstractmethod
    def _wrap(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Wrap model and optimizer. Collective over the world."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Compute gradients of a loss, scaled as the precision needs."""

    @abstractmethod
    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them over the data-parallel ranks."""

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
        """One batch through the pipeline; see `HybridParallelPlugin.execute_pipeline`.

        Raises:
            RuntimeError: the plugin has no pipeline.
        """
        raise RuntimeError(
            f"{type(self).__name__} has no pipeline: call model(**batch) and booster.backward(loss, optimizer), or "
            "use HybridParallelPlugin or LowLevelZeroPlugin, where execute_pipeline works at any size"
        )

    @abstractmethod
    def local_model(self, model: nn.Module) -> LocalModel:
        """This rank's part of a boosted model, to be saved or loaded."""

    @abstractmethod
    def trained(self, optimizer: Optimizer) -> Trained:
        """The tensors that a boosted optimizer steps on this rank, to be saved or loaded."""

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The savers and loaders of all that this plugin boosts."""
        return Checkpoints(self.mesh)

    @property
    def tp_size(self) -> int:
        """Ranks over which each layer is sharded."""
        return self.mesh.size("tp")

    @property
    def pp_size(self) -> int:
        """Stages of the pipeline."""
        return self.mesh.size("pp")

    @property
    def dp_size(self) -> int:
        """Replicas that get different batches."""
        return self.mesh.size("dp")

    @property
    def data_rank(self) -> tuple[int, int]:
        """This rank's replica, and how many there are."""
        return self.mesh.rank("dp"), self.mesh.size("dp")

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
        return shard_given_loader(dataloader, rank=rank, size=size)

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool | None = None,
        num_workers: int = 0,
        distributed_sampler_cls: type[DistributedSampler] | None = None,
        collate_fn: Callable | None = None,
        **kwargs: Any,
    ) -> ShardedLoader:
        """A dataloader that gives each data-parallel rank its share, and equal batches within a replica.

        It reports its position in the data by `state_dict()`, and goes on at one after `load_state_dict()`, also with
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
            pin_memory: make batches in memory from which a GPU copies while the process goes on; None is on CUDA.
            distributed_sampler_cls: another sampler class, called as torch's DistributedSampler is. Then the position
                is known where it has `state_dict` and `load_state_dict`.
            kwargs: further arguments for the DataLoader, without `sampler`, `batch_sampler` and `generator`.

        Raises:
            ValueError: the dataset or the arguments cannot be sharded; all errors at once.
        """
        rank, size = self.data_rank
        return sharded_loader(
            dataset,
            batch_size,
            rank=rank,
            size=size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            sampler_class=distributed_sampler_cls,
            collate_fn=collate_fn or default_collate,
            pin_memory=is_cuda(default_device()) if pin_memory is None else pin_memory,
            num_workers=num_workers,
            **kwargs,
        )


def own_arguments(scope: Mapping[str, Any]) -> dict[str, Any]:
    """The named arguments of an `__init__` that begins with `own_arguments(locals())`."""
    return {name: value for name, value in scope.items() if name not in ("self", "others", "__class__")}


def given_precision(precision: str | None) -> str:
    """The precision of a plugin, or this device's default where none was given."""
    return default_precision(default_device()) if precision is None else precision


def require_process_group() -> None:
    """Refuse to go on where `launch_from_torch` was not called.

    Raises:
        RuntimeError: no process group was started.
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group is started: call echelon.launch_from_torch() before the plugin")


def require_boosted(optimizer: Optimizer, kind: type[AnyOptimizer], call: str) -> AnyOptimizer:
    """The optimizer, as what a plugin whose optimizers are of this kind has boosted.

    Raises:
        ValueError: it is another one.
    """
    if not isinstance(optimizer, kind):
        raise ValueError(
            f"{call} takes the optimizer that booster.boost returned, and this is a {type(optimizer).__name__}"
        )
    return optimizer


class BoostedModule(nn.Module, ABC):
    """A boosted model; `unwrap()` is the model itself.

    Args:
        adapters: what is saved of it as LoRA.
    """

    module: nn.Module

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        super().__init__()
        self.adapters = tuple(adapters)

    @abstractmethod
    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model's outputs."""

    @abstractmethod
    def ranks_of_call(self) -> Sequence[int] | None:
        """The ranks that have to make the same call; None is all, () none but this one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; a rank that fails meanwhile is named on those that wait for it."""
        if torch.compiler.is_compiling():  # torch.compile cannot trace the watch over the ranks
            return self.compute(*args, **kwargs)
        with naming_failures("model(**batch)", self.ranks_of_call()):
            return self.compute(*args, **kwargs)

    def unwrap(self) -> nn.Module:
        """The model without the wrapper."""
        return self.module

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Call the model's own `save_pretrained`.

        Raises:
            RuntimeError: this rank has a part of the model alone, or the model has adapters; it says what to call.
        """
        if self.adapters:  # their layers have names that from_pretrained does not know
            raise RuntimeError(
                "save_pretrained of a model with adapters writes names that from_pretrained does not know: call "
                "booster.save_lora_as_pretrained(model, folder) on every rank, or booster.save_model"
            )
        self.module.save_pretrained(*args, **kwargs)  # type: ignore[operator]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a boosted model has process groups and cannot be copied or pickled: call booster.save_model(model, path) "
            "on every rank, or booster.save_checkpoint"
        )


def optimizer_errors(model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """List reasons why this optimizer cannot train this model."""
    if optimizer is None:
        return []
    if isinstance(optimizer, ShardedOptimizer | ScaledOptimizer):
        return ["the optimizer is already boosted: give booster.boost the plain torch optimizer"]
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    own = set(model.parameters())
    foreign = len(given - own)
    if foreign:
        return [
            f"the optimizer holds {foreign} of {len(given)} parameters that are not the model's: build it on "
            "model.parameters() of the model that is given to booster.boost, after any change of the model's modules"
        ]
    return []


class PipelineLoss(Tensor):
    """The loss that `execute_pipeline` returns in training: a tensor without a graph, whose `backward` says so.

    Whatever is computed of it, and what is saved of it, is a plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeError, which says what to call."""
        raise RuntimeError(
            "loss.backward() after execute_pipeline, which has computed the gradients already: leave it out, and call "
            "optimizer.step() next"
        )

    def _plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self._plain(), memo)

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())
