"""`echelon plan`: layouts that fit a model on a number of GPUs, by predicted memory and time of a step.

torch is imported inside functions: help does not need it.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..pipeline.timeline_drawing import SUFFIXES
from .console import is_set_by_user, picture_errors, refuse, refusing, show_table
from .verify import layout_of, verify

if TYPE_CHECKING:
    from ..planning.search import Job, Plan, Planner
    from ..verify.layout_choice import Layout

RESERVED = 4.0  # GiB of a GPU for CUDA's context, NCCL's buffers and fragmentation
NOTE = "times are estimates from data sheets, not measured on a GPU; memory follows from a trace of the model"
LAYOUT_OPTIONS = {
    *("tp", "pp", "dp", "sp", "sp_mode", "wp", "ep", "zero"),
    *("schedule", "chunks", "microbatches", "recompute", "max_norm"),
}
BAR, MOST_BARS = 40, 8  # characters of a bar, and bars
KINDS = {"parameters": "█", "gradients": "▓", "masters": "▒", "states": "░", "activations": "▚"}


def plan(
    model: Annotated[str, typer.Option(help="Folder with a config.json, the file itself, or a model type.")],
    world: Annotated[int, typer.Option(help="Number of GPUs.")],
    global_batch: Annotated[int, typer.Option(help="Samples of a step, on all GPUs together.")],
    seq: Annotated[int, typer.Option(help="Tokens of a sample.")] = 4096,
    gpu: Annotated[
        str, typer.Option(help="A short name as h100, a100-40, mi300x, rtx4090; another one lists all.")
    ] = "h100",
    memory: Annotated[float | None, typer.Option(help="GiB of a GPU; default: that of --gpu.")] = None,
    reserve: Annotated[
        float, typer.Option(help="GiB that are left to CUDA, NCCL and fragmentation.")
    ] = RESERVED,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    head: Annotated[
        str | None, typer.Option(help="Class or task; default: the class that the config names.")
    ] = None,
    top: Annotated[int, typer.Option(help="Layouts to show.")] = 10,
    layout: Annotated[
        str | None,
        typer.Option(
            help='Check this layout, "--tp 8 --pp 4 --zero 1" for example, by the options of echelon verify.'
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help=f"Draw the memory of the first layout's ranks to this file: {', '.join(SUFFIXES)}."
        ),
    ] = None,
) -> None:
    """Predict which layouts of HybridParallelPlugin fit, their peak memory and the time of a step.

    Starts no process and reads no weights. Exit status: 0 something fits, 1 nothing does (the nearest is named), 2 bad
    arguments.
    """
    refuse("plan", _argument_errors(gpu, seq, top) + (picture_errors("plot", plot) if plot else []))

    from ..cluster.gpus import GPUS
    from ..planning.script import script
    from ..planning.search import Job

    job = Job(
        world=world,
        memory=(GPUS[gpu].memory if memory is None else memory) - reserve,
        global_batch=global_batch,
        device=GPUS[gpu],
        precision=precision,
    )
    refuse("plan", job.errors())
    planner, class_name = _planner_of(model, head, seq, job)
    fitting = _search_layouts(planner, job, top) if layout is None else _check_layout(planner, job, layout)
    if not fitting:
        raise typer.Exit(1)
    best = fitting[0]
    show_memory(best, job)
    if plot is not None:
        from .memory_picture import draw_memory

        draw_memory(plot, [vars(memory) for memory in best.memory], limit=job.memory, title=str(best.layout))
    typer.echo(script(best, model, class_name, planner.example()))


def _argument_errors(gpu: str, seq: int, top: int) -> list[str]:
    """List errors of arguments that need no model."""
    from ..cluster.errors import did_you_mean
    from ..cluster.gpus import GPUS

    hint = did_you_mean(gpu, GPUS)
    errors = [] if gpu in GPUS else [f"--gpu {gpu!r} is not known: {hint}use one of {', '.join(GPUS)}"]
    return errors + [
        f"--{name} {number} must be at least 1" for name, number in (("seq", seq), ("top", top)) if number < 1
    ]


def _planner_of(model: str, head: str | None, seq: int, job: "Job") -> "tuple[Planner, str]":
    """Return the planner of a model, and the name of its class; exit with status 2 if there is no such model."""
    import transformers

    from ..planning.meta_model import build_on_meta, length_errors, load_config
    from ..planning.search import Planner

    transformers.logging.set_verbosity_error()
    with refusing("plan"):
        module, task = build_on_meta(load_config(model), head)
        refuse("plan", length_errors(module, seq))
        planner = Planner(module, task, seq, job)
    return planner, type(module).__name__


def _search_layouts(planner: "Planner", job: "Job", top: int) -> "Sequence[Plan]":
    """Print the fastest layouts that fit, and why others were left out; return those that fit, the fastest first."""
    result = planner.search(top)
    if result.plans:
        show_plans(f"fastest of {result.num_tried:,} layouts ({NOTE})", result.plans, job, planner.tokens)
    elif result.nearest is not None:
        typer.echo(
            f"echelon plan: nothing fits into {job.memory:g} GiB: the nearest is {result.nearest.layout} with "
            f"{result.nearest.peak:.1f} GiB: use more GPUs, or a smaller --seq",
            err=True,
        )
        show_plans("the nearest", [result.nearest], job, planner.tokens)
    else:
        batch = job.world * -(-job.global_batch // job.world)
        advice = f": data parallelism alone works with --global-batch {batch}" * (batch != job.global_batch)
        typer.echo(f"echelon plan: no layout is possible, for the reasons below{advice}", err=True)
    for reason, count in result.left_out.most_common(8):
        typer.echo(f"left out: {count:,} layouts: {reason}", err=not result.plans)
    return result.plans


def _check_layout(planner: "Planner", job: "Job", text: str) -> "Sequence[Plan]":
    """Print the prediction of one layout, or its problems and the nearest layouts that fit; return it if it fits."""
    layout, samples = parse_layout(text, job)
    problems = planner.errors(layout, samples)
    if multiple := job.global_batch % (divisor := max(1, layout.dp) * max(1, layout.microbatches)):
        problems.append(
            f"--global-batch {job.global_batch} does not divide into {layout.dp} replicas with {layout.microbatches} "
            f"microbatches each: use --global-batch {job.global_batch - multiple + divisor}, or fewer microbatches"
        )
    if not problems:
        predicted = planner.predict(layout, samples)
        show_plans(f"predicted ({NOTE})", [predicted], job, planner.tokens)
        if predicted.peak <= job.memory:
            return [predicted]
        problems = [f"it needs {predicted.peak:.1f} GiB, and {job.memory:g} GiB are there"]
        show_memory(predicted, job)
    for problem in problems:
        typer.echo(f"echelon plan: --layout {text!r}: {problem}", err=True)
    if nearest := planner.nearest_to(layout, samples):
        show_plans("the nearest that fit", nearest, job, planner.tokens)
    return []


def parse_layout(text: str, job: "Job") -> "tuple[Layout, int]":
    """Return the layout of `--layout`, with the samples of its microbatches; exit with status 2 if it is not one."""
    from dataclasses import replace

    parser = typer.Typer(add_completion=False)
    parser.command()(verify)
    command = typer.main.get_command(parser)
    with refusing("plan", f"--layout {text!r}: "):
        words = shlex.split(text)
    parsed = command.make_context("echelon plan --layout", words)
    options: dict[str, Any] = dict(parsed.params)
    refuse(
        "plan",
        [
            f"--layout {text!r}: --{name.replace('_', '-')} is no size of a layout: give --model, --head, --precision "
            "and --plot before --layout, and leave others out"
            for name in options
            if name not in LAYOUT_OPTIONS and is_set_by_user(parsed, name)
        ],
    )
    sizes = [max(1, options[name]) for name in ("tp", "pp", "sp")]
    if options["dp"] is None:
        options["dp"] = max(1, job.world // (sizes[0] * sizes[1] * sizes[2]))
    local = max(1, job.global_batch // max(1, options["dp"]))
    if not is_set_by_user(parsed, "microbatches"):
        options["microbatches"] = local
    layout = replace(layout_of(options), precision=job.precision)
    return layout, max(1, job.global_batch // (max(1, layout.dp) * max(1, layout.microbatches)))


def show_plans(title: str, plans: "Sequence[Plan]", job: "Job", tokens: int | None) -> None:
    """Print a table of layouts; the throughput in tokens, if a sample has a number of them."""
    unit = "samples" if tokens is None else "tokens"
    headings = (
        *("layout", ">microbatches", ">peak GiB", ">step s", f">{unit}/s/GPU"),
        *(">bubble", ">exposed s", ">MFU"),
    )
    rows = [
        (
            str(plan.layout),
            f"{plan.layout.microbatches} × {plan.samples}",
            f"{plan.peak:.1f}",
            f"{plan.time.total:.3g}",
            f"{job.global_batch * (tokens or 1) / plan.time.total / job.world:,.0f}",
            f"{max(0.0, plan.time.bubble):.1%}",
            f"{plan.time.exposed:.2g}",
            f"{plan.utilization(job):.1%}",
        )
        for plan in plans
    ]
    show_table(title, headings, rows)


def show_memory(plan: "Plan", job: "Job") -> None:
    """Print the memory of every pipeline rank as a bar."""
    from ..planning.search import GIB

    scale, ranks = BAR / max(job.memory, plan.peak), len(plan.memory)
    typer.echo(f"\npeak memory of {plan.layout}, of {job.memory:g} GiB:")
    fullest = max(range(ranks), key=lambda rank: plan.memory[rank].total)
    for rank in sorted({*range(0, ranks, -(-ranks // MOST_BARS)), fullest, ranks - 1}):
        memory = plan.memory[rank]
        bar = ""
        for name, sign in KINDS.items():
            bar += sign * round(scale * getattr(memory, name) / GIB)
        typer.echo(f"  pipeline rank {rank:<3} {bar:<{BAR}} {memory.total / GIB:6.1f} GiB")
    typer.echo("  " + "  ".join(f"{sign} {name}" for name, sign in KINDS.items()) + "\n")
