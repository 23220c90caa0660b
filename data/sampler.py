"""Samplers that shard the samples over the replicas, and the position of training in the data."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from ..cluster.errors import raise_errors


class Draw(NamedTuple):
    """The samples and the seed of a batch.

    Args:
        number: number of the batch in its pass over the data.
        indices: indices of its samples.
        entropy: whole numbers that seed its random numbers.
        num_samples: samples in the batches of all replicas together, without repeated ones; None if unknown.
    """

    number: int
    indices: list[int]
    entropy: tuple[int, ...]
    num_samples: int | None = None


class BegunPass(NamedTuple):
    """A pass over the data (an epoch, or the rest of one) that has begun.

    Args:
        epoch: its epoch.
        num_batches: number of batches that it yields; None if unknown.
        draws: the draw of each batch, with the position in the data after that batch.
    """

    epoch: int
    num_batches: int | None
    draws: Iterator[tuple[Draw, Any]]


class StatefulSampler(ABC):
    """A sampler of one replica that tracks the position of training in the data.

    Attributes:
        position: the current position. The loader sets it when the training loop takes a batch.
    """

    position: Any

    @abstractmethod
    def begin(self, batch_size: int) -> BegunPass:
        """Begin the next pass, or continue a loaded one at its position."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is common to all replicas."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position at which the next pass continues."""


def num_parts(count: int, size: int, *, drop_last: bool) -> int:
    """Return the number of parts of `size` in `count`; `drop_last` leaves out an incomplete part."""
    return count // size if drop_last else -(-count // size)


def derived_seed(*entropy: int) -> int:
    """Return a 32-bit seed that depends on all of these whole numbers and on their order."""
    return int(np.random.SeedSequence([number % 2**64 for number in entropy]).generate_state(1)[0])


class Position(NamedTuple):
    """The samples of an epoch that all replicas together have taken; the epoch is complete at the data set's size."""

    epoch: int
    samples: int


class ResumableSampler(DistributedSampler[int], StatefulSampler):
    """A DistributedSampler that can resume within an epoch, with any number of replicas.

    The order of an epoch depends only on its number and the seed. Samples are assigned to replicas in turn. So the
    first batches of all replicas together are the first samples of the order, for any number of replicas. If the
    samples do not divide evenly, the first samples of the order are repeated at its end, or with `drop_last` the last
    ones are left out.

    A pass covers the epoch that `set_epoch` has set since the last pass began, else the next epoch. If `set_epoch` sets
    the loaded epoch, the pass continues at the loaded position; any other epoch begins at its start.

    Args:
        dataset, num_replicas, rank, shuffle, seed, drop_last: as in torch's DistributedSampler.

    Attributes:
        position: the current position of training.
    """

    def __init__(self, dataset: Any, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self.position = Position(0, 0)
        self._loaded: Position | None = None
        self._is_due = True  # the epoch is set and no pass over it has begun

    @property
    def size(self) -> int:
        """Number of samples in the data set."""
        assert isinstance(self.dataset, Sized)
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch, self._is_due = int(epoch), True
        # A script that sets the same epoch in each step must keep its position.
        if epoch != self.position.epoch:
            self.position = self._next_position()

    def begin(self, batch_size: int) -> BegunPass:
        """Begin a pass over this rank's batches, from the current position to the end of the epoch."""
        if not self._is_due:
            self.epoch += 1
        first = self._next_position()
        samples = self._share(first)
        num_batches = num_parts(len(samples), batch_size, drop_last=self.drop_last)
        self._loaded, self._is_due = None, False
        self.position = first if num_batches else Position(first.epoch, self.size)
        return BegunPass(first.epoch, num_batches, self._draws(first, samples, batch_size, num_batches))

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the settings on which the order depends; equal on all ranks."""
        return {
            "epoch": self.position.epoch,
            "samples": self.position.samples,
            "seed": int(self.seed),
            "size": self.size,
            "shuffle": bool(self.shuffle),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position at which the next pass continues; after a complete epoch, the next epoch begins.

        Raises:
            ValueError: the state is invalid or of another order; all errors at once.
        """
        raise_errors(self._errors(state))
        self.position = self._loaded = Position(state["epoch"], state["samples"])
        self.epoch = self.position.epoch
        self._is_due = self.position.samples < self.size

    def _next_position(self) -> Position:
        """Return the position at which a pass over the current epoch begins."""
        loaded = self._loaded
        return loaded if loaded is not None and loaded.epoch == self.epoch else Position(self.epoch, 0)

    def _order(self, epoch: int) -> Tensor:
        """Return the (size,) sample indices in the order of an epoch."""
        if not self.shuffle:
            return torch.arange(self.size, device="cpu")
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.size, generator=generator, device="cpu")

    def _share(self, first: Position) -> Tensor:
        """Return this rank's samples of an epoch, from a position on."""
        order = self._order(first.epoch)
        remaining = order[first.samples :]
        missing = -len(remaining) % self.num_replicas
        if missing and not self.drop_last:
            remaining = torch.cat([remaining, order.repeat(math.ceil(missing / len(order)))[:missing]])
        stop = len(remaining) - len(remaining) % self.num_replicas  # equally many samples for every replica
        return remaining[self.rank : stop : self.num_replicas]

    def _draws(
        self, first: Position, samples: Tensor, batch_size: int, num_batches: int
    ) -> Iterator[tuple[Draw, Position]]:
        """Yield the draws of a pass over this rank's samples, each with the position after its batch."""
        for number in range(num_batches):
            begin, end = number * batch_size, (number + 1) * batch_size
            place = first.samples + begin * self.num_replicas + self.rank
            is_last = number + 1 == num_batches
            num_drawn = self.size if is_last else first.samples + end * self.num_replicas
            indices = samples[begin:end].tolist()
            left = self.size - first.samples - begin * self.num_replicas
            num_samples = min(len(indices) * self.num_replicas, left)
            draw = Draw(number, indices, (self.seed, first.epoch, place), num_samples)
            yield draw, Position(first.epoch, num_drawn)

    def _errors(self, state: Mapping[str, Any]) -> list[str]:
        """Return the errors of a state that is invalid, or of a dataloader of other data; empty if there are none."""
        current = self.state_dict()
        if errors := key_errors(state, current):
            return errors
        errors = [
            f"the position in the data has {name}={state[name]!r}, which must be an integer of at least 0"
            for name in ("epoch", "samples")
            if not isinstance(state[name], int) or isinstance(state[name], bool) or state[name] < 0
        ]
        errors += [
            f"the position in the data is of {name}={state[name]!r}, but this dataloader has {current[name]!r}: "
            "prepare the same data as the saved run, or start without the position"
            for name in ("size", "seed", "shuffle")
            if state[name] != current[name]
        ]
        if not errors and state["samples"] > self.size:
            errors.append(
                f"the position in the data, sample {state['samples']}, is beyond its {self.size} samples"
            )
        return errors


def key_errors(state: Any, expected: Collection[str]) -> list[str]:
    """Return errors if a state is not a mapping with exactly these keys."""
    if not isinstance(state, Mapping):
        return [
            f"the position in the data must be a state_dict() of a dataloader, not a {type(state).__name__}"
        ]
    names_by_verb = {
        "lacks": sorted(set(expected) - set(state)),
        "has unknown": sorted(map(str, set(state) - set(expected))),
    }
    return [
        f"the position in the data {verb} {', '.join(names)}: it must have exactly {', '.join(expected)}"
        for verb, names in names_by_verb.items()
        if names
    ]


class Reached(NamedTuple):
    """A replica's position: batches taken in a pass, and the sampler's state after them (None if it has no state)."""

    epoch: int
    batches: int
    state: Any


class ForeignSampler(StatefulSampler):
    """A wrapper of a user's sampler class that has no positions. Each pass counts as an epoch for random numbers.

    Args:
        sampler: yields this rank's samples. Its `state_dict`, if it has one, is called after each batch drawn from it,
            since workers prefetch batches that training has not taken yet.
        seed, rank: seed random numbers, together with the pass and the batch.
        drop_last: leave out an incomplete last batch.
    """

    def __init__(self, sampler: Sampler[int], *, seed: int, rank: int, drop_last: bool) -> None:
        self._sampler = sampler
        self._seed = seed
        self._rank = rank
        self._drop_last = drop_last
        self._has_state = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self.position = Reached(0, 0, None)
        self._continues = True  # the next pass continues at the position

    def begin(self, batch_size: int) -> BegunPass:
        """Begin a pass over the batches of the sampler."""
        total = self._num_batches(batch_size)
        epoch, first, state = self.position
        is_complete = first > 0 and first == total
        if not self._continues or is_complete:
            epoch, first, state = epoch + 1, 0, None
        if state is None and self._has_state:
            state = self._sampler_state()
        self.position, self._continues = Reached(epoch, first, state), False
        batches = BatchSampler(self._sampler, batch_size, self._drop_last)
        return BegunPass(epoch, None if total is None else total - first, self._draws(batches, epoch, first))

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state after the batches that training has taken, and their number in this pass.

        Raises:
            ValueError: the sampler has no state.
        """
        self._require_state()
        epoch, batches, state = self.position
        sampler_state = self._sampler_state() if state is None else state
        return {"sampler": sampler_state, "epoch": epoch, "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the sampler's state and the position in the pass.

        Raises:
            ValueError: the sampler has no state, or the argument is not from `state_dict`.
        """
        self._require_state()
        raise_errors(key_errors(state, ("sampler", "epoch", "batches")))
        self._sampler.load_state_dict(state["sampler"])  # type: ignore[attr-defined]
        self.position, self._continues = Reached(state["epoch"], state["batches"], state["sampler"]), True

    def _draws(self, batches: BatchSampler, epoch: int, first: int) -> Iterator[tuple[Draw, Reached]]:
        for number, indices in enumerate(batches, first):
            draw = Draw(number, indices, (self._seed, epoch, number, self._rank))
            yield draw, Reached(epoch, number + 1, self._sampler_state() if self._has_state else None)

    def _sampler_state(self) -> Any:
        return copy.deepcopy(self._sampler.state_dict())  # type: ignore[attr-defined]

    def _num_batches(self, batch_size: int) -> int | None:
        if not isinstance(self._sampler, Sized):
            return None
        return num_parts(len(self._sampler), batch_size, drop_last=self._drop_last)

    def _require_state(self) -> None:
        """Raise ValueError if the user's sampler cannot save and load its position."""
        if not self._has_state:
            raise ValueError(
                f"the position in the data of a {type(self._sampler).__name__} is not known: give it state_dict() and "
                "load_state_dict(), or leave out distributed_sampler_cls, or save a checkpoint without its dataloader"
            )
