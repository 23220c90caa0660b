"""Parameters that arrive while the next forward runs."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.zero.optimizer import ShardedOptimizer

from ..cluster.helpers import SLICES, with_slices
from ..pool import Pool
from .helpers import Precision, assert_equal, loss_of, shard, small_model, weights_of


class Peeking(nn.Module):
    """Uses the weight of a module inside it without calling that, and one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.inner, self.last = nn.Linear(5, 7), nn.Linear(7, 7, bias=False), nn.Linear(7, 5)
        self.again = nn.Linear(5, 7)
        self.again.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(self.first(x), self.inner.weight).tanh() * self.scale
        return self.again(self.last(hidden))


def late(
    model: nn.Module,
    *,
    stage: int = 1,
    precision: Precision = "fp32",
    **arguments: object,
) -> ShardedOptimizer:
    """An optimizer whose parameters arrive later."""
    optimizer = shard(
        model, lambda p: torch.optim.AdamW(p, lr=0.1), stage=stage, precision=precision, **arguments
    )
    optimizer.publisher.overlap_with_forward(model)
    return optimizer


@SLICES
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_are_those_of_parameters_that_arrive_at_once(
    pool: Pool, ranks: int, stage: int, precision: Precision, slices: bool
) -> None:
    pool.run(ranks, with_slices, slices, check_steps, stage, precision)


def check_steps(stage: int, precision: Precision) -> None:
    expected, model = Peeking(), Peeking()
    at_once = shard(
        expected, lambda p: torch.optim.AdamW(p, lr=0.1), stage=stage, precision=precision, bucket_size=40
    )
    optimizer = late(model, stage=stage, precision=precision, bucket_size=40)
    assert len(optimizer.buckets) > 2
    for step in range(4):
        for trained, its in ((expected, at_once), (model, optimizer)):
            its.backward(loss_of(trained, 10 * step + dist.get_rank()))
            its.step()
            its.zero_grad(set_to_none=step % 2 == 0)
    assert_equal(weights_of(model), weights_of(expected), rtol=0.0, atol=0.0)


def stepped() -> tuple[nn.Sequential, ShardedOptimizer, dict[str, Tensor]]:
    """A model right after a step, whose parameters are under way, and what they will be."""
    expected, model = small_model(), small_model()
    at_once = shard(expected, lambda p: torch.optim.AdamW(p, lr=0.1))
    optimizer = late(model)
    for trained, its in ((expected, at_once), (model, optimizer)):
        its.backward(loss_of(trained, dist.get_rank()))
        its.step()
    return model, optimizer, weights_of(expected)


@SLICES
def test_what_a_model_left_under_way_does_not_meet_that_of_the_next(pool: Pool, slices: bool) -> None:
    pool.run(2, with_slices, slices, check_the_next_model, timeout=30.0)


def check_the_next_model() -> None:
    model = Peeking()
    optimizer = late(model)
    for step in range(3):
        optimizer.backward(loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
    weights_of(model)  # all have what they were sent, and nobody has been told so
    del model, optimizer
    check_steps(1, "fp32")


@SLICES
def test_one_rank_alone_may_look_and_write_before_the_others(pool: Pool, slices: bool) -> None:
    pool.run(2, with_slices, slices, check_alone)


def check_alone() -> None:
    model, _, expected = stepped()
    for turn in range(2):
        if dist.get_rank() == turn:
            assert_equal(weights_of(model), expected, rtol=0.0, atol=0.0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)  # the other rank must not get this
        dist.barrier()


WAYS_TO_LOOK = {
    "parameters": lambda model: [each.detach().clone() for each in model.parameters()],
    "state_dict": lambda model: [each.clone() for each in model.state_dict().values()],
    "attributes": lambda model: [each.detach() for i in (0, 2) for each in (model[i].weight, model[i].bias)],
    "get_parameter": lambda model: [
        model.get_parameter(name).detach() for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    ],
    "deepcopy": lambda model: [each.detach() for each in copy.deepcopy(model).parameters()],
    "pickle": lambda model: [each.detach() for each in pickle.loads(pickle.dumps(model)).parameters()],
    "torch.save": lambda model: [each.detach() for each in saved(model).parameters()],
    "functional_call": lambda model: looked_up_by_functional_call(model),
}


def saved(model: nn.Module) -> nn.Module:
    """What comes back from a file."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def looked_up_by_functional_call(model: nn.Module) -> list[Tensor]:
    """After a call with other weights the own ones are back."""
    other = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    assert not torch.func.functional_call(model, other, torch.ones(1, 5)).any()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("way", WAYS_TO_LOOK)
def test_however_a_module_is_looked_into_its_parameters_are_there(pool: Pool, way: str) -> None:
    pool.run(2, check_way, way)


def check_way(way: str) -> None:
    model, _, expected = stepped()
    found = WAYS_TO_LOOK[way](model)
    assert_equal(dict(zip(expected, found, strict=True)), expected, rtol=0.0, atol=0.0)


def test_a_copy_of_a_module_waits_for_nothing(pool: Pool) -> None:
    pool.run(2, check_copy)


def check_copy() -> None:
    model, optimizer, _ = stepped()
    copied = copy.deepcopy(model)
    before = weights_of(copied)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 7))
    optimizer.step()
    assert type(copied[0].__dict__["_parameters"]) is dict
    assert_equal(weights_of(copied), before, rtol=0.0, atol=0.0)


def test_a_reference_from_before_sees_nothing_rather_than_old_weights(pool: Pool) -> None:
    pool.run(2, check_reference)


def check_reference() -> None:
    model = small_model()
    taken = list(model.parameters())
    optimizer = late(model)
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    assert [each.numel() for each in taken] == [0, 0, 0, 0]
    with pytest.raises(RuntimeError):
        F.linear(torch.ones(1, 5), taken[0])
    optimizer.publisher.wait()
    assert [each.numel() for each in taken] == [35, 7, 21, 3]


def test_a_graph_from_before_a_step_is_refused_also_while_parameters_are_under_way(pool: Pool) -> None:
    pool.run(2, check_stale_graph)


def check_stale_graph() -> None:
    model = small_model()
    optimizer = late(model)
    stale = loss_of(model, 0)
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_parameters_that_no_forward_uses_are_stepped_all_the_same(pool: Pool) -> None:
    pool.run(2, check_unused)


def check_unused() -> None:
    """The second layer gets gradients in the first step alone, and they are not dropped."""
    models = [small_model(), small_model()]
    optimizers = [shard(models[0], bucket_size=1), late_sgd(models[1])]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.backward(loss_of(model, dist.get_rank()))
        optimizer.step()
        for _ in range(2):
            optimizer.backward(model[0](torch.ones(2, 5)).pow(2).mean())
            optimizer.step()
    assert_equal(weights_of(models[1]), weights_of(models[0]))


def late_sgd(model: nn.Module) -> ShardedOptimizer:
    """Buckets of one parameter that arrive later."""
    optimizer = shard(model, bucket_size=1)
    optimizer.publisher.overlap_with_forward(model)
    return optimizer


def test_a_state_that_is_loaded_while_parameters_are_under_way_is_what_they_are(pool: Pool) -> None:
    pool.run(2, check_loading)


def check_loading() -> None:
    model, optimizer, expected = stepped()
    state = copy.deepcopy(optimizer.local_state())
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 3))
    optimizer.step()
    optimizer.load_state_dict(state)
    assert_equal(weights_of(model), expected, rtol=0.0, atol=0.0)


def test_the_optimizer_tells_weights_and_gradients_while_parameters_are_under_way(pool: Pool) -> None:
    pool.run(2, check_told)


def check_told() -> None:
    model, optimizer, expected = stepped()
    assert_equal(optimizer.masters(), expected, rtol=0.0, atol=0.0)
    shapes = {name: each.shape for name, each in expected.items()}
    assert {name: each.shape for name, each in optimizer.gradients().items()} == shapes
    assert next(iter(vars(model[0])["_parameters"]._arrivals.values()))._work is not None  # still


def test_a_module_that_keeps_references_to_parameters_is_refused(pool: Pool) -> None:
    for message in pool.run(2, refusal):
        assert "0 (LSTM) keeps _flat_weights" in message
        assert "overlap_allgather=False" in message


def refusal() -> str:
    model = nn.Sequential(nn.LSTM(3, 4))
    optimizer = shard(model)
    with pytest.raises(ValueError, match="keeps") as raised:
        optimizer.publisher.overlap_with_forward(model)
    return str(raised.value)


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_compiled_module_is_refused(pool: Pool, is_wrapped: bool) -> None:
    for message in pool.run(2, refusal_of_compiled, is_wrapped):
        assert message.startswith("2 is compiled") and "overlap_allgather=False" in message


def refusal_of_compiled(is_wrapped: bool) -> str:
    model = small_model()
    if is_wrapped:
        model[2] = torch.compile(model[2], backend="eager")
    else:
        model[2].compile(backend="eager")
    optimizer = shard(model)
    with pytest.raises(ValueError, match="compiled") as raised:
        optimizer.publisher.overlap_with_forward(model)
    return str(raised.value)


def test_one_rank_alone_has_nothing_to_wait_for(pool: Pool) -> None:
    pool.run(1, check_single)


def check_single() -> None:
    model, _, expected = stepped()
    assert type(model[0].__dict__["_parameters"]) is dict
    assert_equal(weights_of(model), expected)
