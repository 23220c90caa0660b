"""A DataLoader of the user's, sharded over the data axis: its sampler's order, and the generators it draws from."""

import copy
import logging
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Sampler, Subset
from torch.utils.data.distributed import DistributedSampler

from ..cluster.agree import broadcast_object, require_equal
from ..cluster.errors import raise_errors
from .loader import WORKER_SETTINGS, ShardedLoader, loader_errors
from .sampler import BegunPass, Draw, StatefulSampler, key_errors, num_parts


class Streams:
    """The global generators of Python, NumPy and torch's CPU as a sampler sees them, and generators that it was given.

    Args:
        given: of the dataloader and its sampler.
        apart: let the sampler draw from copies of the global ones, as they are now, so that no other draw moves it.

    Attributes:
        apart: whether it does so in every pass.
    """

    def __init__(self, given: Sequence[torch.Generator], *, apart: bool) -> None:
        self.apart = apart
        self._given = given
        self._own = _global_state() if apart else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next draws follow from."""
        return {
            "apart": self.apart,
            "own": _global_state() if self._own is None else self._own,
            "given": [generator.get_state() for generator in self._given],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw what another run would have drawn; until `release`, unless either keeps them apart.

        Raises:
            ValueError: it had another number of generators.
        """
        if len(state["given"]) != len(self._given):
            raise ValueError(
                f"the position in the data is one of {len(state['given'])} generators, and this dataloader has "
                f"{len(self._given)}: give the same generator to both"
            )
        self.apart |= state["apart"]
        self._own = state["own"]
        for generator, saved in zip(self._given, state["given"], strict=True):
            generator.set_state(saved)

    def release(self) -> None:
        """Draw from the global generators again, unless they are kept apart."""
        if not self.apart:
            self._own = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around what a sampler draws. The global generators go on as before where it has copies."""
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
    """The place that all replicas together have reached.

    Args:
        epoch: passes that ended before this one.
        samples: taken of this one.
        start: the generators as its sampler began; None where they are taken as they stand.
        entropy: what the random numbers of its batches follow from; None before it began.
    """

    epoch: int
    samples: int
    start: dict[str, Any] | None
    entropy: int | None


class GivenSampler(Sampler[int], StatefulSampler):
    """Shards the samples of a sampler as `ResumableSampler` does: the batches of all replicas are its next ones.

    What it does not define is the inner sampler's.

    Args:
        loader: has a sampler that gives the same samples on every rank as long as its generators stand alike, and may
            have a generator, from which each pass draws once, as torch's do.
        streams: the generators that the sampler draws from.
        num_replicas, rank: of the data axis.
    """

    def __init__(self, loader: DataLoader, streams: Streams, *, num_replicas: int, rank: int) -> None:
        batches = loader.batch_sampler
        assert isinstance(batches, BatchSampler)
        self.sampler: Any = batches.sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = batches.drop_last  # what does not fill a batch on every rank
        self._size = len(loader.dataset)  # type: ignore[arg-type]
        self._streams = streams
        self._generator = loader.generator
        self._lasts = loader.persistent_workers  # draws once for all passes, as torch's persistent workers do
        self.position = self._next_pass(0, None)
        self._is_loaded = False

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not there yet, when it is copied
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        """Samples of this rank in an epoch."""
        return num_parts(len(self.sampler), self.num_replicas, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[int]:
        """Every sample that is this rank's in a whole pass."""
        with self._streams.drawing():
            return iter([*islice(self.sampler, self.rank, None, self.num_replicas)])

    def begin(self, batch_size: int) -> BegunPass:
        """Begin a pass: the next one, or the one that was loaded, at its place."""
        place, is_loaded, self._is_loaded = self.position, self._is_loaded, False
        if place.samples and not is_loaded:  # the pass before broke off
            place = self._next_pass(place.epoch + 1, place.entropy)
        if is_loaded and place.start is not None:
            self._streams.load_state_dict(place.start)
        else:
            self._streams.release()
        entropy = self._drawn() if place.entropy is None else place.entropy
        self.position = place._replace(start=self._streams.state_dict(), entropy=entropy)
        return BegunPass(place.epoch, self._num_batches(batch_size, place.samples), self._draws(batch_size))

    def state_dict(self) -> dict[str, Any]:
        """The place of all replicas together, and the generators as the pass began."""
        return {**self.position._asdict(), "size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on at a place.

        Raises:
            ValueError: it is one in other data, or of a dataloader of `prepare_dataloader`.
        """
        raise_errors(key_errors(state, (*Place._fields, "size")))
        if state["size"] != self._size:
            raise ValueError(
                f"the position in the data is one of size={state['size']}, and this dataloader has "
                f"size={self._size}: give the same data as the run that was saved, or leave its position and begin anew"
            )
        self.position = Place(*(state[name] for name in Place._fields))
        self._is_loaded = True

    def _drawn(self) -> int:
        """The seed that torch's DataLoader draws for its workers before its sampler draws."""
        with self._streams.drawing():
            return int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())

    def _next_pass(self, epoch: int, entropy: int | None) -> Place:
        start = self._streams.state_dict() if self._streams.apart else None
        return Place(epoch, 0, start, entropy if self._lasts else None)

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
            is_last = not following
            after = (
                self._next_pass(place.epoch + 1, place.entropy)
                if is_last
                else place._replace(samples=samples)
            )
            batch += islice(cycle(first), -len(batch) % self.num_replicas)
            yield Draw(number, batch[self.rank :: self.num_replicas], entropy), after
            batch, number = following, number + 1

    def _batch(self, order: Iterator[int], ahead: list[int], size: int) -> list[int]:
        """The next samples of all replicas together, or none."""
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
_MOST_COMPARED = 4096


def shard_given_loader(loader: Any, *, rank: int, size: int) -> Any:
    """A loader that gives this replica its share of a plain DataLoader's samples, or the loader where there is no need.

    `batch_size` is that of each replica. All ranks draw the order from the generators of rank 0 as they are now, which
    draws of training do not move; one process alone draws from the global ones, as a plain loop does.

    Collective over the world.

    Args:
        loader: a plain DataLoader; or None, one of `sharded_loader` or with a DistributedSampler, which are left as
            they are; and so is, for one replica, what cannot be sharded.
        rank, size: of the data axis.

    Raises:
        ValueError: it cannot be sharded, or differs between ranks; on every rank.
    """
    errors = [] if _is_sharded(loader) else loader_errors(loader)
    is_left = _is_sharded(loader) or (size == 1 and bool(errors))
    _require_equal({"kind": type(loader).__name__, "is sharded": is_left, "why not": "; ".join(errors)})
    if is_left:
        return loader
    if errors:
        raise ValueError(f"boost cannot shard the dataloader: {errors[0]}; {_LEAVE}")
    streams = Streams(_generators(loader), apart=dist.get_world_size() > 1)
    seed = _follow_first_rank(streams)
    if dist.get_world_size() > 1:
        _require_equal(_description(loader, streams))
    if size > 1 and dist.get_rank() == 0:
        _LOG.warning(
            "boost shards the dataloader over %d replicas: batch_size=%d is that of each, %d samples a step",
            size,
            loader.batch_sampler.batch_size,
            loader.batch_sampler.batch_size * size,
        )
    return rebuilt_loader(loader, streams, seed=seed, rank=rank, size=size)


def rebuilt_loader(loader: DataLoader, streams: Streams, *, seed: int, rank: int, size: int) -> ShardedLoader:
    """One rank's share of a DataLoader.

    Args:
        streams: that its sampler draws from, equal on all ranks.
        seed: for what a dataset or `worker_init_fn` keeps generators for.
        rank, size: of the data axis.
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
    # Of Hugging Face's streams, those of split_dataset_by_node know their rank.
    is_split = getattr(loader.dataset, "_distributed", None) is not None
    return is_split or any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _generators(loader: DataLoader) -> list[torch.Generator]:
    """Return the generators that were given to the loader or its sampler, each once."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    given = (loader.generator, getattr(sampler, "generator", None))
    return [*dict.fromkeys(each for each in given if isinstance(each, torch.Generator))]


def _follow_first_rank(streams: Streams) -> int:
    """Let the streams stand where those of rank 0 do; returns a seed that is equal on all ranks. One broadcast."""
    state, seed = broadcast_object((streams.state_dict(), torch.initial_seed() % 2**63), 0, dist.group.WORLD)
    streams.load_state_dict(state)
    return int(seed)


def _description(loader: DataLoader, streams: Streams) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks, so that replicas can share the loader."""
    dataset, batches = loader.dataset, loader.batch_sampler
    assert isinstance(batches, BatchSampler)
    described = f"a {type(dataset).__name__} of {len(dataset)}"  # type: ignore[arg-type]
    if isinstance(dataset, Subset):
        described += f" from {_shown(dataset.indices)}"
    if (fingerprint := getattr(dataset, "_fingerprint", None)) is not None:  # of Hugging Face's data sets
        described += f", fingerprint {fingerprint}"
    return {
        "dataset": described,
        "batch_size": batches.batch_size,
        "drop_last": batches.drop_last,
        "sampler": f"a {type(batches.sampler).__name__} of {_shown(_first_samples(loader, streams))}",
    }


def _first_samples(loader: DataLoader, streams: Streams) -> list[Any]:
    """The beginning of the order, from a copy of the sampler, which may be one that shards by itself."""
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


def _require_equal(settings: dict[str, Any]) -> None:
    try:
        require_equal(settings, what="the dataloader")
    except ValueError as error:
        raise ValueError(f"{error}; {_LEAVE}") from None
