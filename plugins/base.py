"""The interface of a plugin, the base class of boosted models, and the checks that all plugins share."""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import cached_property, partial, wraps
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.local_tensors import Adapter, LocalModel
from ..checkpoint.optimizer_state import Trained
from ..cluster.device import default_device, is_cuda
from ..cluster.failures import naming_failures
from ..cluster.forward_random import ForwardRandom
from ..cluster.gathering import require_equal
from ..cluster.mesh import ParallelMesh
from ..cluster.options import described
from ..cluster.releases import log_newer_releases
from ..data.loader import ShardedLoader, sharded_loader
from ..data.user_loader import shard_user_loaders
from ..pipeline.stage import with_known_cache_name
from .accumulate import accumulating
from .colossalai import Unavailable, unavailable_errors
from .gather_samples import gather_samples
from .nonfinite import naming_nonfinite

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Arguments = ParamSpec("Arguments")
Options = TypeVar("Options")
Returned = bool | Literal["all_ranks"]
Dataloaders = DataLoader | Sequence[DataLoader | None] | None
# The dataloader is Any: one, or a list or tuple, as `boost` got.
Boosted = tuple[nn.Module, Optimizer | None, Callable | None, Any, LRScheduler | None]

_LOG = logging.getLogger("echelon")


def _group_of(axis: str) -> property:
    """Return the property of a plugin that is the process group of an axis."""
    return property(lambda plugin: plugin.mesh.group(axis))


class Plugin(ABC):
    """A way of training over several processes. `Booster` calls it; scripts read its sizes.

    Attributes:
        mesh: all ranks.
        precision_option: the argument by which users choose the precision.
        has_default_precision: True if the user gave none, and the device decided.
    """

    mesh: ParallelMesh
    _num_samples: int | None = None  # in the batches of all replicas that were taken last; None if unknown
    precision_option = "precision"
    has_default_precision: bool
    _has_logged = False

    @property
    @abstractmethod
    def precision(self) -> str:
        """The precision in which layers compute: "fp32", "bf16" or "fp16"."""

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: Dataloaders = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        """Wrap model and optimizer; return the other arguments unchanged. Collective over the world.

        The model must be equal on all ranks. A lazily built one is materialized. See `Booster.boost`.

        Raises:
            ValueError: model or optimizer cannot be wrapped; all reasons at once.
        """
        if lr_scheduler is not None:
            self._schedulers.add(lr_scheduler)
        return *self._wrap(model, optimizer), criterion, dataloader, lr_scheduler

    @cached_property
    def _schedulers(self) -> WeakSet[LRScheduler]:
        """The schedulers that were given to boost."""
        return WeakSet()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a block in which steps before the last call do nothing; see `Booster.accumulate`."""
        return accumulating(models, self._schedulers)

    @abstractmethod
    def _wrap(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Wrap model and optimizer. Collective over the world."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Compute gradients of a loss, scaled if the precision needs it."""

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
        """Run one batch through the pipeline; see `HybridParallelPlugin.execute_pipeline`.

        Raises:
            RuntimeError: the plugin has no pipeline.
        """
        raise RuntimeError(
            f"{type(self).__name__} has no pipeline: call model(**batch) and booster.backward(loss, optimizer), or "
            "use HybridParallelPlugin or LowLevelZeroPlugin, where execute_pipeline works at any size"
        )

    def seed(self, model: nn.Module, seed: int) -> None:
        """Restart the random numbers of a boosted model's training forwards. Collective; see `Booster.seed`.

        Raises:
            ValueError: the model is not boosted, or the seed is not an integer or differs between ranks.
        """
        boosted = require_boosted_model(model, "booster.seed")
        if not isinstance(seed, int):
            raise ValueError(f"seed={seed!r} must be an integer")
        require_equal({"seed": seed}, what="booster.seed")
        boosted.random.seed(seed)

    @abstractmethod
    def local_model(self, model: nn.Module) -> LocalModel:
        """Return this rank's shard of a boosted model, to save, load or look at it."""

    @abstractmethod
    def trained(self, optimizer: Optimizer) -> Trained:
        """Return the tensors that a boosted optimizer updates on this rank, for saving and loading."""

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Save and load functions for models and optimizers of this plugin."""
        return Checkpoints(self.mesh)

    @property
    def tp_size(self) -> int:
        """Number of ranks over which each layer is sharded."""
        return self.mesh.size("tp")

    @property
    def pp_size(self) -> int:
        """Number of ranks of the pipeline."""
        return self.mesh.size("pp")

    @property
    def dp_size(self) -> int:
        """Number of replicas; each gets different batches."""
        return self.mesh.size("dp")

    @property
    def pg_mesh(self) -> ParallelMesh:
        """The mesh, by ColossalAI's name."""
        return self.mesh

    # The groups of the axes, by ColossalAI's names.
    tp_group, pp_group, dp_group, sp_group = map(_group_of, ("tp", "pp", "dp", "sp"))

    @property
    def data_rank(self) -> tuple[int, int]:
        """The index of this rank's replica, and the number of replicas."""
        return self.mesh.rank("dp"), self.mesh.size("dp")

    def log_releases_and_precision(self) -> None:
        """Log untried package releases and a default precision, and warn of fp16 on a CPU: once, on the first rank."""
        if self._has_logged or self.mesh.global_rank:
            return
        self._has_logged = True
        log_newer_releases()
        if self.has_default_precision:
            _LOG.warning(
                "%s=%r, since none was given: the default is fp32 on a CPU, bf16 on a GPU that supports it, "
                "else fp16",
                self.precision_option,
                self.precision,
            )
        if self.precision == "fp16" and self.mesh.device.type == "cpu":
            warnings.warn(
                f"fp16 on a CPU is 10 to 20 times slower than fp32: give {self.precision_option}='fp32' or 'bf16'",
                stacklevel=3,
            )

    def shard_dataloader(self, dataloader: Any) -> Any:
        """Shard a plain DataLoader, or several, over the data-parallel ranks. Collective; called by `Booster.boost`.

        Its batch size is per replica, as in `prepare_dataloader`. Its sampler, generators, collator and workers
        are kept. See docs/checkpoints_data.md.

        Raises:
            ValueError: it cannot be sharded; raised on every rank.
        """
        rank, size = self.data_rank
        sharded = shard_user_loaders(dataloader, rank=rank, size=size)
        for loader in sharded if isinstance(sharded, (list, tuple)) else [sharded]:
            self._watch(loader)
        return sharded

    def _watch(self, dataloader: Any) -> None:
        """Note the samples of each batch that is taken from a dataloader, for `gather_for_metrics`."""
        if isinstance(dataloader, ShardedLoader):
            dataloader.on_batch = partial(setattr, self, "_num_samples")

    def naming_nonfinite(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a block that names the first module with a NaN; see `Booster.naming_nonfinite`."""
        boosted = require_boosted_model(model, "this call")
        return naming_nonfinite(boosted.unwrap(), self.mesh.device)

    def gather_for_metrics(self, values: Any) -> Any:
        """Return the values of all replicas, each sample once; see `Booster.gather_for_metrics`."""
        with naming_failures("gather_for_metrics"):
            return gather_samples(values, self.mesh.group("dp"), self._num_samples)

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
        """Return a dataloader sharded over the data-parallel ranks, with equal batches within a replica.

        `state_dict()` returns its position in the data; after `load_state_dict()` it continues from there, also with
        another number of replicas or another `batch_size`. The order of an epoch depends only on the seed and the
        epoch: for equal global batch sizes, global batches hold the same samples under every layout.

        Random numbers that a dataset or a collator draws from Python, NumPy and torch (masking, augmentation) depend
        on the seed, the epoch and the index of the batch. So they are the same on all ranks of a replica and after
        resuming, with and without workers.

        Args:
            dataset: a map-style dataset.
            batch_size: samples per data-parallel rank and step.
            shuffle: shuffle by `seed` and epoch. The epoch is the one given to the sampler's `set_epoch`, or else
                increases with each pass over the dataloader.
            drop_last: drop samples that do not fill a batch on every rank. Otherwise the last batch is shorter, and
                the first samples are repeated if the number of ranks does not divide the rest.
            pin_memory: put batches into pinned memory, for asynchronous copies to a GPU; None: only on CUDA.
            distributed_sampler_cls: another sampler class, with the arguments of torch's DistributedSampler. The
                position is then saved only if it has `state_dict` and `load_state_dict`.
            kwargs: further arguments of the DataLoader, except `sampler`, `batch_sampler` and `generator`.

        Raises:
            ValueError: the dataset or the arguments cannot be sharded; all errors at once.
        """
        rank, size = self.data_rank
        loader = sharded_loader(
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
        self._watch(loader)
        return loader


def init_from_options(
    options: Callable[Arguments, Options], unavailable: Mapping[str, Unavailable]
) -> Callable[[Callable[[Any, Options, list[str]], None]], Callable[Concatenate[Any, Arguments], None]]:
    """Decorate a plugin's `__init__(self, options, errors)`, so that users give the options as keyword arguments.

    The decorated `__init__` makes a dataclass of its arguments. In `errors` it passes a message for each argument of
    ColossalAI's plugin whose value is not supported. The signature and the docstring are those of the dataclass.

    Args:
        options: the dataclass.
        unavailable: by name, the arguments of ColossalAI's plugin that are not options.

    Raises (the decorated `__init__`):
        TypeError: an argument is unknown, or options are given by position that must be given by name.
        RuntimeError: no process group is started.
    """
    options_signature = signature(options)
    parameters = options_signature.parameters

    def decorate(
        init: Callable[[Any, Options, list[str]], None],
    ) -> Callable[Concatenate[Any, Arguments], None]:
        @wraps(init)
        def init_with_options(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            not_options = {name: value for name, value in kwargs.items() if name not in parameters}
            errors = unavailable_errors(init_with_options, unavailable, not_options)
            require_process_group()
            for name in not_options:
                del kwargs[name]
            try:
                options_signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(
                    f"{type(self).__name__}: {error}; {_positional_options(options_signature)}"
                ) from None
            init(self, options(*args, **kwargs), errors)

        self_parameter = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        init_with_options.__signature__ = Signature([self_parameter, *parameters.values()])  # type: ignore[attr-defined]
        init_with_options.__doc__ = "\n".join(f"{name}: {text}" for name, text in described(options).items())
        return init_with_options

    return decorate


def _positional_options(options: Signature) -> str:
    """Return the end of an error: the options that may be given by position."""
    names = [
        name
        for name, argument in options.parameters.items()
        if argument.kind is argument.POSITIONAL_OR_KEYWORD
    ]
    return f"by position it takes {', '.join(names) or 'nothing'}: give every option by its name"


def require_process_group() -> None:
    """Require the default process group, which `launch_from_torch` starts.

    Raises:
        RuntimeError: it is not started.
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group is started: call echelon.launch_from_torch() before the plugin")


def require_boosted(optimizer: Optimizer, boosted_class: type[AnyOptimizer], call: str) -> AnyOptimizer:
    """Return the optimizer, which must be one that `booster.boost` returned.

    Args:
        optimizer: the user's argument.
        boosted_class: the class in which this plugin wraps optimizers.
        call: the user's call, for the error.

    Raises:
        ValueError: it is of another class.
    """
    if not isinstance(optimizer, boosted_class):
        raise ValueError(
            f"{call} takes the optimizer that booster.boost returned, not a {type(optimizer).__name__}"
        )
    return optimizer


def require_boosted_model(model: nn.Module, call: str) -> "BoostedModule":
    """Return the model, which must be one that `booster.boost` returned.

    Args:
        model: the user's argument.
        call: the user's call, for the error.

    Raises:
        ValueError: it is another one.
    """
    if not isinstance(model, BoostedModule):
        raise ValueError(f"{call} takes the model that booster.boost returned")
    return model


def refuse_pipeline(call: str, mesh: ParallelMesh) -> None:
    """Refuse a call that needs all stages of the model on one rank.

    Raises:
        RuntimeError: the model is cut into several stages; names `execute_pipeline`.
    """
    if mesh.size("pp") > 1:
        raise RuntimeError(
            f"{call} under a pipeline (pp_size={mesh.size('pp')}): no rank has the full model. Call "
            "booster.execute_pipeline(data_iter, model, criterion, optimizer) instead, which works at pp_size=1 too"
        )


class BoostedModule(nn.Module, ABC):
    """A boosted model; `unwrap()` is the model itself.

    Args:
        adapters: its LoRA adapters, for saving.

    Attributes:
        random: the random numbers of its forwards in training.
    """

    module: nn.Module
    random: ForwardRandom

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        super().__init__()
        self.adapters = tuple(adapters)

    @abstractmethod
    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model's outputs."""

    @abstractmethod
    def ranks_of_call(self) -> Sequence[int] | None:
        """Return the ranks that must make the same call; None is all, () only this one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs.

        Raises:
            RankFailure: another rank failed during this call; names it.
        """
        kwargs = with_known_cache_name(self.module, kwargs)
        if torch.compiler.is_compiling():  # torch.compile cannot trace the detection of failed ranks
            return self.compute(*args, **kwargs)
        with naming_failures("model(**batch)", self.ranks_of_call()):
            return self.compute(*args, **kwargs)

    def unwrap(self) -> nn.Module:
        """Return the model without the wrapper."""
        return self.module

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Call the model's own `save_pretrained`.

        Raises:
            RuntimeError: this rank has only a shard of the model, or the model has adapters; names the call to use.
        """
        if self.adapters:  # their layers have names that from_pretrained does not know
            raise RuntimeError(
                "save_pretrained of a model with adapters would write names that from_pretrained cannot "
                "load: call booster.save_lora_as_pretrained(model, folder) on every rank, or "
                "booster.save_model"
            )
        self.module.save_pretrained(*args, **kwargs)  # type: ignore[operator]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a boosted model has process groups and cannot be copied or pickled: call booster.save_model(model, path) "
            "on every rank, or booster.save_checkpoint"
        )


class PipelineLoss(Tensor):
    """The loss that `execute_pipeline` returns in training: a tensor without a graph, whose `backward` raises.

    Results of operations on it, and saved copies of it, are plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeError, with the call to use instead."""
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
