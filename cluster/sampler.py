"""The order of samples over all replicas, and how far training has come in it. Making batches is batches.py."""

import math
from collections.abc import Collection, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from .batches import Dealt, Draw


class Position(NamedTuple):
    """What all replicas together have taken of an epoch: all of it where `samples` is the size of the data set."""

    epoch: int
    samples: int


class ResumableSampler(DistributedSampler[int]):
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

    def begin(self, batch_size: int) -> Dealt:
        """Begin a pass: the batches of this rank, from the place where it begins to the end of the epoch."""
        if not self._is_due:
            self.epoch += 1
        first = self._next_position()
        own = self._share(first)
        rounded = math.floor if self.drop_last else math.ceil
        num_batches = rounded(len(own) / batch_size)
        self._loaded, self._is_due = None, False
        self.position = first if num_batches else Position(first.epoch, self.size)
        return Dealt(first.epoch, num_batches, self._draws(first, own, batch_size, num_batches))

    def reached(self, position: Position) -> None:
        """Note that training has taken the batches up to a position."""
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        """The position of all replicas together, and what tells another order from this; equal on all ranks."""
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
            ValueError: the state is none of this order; all faults are told.
        """
        if faults := self._faults(state):
            raise ValueError("\n".join(faults))
        self.position = self._loaded = Position(state["epoch"], state["samples"])
        self.epoch = self.position.epoch
        self._is_due = self.position.samples < self.size

    def _next_position(self) -> Position:
        """Where a pass over the named epoch begins."""
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

    def _faults(self, state: Mapping[str, Any]) -> list[str]:
        now = self.state_dict()
        if faults := key_faults(state, now):
            return faults
        faults = [
            f"the position in the data has {name}={state[name]!r} and must have a whole number from 0"
            for name in ("epoch", "samples")
            if not isinstance(state[name], int) or isinstance(state[name], bool) or state[name] < 0
        ]
        faults += [
            f"the position in the data is one of {name}={state[name]!r}, and this dataloader has {now[name]!r}: "
            "prepare the same data as the run that was saved, or leave its position and begin anew"
            for name in ("size", "seed", "shuffle")
            if state[name] != now[name]
        ]
        if not faults and state["samples"] > self.size:
            faults.append(f"the position in the data is after {state['samples']} of {self.size} samples")
        return faults


def key_faults(state: Any, expected: Collection[str]) -> list[str]:
    """Why something is not a mapping with exactly these keys."""
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
