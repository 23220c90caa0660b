"""A user's DataLoader with workers, sharded: the order of a plain loop, and the position of training."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from echelon.data.loader import ShardedLoader
from echelon.data.user_loader import SamplerGenerators, rebuilt_loader

from ..slow import slow
from .test_dataloader import WORKERS, as_list, drawing

SIZE = 20


def sharded(rank: int = 0, size: int = 1, batch_size: int = 4, **settings: Any) -> ShardedLoader:
    """Make the loader of one replica; the global generators of all replicas have the same state."""
    torch.manual_seed(3)
    loader: DataLoader = DataLoader(range(SIZE), batch_size, shuffle=True, collate_fn=drawing, **settings)  # type: ignore[arg-type]
    return rebuilt_loader(loader, SamplerGenerators([], isolated=True), seed=3, rank=rank, size=size)


def indices(batches: Any) -> list[list[int]]:
    return [[sample[0] for sample in batch] for batch in batches]


@pytest.mark.parametrize("workers", WORKERS)
def test_workers_see_the_order_of_a_plain_loop_and_their_draws_continue(workers: str) -> None:
    settings = {"collate_fn": as_list, **WORKERS[workers]}
    torch.manual_seed(3)
    plain: DataLoader = DataLoader(range(SIZE), 4, shuffle=True, **settings)  # type: ignore[arg-type]
    expected = [list(plain) for _ in range(3)]
    first = sharded(**WORKERS[workers])
    epochs = [list(first) for _ in range(3)]
    assert [indices(epoch) for epoch in epochs] == expected
    numbers = [sample[1] for epoch in epochs for batch in epoch for sample in batch]
    assert len(set(numbers)) == 3 * SIZE
    stopped = sharded(**WORKERS[workers])
    taken = [*stopped, *itertools.islice(stopped, 2)]
    resumed = sharded(**WORKERS[workers])
    torch.manual_seed(8)
    resumed.load_state_dict(stopped.state_dict())
    rest = iter(resumed)
    assert len(rest) == 3
    taken += [*rest, *resumed]
    assert taken == [batch for epoch in epochs for batch in epoch]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("stop", [5, *slow(4, 6, 10)])
def test_a_generator_continues_after_an_epoch_with_workers(workers: str, stop: int) -> None:
    def batches() -> tuple[ShardedLoader, Iterator[Any]]:
        generator = torch.Generator().manual_seed(5)
        settings = {"collate_fn": as_list, "generator": generator, **WORKERS[workers]}
        loader = DataLoader(range(SIZE), 4, shuffle=True, **settings)
        generators = SamplerGenerators([generator], isolated=False)
        rebuilt = rebuilt_loader(loader, generators, seed=3, rank=0, size=1)
        return rebuilt, itertools.chain.from_iterable(itertools.repeat(rebuilt))

    uninterrupted = [*itertools.islice(batches()[1], 15)]
    stopped, taken = batches()
    first = [*itertools.islice(taken, stop)]
    resumed, rest = batches()
    resumed.load_state_dict(stopped.state_dict())
    assert [*first, *itertools.islice(rest, 15 - stop)] == uninterrupted


def test_an_abandoned_pass_is_followed_by_the_next_one() -> None:
    loader = sharded()
    epochs = [list(loader) for _ in range(2)]
    loader = sharded()
    list(itertools.islice(loader, 2))
    assert list(loader) == epochs[1]
