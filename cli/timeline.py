"""`echelon timeline`: draw a pipeline's schedule, simulated or measured on local processes.

torch is imported inside functions: help and simulations do not need it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..pipeline.action import Op
from ..pipeline.schedules import SCHEDULES, build_schedule, build_stage_ranks, style_errors
from ..pipeline.simulate import Costs, Span, Timeline, simulate
from ..pipeline.timeline_drawing import SUFFIXES, Panel, rank_bubble, save_timelines, stages_of
from .console import is_set_by_user, picture_errors, refuse, show_table

if TYPE_CHECKING:
    from ..verify.model_choice import ModelChoice

LAYERS_PER_STAGE = 2  # of the measured model, unless --layers is given
WARMUP_STEPS = 2
HEAD_MULTIPLE = 8  # a ModelChoice has 4 heads, whose size must be even for rotary positions
SAMPLES = 8  # per microbatch
MILLISECONDS = 1e3
MOST_APART = 1e6  # largest ratio of costs: a box that is lost in the rounding of the clock cannot be drawn
COST_RANGE = (1e-100, 1e100)  # the sums of such costs are finite
FOR_MEASURING = ("model", "layers", "hidden", "steps", "seed", "timeout")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A schedule and its sizes.

    Args:
        style: a name of the pipeline's schedules.
        num_ranks: pipeline ranks.
        num_microbatches: microbatches of one step.
        num_chunks: stages per rank; 1 also for a style with a fixed number.
    """

    style: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1

    def errors(self) -> list[str]:
        """List all errors of the sizes, each with a value that works."""
        sizes = {"pp": self.num_ranks, "microbatches": self.num_microbatches}
        size_errors = [f"{name}={size} must be at least 1" for name, size in sizes.items() if size < 1]
        return size_errors + style_errors(self.style, self.num_chunks, self.num_ranks)

    @property
    def arguments(self) -> dict[str, Any]:
        """The equivalent arguments of HybridParallelPlugin."""
        return {
            "pp_size": self.num_ranks,
            "pp_style": self.style,
            "num_model_chunks": self.num_chunks,
            "num_microbatches": self.num_microbatches,
        }

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline."""
        return len(build_stage_ranks(self.style, self.num_ranks, self.num_chunks))

    @property
    def stages_per_rank(self) -> int:
        """The number of stages of each rank."""
        return self.num_stages // self.num_ranks

    def simulate(self, stage_costs: Costs) -> Timeline:
        """Return its simulated timeline.

        Args:
            stage_costs: the costs of one microbatch on one stage.
        """
        schedule = build_schedule(self.style, self.num_ranks, self.num_microbatches, self.num_chunks)
        return simulate(schedule, stage_costs)

    def __str__(self) -> str:
        chunks = f" × {self.stages_per_rank} chunks" if self.stages_per_rank > 1 else ""
        return f"{self.style}, {self.num_ranks} ranks{chunks}, {self.num_microbatches} microbatches"


def timeline(
    context: typer.Context,
    schedule: Annotated[str, typer.Option(help=f"{', '.join(SCHEDULES)}.")] = "1f1b",
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 8,
    chunks: Annotated[int, typer.Option(help="Stages per rank, for schedules that take any number.")] = 1,
    costs: Annotated[
        str,
        typer.Option(
            help=(
                "F,B,W: cost of a microbatch's forward, input gradient and weight gradient over all layers of a rank. "
                "A chunk costs its fraction, a full backward B + W."
            )
        ),
    ] = "1,1,1",
    out: Annotated[Path, typer.Option(help=f"File to draw to: {', '.join(SUFFIXES)}.")] = Path(
        "timeline.png"
    ),
    measured: Annotated[
        bool,
        typer.Option(
            "--measure", help="Train a small model on local processes, and draw its timeline beside."
        ),
    ] = False,
    model: Annotated[str, typer.Option(help="With --measure: model type of transformers.")] = "llama",
    layers: Annotated[
        int | None,
        typer.Option(help=f"With --measure: its number of layers; default {LAYERS_PER_STAGE} per stage."),
    ] = None,
    hidden: Annotated[int, typer.Option(help="With --measure: its hidden size.")] = 256,
    steps: Annotated[int, typer.Option(help="With --measure: number of steps; the median is drawn.")] = 5,
    seed: Annotated[int, typer.Option(help="With --measure: seed of weights and batch.")] = 0,
    timeout: Annotated[
        float, typer.Option(help="With --measure: seconds until a hanging process is ended.")
    ] = 300.0,
) -> None:
    """Draw the computations of each rank of a pipeline over time, and print bubbles and peak activations.

    With --measure, local processes of one thread each, one per rank, train a small model. Their computations in
    the median step are drawn above a simulation with their mean costs. Exit status: 0 drawn,
    1 a process failed or the file cannot be written, 2 bad arguments.
    """
    pipeline = Pipeline(style=schedule, num_ranks=pp, num_microbatches=microbatches, num_chunks=chunks)
    set_options = [name for name in context.params if is_set_by_user(context, name)]
    errors = [*pipeline.errors(), *picture_errors("out", out)]
    try:
        stage_costs = parse_costs(costs)
    except ValueError as error:
        errors.append(str(error))
    if not measured:
        errors += [
            f"--{name} is for measuring: give --measure too" for name in FOR_MEASURING if name in set_options
        ]
        refuse("timeline", errors)
        simulation = pipeline.simulate(stage_costs.per_chunk(pipeline.stages_per_rank))
        finish([Panel(title=str(pipeline), timeline=simulation)], out, unit="units of cost")
        return
    if "costs" in set_options:
        errors.append("--costs is for simulating alone: --measure measures them, so leave one of the two out")
    choice = small_model(model, pipeline, num_layers=layers, hidden_size=hidden)
    refuse("timeline", errors + measuring_errors(pipeline, choice, hidden_size=hidden, num_steps=steps))
    panels = measured_panels(pipeline, choice, num_steps=steps, seed=seed, timeout_seconds=timeout)
    finish(panels, out, unit="ms")


def finish(panels: Sequence[Panel], out: Path, *, unit: str) -> None:
    """Print the figures of each panel, and draw; end the command if the file cannot be written."""
    for panel in panels:
        ranks = enumerate(zip(panel.timeline.spans, panel.timeline.peak_shares, strict=True))
        rows = (
            (
                str(rank),
                ", ".join(map(str, stages_of(spans))),
                f"{rank_bubble(panel.timeline, rank):.1%}",
                f"{peak:.3g}",
            )
            for rank, (spans, peak) in ranks
        )
        show_table(panel.title, (">rank", ">stages", ">bubble", ">peak activations (microbatches)"), rows)
        typer.echo(f"bubble {panel.timeline.bubble:.1%} of the work, {panel.timeline.end:.6g} {unit} in all")
    try:
        save_timelines(panels, out, unit=unit)
    except OSError as error:
        typer.echo(
            f"echelon timeline: out={str(out)!r} cannot be written ({error.strerror}): give the name of another file",
            err=True,
        )
        raise typer.Exit(1) from None
    typer.echo(f"drawn to {out}")


def parse_costs(text: str) -> Costs:
    """Parse costs from "F,B,W".

    Raises:
        ValueError: they are not three numbers in `COST_RANGE`, at most `MOST_APART` times as large as each other.
    """
    try:
        numbers = [float(word) for word in text.split(",")]
        forward, backward_input, backward_weight = numbers
        least, most = min(numbers), max(numbers)
        if (
            all(map(isfinite, numbers))
            and COST_RANGE[0] <= least
            and most <= min(COST_RANGE[1], least * MOST_APART)
        ):
            return Costs(forward=forward, backward_input=backward_input, backward_weight=backward_weight)
    except ValueError:
        pass
    raise ValueError(
        f"costs={text!r} must be three positive numbers F,B,W, at most {MOST_APART:g} times as large as each "
        f"other, from {COST_RANGE[0]:g} to {COST_RANGE[1]:g}: for example 1,1,1"
    )


def small_model(
    model_type: str, pipeline: Pipeline, *, num_layers: int | None, hidden_size: int
) -> "ModelChoice":
    """Return the model to measure: small, with `num_layers` or else a few for each stage.

    Errors of its arguments are for `measuring_errors` to report.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    from ..verify.model_choice import ModelChoice

    if num_layers is None:
        num_stages = 1 if pipeline.errors() else pipeline.num_stages  # unknown for an impossible pipeline
        num_layers = LAYERS_PER_STAGE * num_stages
    settings = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "head_dim": hidden_size // 4,
    }
    blank = AutoConfig.for_model(model_type) if model_type in CONFIG_MAPPING else None
    known = tuple((name, value) for name, value in settings.items() if hasattr(blank, name))
    return ModelChoice(model_type=model_type, num_layers=num_layers, settings=known)


def measuring_errors(
    pipeline: Pipeline, choice: "ModelChoice", *, hidden_size: int, num_steps: int
) -> list[str]:
    """List all reasons why this model cannot be measured."""
    from ..plugins.hybrid_config import HybridConfig
    from .verify import sharding_errors

    errors = [] if num_steps >= 1 else [f"steps={num_steps} must be at least 1"]
    if hidden_size < 1 or hidden_size % HEAD_MULTIPLE:
        errors.append(f"hidden={hidden_size} must be a positive multiple of {HEAD_MULTIPLE}")
        choice = replace(choice, settings=())  # to find errors that do not follow from this one
    errors += choice.errors()
    if errors or pipeline.errors():
        return errors
    return sharding_errors(choice, HybridConfig(**pipeline.arguments))


def measured_panels(
    pipeline: Pipeline, choice: "ModelChoice", *, num_steps: int, seed: int, timeout_seconds: float
) -> list[Panel]:
    """Measure on local processes, and simulate with the mean costs; end the command if a process fails."""
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
    pipeline: Pipeline, choice: "ModelChoice", *, num_steps: int, seed: int, timeout_seconds: float
) -> list[list[Span]] | str:
    """Measure the spans of every rank in the median step, in milliseconds from its start.

    Starts a process for each rank. Returns an error message if one fails.
    """
    from .local_processes import run_on_processes

    steps = run_on_processes(
        _train,
        (pipeline, choice, num_steps, seed),
        num_processes=pipeline.num_ranks,
        timeout_seconds=timeout_seconds,
    )
    return steps if isinstance(steps, str) else median_step(steps)


def median_step(steps_by_rank: Sequence[Sequence[Sequence[Span]]]) -> list[list[Span]]:
    """Return the step of median length, in milliseconds from its start; of an even number the shorter middle one.

    Args:
        steps_by_rank: by rank and step, spans in seconds of one clock.
    """
    steps = [_from_start(step) for step in zip(*steps_by_rank, strict=True)]
    steps.sort(key=lambda step: max(spans[-1].end for spans in step))
    return steps[(len(steps) - 1) // 2]


def _from_start(step: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Return the spans of a step in milliseconds since its first computation."""
    first = min(spans[0].start for spans in step)
    return [
        [
            Span(action, (start - first) * MILLISECONDS, (end - first) * MILLISECONDS)
            for action, start, end in spans
        ]
        for spans in step
    ]


def mean_costs(spans_by_rank: Sequence[Sequence[Span]]) -> Costs:
    """Return the mean cost of each kind of computation; half of an undivided backward counts for each of its parts."""
    lengths: dict[Op, list[float]] = {}
    for spans in spans_by_rank:
        for action, start, end in spans:
            lengths.setdefault(action.op, []).append(end - start)
    means = {op: mean(seconds) for op, seconds in lengths.items()}
    half = means.get(Op.BACKWARD, 0.0) / 2
    return Costs(
        forward=means[Op.FORWARD],
        backward_input=means.get(Op.BACKWARD_INPUT, half),
        backward_weight=means.get(Op.BACKWARD_WEIGHT, half),
    )


def _train(
    rank: int, pipeline: Pipeline, choice: "ModelChoice", num_steps: int, seed: int
) -> list[list[Span]]:
    """Train for some steps, and return this rank's spans in those after the warm-up."""
    from torch.profiler import ProfilerActivity, profile

    from ..booster.booster import Booster
    from ..pipeline.profiled import chrome_trace, computations
    from ..plugins.hybrid_parallel import HybridParallelPlugin
    from ..verify.batch import loss_of, make_batch
    from ..verify.parity import make_optimizer

    booster = Booster(plugin=HybridParallelPlugin(**pipeline.arguments, precision="fp32"))
    model = choice.build(seed)
    boosted, optimizer, criterion, *_ = booster.boost(model, make_optimizer(model), loss_of)
    assert optimizer is not None
    batch = make_batch(choice, num_samples=SAMPLES * pipeline.num_microbatches, seed=seed)
    steps = []
    for _ in range(WARMUP_STEPS + num_steps):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            booster.execute_pipeline(iter([batch]), boosted, criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(computations(chrome_trace(profiler)))
    return steps[WARMUP_STEPS:]


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # the cores that this process may use; only on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
