"""Shard a user's own DataLoader over the data axis: the order of its sampler, and its random generators."""

import copy
import logging
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Sampler, Subset
from torch.utils.data.distributed import DistributedSampler

from ..cluster.errors import raise_errors
from ..cluster.gathering import broadcast_object, require_equal
from .loader import WORKER_SETTINGS, ShardedLoader, loader_errors, seed_cpu
from .sampler import BegunPass, Draw, StatefulSampler, derived_seed, key_errors, num_parts


class Access(NamedTuple):
    """Read and write the state of a random generator, as plain values."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


_ACCESS: dict[type, Access] = {
    torch.Generator: Access(torch.Generator.get_state, torch.Generator.set_state),
    random.Random: Access(random.Random.getstate, random.Random.setstate),
    np.random.Generator: Access(
        lambda generator: _plain(generator.bit_generator.state),
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    np.random.RandomState: Access(
        lambda generator: _plain(generator.get_state(legacy=False)), np.random.RandomState.set_state
    ),
}


def _plain(state: Any) -> Any:
    """Return the state of a NumPy generator with lists in place of arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


class Streams:
    """The random generators of a sampler: the global ones of Python, NumPy and torch's CPU, and its own.

    Args:
        given: generators of the dataloader and its sampler, of the kinds of `_ACCESS`.
        apart: let the sampler draw from copies of the current global states, independent of all other draws.

    Attributes:
        apart: True if every pass draws from the copies.
    """

    def __init__(self, given: Sequence[Any], *, apart: bool) -> None:
        self.apart = apart
        self._given = given
        self._own = _global_state() if apart else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the next draws."""
        return {
            "apart": self.apart,
            "own": _global_state() if self._own is None else self._own,
            "given": [_ACCESS[type(generator)].read(generator) for generator in self._given],
        }

    def between_passes(self) -> dict[str, Any]:
        """Return the state in which the next pass begins, unless the global generators are drawn from before it."""
        return {**self.state_dict(), "begun": False}

    def require(self, state: Mapping[str, Any]) -> None:
        """Require a state of as many generators.

        Raises:
            ValueError: the other run had another number of generators.
        """
        if len(state["given"]) != len(self._given):
            raise ValueError(
                f"the position in the data has {len(state['given'])} generators, but this dataloader has "
                f"{len(self._given)}: use the same generators as the saved run"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the draws of another run: until `release`, or always if either run has `apart`.

        Without `apart`, a state of `between_passes` leaves the global generators to the script, which restores them.
        """
        self.apart |= state["apart"]
        if self.apart or state.get("begun", True):
            self._own = state["own"]
        for generator, saved in zip(self._given, state["given"], strict=True):
            _ACCESS[type(generator)].write(generator, saved)

    def release(self) -> None:
        """Draw from the global generators again, unless `apart` is set."""
        if not self.apart:
            self._own = None

    def reseed(self, seed: int) -> None:
        """Seed the copies of the global generators."""
        with self.drawing():
            seed_cpu(seed)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Use these generators for a sampler's draws. With copies, the global states are restored afterwards."""
        if self._own is None:
            yield
            return
        outside = _global_state()
        try:
            _set_global(self._own)
            yield
        finally:
            self._own = _global_state()
            _set_global(outside)


def _global_state() -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }


def _set_global(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])


class Place(NamedTuple):
    """The position of all replicas together.

    Args:
        epoch: number of passes that ended before this one.
        samples: samples taken in this pass.
        start: generator states at the start of the pass; None before it begins.
        entropy: seed of the random numbers of its batches; None before the pass begins.
    """

    epoch: int
    samples: int
    start: dict[str, Any] | None
    entropy: int | None


class GivenSampler(Sampler[int], StatefulSampler):
    """Shard the samples of a user's sampler as `ResumableSampler` does: in its order, assigned to replicas in turn.

    Other attributes are those of the inner sampler.

    Args:
        loader: its sampler must yield the same samples on every rank if its generators have the same states. If it has
            a generator, each pass draws one number from it, as torch's does.
        streams: the generators of the sampler.
        num_replicas, rank: size and rank of the data axis.
    """

    def __init__(self, loader: DataLoader, streams: Streams, *, num_replicas: int, rank: int) -> None:
        batches = loader.batch_sampler
        assert isinstance(batches, BatchSampler)
        self.sampler: Any = batches.sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = batches.drop_last  # leave out samples that do not fill a batch on every rank
        self._size = len(loader.dataset)  # type: ignore[arg-type]
        self._streams = streams
        self._generator = loader.generator
        self._lasts = loader.persistent_workers  # one entropy for all passes, as persistent workers have
        self.position = self._next_pass(0, None)
        self._is_loaded = False

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not set yet during a copy
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        """Number of this rank's samples in an epoch."""
        return num_parts(len(self.sampler), self.num_replicas, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's samples of a full pass."""
        with self._streams.drawing():
            return iter([*islice(self.sampler, self.rank, None, self.num_replicas)])

    def begin(self, batch_size: int) -> BegunPass:
        """Begin the next pass, or continue a loaded one at its position."""
        place, is_loaded, self._is_loaded = self.position, self._is_loaded, False
        if place.samples and not is_loaded:  # the previous pass was abandoned
            place = self._next_pass(place.epoch + 1, place.entropy)
        if is_loaded and place.start is not None:
            self._streams.load_state_dict(place.start)
        else:
            self._streams.release()
        entropy = self._drawn() if place.entropy is None else place.entropy
        self.position = place._replace(start=self._streams.state_dict(), entropy=entropy)
        return BegunPass(place.epoch, self._num_batches(batch_size, place.samples), self._draws(batch_size))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all replicas together, and the generator states at the start of the pass."""
        start = self._streams.between_passes() if self.position.start is None else self.position.start
        return {**self.position._replace(start=start)._asdict(), "size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position at which the next pass continues.

        Raises:
            ValueError: the position is of other data, of other generators, or of a dataloader of `prepare_dataloader`.
        """
        raise_errors(key_errors(state, (*Place._fields, "size")))
        if state["size"] != self._size:
            raise ValueError(
                f"the position in the data is of size={state['size']}, but this dataloader has size={self._size}: use "
                "the same data as the saved run, or start without the position"
            )
        place = Place(*(state[name] for name in Place._fields))
        if place.start is not None:
            self._streams.require(place.start)
            if not place.start.get("begun", True):
                self._streams.load_state_dict(place.start)
                place = place._replace(start=None)
        self.position, self._is_loaded = place, True

    def _drawn(self) -> int:
        """Draw the seed that torch's DataLoader draws for its workers before the sampler's first draw."""
        with self._streams.drawing():
            return int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())

    def _next_pass(self, epoch: int, entropy: int | None) -> Place:
        return Place(epoch, 0, None, entropy if self._lasts else None)

    def _draws(self, batch_size: int) -> Iterator[tuple[Draw, Place]]:
        place = self.position
        assert place.entropy is not None
        samples, size = place.samples, batch_size * self.num_replicas
        with self._streams.drawing():
            order = iter(self.sampler)
        begun = self._next(order, max(samples, self.num_replicas))
        first = begun[: self.num_replicas]
        batch, number = self._batch(order, begun[samples:], size), 0
        while batch:
            entropy = (place.entropy, place.epoch, samples + self.rank)
            samples += len(batch)
            following = self._batch(order, [], size)
            if following:
                after = place._replace(samples=samples)
            else:
                after = self._next_pass(place.epoch + 1, place.entropy)
                self._streams.release()
            batch += islice(cycle(first), -len(batch) % self.num_replicas)
            yield Draw(number, batch[self.rank :: self.num_replicas], entropy), after
            batch, number = following, number + 1

    def _batch(self, order: Iterator[int], ahead: list[int], size: int) -> list[int]:
        """Return the samples of the next batch of all replicas together; empty at the end."""
        found = ahead + self._next(order, size - len(ahead))
        return [] if self.drop_last and len(found) < size else found

    def _next(self, order: Iterator[int], count: int) -> list[int]:
        with self._streams.drawing():
            return [*islice(order, count)]

    def _num_batches(self, batch_size: int, samples: int) -> int | None:
        if not isinstance(self.sampler, Sized):
            return None
        left, size = len(self.sampler) - samples, batch_size * self.num_replicas
        return num_parts(left, size, drop_last=self.drop_last)


_LOG = logging.getLogger("echelon")
_LEAVE = (
    "leave the dataloader out of boost if it gives each replica its own samples, or build it with "
    "plugin.prepare_dataloader"
)
_NAME = "the dataloader"
_MOST_COMPARED = 4096


def shard_given_loaders(loaders: Any, *, rank: int, size: int) -> Any:
    """Shard a user's plain DataLoader, or each of a list or tuple; those that need no sharding are unchanged.

    `batch_size` is per replica. All ranks draw the order from copies of the current generator states of rank 0, which
    other draws do not change; every further loader of a list draws from other ones. A single process draws from the
    global generators, as a plain loop does.

    Collective over the world.

    Args:
        loaders: a plain DataLoader, or a list or tuple of them. Returned unchanged are None, loaders of
            `sharded_loader` or with a DistributedSampler, and, with a single replica, loaders that cannot be sharded.
        rank, size: rank and size of the data axis.

    Raises:
        ValueError: loaders cannot be sharded, or differ between ranks; on every rank.
    """
    several = type(loaders) in (list, tuple)
    by_name = {f"dataloader[{n}]": each for n, each in enumerate(loaders)} if several else {_NAME: loaders}
    errors = {name: [] if _is_sharded(each) else loader_errors(each) for name, each in by_name.items()}
    left = [name for name, each in by_name.items() if _is_sharded(each) or (size == 1 and errors[name])]
    _require_equal(
        {
            "kind": {name: type(each).__name__ for name, each in by_name.items()},
            "is sharded": left,
            "why not": errors,
        }
    )
    raise_errors(
        [
            f"boost cannot shard {name}: {reasons[0]}; {_LEAVE}"
            for name, reasons in errors.items()
            if reasons and name not in left
        ]
    )
    sharded = [
        each if name in left else _sharded(each, name, number, rank=rank, size=size)
        for number, (name, each) in enumerate(by_name.items())
    ]
    return type(loaders)(sharded) if several else sharded[0]


def _sharded(loader: DataLoader, name: str, number: int, *, rank: int, size: int) -> ShardedLoader:
    """Return the loader of this rank's share. Collective over the world.

    Args:
        loader: a plain DataLoader.
        name: its name in errors and in the log.
        number: its place among the loaders of one call.
        rank, size: rank and size of the data axis.
    """
    streams = Streams(_generators(loader), apart=dist.get_world_size() > 1)
    seed = _follow_first_rank(streams)
    if dist.get_world_size() > 1:
        _require_equal(_description(loader, streams), what=name)
        if number:  # else loaders of equal length would have one order, as pairs of a sample with itself
            streams.reseed(derived_seed(seed, number))
    if size > 1 and dist.get_rank() == 0:
        batch_size = loader.batch_sampler.batch_size  # type: ignore[union-attr]
        _LOG.warning(
            "boost shards %s over %d replicas: batch_size=%d is that of each, %d samples a step",
            name,
            size,
            batch_size,
            batch_size * size,
        )
    return rebuilt_loader(loader, streams, seed=seed, rank=rank, size=size)


def rebuilt_loader(loader: DataLoader, streams: Streams, *, seed: int, rank: int, size: int) -> ShardedLoader:
    """Return a loader of one rank's share of a DataLoader's samples.

    Args:
        loader: the user's loader.
        streams: the generators of its sampler, equal on all ranks.
        seed: seeds generators of the data set or `worker_init_fn` in worker processes.
        rank, size: rank and size of the data axis.
    """
    sampler = GivenSampler(loader, streams, num_replicas=size, rank=rank)
    own = ("dataset", "collate_fn", "generator", "worker_init_fn", *WORKER_SETTINGS)
    return ShardedLoader(
        stateful_sampler=sampler,
        seed=(seed, rank),
        batch_size=loader.batch_sampler.batch_size,  # type: ignore[union-attr]
        sampler=sampler,
        drop_last=sampler.drop_last,
        **{name: getattr(loader, name) for name in own},
    )


def _is_sharded(loader: Any) -> bool:
    """Return True if there is nothing to shard: no loader, or one that gives each replica its own samples."""
    if loader is None or isinstance(loader, ShardedLoader):
        return True
    if not isinstance(loader, DataLoader):
        return False
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    # Set on Hugging Face's streaming data sets by split_dataset_by_node.
    is_split = getattr(loader.dataset, "_distributed", None) is not None
    return is_split or any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _generators(loader: DataLoader) -> list[Any]:
    """Return the generators of the loader, its sampler and samplers inside of that, without duplicates."""
    inside = _attributes(getattr(loader.batch_sampler, "sampler", None))
    return [*{id(each): each for each in (loader.generator, *inside) if type(each) in _ACCESS}.values()]


def _attributes(sampler: Any) -> Iterator[Any]:
    """Iterate over the attributes of a sampler and of samplers among them."""
    for value in getattr(sampler, "__dict__", {}).values():
        yield value
        if isinstance(value, Sampler):
            yield from _attributes(value)


def _follow_first_rank(streams: Streams) -> int:
    """Load the generator states of rank 0, and return a seed that is equal on all ranks. One broadcast."""
    state, seed = broadcast_object((streams.state_dict(), torch.initial_seed() % 2**63), 0, dist.group.WORLD)
    streams.load_state_dict(state)
    return int(seed)


def _description(loader: DataLoader, streams: Streams) -> dict[str, Any]:
    """Return the settings of the loader that must be equal on all ranks."""
    dataset, batches = loader.dataset, loader.batch_sampler
    assert isinstance(batches, BatchSampler)
    described = f"a {type(dataset).__name__} of {len(dataset)}"  # type: ignore[arg-type]
    if isinstance(dataset, Subset):
        described += f" from {_shown(dataset.indices)}"
    if (fingerprint := getattr(dataset, "_fingerprint", None)) is not None:  # set by Hugging Face datasets
        described += f", fingerprint {fingerprint}"
    return {
        "dataset": described,
        "batch_size": batches.batch_size,
        "drop_last": batches.drop_last,
        "sampler": f"a {type(batches.sampler).__name__} of {_shown(_first_samples(loader, streams))}",
    }


def _first_samples(loader: DataLoader, streams: Streams) -> list[Any]:
    """Return the first samples of the order, from a copy of the sampler: it may shard by rank itself."""
    state = streams.state_dict()
    given: Any = loader.batch_sampler.sampler  # type: ignore[union-attr]
    try:
        sampler = copy.deepcopy(given, {id(loader.dataset): loader.dataset})
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"boost cannot shard the dataloader: its sampler, a {type(given).__name__}, cannot be copied to compare "
            f"its order between ranks ({error}); {_LEAVE}"
        ) from error
    try:
        with streams.drawing():
            return [*islice(sampler, _MOST_COMPARED)]
    finally:
        streams.load_state_dict(state)


def _shown(samples: Any) -> str:
    first = [*islice(samples, 4)]
    return f"{', '.join(map(str, first))}, … ({zlib.crc32(repr([*samples]).encode()):08x})"


def _require_equal(settings: dict[str, Any], what: str = _NAME) -> None:
    try:
        require_equal(settings, what=what)
    except ValueError as error:
        raise ValueError(f"{error}; {_LEAVE}") from None
