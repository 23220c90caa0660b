"""The bubble that a plan predicts, against the timeline of real ranks whose layers take a set time."""

import time
from typing import Any

import pytest
from torch import Tensor, nn
from torch.autograd import Function
from torch.profiler import ProfilerActivity, profile

from echelon.booster import Booster
from echelon.cli.timeline import median_step
from echelon.pipeline.profiled import chrome_trace, computations
from echelon.pipeline.schedules import build_schedule
from echelon.pipeline.simulate import Costs, Span, Timeline, simulate
from echelon.plugins import HybridParallelPlugin
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer

from ..pool import Pool

NUM_RANKS, NUM_LAYERS, NUM_MICROBATCHES, NUM_STEPS = 4, 8, 8, 3
BUBBLES_APART = 0.05
WEIGHT_GRADIENTS = 1e-3
# Seconds of a layer, in which a rank waits: other load on the machine matters little.
FORWARD, BACKWARD = 0.08, 0.16


class Slow(Function):
    """The identity, which takes a set time in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Wait, and return the input."""
        time.sleep(FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Wait, and return the gradient."""
        time.sleep(BACKWARD)
        return gradients[0]


def slow(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Hook: wait after a layer."""
    return Slow.apply(output) if isinstance(output, Tensor) else (Slow.apply(output[0]), *output[1:])


def spans_of_rank(style: str, chunks: int) -> list[list[Span]]:
    """Return this rank's spans in each warm step of the pipeline."""
    pipeline = dict(pp_size=NUM_RANKS, pp_style=style, num_model_chunks=chunks)
    plugin = HybridParallelPlugin(**pipeline, num_microbatches=NUM_MICROBATCHES, precision="fp32")
    choice = ModelChoice(model_type="llama", num_layers=NUM_LAYERS)
    model = choice.build(seed=0)
    for layer in model.model.layers:
        layer.register_forward_hook(slow)
    booster = Booster(plugin=plugin)
    boosted, optimizer, criterion, *_ = booster.boost(model, make_optimizer(model), loss_of)
    batch = make_batch(choice, num_samples=NUM_MICROBATCHES, seed=0)
    steps = []
    for _ in range(1 + NUM_STEPS):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            booster.execute_pipeline(iter([batch]), boosted, criterion, optimizer)
        steps.append(computations(chrome_trace(profiler)))
    return steps[1:]


@pytest.mark.slow  # it waits, and is exact only where nothing else runs
@pytest.mark.parametrize(
    ("style", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2)]
)
def test_the_simulated_bubble_is_the_measured_one(pool: Pool, style: str, chunks: int) -> None:
    by_rank = pool.run(NUM_RANKS, spans_of_rank, style, chunks, timeout=300.0)
    timelines = [
        Timeline(spans=median_step([[spans] for spans in step]), peak_activations=[])
        for step in zip(*by_rank, strict=True)
    ]
    measured = min(timelines, key=lambda timeline: timeline.end)  # with the least of other load
    per_stage = NUM_LAYERS / NUM_RANKS / chunks
    costs = Costs(
        forward=per_stage * FORWARD, backward_input=per_stage * BACKWARD, backward_weight=WEIGHT_GRADIENTS
    )
    simulated = simulate(build_schedule(style, NUM_RANKS, NUM_MICROBATCHES, chunks), costs)
    assert abs(measured.bubble - simulated.bubble) <= BUBBLES_APART
