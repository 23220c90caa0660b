"""A sampler class of the user's in the place of sampler.py: its order, and its own state where it has one."""

import copy
import math
from collections.abc import Iterator, Mapping, Sized
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, Sampler

from .batches import Dealt, Draw
from .sampler import key_faults


class Reached(NamedTuple):
    """What a replica has taken: batches of a pass, and the sampler's state after them (None where it has none)."""

    epoch: int
    batches: int
    state: Any


class ForeignSampler:
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
        self._position = Reached(0, 0, None)
        self._goes_on = True  # the next pass is the one of the position

    def begin(self, batch_size: int) -> Dealt:
        """Begin a pass: the batches that the sampler gives."""
        total = self._num_batches(batch_size)
        epoch, first, state = self._position
        if not self._goes_on or (first and first == total):
            epoch, first, state = epoch + 1, 0, None
        if state is None and self._has_state:
            state = self._own_state()
        self._position, self._goes_on = Reached(epoch, first, state), False
        batches = BatchSampler(self._sampler, batch_size, self._drop_last)
        return Dealt(epoch, None if total is None else total - first, self._draws(batches, epoch, first))

    def reached(self, position: Reached) -> None:
        """Note what training has taken."""
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state as of what training has taken, and how far this pass has come.

        Raises:
            ValueError: the sampler has no state.
        """
        self._require_state()
        epoch, batches, state = self._position
        return {"sampler": self._own_state() if state is None else state, "epoch": epoch, "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand the sampler its state, and go on counting.

        Raises:
            ValueError: the sampler has no state, or this is not one of `state_dict`.
        """
        self._require_state()
        if faults := key_faults(state, ("sampler", "epoch", "batches")):
            raise ValueError("\n".join(faults))
        self._sampler.load_state_dict(state["sampler"])  # type: ignore[attr-defined]
        self._position, self._goes_on = Reached(state["epoch"], state["batches"], state["sampler"]), True

    def _draws(self, batches: BatchSampler, epoch: int, first: int) -> Iterator[tuple[Draw, Reached]]:
        for number, indices in enumerate(batches, first):
            draw = Draw(number, indices, (self._seed, epoch, number, self._rank))
            yield draw, Reached(epoch, number + 1, self._own_state() if self._has_state else None)

    def _own_state(self) -> Any:
        return copy.deepcopy(self._sampler.state_dict())  # type: ignore[attr-defined]

    def _num_batches(self, batch_size: int) -> int | None:
        if not isinstance(self._sampler, Sized):
            return None
        return (math.floor if self._drop_last else math.ceil)(len(self._sampler) / batch_size)

    def _require_state(self) -> None:
        if not self._has_state:
            raise ValueError(
                f"the position in the data of a {type(self._sampler).__name__} is not known: give it state_dict() and "
                "load_state_dict(), or leave out distributed_sampler_cls, or save a checkpoint without its dataloader"
            )
