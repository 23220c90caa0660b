"""Saved and loaded state, and weights that are changed outside of the optimizer."""

import copy

import pytest
import torch
import torch.distributed as dist

from ..pool import on_ranks
from .helpers import (
    Precision,
    adamw,
    assert_equal,
    assert_same_bits,
    loss_of,
    shard,
    small_model,
    train,
    weights_of,
)

PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])


@PRECISIONS
@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_training_continues_bit_for_bit(stage: int, precision: Precision) -> None:
    model, other = small_model(), small_model()
    optimizer = shard(model, adamw, stage=stage, precision=precision)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 5e-3
    state = copy.deepcopy(optimizer.local_state())
    train(model, optimizer, range(2, 4))
    restored = shard(other, adamw, stage=stage, precision=precision)
    restored.load_state_dict(state)
    train(other, restored, range(2, 4))
    assert_same_bits(restored.masters(), optimizer.masters())
    assert_same_bits(weights_of(other), weights_of(model))
    assert restored.last_norm == optimizer.last_norm


@on_ranks(1)
def test_loss_scale_and_skipped_steps_are_restored() -> None:
    model = small_model()
    optimizer = shard(model, precision="fp16")
    for _ in range(2):
        optimizer.backward(loss_of(model, 0) * float("inf"))
        optimizer.step()
        optimizer.zero_grad()
    restored = shard(small_model(), precision="fp16")
    restored.load_state_dict(optimizer.local_state())
    assert (restored.loss_scale, restored.skipped_steps) == (32.0, 2)


@on_ranks(2)
def test_state_of_another_layout_is_refused() -> None:
    optimizer = shard(small_model(), adamw)
    for other in (
        shard(small_model(), adamw, stage=0),
        shard(small_model(), adamw, precision="bf16"),
        shard(small_model(), adamw, bucket_size=10),
    ):
        with pytest.raises(
            ValueError, match=r"another layout: entry 0 of its layout is 0\.weight \(7, 5\) at 0 of group 0"
        ):
            optimizer.load_state_dict(other.local_state())
    with pytest.raises(ValueError, match="entry 0 of its layout is a state dict of another optimizer"):
        optimizer.load_state_dict(adamw(small_model().parameters()).state_dict())
    peer = shard(small_model(), adamw).local_state()
    states: list[dict] = [{}, {}]
    dist.all_gather_object(states, peer)
    with pytest.raises(ValueError, match=r"slice [01] of 2, not"):
        optimizer.load_state_dict(states[1 - dist.get_rank()])


@PRECISIONS
@pytest.mark.parametrize("refreshes", [False, True])
@on_ranks(2)
def test_loaded_weights_are_trained_on(precision: Precision, refreshes: bool) -> None:
    model = small_model()
    optimizer = shard(model, precision=precision)
    train(model, optimizer, range(2))
    loaded = {name: torch.full_like(weight, 0.25) for name, weight in weights_of(model).items()}
    model.load_state_dict(loaded)
    if refreshes:
        optimizer.refresh_masters()
        assert_same_bits(optimizer.masters(), {name: weight.float() for name, weight in loaded.items()})
    optimizer.backward(loss_of(model, dist.get_rank()))
    optimizer.step()
    gradients = optimizer.gradients()
    expected = {name: 0.25 - gradient for name, gradient in gradients.items()}
    assert_equal(optimizer.masters(), expected)
    dtype = next(model.parameters()).dtype
    assert_equal(weights_of(model), {name: master.to(dtype) for name, master in optimizer.masters().items()})


@on_ranks(2)
def test_masters_keep_their_low_bits_where_weights_did_not_change() -> None:
    model = small_model()
    optimizer = shard(model, precision="bf16")
    before = optimizer.masters()
    weights = weights_of(model)
    weights["0.bias"] += 1
    model.load_state_dict(weights)
    optimizer.refresh_masters()
    assert_same_bits(optimizer.masters(), before | {"0.bias": weights["0.bias"].float()})
