"""The order of samples over replicas: torch's for a full epoch, and continued by any other number of replicas."""

import random
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from echelon.data.sampler import ResumableSampler


def samplers(size: int, replicas: int, **settings: Any) -> list[ResumableSampler]:
    settings = {"shuffle": True, "seed": 3, "drop_last": False, **settings}
    settings["num_replicas"] = replicas
    return [ResumableSampler(range(size), rank=rank, **settings) for rank in range(replicas)]


def take(ranks: list[ResumableSampler], batch_size: int, most: int | None = None) -> list[list[int]]:
    """Take up to `most` batches of a new pass: of all replicas together, in the order of the samples."""
    batches: list[list[int]] = []
    for draws in zip(*[sampler.begin(batch_size).draws for sampler in ranks], strict=True):
        if len(batches) == most:
            break
        for sampler, (_, position) in zip(ranks, draws, strict=True):
            sampler.position = position
        shares = [draw.indices for draw, _ in draws]
        assert len(set(map(len, shares))) == 1
        batches.append(list(chain.from_iterable(zip(*shares, strict=True))))
    assert len({str(sampler.state_dict()) for sampler in ranks}) == 1
    return batches


def order(size: int, epoch: int, seed: int = 3) -> list[int]:
    """Return the order of torch's sampler for one process."""
    sampler = DistributedSampler(range(size), num_replicas=1, rank=0, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_full_epoch_is_sharded_as_torch_does(drop_last: bool, shuffle: bool) -> None:
    for size, replicas, batch_size in ((24, 3, 4), (25, 4, 3), (3, 5, 2), (2, 8, 1), (17, 1, 5), (0, 2, 2)):
        settings: dict[str, Any] = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
        for rank, sampler in enumerate(samplers(size, replicas, **settings)):
            theirs = DistributedSampler(range(size), num_replicas=replicas, rank=rank, **settings)
            for epoch in (0, 4):
                sampler.set_epoch(epoch)
                theirs.set_epoch(epoch)
                begun = sampler.begin(batch_size)
                batches = torch.utils.data.BatchSampler(theirs, batch_size, drop_last)
                assert [draw.indices for draw, _ in begun.draws] == list(batches)
                assert (begun.num_batches, begun.epoch, list(sampler)) == (len(batches), epoch, list(theirs))


def test_resuming_anywhere_with_other_sizes_continues_the_uninterrupted_order() -> None:
    draw = random.Random(0)
    for _ in range(300):
        size, epoch = draw.randint(1, 60), draw.randint(0, 3)
        state, seen, replicas = None, [], 1
        while state is None or (state["epoch"], state["samples"]) < (epoch, size):
            replicas, batch_size = draw.randint(1, 5), draw.randint(1, 5)
            ranks = samplers(size, replicas)
            for sampler in ranks:
                if state is None:
                    sampler.set_epoch(epoch)
                else:
                    sampler.load_state_dict(state)
            seen += chain.from_iterable(take(ranks, batch_size, draw.choice([1, 2, 5, None])))
            state = ranks[0].state_dict()
        expected = order(size, epoch)
        assert seen[:size] == expected
        repeated = seen[size:]
        assert len(repeated) < replicas
        assert repeated == (expected * replicas)[: len(repeated)]


def test_samples_that_fill_no_batch_are_dropped_at_the_end_of_an_epoch() -> None:
    draw = random.Random(1)
    for _ in range(100):
        size, batch = draw.randint(1, 60), 12
        before, after = draw.choices([1, 2, 3, 4, 6, 12], k=2)
        ranks = samplers(size, before, drop_last=True)
        seen = take(ranks, batch // before, draw.randint(1, 3))
        resumed = samplers(size, after, drop_last=True)
        for sampler in resumed:
            sampler.load_state_dict(ranks[0].state_dict())
        seen += take(resumed, batch // after) if len(seen) < size // batch else []
        assert list(chain.from_iterable(seen)) == order(size, 0)[: size // batch * batch]
        assert resumed[0].state_dict()["samples"] == size
        second_epoch = samplers(size, after, drop_last=True)
        for sampler in second_epoch:
            sampler.set_epoch(1)
        assert take(resumed, batch // after) == take(second_epoch, batch // after)


# The loaded position; then calls: `set_epoch` (a number), or a pass (its epoch and first sample).
PASSES: dict[str, tuple[tuple[int, int] | None, list[int | tuple[int, int]]]] = {
    "a pass is of the named epoch or else of the next": (
        None,
        [(0, 0), (1, 0), 1, (1, 0), 7, (7, 0), (8, 0)],
    ),
    "goes on unnamed": ((2, 6), [(2, 6), (3, 0)]),
    "naming the epoch keeps its place": ((2, 6), [0, 1, 2, 3, 2, (2, 6), (3, 0)]),
    "naming another epoch begins it": ((2, 6), [1, (1, 0), (2, 0)]),
    "a whole epoch is not given again": ((2, 8), [(3, 0)]),
    "nor where it is named": ((2, 8), [2, (2, 8), (3, 0)]),
}


@pytest.mark.parametrize("name", PASSES)
def test_set_epochs_and_passes_follow_the_position(name: str) -> None:
    place, calls = PASSES[name]
    (one,) = samplers(8, 1)
    if place is not None:
        one.load_state_dict({**one.state_dict(), "epoch": place[0], "samples": place[1]})
    for call in calls:
        if isinstance(call, int):
            one.set_epoch(call)
        else:
            epoch, samples = call
            assert (*chain.from_iterable(take([one], 2)),) == (*order(8, epoch)[samples:],)
            assert one.position == (epoch, 8)
    begun = one.begin(2)
    for _, position in begun.draws:
        one.position = position
        one.set_epoch(begun.epoch)  # in every step
        assert one.position == position
