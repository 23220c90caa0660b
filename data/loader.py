"""Dataloaders whose samples are sharded over the data axis, with the place that training has reached."""

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
from ..cluster.random import generators_put_back, seed_torch
from .sampler import BegunPass, Draw, ForeignSampler, ResumableSampler, StatefulSampler, derived_seed


def dataset_errors(dataset: Any) -> list[str]:
    """Return the reasons why a data set cannot be sharded over replicas."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return [
            f"the data set ({name}) gives its samples in an order of its own or has no length, so it cannot be "
            "sharded: give one with __len__ and __getitem__"
        ]
    if isinstance(dataset, Mapping) and len(dataset) and 0 not in dataset:
        keys = ", ".join(map(repr, list(dataset)[:4]))
        return [f"the data set ({name}) has samples {keys} and none at 0: give one of the data sets in it"]
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


def argument_errors(given: Mapping[str, Any]) -> list[str]:
    """Return the errors of arguments of a sharded dataloader, besides its data set."""
    errors = [
        f"{name}={given[name]!r} must be a whole number from {lowest}"
        for name, lowest in _LOWEST.items()
        if name in given and not (type(given[name]) is int and given[name] >= lowest)
    ]
    errors += [
        f"{name}={given[name]!r} must be True or False"
        for name in _SWITCHES
        if name in given and not isinstance(given[name], bool)
    ]
    errors += [f"{name} is no argument of a DataLoader" for name in given if name not in _KNOWN]
    errors += [f"{name} is not taken: {why}" for name, why in _REFUSED.items() if given.get(name) is not None]
    if not given.get("in_order", True):
        errors.append(
            "in_order=False would give the ranks of a replica batches in other orders, and no place to go on from: "
            "leave it out"
        )
    return errors


def loader_errors(loader: Any) -> list[str]:
    """Return the reasons why a user's dataloader cannot be sharded as it is."""
    if type(loader) is not DataLoader:
        return [
            f"it is a {type(loader).__name__}, and only a plain torch.utils.data.DataLoader can be rebuilt"
        ]
    if errors := dataset_errors(loader.dataset):
        return errors
    if loader.batch_sampler is None:
        return ["it has batch_size=None, so its batches are the data set's own"]
    if type(loader.batch_sampler) is not BatchSampler:
        return [f"its batch_sampler is a {type(loader.batch_sampler).__name__}, whose batches are its own"]
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
    """A dataloader of one rank's share of a data set. Whatever it draws follows from the seed and the place of a batch.

    Args:
        dataset: a map-style dataset.
        batch_size: samples of this rank in a batch.
        rank, size: of the data axis.
        shuffle: in an order that depends on `seed` and on the epoch.
        drop_last: leave out samples that do not fill a batch on every rank.
        sampler_class: in the place of ResumableSampler, called as torch's DistributedSampler is.
        kwargs: further arguments for the DataLoader.

    Raises:
        ValueError: something cannot be sharded; all errors at once.
    """
    given = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last, **kwargs}
    raise_errors([*dataset_errors(dataset), *argument_errors(given)])
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
    """A DataLoader that knows how much of the data was taken from it, by all replicas together.

    Its length is that of a whole epoch. `iter` of it has the length of what that pass gives, which is less where the
    pass goes on within an epoch.

    Args:
        stateful_sampler: begins passes over the samples of `sampler`.
        seed: what worker processes are seeded from, besides the epoch.
        settings: of the DataLoader.
    """

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
        self._num_samples = batch_size
        self._seed = seed
        self._current = _Current()
        self._maker: DataLoader[Any] | None = None

    def __iter__(self) -> "Pass":  # type: ignore[override]
        """Begin a pass; see `ResumableSampler` for its epoch and where in it."""
        begun = self.stateful_sampler.begin(self._num_samples)
        self.num_passes += 1
        if self._maker is None or not self.persistent_workers:
            self._maker = self._new_maker(begun.epoch)
        return Pass(self, begun, self._maker, self._current)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data: what the training loop has taken, not what workers hold ready.

        Returns:
            "epoch", "samples" of it that all replicas have taken, and "seed", "size" and "shuffle" of the data, equal
            on all ranks. After a whole epoch "samples" is "size". With a sampler class of the user's instead: its
            "sampler" state, "epoch" and "batches".

        Raises:
            ValueError: a sampler class of the user's has no state.
        """
        return self.stateful_sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where another run stood, and the one after it be a whole next epoch.

        The run may have had another number of replicas or another batch size.

        Raises:
            ValueError: the position is one in other data or another order; all errors at once.
        """
        self.stateful_sampler.load_state_dict(state)

    def _new_maker(self, epoch: int) -> DataLoader[Any]:
        """The DataLoader that makes batches of draws, here or in workers."""
        return DataLoader(
            BatchDataset(self.dataset, self.collate_fn),
            batch_size=None,
            sampler=self._current,
            collate_fn=unchanged,
            worker_init_fn=partial(_start_worker, then=self.worker_init_fn),
            # Of what a data set or `worker_init_fn` keeps generators for; a batch's own numbers follow from its draw.
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


class _Current:
    """The draws of the pass that began last: what torch's DataLoader takes for its sampler."""

    def __init__(self) -> None:
        self.draws: Iterator[Draw] = iter(())

    def __iter__(self) -> Iterator[Draw]:
        return self.draws


class Pass(Iterator[Any]):
    """The batches from where a pass begins to the end of its epoch. Its loader's position follows what is taken.

    Its length is the number of batches that it gives from its beginning.
    """

    def __init__(
        self, loader: ShardedLoader, begun: BegunPass, maker: DataLoader[Any], current: _Current
    ) -> None:
        self._loader = loader
        self._number = loader.num_passes
        self._num_batches = begun.num_batches
        self._positions: dict[int, Any] = {}  # after each batch that was drawn and not yet taken
        current.draws = _noted(begun.draws, self._positions)
        self._batches = iter(maker)

    def __next__(self) -> Any:
        if self._loader.persistent_workers and self._number != self._loader.num_passes:
            raise RuntimeError(
                "a later pass over this dataloader has begun, and with persistent_workers=True it took the workers "
                "of this one: finish one pass before the next, or leave out persistent_workers"
            )
        number, batch = next(self._batches)
        self._loader.stateful_sampler.position = self._positions.pop(number)
        return batch

    def __len__(self) -> int:
        return len(self._loader) if self._num_batches is None else self._num_batches


# Not a method: a generator that held its pass would keep abandoned workers alive until the garbage is collected.
def _noted(draws: Iterator[tuple[Draw, Any]], positions: dict[int, Any]) -> Iterator[Draw]:
    """The draws, the position after each written down."""
    for draw, position in draws:
        positions[draw.number] = position
        yield draw


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


def _start_worker(worker: int, then: Callable[[int], None] | None) -> None:
    """Let the data set that a worker process reports be the user's own."""
    info = get_worker_info()
    if info is None:
        raise AssertionError(f"worker {worker} starts outside of a worker process")
    # torch forbids plain assignment; scripts open files through get_worker_info().dataset here.
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
    if then is not None:
        then(worker)


@contextmanager
def seeded(entropy: Sequence[int]) -> Iterator[None]:
    """Let Python, NumPy and torch's CPU draw what follows from some numbers alone, and go on afterwards as before."""
    seed, cpu = derived_seed(*entropy), torch.device("cpu")
    with generators_put_back(cpu):
        random.seed(seed)
        np.random.seed(seed)
        seed_torch(seed, cpu)
        yield


def _samples(dataset: Any, indices: list[int]) -> list[Any]:
    """Samples of a data set, all at once where it can give them so, as torch's DataLoader reads them."""
    several = getattr(dataset, "__getitems__", None)
    return several(indices) if several else [dataset[index] for index in indices]
