"""Batches of the examples' training loop; its records are tested with the Llama example."""

import itertools
from typing import Any

import torch

from echelon import Booster, TorchDDPPlugin

from ..pool import Pool
from .scripts import EXAMPLES, load

training = load(EXAMPLES / "training.py")


def three_epochs() -> list[list[int]]:
    """Return this replica's samples in each of three epochs of two batches."""
    plugin = Booster(plugin=TorchDDPPlugin()).plugin
    loader = plugin.prepare_dataloader(list(range(24)), batch_size=4, shuffle=True)
    batches = list(itertools.islice(training.endless(loader, 2), 6))
    return [torch.cat(batches[first : first + 2]).tolist() for first in (0, 2, 4)]


def test_short_epochs_are_reshuffled_and_replicas_share_no_sample(pool: Pool) -> None:
    first, second = pool.run(2, three_epochs)
    for one, other in zip(first, second, strict=True):
        assert len(one) == len(other) == 8
        assert len({*one, *other}) == 16
    assert len(set(map(tuple, first))) == 3


def stopped_after(taken: int) -> bool:
    """Return True if short epochs resumed after some batches yield the rest of an uninterrupted run."""
    plugin = Booster(plugin=TorchDDPPlugin()).plugin

    def loader() -> Any:
        return plugin.prepare_dataloader(list(range(24)), batch_size=4, shuffle=True)

    expected = list(itertools.islice(training.endless(loader(), 2), 6))
    first, second = loader(), loader()
    list(itertools.islice(training.endless(first, 2), taken))
    second.load_state_dict(first.state_dict())
    rest = list(itertools.islice(training.endless(second, 2), 6 - taken))
    return all(map(torch.equal, expected[taken:], rest))


def test_short_epochs_resume_at_their_position(pool: Pool) -> None:
    for taken in range(1, 5):
        assert pool.run(2, stopped_after, taken) == [True, True]
