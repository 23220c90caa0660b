"""A user's DataLoader given to boost: sharded over the replicas, in the order of a plain loop."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from echelon import Booster
from echelon.data.loader import ShardedLoader
from echelon.data.sampler import num_parts
from echelon.plugins import base
from echelon.verify.model_choice import ModelChoice

from ..log_lines import logged
from ..plugins.training import booster_of
from ..pool import Pool, on_ranks
from ..slow import slow, slow_row

LLAMA = ModelChoice(model_type="llama", num_layers=1)

PLUGINS: dict[str, Callable[[], Booster]] = {
    "replicas": lambda: booster_of("hybrid"),
    "ddp": lambda: booster_of("ddp"),
    "fsdp": lambda: booster_of("fsdp"),
    "slices": lambda: booster_of("hybrid", tp_size=2),
}
SIZE = 22


class Numbers(Dataset):
    """Numbers from 0."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    """Numbers in a fixed order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class Shuffled(Sampler[int]):
    """A user's sampler that shuffles by Python's generator."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(SIZE), SIZE))


class EveryOther(Sampler[int]):
    """A sampler that is sharded already."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank() if dist.is_initialized() else 0, SIZE, 2))


class Sum(nn.Module):
    """A model that sums numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.weight * numbers


def as_list(samples: list[int]) -> list[int]:
    return samples


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def lists(batch_size: int = 4, **settings: Any) -> DataLoader:
    """Return a loader of lists of numbers."""
    return DataLoader(Numbers(), batch_size, collate_fn=as_list, **settings)


LOADERS: dict[str, Callable[[int], DataLoader]] = {
    "shuffled": lambda size: lists(size, shuffle=True),
    "in order, last dropped": lambda size: lists(size, drop_last=True),
    "generator": lambda size: lists(size, shuffle=True, generator=seeded()),
    "weighted": lambda size: lists(size, sampler=WeightedRandomSampler([1.0] * SIZE, 20)),
    "own sampler": lambda size: lists(size, sampler=Shuffled()),
    "batch sampler": lambda size: lists(
        1, batch_sampler=BatchSampler(RandomSampler(range(SIZE)), size, True)
    ),
}


def model_for(plugin: str) -> nn.Module:
    return LLAMA.build() if plugin == "slices" else Sum()


def boosted_loader(plugin: str, loader: Any, model: nn.Module | None = None) -> tuple[Booster, Any, Any]:
    booster = PLUGINS[plugin]()
    boosted, _, _, dataloader, _ = booster.boost(model or model_for(plugin), dataloader=loader)
    return booster, boosted, dataloader


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def plain_epochs(kind: str, batch_size: int) -> list[list[list[int]]]:
    """Return the batches of three epochs of a plain loop."""
    seed_all(0)
    loader = LOADERS[kind](batch_size)
    return [list(loader) for _ in range(3)]


def boosted_epochs(plugin: str, kind: str, batch_size: int) -> tuple[int, list[list[list[int]]]]:
    """Return this rank's replica, and its batches of three epochs; all ranks but the first have other seeds."""
    model = model_for(plugin)
    seed_all(dist.get_rank())
    loader = LOADERS[kind](batch_size)
    if loader.generator is not None:
        loader.generator.manual_seed(5 + dist.get_rank())
    booster, _, dataloader = boosted_loader(plugin, loader, model)
    epochs = [list(dataloader) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [len(dataloader)] * 3
    return booster.plugin.data_rank[0], epochs


def global_batches(by_replica: list[list[list[int]]]) -> list[list[int]]:
    """Return the global batches, in the order of their samples."""
    batches = []
    for parts in zip(*by_replica, strict=True):
        in_turns = itertools.chain.from_iterable(itertools.zip_longest(*parts))
        batches.append([sample for sample in in_turns if sample is not None])
    return batches


@pytest.mark.parametrize(
    ("plugin", "kind"),
    [*(("replicas", kind) for kind in LOADERS), *((name, "shuffled") for name in ("ddp", "fsdp", "slices"))],
)
def test_replicas_shard_the_batches_of_a_plain_loop_for_any_seeds_of_the_ranks(
    pool: Pool, plugin: str, kind: str
) -> None:
    (_, first), (_, second) = pool.run(2, boosted_epochs, plugin, kind, 3)
    if plugin == "slices":  # ranks of one replica get equal batches
        assert first == second == plain_epochs(kind, 3)
    else:
        by_epoch = [global_batches([*epochs]) for epochs in zip(first, second, strict=True)]
        assert by_epoch == plain_epochs(kind, 6)


@pytest.mark.parametrize("plugin", [plugin for plugin in PLUGINS if plugin != "slices"])
@on_ranks(1)
def test_one_process_has_the_order_and_random_numbers_of_a_plain_loop(plugin: str) -> None:
    expected = plain_epochs("shuffled", 4)
    drawn = torch.rand(3)
    assert boosted_epochs(plugin, "shuffled", 4) == (0, expected)
    assert torch.equal(torch.rand(3), drawn)


class Buckets(Sampler[list[int]]):
    """A user's batch sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2]])


class OwnLoader(DataLoader):
    """A subclass, whose changes would be lost."""


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "stream": (
        lambda: DataLoader(Stream(), 2),
        "boost cannot shard the dataloader: the data set (Stream) is iterable-style or has no length",
    ),
    "buckets": (
        lambda: DataLoader(Numbers(), batch_sampler=Buckets()),
        "boost cannot shard the dataloader: its batch_sampler is a Buckets",
    ),
    "whole": (
        lambda: DataLoader(Numbers(), batch_size=None),
        "boost cannot shard the dataloader: it has batch_size=None",
    ),
    "subclass": (lambda: OwnLoader(Numbers(), 2), "boost cannot shard the dataloader: it is a OwnLoader"),
    "list": (lambda: [1], "boost cannot shard dataloader[0]: it is a int"),
    "sharded sampler": (
        lambda: DataLoader(Numbers(), 2, sampler=EveryOther()),
        "the settings of the dataloader differ between ranks, and every rank must give the same: sampler is 'a "
        "EveryOther of 0, 2, 4, 6",
    ),
    "sharded data": (
        lambda: DataLoader(torch.utils.data.Subset(Numbers(), range(dist.get_rank(), SIZE, 2)), 2),
        "the settings of the dataloader differ between ranks, and every rank must give the same: dataset is",
    ),
    "one rank": (
        lambda: DataLoader(Numbers(), 2) if dist.get_rank() else None,
        "the settings of the dataloader differ between ranks",
    ),
}


def refuse_all() -> dict[str, str]:
    messages = {}
    for kind, (make, _) in REFUSED.items():
        with pytest.raises(ValueError) as refusal:
            boosted_loader("ddp" if kind == "list" else "replicas", make())
        messages[kind] = str(refusal.value)
    return messages


def test_loaders_that_cannot_be_sharded_are_refused_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(2, refuse_all)
    assert first == second
    for kind, message in first.items():
        assert message.startswith(REFUSED[kind][1])
        assert "leave the dataloader out of boost" in message


@on_ranks(1)
def test_batches_are_pinned_on_cuda() -> None:
    for on_a_gpu in (False, True):
        with patch.object(base, "is_cuda", lambda _, on_a_gpu=on_a_gpu: on_a_gpu):
            plugin = PLUGINS["replicas"]().plugin
            assert plugin.prepare_dataloader(Numbers(), 2).pin_memory == on_a_gpu
            assert not plugin.prepare_dataloader(Numbers(), 2, pin_memory=False).pin_memory


@on_ranks(2)
def test_sharded_loaders_are_unchanged() -> None:
    """Give boost loaders that are sharded already, and none."""
    booster = PLUGINS["replicas"]()
    prepared = booster.plugin.prepare_dataloader(Numbers(), 2)
    distributed = DataLoader(Numbers(), 2, sampler=DistributedSampler(Numbers()))
    for loader in (None, prepared, distributed):
        assert booster.boost(Sum(), dataloader=loader)[3] is loader
    # One replica keeps loaders that cannot be sharded.
    for kind in ("stream", "buckets", "whole", "subclass", "list"):
        loader = REFUSED[kind][0]()
        returned = boosted_loader("slices", loader)[2]
        assert returned == loader if kind == "list" else returned is loader


def run_to(folder: Path, kind: str, stop: int, batch_size: int, *, resume: bool) -> list[list[int]]:
    """Return this rank's batches until all replicas together have taken `stop` samples; then save."""
    seed_all(7 if resume else dist.get_rank())
    loader = LOADERS[kind](batch_size)
    booster, model, dataloader = boosted_loader("replicas", loader)
    if resume:
        booster.load_checkpoint(folder, model=model, dataloader=dataloader)
    taken: list[list[int]] = []
    while sum(map(len, taken)) * dist.get_world_size() < stop:
        for batch in dataloader:
            taken.append(batch)
            if sum(map(len, taken)) * dist.get_world_size() >= stop:
                break
    if not resume:
        booster.save_checkpoint(folder, 1, model=model, dataloader=dataloader).wait()
    return taken


def samples(by_rank: list[list[list[int]]]) -> list[int]:
    return [sample for batch in global_batches(by_rank) for sample in batch]


@pytest.mark.parametrize(("kind", "stop"), [("shuffled", 12), ("generator", 22), ("own sampler", 38)])
def test_a_checkpoint_resumes_in_the_order_with_any_number_of_replicas(
    pool: Pool, tmp_path: Path, kind: str, stop: int
) -> None:
    # 22 samples: two replicas divide them, so an epoch repeats none.
    plain_samples = [sample for epoch in plain_epochs(kind, 4) for batch in epoch for sample in batch]
    assert samples(pool.run(2, run_to, tmp_path, kind, stop, 2, resume=False)) == plain_samples[:stop]
    for size in (1, 2):
        rest = samples(pool.run(size, run_to, tmp_path, kind, 66 - stop, 2, resume=True))
        assert rest == plain_samples[stop:]


def boost_several(plugin: str) -> tuple[int, list[list[list[int]]]]:
    """Return this rank's replica, and its batches of a first and a second of several loaders."""
    model = model_for(plugin)
    seed_all(dist.get_rank())
    loaders = [LOADERS["shuffled"](3), LOADERS["shuffled"](3)]
    booster, _, returned = boosted_loader(plugin, loaders, model)
    assert type(returned) is list and len(returned) == 2
    prepared = booster.plugin.prepare_dataloader(Numbers(), 2)
    _, _, boosted_tuple = boosted_loader(plugin, (prepared, None, loaders[0]))
    assert type(boosted_tuple) is tuple and boosted_tuple[:2] == (prepared, None)
    assert isinstance(boosted_tuple[2], ShardedLoader)
    return booster.plugin.data_rank[0], [list(loader) for loader in returned]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_several_loaders_are_sharded_and_returned_as_they_were_given(pool: Pool, plugin: str) -> None:
    (_, first), (_, second) = pool.run(2, boost_several, plugin)
    if plugin == "slices":
        assert first == second
        (one, other), batch_size = first, 3
    else:
        one, other = (global_batches([*epochs]) for epochs in zip(first, second, strict=True))
        batch_size = 6
    assert one == plain_epochs("shuffled", batch_size)[0]  # as of a single loader
    assert one != other
    for batches in (one, other):
        assert sorted(itertools.chain.from_iterable(batches)) == [*range(SIZE)]


def refuse_several(folder: Path) -> dict[str, str]:
    good, stream = LOADERS["shuffled"](2), REFUSED["stream"][0]()
    uneven = DataLoader(Numbers(4 + dist.get_rank()), 2)
    cases = {
        "one of them": [good, stream],
        "two of them": [stream, good, stream],
        "another number": [good] * (1 + dist.get_rank()),
        "a list and none": [good] if dist.get_rank() else good,
        "other data": (good, uneven),
    }
    messages = {}
    for name, loaders in cases.items():
        with pytest.raises(ValueError) as refusal:
            boosted_loader("replicas", loaders)
        messages[name] = str(refusal.value)
    booster, model, loaders = boosted_loader("replicas", [good, good], Sum())
    with pytest.raises(ValueError) as refusal:
        booster.save_checkpoint(folder, 1, model=model, dataloader=loaders)
    return messages | {"saved": str(refusal.value)}


def test_several_loaders_are_refused_by_their_places(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, refuse_several, tmp_path)
    assert first == second
    assert first["one of them"].startswith(
        "boost cannot shard dataloader[1]: the data set (Stream) is iterable"
    )
    for number, is_refused in enumerate((True, False, True)):
        assert (f"dataloader[{number}]: the data" in first["two of them"]) == is_refused
    assert "settings of the dataloader differ" in first["another number"]
    assert "settings of the dataloader differ" in first["a list and none"]
    assert "settings of dataloader[1] differ" in first["other data"] and "of 4" in first["other data"]
    assert first["saved"] == "dataloader is a list: give the one whose position the run has, that of training"


def train_two(folder: Path, stop: int, *, resume: bool) -> list[list[list[int]]]:
    """Take batches of two loaders by turns, and save both positions, or resume from them."""
    seed_all(5 if resume else 0)
    loaders = [LOADERS["shuffled"](2), LOADERS["generator"](2)]
    booster, model, (first, second) = boosted_loader("replicas", loaders, Sum())
    if resume:
        resumed = booster.load_checkpoint(folder, model=model, dataloader=first)
        assert resumed is not None
        second.load_state_dict(resumed.user["second"])
    endless = [itertools.chain.from_iterable(itertools.repeat(loader)) for loader in (first, second)]
    taken = [[next(batches) for batches in endless] for _ in range(stop)]
    if not resume:
        user = {"second": second.state_dict()}
        booster.save_checkpoint(folder / str(stop), 1, model=model, dataloader=first, user=user).wait()
    return taken


@pytest.mark.parametrize("world", [*slow(1), 2])
def test_positions_of_several_loaders_are_saved_one_by_one(pool: Pool, tmp_path: Path, world: int) -> None:
    length = num_parts(SIZE, 2 * world, drop_last=False)
    uninterrupted = pool.run(world, train_two, tmp_path, 40, resume=False)
    for stop in (3, length, length + 1, 2 * length):
        begun = pool.run(world, train_two, tmp_path, stop, resume=False)
        rest = pool.run(world, train_two, tmp_path / str(stop), 40 - stop, resume=True)
        assert [[*a, *b] for a, b in zip(begun, rest, strict=True)] == uninterrupted


class Drawn(Sampler[int]):
    """A user's sampler around another one, which skips a sample that a generator of its own draws."""

    def __init__(self, rng: Any, draw: str) -> None:
        self.inner = RandomSampler(range(SIZE), generator=seeded())
        self.rng, self.draw = rng, draw

    def __len__(self) -> int:
        return SIZE - 1

    def __iter__(self) -> Iterator[int]:
        left_out = getattr(self.rng, self.draw)(SIZE)
        return (sample for sample in self.inner if sample != left_out)


# Settings of loaders.
WITH_GENERATORS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: {"shuffle": True},
    "loader's": lambda: {"shuffle": True, "generator": seeded()},
    "last dropped": lambda: {"shuffle": True, "generator": seeded(), "drop_last": True},
    "sampler's": lambda: {"sampler": RandomSampler(range(SIZE), generator=seeded())},
    "replacement": lambda: {"sampler": RandomSampler(range(SIZE), True, 40, generator=seeded())},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * SIZE, 20, generator=seeded())},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(SIZE), generator=seeded())},
    "Python's": lambda: {"sampler": Drawn(random.Random(1), "randrange")},
    "NumPy's": lambda: {"sampler": Drawn(np.random.default_rng(1), "integers")},
    "NumPy's old one": lambda: {"sampler": Drawn(np.random.RandomState(1), "randint")},
    "NumPy's Philox": lambda: {"sampler": Drawn(np.random.Generator(np.random.Philox(1)), "integers")},
}


def batches_of(kind: str, seed: int) -> tuple[Booster, nn.Module, Iterator[Any], Any]:
    """Return a new run: its loader, and an iterator over the batches of all passes."""
    seed_all(seed)
    booster, model, loader = boosted_loader("replicas", lists(**WITH_GENERATORS[kind]()))
    return booster, model, itertools.chain.from_iterable(itertools.repeat(loader)), loader


def resumed_anywhere(folder: Path, kinds: tuple[str, ...]) -> dict[str, list[int]]:
    """Return the numbers of batches after which a run that resumes departs from an uninterrupted one, by kind."""
    wrong = {}
    for kind in kinds:
        *_, batches, loader = batches_of(kind, 0)
        length = len(loader)
        uninterrupted = [*itertools.islice(batches, 3 * length)]
        assert uninterrupted[:length] != uninterrupted[length : 2 * length] != uninterrupted[2 * length :]
        stops = (length, 2 * length)
        if dist.get_world_size() == 1:
            stops += (0, 1, length - 1, length + 1, 2 * length - 1)
        for stop in stops:
            booster, model, batches, loader = batches_of(kind, 0)
            taken = [*itertools.islice(batches, stop)]
            booster.save_checkpoint(folder / kind, stop, model=model, dataloader=loader).wait()
            booster, model, batches, loader = batches_of(kind, 7)
            booster.load_checkpoint(folder / kind, model=model, dataloader=loader, resume=stop)
            if [*taken, *itertools.islice(batches, 3 * length - stop)] != uninterrupted:
                wrong.setdefault(kind, []).append(stop)
    return wrong


QUICK = ("none", "weighted", "Python's", "NumPy's")  # without a generator, torch's, and those of samplers


@pytest.mark.parametrize("world", [*slow(1), 2])
@pytest.mark.parametrize("kinds", [QUICK, slow_row((*WITH_GENERATORS,), id="all")])
def test_a_run_resumes_in_its_order_wherever_its_epochs_end(
    pool: Pool, tmp_path: Path, kinds: tuple[str, ...], world: int
) -> None:
    assert pool.run(world, resumed_anywhere, tmp_path, kinds) == [{}] * world


def end_an_epoch(folder: Path) -> list[list[int]]:
    """Save after the first epoch on one process, and return the second."""
    booster, model, _, loader = batches_of("none", 3)
    list(loader)
    booster.save_checkpoint(folder, 1, model=model, dataloader=loader).wait()
    return list(loader)


def begin_the_next(folder: Path) -> list[list[int]]:
    booster, model, _, loader = batches_of("none", 3)
    booster.load_checkpoint(folder, model=model, dataloader=loader)
    return list(loader)


def test_more_processes_do_not_repeat_the_first_epoch(pool: Pool, tmp_path: Path) -> None:
    (second,) = pool.run(1, end_an_epoch, tmp_path)
    expected = [sample for batch in second for sample in batch]
    assert samples(pool.run(2, begin_the_next, tmp_path)) == expected


def lines_of_steps(is_boosted: bool) -> list[str]:
    """Return the log lines of four steps."""
    model, loader = Sum(), DataLoader(Floats(), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged() as lines:
        booster = PLUGINS["replicas"]()
        given = loader if is_boosted else None
        model, optimizer, _, prepared_loader, _ = booster.boost(model, optimizer, dataloader=given)
        batches = iter(prepared_loader or loader)
        for _ in range(4):
            booster.execute_pipeline(batches, model, lambda outputs, inputs: outputs.mean(), optimizer)
            optimizer.step()
    return lines


class Floats(Numbers):
    """The same numbers as floats."""

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        return torch.tensor(float(index))


def test_one_line_reports_that_a_loader_is_sharded_or_that_replicas_get_equal_batches(pool: Pool) -> None:
    (line,), nothing = pool.run(2, lines_of_steps, True)
    assert (
        line == "boost shards the dataloader over 2 replicas: batch_size=2 is that of each, 4 samples a step"
    )
    (other,), still_nothing = pool.run(2, lines_of_steps, False)
    assert other.startswith("all 2 replicas were given equal batches in each of the first 3 steps: give the")
    assert nothing == still_nothing == []
