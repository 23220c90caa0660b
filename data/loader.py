"""Dataloaders whose samples are sharded over the data axis and which track the position of training in the data."""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from ..cluster.errors import raise_errors
from ..cluster.failures import note_end_of_data
from ..cluster.forward_random import generators_put_back, seed_torch
from .sampler import BegunPass, Draw, ForeignSampler, ResumableSampler, StatefulSampler, derived_seed


def dataset_errors(dataset: Any) -> list[str]:
    """Return the reasons why a data set cannot be sharded over replicas."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return [
            f"the data set ({name}) is iterable-style or has no length, so it cannot be sharded: give one with __len__ "
            "and __getitem__"
        ]
    if isinstance(dataset, Mapping) and len(dataset) and 0 not in dataset:
        keys = ", ".join(map(repr, list(dataset)[:4]))
        return [f"the data set ({name}) has the keys {keys} and no sample 0: give one of the data sets in it"]
    if not hasattr(dataset, "__getitem__"):
        return [f"the data set ({name}) has no __getitem__: give one with __len__ and __getitem__"]
    return []


_REFUSED = {
    "sampler": "samples are sharded over the replicas: give a class as distributed_sampler_cls instead",
    "batch_sampler": "samples are sharded over the replicas: give batch_size, and a class as distributed_sampler_cls",
    "generator": "random numbers follow from the seed and a batch's place: give seed instead",
}


_LOWEST = {"batch_size": 1, "num_workers": 0, "seed": 0}
_SWITCHES = ("shuffle", "drop_last", "pin_memory")
_KNOWN = {*_LOWEST, *_SWITCHES, *inspect.signature(DataLoader).parameters}


def argument_errors(arguments: Mapping[str, Any]) -> list[str]:
    """Return the errors of a sharded dataloader's arguments, except the data set."""
    errors = [
        f"{name}={arguments[name]!r} must be an integer of at least {lowest}"
        for name, lowest in _LOWEST.items()
        if name in arguments and not (type(arguments[name]) is int and arguments[name] >= lowest)
    ]
    errors += [
        f"{name}={arguments[name]!r} must be True or False"
        for name in _SWITCHES
        if name in arguments and not isinstance(arguments[name], bool)
    ]
    errors += [f"{name} is not an argument of a DataLoader" for name in arguments if name not in _KNOWN]
    errors += [
        f"{name} is not supported: {why}" for name, why in _REFUSED.items() if arguments.get(name) is not None
    ]
    if not arguments.get("in_order", True):
        errors.append(
            "in_order=False would give the ranks of a replica different batches, and no position to resume from: leave "
            "it out"
        )
    return errors


def loader_errors(loader: Any) -> list[str]:
    """Return the reasons why a user's dataloader cannot be sharded."""
    if type(loader) is not DataLoader:
        return [
            f"it is a {type(loader).__name__}, and only a plain torch.utils.data.DataLoader can be rebuilt"
        ]
    if errors := dataset_errors(loader.dataset):
        return errors
    if loader.batch_sampler is None:
        return ["it has batch_size=None, so the data set makes the batches itself"]
    if type(loader.batch_sampler) is not BatchSampler:
        return [
            f"its batch_sampler is a {type(loader.batch_sampler).__name__}, which chooses the batches itself"
        ]
    return argument_errors({"batch_size": loader.batch_sampler.batch_size, "in_order": loader.in_order})


def sharded_loader(
    dataset: Dataset,
    batch_size: int,
    *,
    rank: int,
    size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    collate_fn: Callable,
    sampler_class: type[DistributedSampler] | None = None,
    **kwargs: Any,
) -> "ShardedLoader":
    """Return a dataloader of one rank's share of a data set.

    Its random numbers depend only on the seed and on the position of a batch in the data.

    Args:
        dataset: a map-style dataset.
        batch_size: samples in a batch of this rank.
        rank, size: rank and size of the data axis.
        shuffle: shuffle in an order that depends on `seed` and the epoch.
        seed: seed of the order and of random numbers.
        drop_last: leave out samples that do not fill a batch on every rank.
        collate_fn: makes a batch from a list of samples.
        sampler_class: used instead of ResumableSampler, with the arguments of torch's DistributedSampler.
        kwargs: further arguments for the DataLoader.

    Raises:
        ValueError: the data set cannot be sharded, or arguments are invalid; all errors at once.
    """
    arguments = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last, **kwargs}
    raise_errors([*dataset_errors(dataset), *argument_errors(arguments)])
    sampler = (sampler_class or ResumableSampler)(
        dataset, num_replicas=size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    stateful_sampler = (
        sampler
        if isinstance(sampler, ResumableSampler)
        else ForeignSampler(sampler, seed=seed, rank=rank, drop_last=drop_last)
    )
    return ShardedLoader(
        dataset,
        stateful_sampler=stateful_sampler,
        seed=(seed, rank),
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        collate_fn=collate_fn,
        **kwargs,
    )


class ShardedLoader(DataLoader[Any]):
    """A DataLoader that tracks the samples that all replicas together have taken.

    Its length is the number of batches in a full epoch. The length of its iterator is the number of batches in that
    pass, which is smaller if the pass resumes within an epoch.

    Args:
        dataset: a map-style dataset.
        stateful_sampler: begins passes over the samples of `sampler`.
        seed: seeds worker processes, together with the epoch.
        batch_size: samples in a batch of this rank.
        sampler: yields this rank's samples.
        settings: further arguments for the DataLoader.

    Attributes:
        on_batch: called whenever a batch is taken, with the number of samples in the batches of all replicas together,
            without repeated ones; None if it is unknown.
    """

    on_batch: Callable[[int | None], None] | None = None

    def __init__(
        self,
        dataset: Dataset,
        *,
        stateful_sampler: StatefulSampler,
        seed: tuple[int, ...],
        batch_size: int,
        sampler: Sampler[int],
        **settings: Any,
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **settings)
        self.stateful_sampler = stateful_sampler
        self.num_passes = 0
        self._batch_size = batch_size
        self._seed = seed
        self._draw_sampler = _DrawSampler()
        self._batch_loader: DataLoader[Any] | None = None  # of the latest pass; kept with persistent workers

    def __iter__(self) -> "Pass":  # type: ignore[override]
        """Begin a pass; see `ResumableSampler` for its epoch and position."""
        begun = self.stateful_sampler.begin(self._batch_size)
        self.num_passes += 1
        if self._batch_loader is None or not self.persistent_workers:
            self._batch_loader = self._new_batch_loader(begun.epoch)
        return Pass(self, begun, self._batch_loader, self._draw_sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: batches that the training loop has taken, without prefetched ones.

        Returns:
            "epoch", its "samples" that all replicas together have taken, and the "seed", "size" and "shuffle" of the
            data; equal on all ranks. After a complete epoch "samples" equals "size". With a sampler class of the
            user's: the "sampler" state, "epoch" and "batches". Of a user's loader: the fields of `LoaderPosition`, and
            "size".

        Raises:
            ValueError: the user's sampler class has no state.
        """
        return self.stateful_sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position, saved by another run, at which the next pass continues. Later passes are full epochs.

        That run may have had another number of replicas or another batch size.

        Raises:
            ValueError: the position is of other data or another order; all errors at once.
        """
        self.stateful_sampler.load_state_dict(state)

    def _new_batch_loader(self, epoch: int) -> DataLoader[Any]:
        """Return the DataLoader that makes batches from draws, in this process or in workers."""
        return DataLoader(
            BatchDataset(self.dataset, self.collate_fn),
            batch_size=None,
            sampler=self._draw_sampler,
            collate_fn=unchanged,
            worker_init_fn=partial(_start_worker, then=self.worker_init_fn),
            # Seeds generators of the data set or `worker_init_fn`; a batch's random numbers depend on its draw alone.
            generator=torch.Generator().manual_seed(derived_seed(*self._seed, epoch)),
            **{name: getattr(self, name) for name in WORKER_SETTINGS},
        )


WORKER_SETTINGS = (
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class _DrawSampler:
    """Sampler of torch's DataLoader: the draws of the latest pass, so that persistent workers get those of the next."""

    def __init__(self) -> None:
        self.draws: Iterator[Draw] = iter(())

    def __iter__(self) -> Iterator[Draw]:
        return self.draws


class Pass(Iterator[Any]):
    """Iterator over the batches of a pass. Taking a batch advances the loader's position.

    Its length is the number of all batches of the pass.
    """

    def __init__(
        self,
        loader: ShardedLoader,
        begun: BegunPass,
        batch_loader: DataLoader[Any],
        draw_sampler: _DrawSampler,
    ) -> None:
        self._loader = loader
        self._pass_number = loader.num_passes
        self._num_batches = begun.num_batches
        # By number of the batches in flight: the position after it, and its samples as for `on_batch`.
        self._positions: dict[int, tuple[Any, int | None]] = {}
        draw_sampler.draws = _noted(begun.draws, self._positions)
        self._batches = iter(batch_loader)

    def __next__(self) -> Any:
        """Return the next batch, and move the position behind it."""
        if self._loader.persistent_workers and self._pass_number != self._loader.num_passes:
            raise RuntimeError(
                "a later pass over this dataloader has begun, and with persistent_workers=True it took the workers "
                "of this one: finish one pass before the next, or leave out persistent_workers"
            )
        try:
            batch_number, batch = next(self._batches)
        except StopIteration:
            note_end_of_data()  # for the errors of ranks that still have batches
            raise
        self._loader.stateful_sampler.position, num_samples = self._positions.pop(batch_number)
        if self._loader.on_batch is not None:
            self._loader.on_batch(num_samples)
        return batch

    def __len__(self) -> int:
        return len(self._loader) if self._num_batches is None else self._num_batches


# Not a method: a generator with a reference to its pass would keep abandoned workers alive until garbage collection.
def _noted(draws: Iterator[tuple[Draw, Any]], positions: dict[int, tuple[Any, int | None]]) -> Iterator[Draw]:
    """Yield the draws, and record the position after each, and its samples, in `positions`."""
    for draw, position in draws:
        positions[draw.number] = (position, draw.num_samples)
        yield draw


class BatchDataset(Dataset[tuple[int, Any]]):
    """A data set of batches, indexed by draws, so that any process that makes a batch can seed it."""

    def __init__(self, dataset: Any, collate: Callable[[list], Any]) -> None:
        self.dataset = dataset
        self._collate = collate

    def __getitem__(self, draw: Draw) -> tuple[int, Any]:
        """Return the number of a batch and the batch. The process's random states are unchanged."""
        with seeded(draw.entropy):
            return draw.number, self._collate(_samples(self.dataset, draw.indices))


def unchanged(batch: Any) -> Any:
    """Return the batch: a collator that workers can unpickle, for a DataLoader whose data set yields batches."""
    return batch


def _start_worker(worker: int, then: Callable[[int], None] | None) -> None:
    """Make `get_worker_info` report the user's own data set in a worker process."""
    info = get_worker_info()
    if info is None:
        raise AssertionError(f"worker {worker} starts outside of a worker process")
    # torch forbids plain assignment; scripts open files through get_worker_info().dataset here.
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
    if then is not None:
        then(worker)


@contextmanager
def seeded(entropy: Sequence[int]) -> Iterator[None]:
    """Seed Python, NumPy and torch's CPU generator for a block, and restore their states afterwards."""
    with generators_put_back(torch.device("cpu")):
        seed_cpu(derived_seed(*entropy))
        yield


def seed_cpu(seed: int) -> None:
    """Seed Python, NumPy and torch's CPU generator."""
    random.seed(seed)
    np.random.seed(seed)
    seed_torch(seed, torch.device("cpu"))


def _samples(dataset: Any, indices: list[int]) -> list[Any]:
    """Return samples of a data set, with one call of `__getitems__` if it has one, as torch's DataLoader does."""
    get_samples = getattr(dataset, "__getitems__", None)
    return get_samples(indices) if get_samples else [dataset[index] for index in indices]
