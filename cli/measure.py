"""A pipeline measured on local processes: when each rank computed what in a usual step."""

from collections.abc import Sequence
from statistics import mean

from ..booster.booster import Booster
from ..pipeline.action import Op
from ..pipeline.simulate import Costs, Span
from ..plugins.hybrid_module import HybridParallelModule
from ..plugins.hybrid_parallel import HybridParallelPlugin
from ..verify.batch import loss_of, make_batch
from ..verify.models import ModelChoice
from ..verify.parity import make_optimizer
from .local import run_on_processes
from .pipeline import Pipeline

WARMUP_STEPS = 2
SAMPLES = 8  # of a microbatch
MILLISECONDS = 1e3


def measure(
    pipeline: Pipeline, choice: ModelChoice, *, num_steps: int, seed: int, timeout_seconds: float
) -> list[list[Span]] | str:
    """The spans of every rank in the median step, in milliseconds from the first one's start; or how a process failed.

    Starts a process for each rank.
    """
    steps = run_on_processes(
        _train,
        (pipeline, choice, num_steps, seed),
        num_processes=pipeline.num_ranks,
        timeout_seconds=timeout_seconds,
    )
    return steps if isinstance(steps, str) else median_step(steps)


def median_step(steps_by_rank: Sequence[Sequence[Sequence[Span]]]) -> list[list[Span]]:
    """The step of median length, of an even number the shorter one, in milliseconds from its start.

    Args:
        steps_by_rank: by rank and step, spans in seconds of one clock.
    """
    steps = [_from_start(step) for step in zip(*steps_by_rank, strict=True)]
    steps.sort(key=lambda step: max(spans[-1].end for spans in step))
    return steps[(len(steps) - 1) // 2]


def _from_start(step: Sequence[Sequence[Span]]) -> list[list[Span]]:
    first = min(spans[0].start for spans in step)
    return [
        [
            Span(action, (start - first) * MILLISECONDS, (end - first) * MILLISECONDS)
            for action, start, end in spans
        ]
        for spans in step
    ]


def mean_costs(spans_by_rank: Sequence[Sequence[Span]]) -> Costs:
    """What each kind of computation took on average over all stages; parts of a backward that was whole, half of it."""
    lengths: dict[Op, list[float]] = {}
    for spans in spans_by_rank:
        for action, start, end in spans:
            lengths.setdefault(action.op, []).append(end - start)
    means = {op: mean(found) for op, found in lengths.items()}
    half = means.get(Op.BACKWARD, 0.0) / 2
    return Costs(
        forward=means[Op.FORWARD],
        backward_input=means.get(Op.BACKWARD_INPUT, half),
        backward_weight=means.get(Op.BACKWARD_WEIGHT, half),
    )


def _train(rank: int, pipeline: Pipeline, choice: ModelChoice, num_steps: int, seed: int) -> list[list[Span]]:
    """Train for some steps, and return this rank's spans in those after the warm-up."""
    plugin = HybridParallelPlugin(
        pp_size=pipeline.num_ranks,
        pp_style=pipeline.style,
        num_model_chunks=pipeline.num_chunks,
        num_microbatches=pipeline.num_microbatches,
        precision="fp32",
    )
    booster = Booster(plugin=plugin)
    model = choice.build(seed)
    boosted, optimizer, criterion, *_ = booster.boost(model, make_optimizer(model), loss_of)
    assert isinstance(boosted, HybridParallelModule) and optimizer is not None
    batch = make_batch(choice, num_samples=SAMPLES * pipeline.num_microbatches, seed=seed)
    steps = []
    for _ in range(WARMUP_STEPS + num_steps):
        spans: list[Span] = []
        boosted.engine.trace = spans
        booster.execute_pipeline(iter([batch]), boosted, criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(spans)
    return steps[WARMUP_STEPS:]
