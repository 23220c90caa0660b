"""A sampler of the user's, the same on all ranks, whose samples are dealt out to replicas, and the place in them."""

import math
from collections.abc import Iterator, Mapping, Sized
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from .batches import Dealt, Draw
from .sampler import key_faults
from .streams import Streams


class Place(NamedTuple):
    """How far all replicas together have come.

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


class GivenSampler(Sampler[int]):
    """Deals out the samples of a sampler as `ResumableSampler` does: the batches of all replicas are its next ones.

    What it does not define is the inner sampler's.

    Args:
        sampler: gives the same samples on every rank as long as its generators stand alike.
        size: samples of the data set.
        streams: the generators that it draws from.
        generator: of the dataloader, from which each pass draws once, as torch's do.
        num_replicas, rank: of the data axis.
        drop_last: leave out samples that do not fill a batch on every rank.
        workers_last: draw once for all passes, as torch's persistent workers do.
    """

    def __init__(
        self,
        sampler: Sampler[int],
        *,
        size: int,
        streams: Streams,
        generator: torch.Generator | None,
        num_replicas: int,
        rank: int,
        drop_last: bool,
        workers_last: bool,
    ) -> None:
        self.sampler = sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last
        self._size = size
        self._streams = streams
        self._generator = generator
        self._lasts = workers_last
        self._place = self._next_pass(0, None)
        self._is_loaded = False

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not there yet, when it is copied
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        """Samples of this rank in an epoch."""
        assert isinstance(self.sampler, Sized)
        return (math.floor if self.drop_last else math.ceil)(len(self.sampler) / self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """Every sample that is this rank's in a whole pass."""
        with self._streams.drawing():
            return iter([*islice(self.sampler, self.rank, None, self.num_replicas)])

    def begin(self, batch_size: int) -> Dealt:
        """Begin a pass: the next one, or the one that was loaded, at its place."""
        place, is_loaded, self._is_loaded = self._place, self._is_loaded, False
        if place.samples and not is_loaded:  # the pass before broke off
            place = self._next_pass(place.epoch + 1, place.entropy)
        if is_loaded and place.start is not None:
            self._streams.load_state_dict(place.start)
        else:
            self._streams.release()
        entropy = self._drawn() if place.entropy is None else place.entropy
        self._place = place._replace(start=self._streams.state_dict(), entropy=entropy)
        return Dealt(place.epoch, self._num_batches(batch_size, place.samples), self._draws(batch_size))

    def reached(self, place: Place) -> None:
        """Note that training has taken the batches up to a place."""
        self._place = place

    def state_dict(self) -> dict[str, Any]:
        """The place of all replicas together, and the generators as the pass began."""
        return {**self._place._asdict(), "size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on at a place.

        Raises:
            ValueError: it is one in other data, or of a dataloader of `prepare_dataloader`.
        """
        if faults := key_faults(state, (*Place._fields, "size")):
            raise ValueError("\n".join(faults))
        if state["size"] != self._size:
            raise ValueError(
                f"the position in the data is one of size={state['size']}, and this dataloader has "
                f"size={self._size}: give the same data as the run that was saved, or leave its position and begin anew"
            )
        self._place = Place(*(state[name] for name in Place._fields))
        self._is_loaded = True

    def _drawn(self) -> int:
        """The seed that torch's DataLoader draws for its workers before its sampler draws."""
        with self._streams.drawing():
            return int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())

    def _next_pass(self, epoch: int, entropy: int | None) -> Place:
        start = self._streams.state_dict() if self._streams.apart else None
        return Place(epoch, 0, start, entropy if self._lasts else None)

    def _draws(self, batch_size: int) -> Iterator[tuple[Draw, Place]]:
        place = self._place
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
        rounded = math.floor if self.drop_last else math.ceil
        return rounded((len(self.sampler) - samples) / (batch_size * self.num_replicas))
