"""Random state: equal outside of split regions, different inside, reproduced by recomputation."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from echelon.cluster import forward_random as random_module
from echelon.cluster.forward_random import SplitRandom
from echelon.cluster.launch import seed_everything
from echelon.shardformer.layers.region import Region
from echelon.shardformer.layers.sequence_axis import CommonRandom, ShardRandom

CPU = torch.device("cpu")


def draws(rank: int) -> tuple[list[float], list[float]]:
    """Numbers drawn outside and inside of two regions, by one rank."""
    seed_everything(1)
    split = SplitRandom(rank)
    outside, inside = [torch.rand(()).item()], []
    for _ in range(2):
        split.enter(CPU)
        inside.append(torch.rand(()).item())
        split.leave()
        outside.append(torch.rand(()).item())
    return outside, inside


def layer(x: Tensor, weight: Tensor, split: SplitRandom) -> Tensor:
    """Replicated dropout, a region with dropout inside, replicated dropout."""
    x = dropout(x, 0.5)
    split.enter(CPU)
    x = dropout(x * weight, 0.5)
    split.leave()
    return dropout(x * weight, 0.5)


def gradient(rank: int, *, recompute: bool) -> tuple[Tensor, Tensor]:
    """The gradient of the weight through three layers, and the next random numbers."""
    seed_everything(2)
    split = SplitRandom(rank)
    weight = torch.rand(64, requires_grad=True)
    x = torch.rand(64)
    for _ in range(3):
        x = checkpoint(layer, x, weight, split, use_reentrant=False) if recompute else layer(x, weight, split)
    x.sum().backward()
    assert weight.grad is not None
    return weight.grad, torch.rand(8)


def test_all_generators_are_seeded() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    seed_everything(2**40 + 3)
    first = drawn()
    seed_everything(2**40 + 3)
    assert drawn() == first
    seed_everything(2**40 + 4)
    assert drawn() != first


def test_ranks_agree_outside_of_regions_and_differ_inside() -> None:
    ranks = [draws(rank) for rank in range(4)]
    assert all(outside == ranks[0][0] for outside, _ in ranks)
    insides = [number for _, inside in ranks for number in inside]
    assert len(set(insides)) == len(insides)
    assert not set(insides) & set(ranks[0][0])


@pytest.mark.parametrize("rank", [0, 3])
def test_recomputation_repeats_the_dropout_of_regions(rank: int) -> None:
    plain, after_plain = gradient(rank, recompute=False)
    again, after_again = gradient(rank, recompute=True)
    assert torch.equal(plain, again)
    assert torch.equal(after_plain, after_again)
    assert plain.count_nonzero() < plain.numel()


def test_a_region_interrupted_in_recomputation_leaves_nothing_behind() -> None:
    split = SplitRandom(1)

    def interrupted(x: Tensor, weight: Tensor) -> Tensor:
        split.enter(CPU)
        x = dropout(x * weight, 0.5)  # the last tensor that backward needs: recomputation ends here
        split.leave()
        return x

    weight = torch.rand(8, requires_grad=True)
    for _ in range(2):
        checkpoint(interrupted, torch.rand(8), weight, use_reentrant=False).sum().backward()
    before = torch.get_rng_state()
    split.enter(CPU)
    split.leave()
    torch.set_rng_state(before)
    torch.randint(0, 2**62, ())
    expected = torch.rand(4)
    torch.set_rng_state(before)
    split.enter(CPU)
    split.leave()
    assert torch.equal(torch.rand(4), expected)


def test_leaving_a_region_that_was_not_entered_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not entered"):
        SplitRandom(0).leave()


@pytest.mark.parametrize("marked", ["region", "layer", "common"])
def test_a_region_draws_from_the_device_that_the_model_was_moved_to(
    monkeypatch: pytest.MonkeyPatch, marked: str
) -> None:
    # "meta" stands for a GPU: a generator of its own, here a second one of the CPU.
    of_device = torch.Generator().manual_seed(7)
    monkeypatch.setattr(
        random_module, "generator_of", lambda device: of_device if device.type == "meta" else None
    )
    group: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 1)
    module = nn.Linear(2, 2)
    seeds: list[int] = []
    module.register_forward_pre_hook(lambda *_: seeds.append(of_device.initial_seed()))
    if marked == "region":
        model = Region.from_native_module(module, group, split_random=SplitRandom(1))
    elif marked == "layer":
        model = ShardRandom.from_native_module(module, group)
    else:
        model = CommonRandom.from_native_module(module, group, layer=nn.Linear(2, 2))
    model.register_forward_pre_hook(
        lambda *_: seeds.extend([of_device.initial_seed(), torch.default_generator.initial_seed()])
    )
    model.to("meta")(torch.ones(2, device="meta"))
    assert seeds[0] == 7 and seeds[1] == seeds[2] != 7
