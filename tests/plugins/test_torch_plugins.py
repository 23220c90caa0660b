"""torch's plugins, compared with a plain torch loop in one process over the same global batch."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon import PipelineGradientCheckpointConfig
from echelon.shardformer.recompute import checkpoint_layers, recomputable_layers
from echelon.verify.batch import make_batch
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer
from echelon.verify.reference import StepRecord, train
from echelon.zero.precision import DTYPES

from ..pool import Pool, on_ranks
from ..slow import slow_row
from ..zero.helpers import assert_equal, gradients_of
from .training import boosted as boosted_by
from .training import booster_of, full, mean_over_replicas, parts, refused

LLAMA = ModelChoice(model_type="llama", num_layers=2)
GPT2 = ModelChoice(model_type="gpt2", tied=True, num_layers=2)
NUM_STEPS = 3
SCALE = 2.0**16  # torch's initial loss scale
# Another order of sums: gradients differ in float32's last bits, weights by 1e-2 of that (AdamW, eps 1e-5, lr 1e-3).
NEAR = {"rtol": 1e-5, "atol": 1e-6}
OFFLOAD = {"cpu_offload": True}


def prepared(choice: ModelChoice, change: str = "") -> nn.Module:
    """Return a model of which half is frozen, parameters are unused, or layers are recomputed."""
    model = choice.build()
    if change == "recomputed":
        first = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1])
        checkpoint_layers({0: recomputable_layers(model)}, first)
    elif change == "frozen":
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
    elif change == "unused":
        layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        model.idle, layers[0].idle = nn.Linear(3, 5), nn.Linear(1, 1)
    return model


def microbatches(choice: ModelChoice, step: int, replicas: int, count: int) -> list[list[dict[str, Tensor]]]:
    """Return the microbatches of a global batch of 8 samples, by replica."""
    batch = make_batch(choice, num_samples=8, seed=step)
    return [parts(of_replica, count) for of_replica in parts(batch, replicas)]


def reference(
    choice: ModelChoice,
    replicas: int,
    *,
    change: str = "",
    count: int = 1,
    max_norm: float = 0.0,
    precision: str = "fp32",
) -> list[StepRecord]:
    """Train the same steps in one process by a plain torch loop."""
    return train(
        prepared(choice, change),
        [microbatches(choice, step, replicas, count) for step in range(NUM_STEPS)],
        make_optimizers=lambda model: [make_optimizer(model)],
        criterion=lambda outputs, _: outputs.loss,
        dtypes=[DTYPES[precision]] * NUM_STEPS,
        max_norm=max_norm,
        loss_scale=SCALE if precision == "fp16" else 1.0,
        weigh=lambda *_: 1.0,  # the mean over replicas and calls, as of torch's DDP
    )


def boosted(
    choice: ModelChoice, change: str = "", kind: str = "fsdp", **settings: Any
) -> tuple[Any, Any, Any]:
    booster = booster_of(kind, **settings)
    return booster, *boosted_by(booster, prepared(choice, change))


def steps(
    choice: ModelChoice, settings: dict[str, Any], *, change: str = "", count: int = 1, max_norm: float = 0.0
) -> list[StepRecord]:
    """Run a training loop as with any plugin; return the unsharded results of each step."""
    booster, model, optimizer = boosted(choice, change, **settings)
    rank, size = booster.plugin.data_rank
    records = []
    for step in range(NUM_STEPS):
        *first, last = microbatches(choice, step, size, count)[rank]
        losses = []
        for batch in (*first, last):
            with nullcontext() if batch is last else booster.no_sync(model, optimizer):
                losses.append(model(**batch).loss)
                booster.backward(losses[-1] / count, optimizer)
        norm = optimizer.clip_grad_by_norm(max_norm or float("inf"))
        # Undo the scaling of clipping, to compare the gradients.
        factor = max(float(norm) / max_norm, 1.0) if max_norm else 1.0
        gradients = {name: full(grad) * factor for name, grad in gradients_of(model.unwrap()).items()}
        optimizer.step()
        optimizer.zero_grad()
        records.append(
            StepRecord(
                loss=mean_over_replicas(sum(loss.item() for loss in losses) / count),
                norm=float(norm),
                gradients=gradients,
                weights={name: full(weight) for name, weight in model.unwrap().named_parameters()},
            )
        )
    return records


def assert_same_steps(by_rank: list[list[StepRecord]], expected: list[StepRecord]) -> None:
    """Compare loss, norm, every gradient and every weight of each step."""
    for records in by_rank:
        for ours, theirs in zip(records, expected, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, abs=2e-6)
            assert ours.norm == pytest.approx(theirs.norm, rel=1e-5)
            assert_equal(ours.gradients, theirs.gradients, **NEAR)
            assert_equal(ours.weights, theirs.weights, **NEAR)


@pytest.mark.parametrize(
    ("ranks", "choice", "settings", "case"),
    [
        slow_row(2, LLAMA, {}, {}),
        slow_row(4, LLAMA, {"shard_size": 2}, {"count": 2, "max_norm": 0.5}),
        (2, GPT2, {}, {"change": "frozen"}),
        slow_row(2, GPT2, {}, {"change": "unused"}),
        (2, GPT2, OFFLOAD, {"max_norm": 0.5, "count": 2}),
        slow_row(2, GPT2, {"reshard_after_forward": False}, {}),
        slow_row(2, GPT2, {"reshard_after_forward": True}, {"change": "frozen"}),
        (2, LLAMA, {}, {"change": "recomputed"}),
        (2, GPT2, {"kind": "ddp"}, {"max_norm": 0.5, "count": 2}),
    ],
    ids=str,
)
def test_training_equals_one_process(
    pool: Pool, ranks: int, choice: ModelChoice, settings: dict[str, Any], case: dict[str, Any]
) -> None:
    plain = {**case, "change": case.get("change", "").replace("recomputed", "")}
    assert_same_steps(pool.run(ranks, steps, choice, settings, **case), reference(choice, ranks, **plain))


@pytest.mark.parametrize(("kind", "precision"), [slow_row("fsdp", "bf16"), ("fsdp", "fp16"), ("ddp", "fp16")])
def test_16_bit_training_is_as_near_to_float32_as_one_process_is(
    pool: Pool, kind: str, precision: str
) -> None:
    exact, peer = (
        reference(LLAMA, 2, count=2, precision=float_format) for float_format in ("fp32", precision)
    )
    for records in pool.run(2, steps, LLAMA, {"kind": kind, "precision": precision}, count=2):
        for ours, theirs, true in zip(records, peer, exact, strict=True):
            assert {weight.dtype for weight in ours.weights.values()} == {torch.float32}
            for name in ("gradients", "weights"):
                usual = distance(getattr(theirs, name), getattr(true, name))
                assert 0 < distance(getattr(ours, name), getattr(true, name)) <= 1.5 * usual


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the distance over all tensors together."""
    return sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs) ** 0.5


GROWTH = {"backoff_factor": 0.125, "growth_factor": 4.0, "growth_interval": 1}


def overflow_on_one_rank(settings: dict[str, Any]) -> tuple[bool, bool, float, int]:
    """Report whether a step with an infinite loss on one rank changed a weight, and a later step; scale and skips."""
    booster, model, optimizer = boosted(LLAMA, precision="fp16", **settings)
    parameter = next(model.unwrap().parameters())
    batch = make_batch(LLAMA, num_samples=2, seed=0)
    changes = []
    for step in range(2):
        before = full(parameter)
        loss = model(**batch).loss
        if step == 0 and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * float("inf")
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_value(1.0)  # does not hide an overflow
        optimizer.step()
        optimizer.zero_grad()
        changes.append(not torch.equal(before, full(parameter)))
    return changes[0], changes[1], optimizer.scaler.get_scale(), optimizer.skipped_steps


@pytest.mark.parametrize(
    ("ranks", "settings", "scale"),
    [
        slow_row(2, {}, 2.0**15),
        # 2**12 / 8 after the overflow, and four times that after the next step.
        (4, {"shard_size": 2, "initial_scale": 2.0**12} | GROWTH, 2.0**11),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    pool: Pool, ranks: int, settings: dict[str, Any], scale: float
) -> None:
    assert pool.run(ranks, overflow_on_one_rank, settings) == [(False, True, scale, 1)] * ranks


def held(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the local shards of a Llama after a step: rows by parameter, states, gradients and devices."""
    booster, model, optimizer = boosted(LLAMA, **settings)
    rank, size = booster.plugin.data_rank
    booster.backward(model(**microbatches(LLAMA, 0, size, 1)[rank][0]).loss, optimizer)
    named = dict(model.unwrap().named_parameters())
    gradients = sum(parameter.grad.to_local().numel() for parameter in named.values())
    optimizer.step()
    states = [
        state for parameter in named.values() for state in optimizer.state[parameter].values() if state.ndim
    ]
    sharded = [type(module).__name__ for module in model.unwrap().modules() if hasattr(module, "unshard")]
    return {
        "whole": sum(parameter.numel() for parameter in named.values()),
        "parameters": sum(parameter.to_local().numel() for parameter in named.values()),
        "rows": named["model.layers.0.mlp.up_proj.weight"].to_local().shape[0],
        "gradients": gradients,
        "states": sum(state.to_local().numel() for state in states),
        "sharded": sharded,
        "groups": [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups],
        "on_cpu": {parameter.device.type for parameter in named.values()} == {"cpu"},
    }


@pytest.mark.parametrize(
    ("ranks", "settings", "parts"),
    [(2, {}, 2), (4, {"shard_size": 2}, 2), slow_row(4, {}, 4), (2, OFFLOAD, 2)],
    ids=str,
)
def test_each_rank_has_only_its_shard(pool: Pool, ranks: int, settings: dict[str, Any], parts: int) -> None:
    by_rank = pool.run(ranks, held, settings)
    total = by_rank[0]["whole"]
    groups = [by_rank[first : first + parts] for first in range(0, ranks, parts)]
    for group in groups:
        assert sum(rank["parameters"] for rank in group) == total
        assert sum(rank["gradients"] for rank in group) == total
        assert sum(rank["states"] for rank in group) == 2 * total, "both moments of AdamW"
        assert {rank["rows"] for rank in group} == {48 // parts}
    for rank in by_rank:
        assert rank["sharded"] == ["FSDPLlamaForCausalLM", *["FSDPLlamaDecoderLayer"] * 2]
        assert rank["groups"] == [(16, 0.01), (5, 0.0)]


def evaluate_before_a_step() -> tuple[float, float]:
    """Return the loss after a step with an evaluation between backward and step, and without one."""
    losses = []
    for evaluates in (True, False):
        booster, model, optimizer = boosted(GPT2)
        batch = make_batch(GPT2, num_samples=2, seed=0)
        booster.backward(model(**batch).loss, optimizer)
        if evaluates:
            with torch.no_grad():
                model(**batch)
        optimizer.step()
        losses.append(model(**batch).loss.item())
    return losses[0], losses[1]


def test_an_evaluation_before_a_step_leaves_no_old_weights_behind(pool: Pool) -> None:
    with_evaluation, without = pool.run(2, evaluate_before_a_step)[0]
    assert with_evaluation == without


@on_ranks(2)
def test_gradients_that_were_never_reduced_are_reported_and_can_be_dropped() -> None:
    """The norm of a later step is the same with and without them."""
    booster, model, optimizer = boosted(GPT2)
    first, second = (make_batch(GPT2, num_samples=2, seed=seed) for seed in (0, 1))
    norms = []
    for batch in (first, second, second):
        if batch is first:
            with booster.no_sync(model, optimizer):
                with booster.no_sync(model, optimizer):
                    pass
                booster.backward(model(**batch).loss, optimizer)
            assert "step() without a backward outside of booster.no_sync" in refused(optimizer.step)
        else:
            booster.backward(model(**batch).loss, optimizer)
            norms.append(float(optimizer.clip_grad_by_norm(float("inf"))))
        optimizer.zero_grad()
    assert norms[0] == norms[1]


@on_ranks(2)
def test_a_step_without_scaled_gradients_is_reported_and_a_later_one_works() -> None:
    """Reported before a backward and after a plain one; a full step then changes a weight."""
    booster, model, optimizer = boosted(GPT2, precision="fp16")
    batch = make_batch(GPT2, num_samples=2, seed=0)
    calls: dict[str, Any] = {
        "step()": optimizer.step,
        "clip_grad_by_norm()": lambda: optimizer.clip_grad_by_norm(1.0),
        "clip_grad_by_value()": lambda: optimizer.clip_grad_by_value(1.0),
    }

    def require_refusals() -> None:
        for name, call in calls.items():
            assert f"{name} in fp16 needs gradients of a scaled loss, but there are none" in refused(call)

    require_refusals()
    model(**batch).loss.backward()
    require_refusals()
    optimizer.zero_grad()
    before = full(next(model.unwrap().parameters()))
    booster.backward(model(**batch).loss, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    assert not torch.equal(before, full(next(model.unwrap().parameters())))
