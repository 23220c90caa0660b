"""The order of samples over all replicas, and how far training has come in it."""

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
    """The samples and random numbers that a batch is made from.

    Args:
        number: of the batch in its pass over the data.
        indices: of its samples.
        entropy: whole numbers that its random numbers follow from.
    """

    number: int
    indices: list[int]
    entropy: tuple[int, ...]


class BegunPass(NamedTuple):
    """A pass over the data that has begun.

    Args:
        epoch: that it is of.
        num_batches: that it gives; None where nobody knows.
        draws: what each batch is made from, and the position in the data once that batch is taken.
    """

    epoch: int
    num_batches: int | None
    draws: Iterator[tuple[Draw, Any]]


class StatefulSampler(ABC):
    """A sampler of one replica that knows the place in the data that training has reached.

    Attributes:
        position: the place; it is set to the one of the batch's draw when a batch is taken.
    """

    position: Any

    @abstractmethod
    def begin(self, batch_size: int) -> BegunPass:
        """Begin a pass: the next one, or the one that was loaded, at its place."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The place of all replicas together."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on at a place."""


def num_parts(count: int, size: int, *, drop_last: bool) -> int:
    """The number of parts of this size, batches or shares; `drop_last` leaves out one that is not full."""
    return count // size if drop_last else -(-count // size)


def derived_seed(*entropy: int) -> int:
    """A seed of 32 bits that differs with each of these whole numbers and with their order."""
    return int(np.random.SeedSequence([number % 2**64 for number in entropy]).generate_state(1)[0])


class Position(NamedTuple):
    """The part of an epoch that all replicas have taken: all of it where `samples` is the size of the data set."""

    epoch: int
    samples: int


class ResumableSampler(DistributedSampler[int], StatefulSampler):
    """torch's DistributedSampler, whose passes can begin within an epoch, for any number of replicas.

    The order of an epoch follows from its number and the seed alone. It is dealt out like cards: the first batches
    of all replicas together are its first samples, however many replicas share them. Where they do not share
    them evenly, the first samples of the order are given again at its end, or with `drop_last` the last are left out.

    A pass is of the epoch that `set_epoch` named since the last pass began, or else of the next one. `set_epoch` of
    an epoch that was loaded goes on at its place, and of another begins it.

    Args:
        dataset, num_replicas, rank, shuffle, seed, drop_last: as torch's.

    Attributes:
        position: where training stands.
    """

    def __init__(self, dataset: Any, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self.position = Position(0, 0)
        self._loaded: Position | None = None
        self._is_due = True  # the epoch was named and no pass over it has begun

    @property
    def size(self) -> int:
        """Samples of the data set."""
        assert isinstance(self.dataset, Sized)
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch of the next pass."""
        self.epoch, self._is_due = int(epoch), True
        # A script that names the epoch in each step stays where it is.
        if epoch != self.position.epoch:
            self.position = self._next_position()

    def begin(self, batch_size: int) -> BegunPass:
        """Begin a pass: the batches of this rank, from the place where it begins to the end of the epoch."""
        if not self._is_due:
            self.epoch += 1
        first = self._next_position()
        own = self._share(first)
        num_batches = num_parts(len(own), batch_size, drop_last=self.drop_last)
        self._loaded, self._is_due = None, False
        self.position = first if num_batches else Position(first.epoch, self.size)
        return BegunPass(first.epoch, num_batches, self._draws(first, own, batch_size, num_batches))

    def state_dict(self) -> dict[str, Any]:
        """The position of all replicas together, and what differs in another order; equal on all ranks."""
        return {
            "epoch": self.position.epoch,
            "samples": self.position.samples,
            "seed": int(self.seed),
            "size": self.size,
            "shuffle": bool(self.shuffle),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on at a position; after a whole epoch it is of the next one.

        Raises:
            ValueError: the state is none of this order; all errors at once.
        """
        raise_errors(self._errors(state))
        self.position = self._loaded = Position(state["epoch"], state["samples"])
        self.epoch = self.position.epoch
        self._is_due = self.position.samples < self.size

    def _next_position(self) -> Position:
        """The position at which a pass over the named epoch begins."""
        loaded = self._loaded
        return loaded if loaded is not None and loaded.epoch == self.epoch else Position(self.epoch, 0)

    def _order(self, epoch: int) -> Tensor:
        """(size,), the samples in the order of an epoch."""
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + epoch))

    def _share(self, first: Position) -> Tensor:
        """This rank's samples of an epoch, from a position on."""
        order = self._order(first.epoch)
        left = order[first.samples :]
        missing = -len(left) % self.num_replicas
        if missing and not self.drop_last:
            left = torch.cat([left, order.repeat(math.ceil(missing / len(order)))[:missing]])
        even = len(left) - len(left) % self.num_replicas
        return left[self.rank : even : self.num_replicas]

    def _draws(
        self, first: Position, own: Tensor, batch_size: int, num_batches: int
    ) -> Iterator[tuple[Draw, Position]]:
        for number in range(num_batches):
            begin, end = number * batch_size, (number + 1) * batch_size
            place = first.samples + begin * self.num_replicas + self.rank
            taken = first.samples + end * self.num_replicas if number + 1 < num_batches else self.size
            draw = Draw(number, own[begin:end].tolist(), (self.seed, first.epoch, place))
            yield draw, Position(first.epoch, taken)

    def _errors(self, state: Mapping[str, Any]) -> list[str]:
        now = self.state_dict()
        if errors := key_errors(state, now):
            return errors
        errors = [
            f"the position in the data has {name}={state[name]!r} and must have a whole number from 0"
            for name in ("epoch", "samples")
            if not isinstance(state[name], int) or isinstance(state[name], bool) or state[name] < 0
        ]
        errors += [
            f"the position in the data is one of {name}={state[name]!r}, and this dataloader has {now[name]!r}: "
            "prepare the same data as the run that was saved, or leave its position and begin anew"
            for name in ("size", "seed", "shuffle")
            if state[name] != now[name]
        ]
        if not errors and state["samples"] > self.size:
            errors.append(f"the position in the data is after {state['samples']} of {self.size} samples")
        return errors


def key_errors(state: Any, expected: Collection[str]) -> list[str]:
    """Return the reasons why something is no mapping with exactly these keys."""
    if not isinstance(state, Mapping):
        return [
            f"the position in the data must be a state_dict() of a dataloader, not a {type(state).__name__}"
        ]
    found = {
        "lacks": sorted(set(expected) - set(state)),
        "has unknown": sorted(map(str, set(state) - set(expected))),
    }
    return [
        f"the position in the data {verb} {', '.join(names)}: it must have exactly {', '.join(expected)}"
        for verb, names in found.items()
        if names
    ]


class Reached(NamedTuple):
    """The part a replica has taken: batches of a pass, and the sampler's state after them (None where it has none)."""

    epoch: int
    batches: int
    state: Any


class ForeignSampler(StatefulSampler):
    """The passes of a sampler that knows nothing of positions; those count as epochs for random numbers.

    Args:
        sampler: gives this rank's samples. Its `state_dict` is called after each batch that is drawn from it, since
            workers are ahead of what training has taken.
        seed, rank: what random numbers follow from, besides the pass and the batch.
        drop_last: leave out a last batch that is not full.
    """

    def __init__(self, sampler: Sampler[int], *, seed: int, rank: int, drop_last: bool) -> None:
        self._sampler = sampler
        self._seed = seed
        self._rank = rank
        self._drop_last = drop_last
        self._has_state = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self.position = Reached(0, 0, None)
        self._goes_on = True  # the next pass is the one of the position

    def begin(self, batch_size: int) -> BegunPass:
        """Begin a pass: the batches that the sampler gives."""
        total = self._num_batches(batch_size)
        epoch, first, state = self.position
        if not self._goes_on or (first and first == total):
            epoch, first, state = epoch + 1, 0, None
        if state is None and self._has_state:
            state = self._own_state()
        self.position, self._goes_on = Reached(epoch, first, state), False
        batches = BatchSampler(self._sampler, batch_size, self._drop_last)
        return BegunPass(epoch, None if total is None else total - first, self._draws(batches, epoch, first))

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state as of what training has taken, and how far this pass has come.

        Raises:
            ValueError: the sampler has no state.
        """
        self._require_state()
        epoch, batches, state = self.position
        return {"sampler": self._own_state() if state is None else state, "epoch": epoch, "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand the sampler its state, and go on counting.

        Raises:
            ValueError: the sampler has no state, or this is not one of `state_dict`.
        """
        self._require_state()
        raise_errors(key_errors(state, ("sampler", "epoch", "batches")))
        self._sampler.load_state_dict(state["sampler"])  # type: ignore[attr-defined]
        self.position, self._goes_on = Reached(state["epoch"], state["batches"], state["sampler"]), True

    def _draws(self, batches: BatchSampler, epoch: int, first: int) -> Iterator[tuple[Draw, Reached]]:
        for number, indices in enumerate(batches, first):
            draw = Draw(number, indices, (self._seed, epoch, number, self._rank))
            yield draw, Reached(epoch, number + 1, self._own_state() if self._has_state else None)

    def _own_state(self) -> Any:
        return copy.deepcopy(self._sampler.state_dict())  # type: ignore[attr-defined]

    def _num_batches(self, batch_size: int) -> int | None:
        if not isinstance(self._sampler, Sized):
            return None
        return num_parts(len(self._sampler), batch_size, drop_last=self._drop_last)

    def _require_state(self) -> None:
        if not self._has_state:
            raise ValueError(
                f"the position in the data of a {type(self._sampler).__name__} is not known: give it state_dict() and "
                "load_state_dict(), or leave out distributed_sampler_cls, or save a checkpoint without its dataloader"
            )
