"""A pipeline measured on local processes: when each rank computed what in a usual step."""

import os
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import typer
from transformers import CONFIG_MAPPING, AutoConfig

from ..booster.booster import Booster
from ..pipeline.action import Op
from ..pipeline.simulate import Costs, Span, Timeline
from ..pipeline.timeline import Panel
from ..plugins.hybrid_model import HybridParallelModule
from ..plugins.hybrid_parallel import HybridParallelPlugin
from ..verify.batch import loss_of, make_batch
from ..verify.models import ModelChoice
from ..verify.parity import make_optimizer
from .check import split_faults
from .local import run_on_processes
from .pipeline import LAYERS_PER_STAGE, Pipeline

WARMUP_STEPS = 2
HEAD_MULTIPLE = 8  # a ModelChoice has 4 heads, and rotary positions need heads of even size
SAMPLES = 8  # of a microbatch
MILLISECONDS = 1e3


def small_model(
    model_type: str, pipeline: Pipeline, *, num_layers: int | None, hidden_size: int
) -> ModelChoice:
    """The model to measure."""
    if num_layers is None:
        num_stages = 1 if pipeline.faults() else pipeline.num_stages
        num_layers = LAYERS_PER_STAGE * num_stages
    settings = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "head_dim": hidden_size // 4,
    }
    blank = AutoConfig.for_model(model_type) if model_type in CONFIG_MAPPING else None
    known = tuple((name, value) for name, value in settings.items() if hasattr(blank, name))
    return ModelChoice(model_type=model_type, num_layers=num_layers, settings=known)


def measuring_faults(
    pipeline: Pipeline, choice: ModelChoice, *, hidden_size: int, num_steps: int
) -> list[str]:
    """Why this model cannot be trained so."""
    faults = [] if num_steps >= 1 else [f"steps={num_steps} must be at least 1"]
    if hidden_size < 1 or hidden_size % HEAD_MULTIPLE:
        faults.append(f"hidden={hidden_size} must be a positive multiple of {HEAD_MULTIPLE}")
        choice = replace(choice, settings=())  # for the faults that do not follow from this one
    faults += choice.faults()
    if faults or pipeline.faults():
        return faults
    return split_faults(choice, num_stages=pipeline.num_stages)


def measured_panels(
    pipeline: Pipeline, choice: ModelChoice, *, num_steps: int, seed: int, timeout_seconds: float
) -> list[Panel]:
    """Measure on local processes, and simulate with their mean costs; end the command if a process fails."""
    spans = measure(pipeline, choice, num_steps=num_steps, seed=seed, timeout_seconds=timeout_seconds)
    if isinstance(spans, str):
        typer.echo(spans, err=True)
        raise typer.Exit(1)
    if (num_cores := _num_cores()) < pipeline.num_ranks:
        typer.echo(
            f"{pipeline.num_ranks} processes shared {num_cores} cores: what was measured includes waiting for a core",
            err=True,
        )
    simulation = pipeline.simulate(mean_costs(spans))
    measurement = Timeline(spans=spans, peak_activations=simulation.peak_activations)
    return [
        Panel(title=f"{pipeline}, measured", timeline=measurement),
        Panel(title="simulated with the mean costs measured", timeline=simulation),
    ]


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


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # the cores that this process may use; Linux alone tells
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
