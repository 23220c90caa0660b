"""All-gathers of parameters that overlap the next forward."""

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.zero.optimizer import ShardedOptimizer

from ..cluster.helpers import SLICES, with_slices
from ..pool import Pool, on_ranks
from .helpers import adamw, assert_equal, assert_same_bits, loss_of, shard, small_model, weights_of


def late(model: nn.Module) -> ShardedOptimizer:
    """Make an optimizer whose all-gathers overlap the next forward."""
    optimizer = shard(model, adamw)
    optimizer.parameter_gather.overlap_with_forward(model)
    return optimizer


def stepped() -> tuple[nn.Sequential, ShardedOptimizer, dict[str, Tensor]]:
    """Return a model right after a step, with its all-gathers in flight, and the expected parameters."""
    expected, model = small_model(), small_model()
    at_once = shard(expected, adamw)
    optimizer = late(model)
    for trained, its in ((expected, at_once), (model, optimizer)):
        its.backward(loss_of(trained, dist.get_rank()))
        its.step()
    return model, optimizer, weights_of(expected)


@SLICES
def test_one_rank_may_read_and_write_parameters_before_the_others(pool: Pool, slices: bool) -> None:
    pool.run(2, with_slices, slices, check_alone)


def check_alone() -> None:
    model, _, expected = stepped()
    for turn in range(2):
        if dist.get_rank() == turn:
            assert_same_bits(weights_of(model), expected)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)  # must not reach the other rank
        dist.barrier()


NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
WAYS_TO_LOOK: dict[str, Callable[[Any], Iterable[Tensor]]] = {
    "parameters": lambda model: model.parameters(),
    "state_dict": lambda model: model.state_dict().values(),
    "attributes": lambda model: [model[0].weight, model[0].bias, model[2].weight, model[2].bias],
    "get_parameter": lambda model: [model.get_parameter(name) for name in NAMES],
    "deepcopy": lambda model: plain_copy(model).parameters(),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)).parameters(),
    "torch.save": lambda model: saved(model).parameters(),
    "functional_call": lambda model: after_functional_call(model),
}


def plain_copy(model: nn.Module) -> nn.Module:
    """Copy the model; the copy waits for nothing."""
    copied = copy.deepcopy(model)
    assert type(copied[0].__dict__["_parameters"]) is dict  # type: ignore[index]
    return copied


def saved(model: nn.Module) -> nn.Module:
    """Save the model to a file and load it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def after_functional_call(model: nn.Module) -> Iterable[Tensor]:
    """Return the parameters after a call with other weights: the original ones are restored."""
    other = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    assert not torch.func.functional_call(model, other, torch.ones(1, 5)).any()
    return model.parameters()


@on_ranks(2)
def test_parameters_are_gathered_for_every_way_to_read_them() -> None:
    for look in WAYS_TO_LOOK.values():
        model, _, expected = stepped()
        seen = [tensor.detach().clone() for tensor in look(model)]
        assert_same_bits(dict(zip(expected, seen, strict=True)), expected)


@on_ranks(2)
def test_an_old_reference_is_empty_rather_than_outdated() -> None:
    model = small_model()
    taken = list(model.parameters())
    optimizer = late(model)
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    assert [parameter.numel() for parameter in taken] == [0, 0, 0, 0]
    with pytest.raises(RuntimeError):
        F.linear(torch.ones(1, 5), taken[0])
    optimizer.parameter_gather.wait()
    assert [parameter.numel() for parameter in taken] == [35, 7, 21, 3]


@on_ranks(2)
def test_a_state_loaded_during_an_all_gather_is_kept() -> None:
    model, optimizer, expected = stepped()
    state = copy.deepcopy(optimizer.local_state())
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 3))
    optimizer.step()
    optimizer.load_state_dict(state)
    assert_same_bits(weights_of(model), expected)


@on_ranks(2)
def test_the_optimizer_returns_weights_and_gradients_during_an_all_gather() -> None:
    model, optimizer, expected = stepped()
    assert_same_bits(optimizer.masters(), expected)
    shapes = {name: master.shape for name, master in expected.items()}
    assert {name: gradient.shape for name, gradient in optimizer.gradients().items()} == shapes
    assert next(iter(vars(model[0])["_parameters"]._arrivals.values()))._work is not None  # still in flight


@on_ranks(1)
def test_a_single_rank_does_not_wait() -> None:
    model, _, expected = stepped()
    assert type(model[0].__dict__["_parameters"]) is dict
    assert_equal(weights_of(model), expected)
