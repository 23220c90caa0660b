"""The runner and the transport over real processes, equal to one process bit for bit; errors name the peer."""

import os
import random
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from echelon.cluster.mesh import ParallelMesh
from echelon.pipeline.action import Action, Op, inputs, result
from echelon.pipeline.microbatch import merge
from echelon.pipeline.profiled import chrome_trace, computations
from echelon.pipeline.runner import RunResult
from echelon.pipeline.schedules import build_schedule, build_stage_ranks
from echelon.pipeline.simulate import Costs, Span, simulate

from ..pool import Pool
from ..shardformer.compare import gradients, require_equal
from ..slow import slow, slow_except
from .sequential import (
    STYLES,
    WIDTH,
    Batch,
    CountingStage,
    LayerStage,
    Pipeline,
    as_if_large,
    make_batch,
    make_layers,
    pieces,
    reference,
    run_alone,
)
from .small_schedules import random_schedule


def train_like_one_process(
    stage_class: type[LayerStage], styles: Sequence[tuple[str, int]] = STYLES, **settings: Any
) -> None:
    """Train steps of different batch sizes and numbers of microbatches, also unequal ones, with accumulated gradients.

    The last step repeats earlier shapes, and limits the tensors in flight as for large ones.
    """
    for style, num_chunks in styles:
        pipeline = Pipeline(stage_class=stage_class, style=style, num_chunks=num_chunks, **settings)
        for seed, (samples, count) in enumerate([(8, 4), (7, 3), (7, 3), (1, 1)]):
            pipeline.check_train(pieces(samples, count, seed, pipeline.dtype))
            pipeline.evaluate(pieces(samples + 3, count, seed, pipeline.dtype))
        with as_if_large():
            pipeline.check_train(pieces(9, 8, 0, pipeline.dtype), scale=lambda loss: loss * 2)


class UnusedStage(LayerStage):
    """A stage that sends a second tensor, which the last stage does not use: its gradient is zero, not missing."""

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        output = super().forward(microbatch, received[:1])
        return output if self.is_last else (output[0], output[0] * 3)


class TrainingExtraStage(LayerStage):
    """A stage that sends a second tensor in training only, like a model with an auxiliary loss."""

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        is_training = torch.is_grad_enabled()
        assert len(received) == (0 if self.is_first else 1 + is_training)
        assert all(tensor.requires_grad == is_training for tensor in received)
        output = super().forward(microbatch, received[:1])
        return output if self.is_last or not is_training else (output[0], output[0] * 2)


ONE_STYLE: dict[str, Any] = dict(styles=[("1f1b", 1)])


@pytest.mark.parametrize(
    ("world_size", "stage_class", "settings"),
    [
        (1, LayerStage, {}),
        (2, CountingStage, {}),
        *slow((3, CountingStage, {}), (2, CountingStage, dict(overlap=False))),
        (2, UnusedStage, ONE_STYLE),
        (2, TrainingExtraStage, ONE_STYLE),
        *((2, LayerStage, dict(dtype=dtype, **ONE_STYLE)) for dtype in (torch.float16, torch.float64)),
        (4, LayerStage, dict(pp=2, **ONE_STYLE)),  # two replicas
        (3, LayerStage, dict(num_frozen=4, **ONE_STYLE)),  # no sent tensor needs a gradient
    ],
)
def test_losses_and_gradients_are_those_of_one_process(
    pool: Pool, world_size: int, stage_class: type[LayerStage], settings: dict[str, Any]
) -> None:
    pool.run(world_size, train_like_one_process, stage_class, **settings)


def run_random_schedules() -> None:
    """Run random schedules, each with new shapes, which are described during the run; then again."""
    generator, world = random.Random(0), dist.get_world_size()
    for number in range(8):
        compute, num_microbatches = random_schedule(generator, world)
        pipeline = Pipeline(style=compute)
        for seed in range(2):
            with as_if_large():
                pipeline.check_train(pieces(num_microbatches + number, num_microbatches, seed))


@pytest.mark.parametrize("world_size", [2, *slow(3)])
def test_any_order_of_computations_on_any_placement_runs(pool: Pool, world_size: int) -> None:
    pool.run(world_size, run_random_schedules)


def train_traced() -> list[list[Span]]:
    spans = []
    for style, num_chunks in STYLES:
        pipeline = Pipeline(style=style, num_chunks=num_chunks)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            pipeline.train(pieces(11, 5))
        spans.append(computations(chrome_trace(profiler)))
    return spans


def test_computations_run_in_the_simulated_order_and_after_what_they_need(pool: Pool) -> None:
    traced = pool.run(3, train_traced)
    for number, (style, num_chunks) in enumerate(STYLES):
        by_rank = [of_rank[number] for of_rank in traced]
        simulated = simulate(build_schedule(style, 3, 5, num_chunks), Costs())
        for spans, expected in zip(by_rank, simulated.spans, strict=True):
            assert [span.action for span in spans] == [span.action for span in expected]
        ends = {result(span.action): span.end for spans in by_rank for span in spans}
        for action, start, _ in (span for spans in by_rank for span in spans):
            for need in inputs(action, 3 * num_chunks):
                assert ends[need] <= start, f"{style}: {action} began before {need} was done"


def weighted(outputs: Any, microbatch: Batch) -> tuple[Tensor, Tensor]:
    error = (outputs["out"] - microbatch["labels"]).square()
    return error.sum(), torch.tensor(error.numel())


def evaluate_between_steps() -> None:
    pipeline = Pipeline()
    pipeline.check_train(pieces(6, 3))
    before = deepcopy(gradients(pipeline.layers))
    result = pipeline.evaluate(pieces(5, 2, seed=10), keep_outputs=True, criterion=weighted)
    require_equal(gradients(pipeline.layers), before)
    if pipeline.has_last:
        expected = make_batch(5, seed=10)["x"]
        for layer in pipeline.expected:
            expected = layer(expected)
        # Rows of a product may be summed in another order when the batch is split: hence not bit for bit.
        torch.testing.assert_close(merge(result.outputs)["out"], expected)
        assert [int(weight) for weight in result.weights] == [3 * WIDTH, 2 * WIDTH]
        assert len(result.losses) == 2
        assert not any(output["out"].requires_grad for output in result.outputs)
    else:
        assert result == RunResult()
    assert pipeline.evaluate(pieces(4, 2), criterion=None).losses == []


def test_evaluation_between_steps_changes_nothing(pool: Pool) -> None:
    pool.run(2, evaluate_between_steps)


class WatchedStage(LayerStage):
    """A stage that counts at every call how many of its earlier inputs and outputs are still in memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.storages: list[StorageWeakRef] = []
        self.alive: list[int] = []

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        self.alive.append(sum(not storage.expired() for storage in self.storages))
        output = super().forward(microbatch, received)
        kept = output if not self.is_last else received
        self.storages += [StorageWeakRef(tensor.untyped_storage()) for tensor in kept]
        return output


def train_watched(name: str) -> list[int]:
    pipeline = Pipeline(stage_class=WatchedStage)
    stage: Any = pipeline.stage
    with as_if_large():
        for _ in range(2):  # the first step describes shapes, and does not wait for sends
            stage.storages.clear()
            stage.alive.clear()
            pipeline.train(pieces(12, 12), name)
            assert all(storage.expired() for storage in stage.storages)
    return stage.alive


def test_outputs_are_freed_once_sent_and_inputs_after_their_backward(pool: Pool) -> None:
    # 4 large sends may be in flight, and gloo may still keep the tensor of the last completed one.
    first, last = pool.run(2, train_watched, "gpipe")
    assert max(first) <= 5 < 11
    assert last == list(range(12)), "all inputs live until their backwards"
    first, last = pool.run(2, train_watched, "1f1b")
    assert max(first) <= 5 and max(last) <= 1


# Errors.


class UnsteadyStage(LayerStage):
    """A stage whose output width depends on the values of the microbatch, not on its shapes."""

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        output = super().forward(microbatch, tuple(r[:, :WIDTH] for r in received))
        wide = not self.is_last and bool(microbatch["x"][0, 0] > 100)
        return (torch.cat([output[0], output[0]], 1),) if wide else output


def train_with_changing_shapes() -> None:
    pipeline = Pipeline(stage_class=UnsteadyStage)
    microbatches = pieces(4, 2)
    pipeline.train(microbatches)
    microbatches[1]["x"][0, 0] = 1000
    pipeline.train(microbatches)


def train_on_different_batches() -> None:
    Pipeline().train(pieces(4 + dist.get_rank(), 2))


def fail_in_criterion() -> None:
    pipeline = Pipeline()
    pipeline.train(pieces(6, 3))
    try:
        pipeline.train(pieces(6, 3), criterion=lambda outputs, microbatch: 1 / 0)
    except ZeroDivisionError:
        failed = r"an earlier step of this pipeline failed \(ZeroDivisionError"
        with pytest.raises(RuntimeError, match=failed):
            pipeline.train(pieces(6, 3))
        raise


LOST = "lost rank {} (pipeline stage {}) while receiving the {}"


@pytest.mark.parametrize(
    ("function", "kind", "cause", "other"),
    [
        (
            train_with_changing_shapes,
            ValueError,
            (0, "stage 0 sends float32 [2, 12] for microbatch 1, but float32 [2, 6] for an earlier one"),
            (1, LOST.format(0, 0, "activations")),
        ),
        (train_on_different_batches, ValueError, (1, "give every rank of a pipeline the same batch"), None),
        (fail_in_criterion, ZeroDivisionError, (1, "division by zero"), (0, LOST.format(1, 1, "gradients"))),
    ],
)
def test_a_rank_that_fails_says_why_and_its_peer_names_it(
    pool: Pool, function: Callable, kind: type, cause: tuple[int, str], other: tuple[int, str] | None
) -> None:
    errors = pool.run_failing(2, function)
    assert isinstance(errors[cause[0]], kind)
    for rank, message in filter(None, (cause, other)):
        assert message in str(errors[rank])


def die_in_step(dying_rank: int, style: str, num_chunks: int) -> None:
    pipeline = Pipeline(style=style, num_chunks=num_chunks)
    pipeline.train(pieces(6, 3))
    if ParallelMesh(pp=2).rank("pp") == dying_rank:
        forward, calls = pipeline.stage.forward, []

        def forward_twice(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                os._exit(3)
            return forward(*args)

        pipeline.stage.forward = forward_twice  # type: ignore[method-assign]
    pipeline.train(pieces(6, 3))


# Each row needs a new process.
@pytest.mark.parametrize(("style", "num_chunks"), slow_except([("1f1b", 1)], STYLES))
@pytest.mark.parametrize("dying_rank", [0, 1])
def test_a_rank_that_dies_is_named_by_its_peer(
    pool: Pool, dying_rank: int, style: str, num_chunks: int
) -> None:
    error = pool.run_failing(2, die_in_step, dying_rank, style, num_chunks)[1 - dying_rank]
    assert isinstance(error, RuntimeError)
    stage_ranks = build_stage_ranks(style, 2, num_chunks)
    stage = "|".join(str(stage) for stage, rank in enumerate(stage_ranks) if rank == dying_rank)
    assert re.search(
        rf"lost rank {dying_rank} \(pipeline stage ({stage})\) while (sending|receiving) the "
        r"(activations|gradients) of microbatch \d at stage \d: .*(connection|broken pipe)",
        str(error),
        re.IGNORECASE,
    )


# One process: a single stage, or several that pass tensors to the next.


def test_stages_of_one_rank_need_no_transport() -> None:
    forwards = [Action(Op.FORWARD, stage, m) for m in (2, 0, 1) for stage in range(3)]
    backwards = [Action(Op.BACKWARD, stage, m) for m in range(3) for stage in (2, 1, 0)]
    layers, expected = make_layers(), make_layers()
    result = run_alone(forwards + backwards, 3, pieces(7, 3), layers=layers, keep_outputs=True)
    assert result.losses == reference(expected, pieces(7, 3), num_stages=1)
    assert [len(output["out"]) for output in result.outputs] == [3, 2, 2]
    require_equal(gradients(layers), gradients(expected))
