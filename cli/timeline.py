"""`echelon timeline`: a pipeline's schedule as a picture, simulated or measured on local processes."""

import os
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..pipeline.schedules import SCHEDULES
from ..pipeline.simulate import Costs
from ..pipeline.timeline import SUFFIXES, Panel, rank_bubble, require_matplotlib, save_timelines, stages_of
from .console import refuse, table_console
from .pipeline import LAYERS_PER_STAGE, Pipeline

MOST_APART = 1e6  # costs: a box that is lost in the rounding of the clock cannot be drawn
COSTS = (1e-100, 1e100)  # what adds up to a number
FOR_MEASURING = ("model", "layers", "hidden", "steps", "seed", "timeout")


def timeline(
    context: typer.Context,
    schedule: Annotated[str, typer.Option(help=f"{', '.join(SCHEDULES)}.")] = "1f1b",
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 8,
    chunks: Annotated[int, typer.Option(help="Stages per rank, for schedules that take any number.")] = 1,
    costs: Annotated[
        str,
        typer.Option(
            help="F,B,W: cost of a microbatch's forward, input gradient and weight gradient through all that a "
            "rank holds. A chunk costs its share, a backward in one part B + W."
        ),
    ] = "1,1,1",
    out: Annotated[Path, typer.Option(help=f"File to draw to: {', '.join(SUFFIXES)}.")] = Path(
        "timeline.png"
    ),
    measured: Annotated[
        bool, typer.Option("--measure", help="Train a small model on local processes, and draw that beside.")
    ] = False,
    model: Annotated[str, typer.Option(help="With --measure: model type of transformers.")] = "llama",
    layers: Annotated[
        int | None, typer.Option(help=f"With --measure: its layers; else {LAYERS_PER_STAGE} for each stage.")
    ] = None,
    hidden: Annotated[int, typer.Option(help="With --measure: its hidden size.")] = 256,
    steps: Annotated[int, typer.Option(help="With --measure: steps, of which the median is drawn.")] = 5,
    seed: Annotated[int, typer.Option(help="With --measure: seed of weights and batch.")] = 0,
    timeout: Annotated[
        float, typer.Option(help="With --measure: seconds until a process that hangs is given up.")
    ] = 300.0,
) -> None:
    """Draw when each rank of a pipeline computes what, and print bubbles and peak activations.

    With --measure, local processes of one thread each, one for each rank, train a small model. What they did in
    the median step is drawn above a simulation with the mean costs that were measured. Exit status: 0 drawn,
    1 a process failed, 2 bad arguments.
    """
    pipeline = Pipeline(style=schedule, num_ranks=pp, num_microbatches=microbatches, num_chunks=chunks)
    given = [name for name in context.params if _is_given(context, name)]
    faults = [*pipeline.faults(), *costs_faults(costs), *out_faults(out)]
    if not measured:
        faults += [
            f"--{name} is for measuring: give --measure too" for name in FOR_MEASURING if name in given
        ]
        refuse("timeline", faults)
        simulation = pipeline.simulate(parse_costs(costs).per_chunk(pipeline.stages_per_rank))
        finish([Panel(title=str(pipeline), timeline=simulation)], out, unit="units of cost")
        return
    if "costs" in given:
        faults.append("--costs is for simulating alone: --measure measures them, so leave one of the two out")
    # Here and not above, so that help and simulations need no torch.
    from .measure import measured_panels, measuring_faults, small_model

    choice = small_model(model, pipeline, num_layers=layers, hidden_size=hidden)
    refuse("timeline", faults + measuring_faults(pipeline, choice, hidden_size=hidden, num_steps=steps))
    panels = measured_panels(pipeline, choice, num_steps=steps, seed=seed, timeout_seconds=timeout)
    finish(panels, out, unit="ms")


def finish(panels: Sequence[Panel], out: Path, *, unit: str) -> None:
    """Print the figures of each panel, and draw; ends the command if the file cannot be written."""
    console = table_console()
    for panel in panels:
        console.print(figures(panel))
        typer.echo(f"bubble {panel.timeline.bubble:.1%} of the work, {panel.timeline.end:.6g} {unit} in all")
    try:
        save_timelines(panels, out, unit=unit)
    except OSError as error:
        typer.echo(f"echelon timeline: {unwritable(out, error.strerror)}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"drawn to {out}")


def figures(panel: Panel) -> Table:
    """A row for each rank."""
    table = Table(title=panel.title, title_justify="left")
    for heading in ("rank", "stages", "bubble", "peak activations (microbatches)"):
        table.add_column(heading, justify="right")
    for rank, (spans, peak) in enumerate(zip(panel.timeline.spans, panel.timeline.peak_shares, strict=True)):
        stages = ", ".join(map(str, stages_of(spans)))
        table.add_row(str(rank), stages, f"{rank_bubble(panel.timeline, rank):.1%}", f"{peak:.3g}")
    return table


def parse_costs(text: str) -> Costs:
    """Costs from "F,B,W".

    Raises:
        ValueError: they are not three positive numbers that a clock can add up.
    """
    forward, backward_input, backward_weight = numbers = [float(part) for part in text.split(",")]
    least, most = min(numbers), max(numbers)
    if not (all(map(isfinite, numbers)) and COSTS[0] <= least and most <= min(COSTS[1], least * MOST_APART)):
        raise ValueError(f"{text!r} cannot be added up")
    return Costs(forward=forward, backward_input=backward_input, backward_weight=backward_weight)


def costs_faults(text: str) -> list[str]:
    """Whether costs cannot be read."""
    try:
        parse_costs(text)
    except ValueError:
        return [
            f"costs={text!r} must be three positive numbers F,B,W, at most {MOST_APART:g} times as large as each "
            f"other, from {COSTS[0]:g} to {COSTS[1]:g}: for example 1,1,1"
        ]
    return []


def out_faults(out: Path) -> list[str]:
    """Why nothing can be drawn to this file."""
    faults = []
    if out.suffix.lower() not in SUFFIXES:
        faults.append(f"out={str(out)!r} must end in one of {', '.join(SUFFIXES)}")
    if out.is_dir():
        faults.append(f"out={str(out)!r} is a folder: give the name of a file")
    if not out.parent.is_dir():
        faults.append(f"out={str(out)!r}: there is no folder {str(out.parent)!r}, make it first")
    elif not os.access(out if out.exists() else out.parent, os.W_OK):
        faults.append(unwritable(out, "Permission denied"))
    try:
        require_matplotlib()
    except ImportError as error:
        faults.append(str(error))
    return faults


def unwritable(out: Path, reason: str | None) -> str:
    """What is said of a file that cannot be drawn to."""
    return f"out={str(out)!r} cannot be written ({reason}): give the name of another file"


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
