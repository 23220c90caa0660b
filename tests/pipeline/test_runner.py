"""The runner over real processes against the same computation in one process: equal to the bit."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.pipeline.action import Action, Op, inputs, result
from echelon.pipeline.microbatch import merge
from echelon.pipeline.runner import RunResult, ScheduleRun, Trace
from echelon.pipeline.schedules import build_schedule, gpipe
from echelon.pipeline.simulate import Costs, Span, simulate

from ..pool import Pool
from .sequential import (
    STYLES,
    WIDTH,
    Batch,
    CountingStage,
    LayerStage,
    Pipeline,
    StageClass,
    as_if_large,
    criterion,
    gradients,
    identity,
    make_batch,
    make_layers,
    pieces,
    reference,
)
from .small_schedules import random_schedule


def train_like_one_process(
    stage_class: StageClass, overlap: bool = True, styles: Sequence[tuple[str, int]] = STYLES
) -> None:
    """Steps of different batch sizes and numbers of microbatches, unequal ones too, gradients adding up.

    The last one has shapes that were met before, and as few tensors in flight as if they were large.
    """
    for style, num_chunks in styles:
        pipeline = Pipeline(stage_class=stage_class, style=style, num_chunks=num_chunks, overlap=overlap)
        for seed, (samples, count) in enumerate([(8, 4), (7, 3), (7, 3), (1, 1), (9, 8)]):
            pipeline.check_train(pieces(samples, count, seed))
            pipeline.evaluate(pieces(samples + 3, count, seed))
        with as_if_large():
            pipeline.check_train(pieces(9, 8))
            pipeline.evaluate(pieces(12, 8))


@pytest.mark.parametrize("stage_class", [LayerStage, CountingStage])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_and_gradients_are_those_of_one_process(
    pool: Pool, world_size: int, stage_class: StageClass
) -> None:
    pool.run(world_size, train_like_one_process, stage_class)


def test_without_overlap_they_are_the_same(pool: Pool) -> None:
    pool.run(2, train_like_one_process, CountingStage, False)


def train_traced() -> list[list[Span]]:
    spans = []
    for style, num_chunks in STYLES:
        pipeline, trace = Pipeline(style=style, num_chunks=num_chunks), Trace(torch.device("cpu"))
        pipeline.train(pieces(11, 5), trace=trace)
        spans.append(trace.spans())
    return spans


def test_computations_run_in_the_simulated_order_and_after_what_they_need(pool: Pool) -> None:
    traced = pool.run(3, train_traced)
    for number, (style, num_chunks) in enumerate(STYLES):
        by_rank = [of_rank[number] for of_rank in traced]
        simulated = simulate(build_schedule(style, 3, 5, num_chunks), Costs())
        for found, expected in zip(by_rank, simulated.spans, strict=True):
            assert [span.action for span in found] == [span.action for span in expected]
        ends = {result(span.action): span.end for found in by_rank for span in found}
        for action, start, _ in (span for found in by_rank for span in found):
            for need in inputs(action, 3 * num_chunks):
                assert ends[need] <= start, f"{style}: {action} began before {need} was done"


def run_random_schedules() -> None:
    """Each with shapes that were not seen before, so that these are described in the middle of it; then again."""
    generator, world = random.Random(0), dist.get_world_size()
    for number in range(12):
        compute, num_microbatches = random_schedule(generator, world)
        pipeline = Pipeline(style=compute)
        for seed in range(2):
            with as_if_large():
                pipeline.check_train(pieces(num_microbatches + number, num_microbatches, seed))


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_order_of_computations_on_any_placement_runs(pool: Pool, world_size: int) -> None:
    pool.run(world_size, run_random_schedules)


def evaluate_between_steps() -> None:
    pipeline = Pipeline()
    for seed in range(2):
        pipeline.check_train(pieces(6, 3, seed))
        microbatches = pieces(5, 2, seed=10 + seed)
        before = gradients(pipeline.layers)
        result = pipeline.evaluate(microbatches, keep_outputs=True)
        after = gradients(pipeline.layers)
        assert all(after[name] is None or torch.equal(after[name], before[name]) for name in after)
        assert (result.outputs is not None) == pipeline.stage.is_last
        if pipeline.stage.is_last:
            expected = make_batch(5, seed=10 + seed)["x"]
            for layer in pipeline.expected:
                expected = layer(expected)
            # Rows of a product may be summed in another order when the batch is cut: hence not to the bit.
            torch.testing.assert_close(merge(result.outputs)["out"], expected)
            assert len(result.losses) == 2
    assert pipeline.evaluate(pieces(4, 2), criterion=None).losses == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_evaluation_between_steps_changes_nothing(pool: Pool, world_size: int) -> None:
    pool.run(world_size, evaluate_between_steps)


class TrainingExtraStage(LayerStage):
    """Sends a second tensor in training only, as a model with an auxiliary loss does."""

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        is_training = torch.is_grad_enabled()
        assert len(received) == (0 if self.is_first else 1 + is_training)
        assert all(tensor.requires_grad == is_training for tensor in received)
        output = super().forward(microbatch, received[:1])
        return output if self.is_last or not is_training else (output[0], output[0] * 2)


def evaluate_and_train_on_equal_shapes() -> None:
    pipeline = Pipeline(stage_class=TrainingExtraStage)
    for seed in range(2):
        pipeline.evaluate(pieces(4, 2, seed))
        pipeline.check_train(pieces(4, 2, seed))


def test_evaluation_may_send_other_tensors_than_training(pool: Pool) -> None:
    pool.run(2, evaluate_and_train_on_equal_shapes)


def weighted(outputs: Any, microbatch: Batch) -> tuple[Tensor, Tensor]:
    error = (outputs["out"] - microbatch["labels"]).square()
    return error.sum(), torch.tensor(error.numel())


def train_with_weights() -> None:
    pipeline = Pipeline()
    microbatches = pieces(7, 3)
    result = pipeline.train(microbatches, criterion=weighted, keep_outputs=True)
    if pipeline.stage.is_last:
        assert [int(weight) for weight in result.weights] == [3 * WIDTH, 2 * WIDTH, 2 * WIDTH]
        assert len(result.losses) == len(result.outputs) == 3
        assert not any(output["out"].requires_grad for output in result.outputs)
    else:
        assert result == RunResult()


def test_a_weighted_criterion_gives_sums_and_weights(pool: Pool) -> None:
    pool.run(2, train_with_weights)


def freeze(layers: Sequence[nn.Module], count: int) -> None:
    for layer in layers[:count]:
        layer.requires_grad_(False)


def train_with_frozen_first_stages() -> None:
    """Nothing that the frozen stages send needs a gradient, and the pipeline neither hangs nor makes any."""
    pipeline = Pipeline()
    count = 2 * (pipeline.num_stages - 1)
    freeze(pipeline.layers, count)
    freeze(pipeline.expected, count)
    for seed in range(2):
        microbatches = pieces(6, 3, seed)
        pipeline.train(microbatches, "gpipe" if seed else "1f1b")
        reference(pipeline.expected, microbatches, num_stages=pipeline.num_stages)
    own, expected = gradients(pipeline.layers), gradients(pipeline.expected)
    here = pipeline.stage.layers  # type: ignore[attr-defined]
    for name, gradient in expected.items():
        if gradient is None or name.split(".")[0] not in here:
            assert own[name] is None
        else:
            assert torch.equal(own[name], gradient)


@pytest.mark.parametrize("world_size", [2, 3])
def test_frozen_first_stages_do_not_hang(pool: Pool, world_size: int) -> None:
    pool.run(world_size, train_with_frozen_first_stages)


class UnusedStage(LayerStage):
    """Sends a second tensor that the last stage does not use: its gradient is nothing, not missing."""

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        output = super().forward(microbatch, received[:1])
        return output if self.is_last else (output[0], output[0] * 3)


def test_a_tensor_nobody_uses_has_a_gradient_of_zero(pool: Pool) -> None:
    pool.run(2, train_like_one_process, UnusedStage, True, [("1f1b", 1)])


def fail_in_criterion() -> None:
    pipeline = Pipeline()
    pipeline.train(pieces(6, 3))
    try:
        pipeline.train(pieces(6, 3), criterion=lambda outputs, microbatch: 1 / 0)
    except ZeroDivisionError:
        with pytest.raises(
            RuntimeError, match="an earlier step of this pipeline broke off \\(ZeroDivisionError"
        ):
            pipeline.train(pieces(6, 3))
        raise


def test_an_error_passes_through_and_closes_the_transport(pool: Pool) -> None:
    errors = pool.run_failing(2, fail_in_criterion)
    assert isinstance(errors[1], ZeroDivisionError)
    assert "lost rank 1 (pipeline stage 1)" in str(errors[0])


def some_weights(outputs: Any, microbatch: Batch) -> Any:
    loss = criterion(outputs, microbatch)
    return (loss, 3) if len(microbatch["x"]) == 3 else loss


def test_a_weight_for_some_microbatches_only_is_refused() -> None:
    with pytest.raises(TypeError, match="a weight for some microbatches only"):
        run_alone(gpipe(1, 2)[0], 1, pieces(5, 2), criterion=some_weights)


# ---- one process: a single stage, or several handed from one to the next


def run_alone(
    actions: Sequence[Action], num_stages: int, microbatches: Sequence[Batch], **options: Any
) -> RunResult:
    layers = options.pop("layers", None) or make_layers()
    stages = {index: LayerStage(layers, index, num_stages) for index in range(num_stages)}
    settings: dict[str, Any] = {
        "criterion": criterion,
        "scale": identity,
        "transport": None,
        "stages": stages,
    }
    return ScheduleRun(microbatches=microbatches, **settings | options).run(actions)


def test_several_stages_on_one_rank_are_handed_on_without_a_transport() -> None:
    forwards = [Action(Op.FORWARD, stage, m) for m in range(3) for stage in range(3)]
    backwards = [Action(Op.BACKWARD, stage, m) for m in range(3) for stage in (2, 1, 0)]
    layers, expected = make_layers(), make_layers()
    result = run_alone(forwards + backwards, 3, pieces(7, 3), layers=layers)
    assert result.losses == reference(expected, pieces(7, 3), num_stages=1)
    assert all(torch.equal(g, gradients(expected)[name]) for name, g in gradients(layers).items())


def test_losses_stand_by_microbatch_whatever_the_order() -> None:
    actions = [Action(op, 0, m) for m in (2, 0, 1) for op in (Op.FORWARD, Op.BACKWARD)]
    result = run_alone(actions, 1, pieces(7, 3), keep_outputs=True)
    assert result.losses == reference(make_layers(), pieces(7, 3), num_stages=1)
    assert [len(output["out"]) for output in result.outputs] == [3, 2, 2]


@pytest.mark.parametrize(
    "returned, told",
    [(lambda o, m: o["out"], "shape"), (lambda o, m: 1.0, "float"), (lambda o, m: None, "NoneType")],
)
def test_a_criterion_that_returns_no_scalar_is_refused(returned: Callable, told: str) -> None:
    with pytest.raises(TypeError, match=f"the criterion must return a scalar tensor.*{told}"):
        run_alone(gpipe(1, 1)[0], 1, pieces(2, 1), criterion=returned)
