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
from ..cluster.gathering import require_equal
from ..cluster.objects import broadcast_object
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


class SamplerGenerators:
    """The random generators of a sampler: the global ones of Python, NumPy and torch's CPU, and its own.

    Args:
        generators: those of the dataloader and its sampler, of the kinds of `_ACCESS`.
        isolated: let the sampler draw from copies of the current global states, independent of all other draws.

    Attributes:
        isolated: True if every pass draws from the copies.
    """

    def __init__(self, generators: Sequence[Any], *, isolated: bool) -> None:
        self.isolated = isolated
        self._generators = generators
        self._copies = _global_state() if isolated else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the next draws."""
        return {  # by the names in checkpoints
            "apart": self.isolated,
            "own": _global_state() if self._copies is None else self._copies,
            "given": [_ACCESS[type(generator)].read(generator) for generator in self._generators],
        }

    def between_passes(self) -> dict[str, Any]:
        """Return the state in which the next pass begins, unless the global generators are drawn from before it."""
        return {**self.state_dict(), "begun": False}

    def require(self, state: Mapping[str, Any]) -> None:
        """Require a state of as many generators.

        Raises:
            ValueError: the other run had another number of generators.
        """
        if len(state["given"]) != len(self._generators):
            raise ValueError(
                f"the position in the data has {len(state['given'])} generators, but this dataloader has "
                f"{len(self._generators)}: use the same generators as the saved run"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the draws of another run: until `release`, or always if either run is isolated.

        Unless isolated, a state of `between_passes` leaves the global generators to the script, which restores them.
        """
        self.isolated |= state["apart"]
        if self.isolated or state.get("begun", True):
            self._copies = state["own"]
        for generator, saved in zip(self._generators, state["given"], strict=True):
            _ACCESS[type(generator)].write(generator, saved)

    def release(self) -> None:
        """Draw from the global generators again, unless they are isolated."""
        if not self.isolated:
            self._copies = None

    def reseed(self, seed: int) -> None:
        """Seed the copies of the global generators."""
        with self.drawing():
            seed_cpu(seed)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Use these generators for a sampler's draws. With copies, the global states are restored afterwards."""
        if self._copies is None:
            yield
            return
        outside = _global_state()
        try:
            _set_global(self._copies)
            yield
        finally:
            self._copies = _global_state()
            _set_global(outside)


def _global_state() -> dict[str, Any]:
    """Return the states of the global random generators, in a form that ranks can compare and pickle."""
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


class LoaderPosition(NamedTuple):
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


class ShardedSampler(Sampler[int], StatefulSampler):
    """Shard the samples of a user's sampler as `ResumableSampler` does: in its order, assigned to replicas in turn.

    Other attributes are those of the inner sampler.

    Args:
        loader: its sampler must yield the same samples on every rank if its generators have the same states. Each
            pass draws one number from its generator, or else from torch's, as torch's DataLoader does.
        generators: the generators of the sampler.
        num_replicas, rank: size and rank of the data axis.
    """

    def __init__(
        self, loader: DataLoader, generators: SamplerGenerators, *, num_replicas: int, rank: int
    ) -> None:
        batches = loader.batch_sampler
        assert isinstance(batches, BatchSampler)
        self.sampler: Any = batches.sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = batches.drop_last  # leave out samples that do not fill a batch on every rank
        self._size = len(loader.dataset)  # type: ignore[arg-type]
        self._generators = generators
        self._loader_generator = loader.generator
        self._keeps_seed = loader.persistent_workers  # one entropy for all passes, as persistent workers have
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
        with self._generators.drawing():
            return iter([*islice(self.sampler, self.rank, None, self.num_replicas)])

    def begin(self, batch_size: int) -> BegunPass:
        """Begin the next pass, or continue a loaded one at its position.

        A new pass draws from the generators as they are now; a loaded one from their states at its start. The seed of
        the pass is kept if a loaded position has one, or persistent workers do.
        """
        position, is_loaded, self._is_loaded = self.position, self._is_loaded, False
        if position.samples and not is_loaded:  # the previous pass was abandoned
            position = self._next_pass(position.epoch + 1, position.entropy)
        if is_loaded and position.start is not None:
            self._generators.load_state_dict(position.start)
        else:
            self._generators.release()
        entropy = self._draw_seed() if position.entropy is None else position.entropy
        self.position = position._replace(start=self._generators.state_dict(), entropy=entropy)
        return BegunPass(
            position.epoch, self._num_batches(batch_size, position.samples), self._batches(batch_size)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all replicas together, and the generator states at the start of the pass."""
        start = self._generators.between_passes() if self.position.start is None else self.position.start
        return {**self.position._replace(start=start)._asdict(), "size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position at which the next pass continues.

        Raises:
            ValueError: the position is of other data, of other generators, or of a dataloader of `prepare_dataloader`.
        """
        raise_errors(key_errors(state, (*LoaderPosition._fields, "size")))
        if state["size"] != self._size:
            raise ValueError(
                f"the position in the data is of size={state['size']}, but this dataloader has size={self._size}: use "
                "the same data as the saved run, or start without the position"
            )
        position = LoaderPosition(*(state[name] for name in LoaderPosition._fields))
        if position.start is not None:
            self._generators.require(position.start)
            if not position.start.get("begun", True):
                self._generators.load_state_dict(position.start)
                position = position._replace(start=None)
        self.position, self._is_loaded = position, True

    def _draw_seed(self) -> int:
        """Draw the seed that torch's DataLoader draws for its workers before the sampler's first draw."""
        with self._generators.drawing():
            seed = torch.empty((), dtype=torch.int64, device="cpu")
            return int(seed.random_(generator=self._loader_generator))

    def _next_pass(self, epoch: int, entropy: int | None) -> LoaderPosition:
        return LoaderPosition(epoch, 0, None, entropy if self._keeps_seed else None)

    def _batches(self, batch_size: int) -> Iterator[tuple[Draw, LoaderPosition]]:
        """Yield this rank's draws from the position to the end of the pass, each with the position after it."""
        position = self.position
        assert position.entropy is not None
        samples, size = position.samples, batch_size * self.num_replicas
        with self._generators.drawing():
            order = iter(self.sampler)
        # Skip the samples that were taken, and keep the first ones, which fill up an incomplete last batch.
        skipped = self._take(order, max(samples, self.num_replicas))
        first = skipped[: self.num_replicas]
        batch, number = self._batch(order, skipped[samples:], size), 0
        while batch:  # the next one is drawn ahead, since the position after the last one is the next pass
            entropy = (position.entropy, position.epoch, samples + self.rank)
            samples, num_samples = samples + len(batch), len(batch)
            next_batch = self._batch(order, [], size)
            if next_batch:
                after = position._replace(samples=samples)
            else:
                after = self._next_pass(position.epoch + 1, position.entropy)
                self._generators.release()
            batch += islice(cycle(first), -len(batch) % self.num_replicas)
            yield Draw(number, batch[self.rank :: self.num_replicas], entropy, num_samples), after
            batch, number = next_batch, number + 1

    def _batch(self, order: Iterator[int], drawn: list[int], size: int) -> list[int]:
        """Return the next batch of all replicas together, which begins with `drawn`; empty at the end."""
        batch = drawn + self._take(order, size - len(drawn))
        return [] if self.drop_last and len(batch) < size else batch

    def _take(self, order: Iterator[int], count: int) -> list[int]:
        with self._generators.drawing():
            return [*islice(order, count)]

    def _num_batches(self, batch_size: int, samples: int) -> int | None:
        if not isinstance(self.sampler, Sized):
            return None
        remaining, size = len(self.sampler) - samples, batch_size * self.num_replicas
        return num_parts(remaining, size, drop_last=self.drop_last)


_LOG = logging.getLogger("echelon")
_LEAVE = (
    "leave the dataloader out of boost if it gives each replica its own samples, or build it with "
    "plugin.prepare_dataloader"
)
_NAME = "the dataloader"
_MOST_COMPARED = 4096


def shard_user_loaders(loaders: Any, *, rank: int, size: int) -> Any:
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
    is_collection = type(loaders) in (list, tuple)
    by_name = (
        {f"dataloader[{number}]": loader for number, loader in enumerate(loaders)}
        if is_collection
        else {_NAME: loaders}
    )
    errors = {name: [] if _is_sharded(loader) else loader_errors(loader) for name, loader in by_name.items()}
    unsharded = [
        name for name, loader in by_name.items() if _is_sharded(loader) or (size == 1 and errors[name])
    ]
    _require_equal(
        {
            **{f"the kind of {name}": type(loader).__name__ for name, loader in by_name.items()},
            "what needs no sharding": unsharded,
            **{f"what is wrong with {name}": reasons for name, reasons in errors.items()},
        }
    )
    raise_errors(
        [
            f"boost cannot shard {name}: {reasons[0]}; {_LEAVE}"
            for name, reasons in errors.items()
            if reasons and name not in unsharded
        ]
    )
    sharded = [
        loader if name in unsharded else _sharded(loader, name, number, rank=rank, size=size)
        for number, (name, loader) in enumerate(by_name.items())
    ]
    return type(loaders)(sharded) if is_collection else sharded[0]


def _sharded(loader: DataLoader, name: str, number: int, *, rank: int, size: int) -> ShardedLoader:
    """Return the loader of this rank's share. Collective over the world.

    Args:
        loader: a plain DataLoader.
        name: its name in errors and in the log.
        number: its index among the loaders of one call.
        rank, size: rank and size of the data axis.
    """
    generators = SamplerGenerators(_generators(loader), isolated=dist.get_world_size() > 1)
    seed = _follow_first_rank(generators)
    if dist.get_world_size() > 1:
        _require_equal(_description(loader, generators), what=name)
        if number:  # else loaders of equal length would have one order, as pairs of a sample with itself
            generators.reseed(derived_seed(seed, number))
    if size > 1 and dist.get_rank() == 0:
        batch_size = loader.batch_sampler.batch_size  # type: ignore[union-attr]
        _LOG.warning(
            "boost shards %s over %d replicas: batch_size=%d is that of each, %d samples a step",
            name,
            size,
            batch_size,
            batch_size * size,
        )
    return rebuilt_loader(loader, generators, seed=seed, rank=rank, size=size)


def rebuilt_loader(
    loader: DataLoader, generators: SamplerGenerators, *, seed: int, rank: int, size: int
) -> ShardedLoader:
    """Return a loader of one rank's share of a DataLoader's samples.

    Args:
        loader: the user's loader.
        generators: the generators of its sampler, equal on all ranks.
        seed: seeds generators of the data set or `worker_init_fn` in worker processes.
        rank, size: rank and size of the data axis.
    """
    sampler = ShardedSampler(loader, generators, num_replicas=size, rank=rank)
    kept = ("dataset", "collate_fn", "generator", "worker_init_fn", *WORKER_SETTINGS)
    return ShardedLoader(
        stateful_sampler=sampler,
        seed=(seed, rank),
        batch_size=loader.batch_sampler.batch_size,  # type: ignore[union-attr]
        sampler=sampler,
        drop_last=sampler.drop_last,
        **{name: getattr(loader, name) for name in kept},
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
    attributes = _attributes(getattr(loader.batch_sampler, "sampler", None))
    by_identity = {id(value): value for value in (loader.generator, *attributes) if type(value) in _ACCESS}
    return [*by_identity.values()]


def _attributes(sampler: Any) -> Iterator[Any]:
    """Iterate over the attributes of a sampler and of samplers among them."""
    for value in getattr(sampler, "__dict__", {}).values():
        yield value
        if isinstance(value, Sampler):
            yield from _attributes(value)


def _follow_first_rank(generators: SamplerGenerators) -> int:
    """Load the generator states of rank 0, and return a seed that is equal on all ranks. One broadcast."""
    state, seed = broadcast_object(
        (generators.state_dict(), torch.initial_seed() % 2**63), 0, dist.group.WORLD
    )
    generators.load_state_dict(state)
    return int(seed)


def _description(loader: DataLoader, generators: SamplerGenerators) -> dict[str, Any]:
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
        "sampler": f"a {type(batches.sampler).__name__} of {_shown(_first_samples(loader, generators))}",
    }


def _first_samples(loader: DataLoader, generators: SamplerGenerators) -> list[Any]:
    """Return the first samples of the order, from a copy of the sampler: it may shard by rank itself."""
    state = generators.state_dict()
    original: Any = loader.batch_sampler.sampler  # type: ignore[union-attr]
    try:
        sampler = copy.deepcopy(original, {id(loader.dataset): loader.dataset})
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"boost cannot shard the dataloader: its sampler, a {type(original).__name__}, cannot be copied to compare "
            f"its order between ranks ({error}); {_LEAVE}"
        ) from error
    try:
        with generators.drawing():
            return [*islice(sampler, _MOST_COMPARED)]
    finally:
        generators.load_state_dict(state)


def _shown(samples: Any) -> str:
    first = [*islice(samples, 4)]
    return f"{', '.join(map(str, first))}, … ({zlib.crc32(repr([*samples]).encode()):08x})"


def _require_equal(settings: dict[str, Any], what: str = _NAME) -> None:
    try:
        require_equal(settings, what=what)
    except ValueError as error:
        raise ValueError(f"{error}; {_LEAVE}") from None
