"""The random generators that a sampler may draw from, kept apart from those of training."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


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
        """What is drawn next follows from it."""
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
