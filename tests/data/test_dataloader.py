"""The position of training in the data: in common loops, with workers, and with random numbers of batches."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from echelon.data.loader import ShardedLoader, sharded_loader

from ..slow import slow


def as_list(samples: list) -> list:
    return samples


def drawing(samples: list[int]) -> list[tuple[int, float, float, float]]:
    """Return a batch with a number from each random generator."""
    return [(sample, random.random(), np.random.rand(), torch.rand(()).item()) for sample in samples]


WORKERS: dict[str, dict[str, Any]] = {
    "here": {},
    "in workers": {"num_workers": 2},
    "in lasting workers": {"num_workers": 2, "persistent_workers": True},
}


def loader_of(dataset: Any = range(20), batch_size: int = 2, **settings: Any) -> ShardedLoader:
    plain: dict[str, Any] = {"rank": 0, "size": 2, "shuffle": True, "seed": 3, "drop_last": False}
    return sharded_loader(dataset, batch_size, **{**plain, "collate_fn": as_list, **settings})


def going_on(loader: ShardedLoader, **settings: Any) -> ShardedLoader:
    """Make the loader of another run, at the position of this one."""
    resumed = loader_of(**settings)
    resumed.load_state_dict(loader.state_dict())
    return resumed


def place(loader: ShardedLoader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["samples"]


def epochs(loader: ShardedLoader, first: int, last: int) -> Iterator[Any]:
    """The usual loop, with `set_epoch` before each epoch."""
    for epoch in range(first, last):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader


def unnamed(loader: ShardedLoader, first: int, last: int) -> Iterator[Any]:
    """A loop without `set_epoch`."""
    for _ in range(first, last):
        yield from loader


def each_step(loader: ShardedLoader, first: int, last: int) -> Iterator[Any]:
    """A loop with `set_epoch` before each batch, which detects the end of an epoch by StopIteration."""
    for epoch in range(first, last):
        batches = iter(loader)
        while True:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            try:
                batch = next(batches)
            except StopIteration:
                loader.sampler.set_epoch(epoch + 1)  # type: ignore[attr-defined]
                break
            yield batch


@pytest.mark.parametrize("loop", [epochs, unnamed, each_step])
def test_a_loop_stopped_anywhere_resumes_as_if_uninterrupted(loop: Any) -> None:
    uninterrupted = list(loop(loader_of(collate_fn=drawing), 0, 3))
    assert len(uninterrupted) == 15
    for stop in range(1, 15):
        first = loader_of(collate_fn=drawing)
        seen = list(itertools.islice(loop(first, 0, 3), stop))
        assert place(first) == ((stop - 1) // 5, ((stop - 1) % 5 + 1) * 4)
        second = going_on(first, collate_fn=drawing)
        # A loaded complete epoch is an empty pass if `set_epoch` sets it, and is skipped otherwise.
        begun = stop // 5 if loop in (unnamed, each_step) else place(second)[0]
        assert seen + list(loop(second, begun, 3)) == uninterrupted


def test_an_abandoned_pass_counts_taken_batches_and_the_next_starts_anew() -> None:
    loader = loader_of()
    list(itertools.islice(loader, 3))
    assert place(loader) == (0, 12)
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert place(loader) == (1, 0)
    list(itertools.islice(loader, 1))
    assert place(loader) == (1, 4)


def test_a_loader_has_the_length_of_an_epoch_and_a_pass_that_of_what_is_left() -> None:
    loader = loader_of()
    list(itertools.islice(loader, 3))
    second = going_on(loader)
    assert second.state_dict() == loader.state_dict()
    batches = iter(second)
    assert second.state_dict() == loader.state_dict()
    assert (len(second), len(batches), len(list(batches)), len(iter(second))) == (5, 2, 2, 5)


@pytest.mark.parametrize("workers", WORKERS)
def test_prefetched_batches_are_not_counted_and_random_numbers_continue(workers: str) -> None:
    batches = [batch for _ in range(2) for batch in loader_of(collate_fn=drawing)]
    assert batches[:5] == batches[5:]  # a new loader begins the first epoch
    plain = loader_of(collate_fn=drawing)
    expected = [batch for _ in range(3) for batch in plain]
    first = loader_of(collate_fn=drawing, **WORKERS[workers])
    seen = list(first)
    for batch in itertools.islice(first, 2):
        seen.append(batch)
    assert place(first) == (1, 8)
    second = going_on(first, collate_fn=drawing, **WORKERS[workers])
    for _ in range(2):
        seen += list(second)
    assert seen == expected


def test_batches_of_other_places_ranks_epochs_and_seeds_draw_other_numbers() -> None:
    loaders = [loader_of(collate_fn=drawing, rank=rank, seed=seed) for rank in (0, 1) for seed in (0, 1)]
    drawn = [batch[0][1:] for loader in loaders for _ in range(2) for batch in loader]
    assert len(drawn) == 40
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 40


def test_making_a_batch_leaves_the_generators_of_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def reseed(seed: int) -> None:
        raise AssertionError("the GPUs were seeded")

    torch.manual_seed(0)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseed)
    before = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]
    list(loader_of(collate_fn=drawing))
    assert before == [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


class Read(Dataset):
    """A data set of what a function returns for an index."""

    def __init__(self, read: Callable[[int], Any], size: int = 20) -> None:
        self.read, self.size = read, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


def faulty(index: int) -> int:
    """One sample is unreadable."""
    if index == 5:
        raise OSError("sample 5")
    return index


@pytest.mark.parametrize("workers", ["here", "in workers"])
def test_a_batch_that_failed_is_skipped(workers: str) -> None:
    first, second = (loader_of(Read(faulty), shuffle=False, rank=rank, **WORKERS[workers]) for rank in (0, 1))
    batches, failing = iter(first), iter(second)
    assert [next(batches), next(failing)] == [[0, 2], [1, 3]]
    with pytest.raises(OSError, match="sample 5"):
        next(failing)
    next(batches)
    assert [next(batches), next(failing)] == [[8, 10], [9, 11]]
    assert place(first) == place(second) == (0, 12)
    # Finish both: the error keeps the passes alive, and torch is slow to stop workers of abandoned passes.
    assert [len(list(iterator)) for iterator in (batches, failing)] == [2, 2]


def test_a_pass_whose_persistent_workers_were_taken_raises() -> None:
    loader = loader_of(**WORKERS["in lasting workers"])
    earlier, later = iter(loader), iter(loader)
    with pytest.raises(RuntimeError, match="a later pass over this dataloader has begun"):
        next(earlier)
    assert len(list(later)) == 5


class Several(Dataset):
    """A data set that returns several samples in one call."""

    def __len__(self) -> int:
        return 20

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [-index for index in indices]


def test_samples_are_read_in_one_call_if_a_data_set_can() -> None:
    plain, several = loader_of(), loader_of(Several())
    assert [[-sample for sample in batch] for batch in plain] == list(several)
    table = datasets.Dataset.from_dict({"number": list(range(20))})
    rows = [[row["number"] for row in batch] for batch in loader_of(table)]
    assert rows == list(loader_of())


def open_numbers(worker: int) -> None:
    dataset = get_worker_info().dataset
    assert isinstance(dataset, Read)
    dataset.read = lambda index: worker


def test_a_worker_starts_with_the_data_set_of_the_script() -> None:
    unopened = Read(lambda index: -1, size=4)
    loader = loader_of(unopened, size=1, num_workers=1, worker_init_fn=open_numbers)
    assert list(loader) == [[0, 0], [0, 0]]
    assert loader.dataset is unopened


def test_workers_are_seeded_by_the_epoch() -> None:
    def seeds(loader: ShardedLoader) -> set[int]:
        return set(itertools.chain.from_iterable(loader))

    of_workers = Read(lambda index: get_worker_info().seed, size=4)
    first, other = (loader_of(of_workers, rank=rank, num_workers=1) for rank in (0, 1))
    drawn = [seeds(first), seeds(other), seeds(first)]
    assert len(set.union(*drawn)) == 3
    second = loader_of(of_workers, num_workers=1)
    second.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert seeds(second) == drawn[2]


class Backwards(Sampler[int]):
    """A user's sampler with an order of its own."""

    def __init__(self, dataset: Any, *, num_replicas: int, rank: int, **_: Any) -> None:
        self.indices = list(reversed(range(rank, len(dataset), num_replicas)))

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Remembering(Backwards):
    """The same sampler with a state: the number of samples drawn from it."""

    def __init__(self, dataset: Any, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self.state = {"given": 0}

    def __iter__(self) -> Iterator[int]:
        for number in range(self.state["given"] % len(self.indices), len(self.indices)):
            self.state["given"] = number + 1
            yield self.indices[number]

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state.update(state)


def test_a_sampler_without_a_state_has_an_order_and_no_position() -> None:
    loader = loader_of(sampler_class=Backwards, num_workers=1)
    assert [list(loader) for _ in range(2)] == [[[18, 16], [14, 12], [10, 8], [6, 4], [2, 0]]] * 2
    assert len(loader) == len(iter(loader)) == 5
    for call in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(
            ValueError, match=r"of a Backwards is not known: give it state_dict\(\) and load_state"
        ):
            call()


@pytest.mark.parametrize("stop", [5, *slow(0, 3, 7)])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_sampler_with_a_state_resumes_from_it(workers: str, stop: int) -> None:
    settings = {"sampler_class": Remembering, "collate_fn": drawing, **WORKERS[workers]}
    plain = loader_of(sampler_class=Backwards, collate_fn=drawing)
    uninterrupted = [batch for _ in range(3) for batch in plain]
    assert uninterrupted[0] != uninterrupted[5]
    first = loader_of(**settings)
    seen = list(first) if stop > 5 else []
    batches = iter(first)
    seen += list(itertools.islice(batches, stop - len(seen)))
    state = first.state_dict()
    assert state == {
        "sampler": {"given": (2 * stop - 1) % 10 + 1 if stop else 0},
        "epoch": max(stop - 1, 0) // 5,
        "batches": (stop - 1) % 5 + 1 if stop else 0,
    }
    second = loader_of(**settings)
    second.load_state_dict(state)
    while len(seen) < 15:
        seen += list(second)
    assert seen == uninterrupted
    with pytest.raises(ValueError, match="lacks batches, sampler"):
        second.load_state_dict({"epoch": 0})


def test_the_end_of_the_data_is_noted_for_reports_of_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []
    monkeypatch.setattr("echelon.data.loader.note_end_of_data", lambda: noted.append(1))
    for _ in loader_of():
        assert noted == []
    assert noted == [1]
