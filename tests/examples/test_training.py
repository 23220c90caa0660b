"""The training loop that the examples share: its batches. Its records are tested with the Llama example."""

import itertools
from typing import Any

import torch

from echelon import Booster, TorchDDPPlugin

from ..pool import Pool
from .scripts import EXAMPLES, load

training = load(EXAMPLES / "training.py")


def three_epochs() -> list[list[int]]:
    """The samples of each of three epochs of two batches, on this replica."""
    plugin = Booster(plugin=TorchDDPPlugin()).plugin
    loader = plugin.prepare_dataloader(list(range(24)), batch_size=4, shuffle=True)
    batches = list(itertools.islice(training.endless(loader, 2), 6))
    return [torch.cat(batches[first : first + 2]).tolist() for first in (0, 2, 4)]


def test_epochs_end_early_in_orders_of_their_own_and_replicas_share_no_sample(pool: Pool) -> None:
    first, second = pool.run(2, three_epochs)
    for own, other in zip(first, second, strict=True):
        assert len(own) == len(other) == 8
        assert len({*own, *other}) == 16
    assert len(set(map(tuple, first))) == 3


def stopped_after(taken: int) -> bool:
    """True where epochs that end early go on where they stood, as the rest of those that were never stopped."""
    plugin = Booster(plugin=TorchDDPPlugin()).plugin

    def loader() -> Any:
        return plugin.prepare_dataloader(list(range(24)), batch_size=4, shuffle=True)

    whole = list(itertools.islice(training.endless(loader(), 2), 6))
    first, second = loader(), loader()
    list(itertools.islice(training.endless(first, 2), taken))
    second.load_state_dict(first.state_dict())
    rest = list(itertools.islice(training.endless(second, 2), 6 - taken))
    return all(map(torch.equal, whole[taken:], rest))


def test_epochs_that_end_early_go_on_where_they_stood(pool: Pool) -> None:
    for taken in range(1, 5):
        assert pool.run(2, stopped_after, taken) == [True, True]
