"""`echelon verify`: the parity check on local processes, also for a run resumed under further layouts.

torch is imported inside functions, so that help needs no torch.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import lcm
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ..pipeline.schedules import SCHEDULES
from ..pipeline.timeline_drawing import SUFFIXES
from .console import is_set_by_user, picture_errors, refuse, show_table
from .curve_picture import draw_curves

if TYPE_CHECKING:
    from ..plugins.hybrid_config import HybridConfig
    from ..verify.compare import Measure
    from ..verify.layout_choice import Layout
    from ..verify.model_choice import ModelChoice
    from ..verify.resume import Leg, Relay, ResumeReport

# Options that a leg inherits from the previous one unless it sets them; all others have their defaults.
INHERITED = ("precision", "microbatches", "steps")
# Options of the run, which its legs cannot set.
OF_THE_RUN = (
    "model",
    "head",
    "tied",
    "layers",
    "optimizer",
    "max_norm",
    "seed",
    "batches",
    "timeout",
    "plot",
    "then",
)


def verify(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Model type of transformers: llama, bert, t5, ...")] = "llama",
    head: Annotated[
        str | None,
        typer.Option(help="causal, classification, seq2seq, ...; default: the usual head of the model"),
    ] = None,
    tied: Annotated[bool, typer.Option(help="Share the embedding's weight with the head.")] = False,
    layers: Annotated[int, typer.Option(help="Layers of the small model; of encoder and decoder each.")] = 4,
    tp: Annotated[int, typer.Option(help="Ranks over which layers are sharded.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[
        int | None,
        typer.Option(help="Replicas with different batches; by default as few as --sp, --wp and --ep allow."),
    ] = None,
    sp: Annotated[
        int, typer.Option(help="Ranks over which sequences are sharded: all_to_all, ring_attn.")
    ] = 1,
    sp_mode: Annotated[
        str | None,
        typer.Option(help="split_gather or ring (over --tp), all_to_all or ring_attn (over --sp)."),
    ] = None,
    wp: Annotated[int, typer.Option(help="Ranks over which weights of linear layers are sharded.")] = 1,
    ep: Annotated[int, typer.Option(help="Ranks over which experts are distributed.")] = 1,
    zero: Annotated[int, typer.Option(help="ZeRO stage: 0, 1 or 2.")] = 0,
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw, adafactor, sgd at a rate of 0.1, or muon for hidden matrices beside adamw for the others."
        ),
    ] = "adamw",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    schedule: Annotated[str, typer.Option(help=f"{', '.join(SCHEDULES)}.")] = "1f1b",
    chunks: Annotated[int, typer.Option(help="Pipeline stages per rank: interleaved and gpipe.")] = 1,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a batch, of unequal size.")] = 3,
    recompute: Annotated[
        float, typer.Option(help="Fraction of each stage's layers that is recomputed.")
    ] = 0.0,
    max_norm: Annotated[float, typer.Option(help="Clip gradients to this norm; 0 disables clipping.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    batches: Annotated[
        int | None,
        typer.Option(help="Different batches, taken in turn: few of them are learned. Default: all differ."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a hanging process is ended.")] = 300.0,
    plot: Annotated[
        Path | None, typer.Option(help=f"Draw both loss curves to this file: {', '.join(SUFFIXES)}.")
    ] = None,
    then: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                'Save, and resume in new processes under this layout, for example "--pp 2 --zero 1"; repeatable. '
                "Precision, microbatches and steps stay the same unless given."
            )
        ),
    ] = None,
) -> None:
    """Train a small model under a layout and in one process, and compare every step.

    Starts tp * pp * dp * sp local processes. Exit status: 0 all agree, 1 a quantity departs (the first is named) or
    a process failed, 2 bad arguments.
    """
    run(context)


def run(context: typer.Context) -> None:
    """Check a run whose first leg has the options of `verify`; end the command with its exit status."""
    from ..verify.layout_choice import Training
    from ..verify.model_choice import ModelChoice
    from ..verify.optimizers import OPTIMIZERS
    from ..verify.resume import Leg, Relay

    first = context.params
    choice = ModelChoice(
        model_type=first["model"], head=first["head"], tied=first["tied"], num_layers=first["layers"]
    )
    further, errors = further_options(context, first["then"] or ())
    legs = tuple(Leg(layout=layout_of(options), num_steps=options["steps"]) for options in (first, *further))
    if first["optimizer"] not in OPTIMIZERS:
        errors.append(f"optimizer={first['optimizer']!r} is not known: use one of {', '.join(OPTIMIZERS)}")
    if first["batches"] is not None and first["batches"] < 1:
        errors.append(f"batches={first['batches']} must be at least 1")
    plot = first["plot"]
    refuse("verify", errors + leg_errors(choice, legs) + (picture_errors("plot", plot) if plot else []))
    training = Training(optimizer=first["optimizer"], num_batches=first["batches"])
    relay = Relay(choice=choice, legs=legs, training=training, seed=first["seed"])
    report = run_relay(relay, timeout_seconds=first["timeout"])
    if isinstance(report, str):
        typer.echo(report, err=True)
        raise typer.Exit(1)
    layouts = ", then ".join(str(leg.layout) for leg in legs)
    comma = "," if further else ""
    show(
        report,
        title=f"{choice.model_type} ({choice.described_head}) under {layouts}{comma} beside one process"
        + (f", by {training.optimizer}" if training.optimizer != "adamw" else ""),
    )
    if plot is not None:
        reference = [step.reference_loss for step in report.steps]
        draw_curves(plot, reference, {layouts: [step.loss for step in report.steps]})
    raise typer.Exit(0 if report.agrees else 1)


def further_options(
    context: typer.Context, texts: Sequence[str]
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the options of each further leg, by the names of `verify`'s arguments, and all errors in the texts.

    Args:
        context: the context of `verify` with the options of the first leg; exits with status 2 for unknown words.
        texts: the value of each `--then`.
    """
    options_of_legs: list[Mapping[str, Any]] = []
    errors: list[str] = []
    first = previous = context.params
    for text in texts:
        try:
            words = shlex.split(text)
        except ValueError as error:
            errors.append(f"--then {text!r}: {error}")
            continue
        parsed = context.command.make_context("echelon verify --then", words)
        set_names = {name for name in parsed.params if is_set_by_user(parsed, name)}
        errors += [
            f"--then {text!r}: --{name.replace('_', '-')} applies to the whole run: give it before --then"
            for name in OF_THE_RUN
            if name in set_names
        ]
        run_options = {name: first[name] for name in OF_THE_RUN}
        inherited = {name: previous[name] for name in INHERITED if name not in set_names}
        previous = {**parsed.params, **run_options, **inherited}
        options_of_legs.append(previous)
    return options_of_legs, errors


def layout_of(options: Mapping[str, Any]) -> "Layout":
    """Return the layout with a leg's options."""
    from ..verify.layout_choice import Layout

    sequence = options["sp_mode"] or ("all_to_all" if options["sp"] > 1 else None)
    sizes = {field.name: options[field.name] for field in fields(Layout) if field.name in options}
    if sizes["dp"] is None:  # sp * dp must be a multiple of wp and of ep
        sp, wp, ep = (max(1, sizes[axis]) for axis in ("sp", "wp", "ep"))
        sizes["dp"] = lcm(sp, wp, ep) // sp
    return Layout(**sizes, sequence=sequence)


def leg_errors(choice: "ModelChoice", legs: Sequence["Leg"]) -> list[str]:
    """List all errors of a model and the legs of its run; those of the model once."""
    first, *further = legs
    errors = argument_errors(choice, first.layout, first.num_steps)
    if choice.errors():
        return errors
    return errors + [
        f"--then number {number}: {error}"
        for number, leg in enumerate(further, start=1)
        for error in argument_errors(choice, leg.layout, leg.num_steps)
    ]


def argument_errors(choice: "ModelChoice", layout: "Layout", num_steps: int) -> list[str]:
    """List all errors of a model, a layout and a number of steps, without starting a process."""
    layout_errors = layout.errors()
    errors = [*layout_errors, *([] if num_steps >= 1 else [f"steps={num_steps} must be at least 1"])]
    model_errors = choice.errors()
    if layout_errors or model_errors:
        return errors + model_errors
    return errors + sharding_errors(choice, layout.config)


def sharding_errors(choice: "ModelChoice", config: "HybridConfig") -> list[str]:
    """List all reasons why this model cannot be sharded under this config."""
    import torch

    from ..cluster.errors import errors_of
    from ..cluster.layout import SUB_AXES
    from ..shardformer.sharder import StandInGroup, stand_in_config
    from ..shardformer.transforms import ModelPlan, TransformOptions

    num_stages, sequence = len(config.stage_ranks), config.sequence
    sizes = {axis: getattr(config, f"{axis}_size") for axis in SUB_AXES}
    try:
        options = TransformOptions(
            shard_config=stand_in_config(
                tp_size=config.tp_size, num_stages=num_stages, sp_size=config.sp, sequence=sequence
            ),
            device=torch.device("cpu"),
            dtype=config.dtype,
            shards=config.tp_size > 1 or num_stages > 1 or sequence.mode is not None,
            groups={axis: StandInGroup(0, size) for axis, size in sizes.items() if size > 1},
        )
        ModelPlan(choice.build_on_meta(), options, [])
    except ValueError as error:
        return list(errors_of(error))
    return []


def run_relay(relay: "Relay", *, timeout_seconds: float) -> "ResumeReport | str":
    """Run all legs on local processes, new ones for each leg; return the report, or an error message."""
    from .local_processes import run_on_processes

    answers: Sequence[ResumeReport | None] | str = []
    with TemporaryDirectory(prefix="echelon-verify-") as folder:
        for number, leg in enumerate(relay.legs):
            answers = run_on_processes(
                _run_leg,
                (relay, number, Path(folder)),
                num_processes=leg.layout.world_size,
                timeout_seconds=timeout_seconds,
            )
            if isinstance(answers, str):
                return f"leg {number + 1}, under {leg.layout}:\n{answers}" if relay.legs[1:] else answers
    report = answers[0]
    assert report is not None  # rank 0 returns it in the last leg
    return report


def _run_leg(rank: int, relay: "Relay", number: int, folder: Path) -> "ResumeReport | None":
    """Run a leg of a relay; after the last one the first rank compares all legs."""
    from ..verify.resume import compare_legs, run_leg

    run_leg(relay, number, folder)
    is_last = number + 1 == len(relay.legs)
    return compare_legs(relay, folder) if is_last and rank == 0 else None


def show(report: "ResumeReport", *, title: str) -> None:
    """Print a report as a table, one row per step: distances, each as a fraction of the allowed one."""
    headings = (">step", ">loss", ">reference", ">loss off by", ">norm off by")
    rows = []
    for step in report.steps:
        loss, norm, gradient, weight = map(step.measure, ("loss", "norm", "gradient", "weight"))
        worst = (f"{_shown(gradient)} {gradient.name}", f"{_shown(weight)} {weight.name}")
        losses = (f"{step.loss:.6f}", f"{step.reference_loss:.6f}")
        rows.append((str(step.step), *losses, _shown(loss), _shown(norm), *worst))
    sections = [handover.step for handover in report.handovers]
    show_table(title, (*headings, "worst gradient off by", "worst weight off by"), rows, sections=sections)
    for handover in report.handovers:
        typer.echo(str(handover))
    if report.routing is not None:
        typer.echo(str(report.routing))
    typer.echo("all agree" if report.agrees else f"departs: {report.departure}")


def _shown(measure: "Measure") -> Text:
    share = f" ({measure.distance / measure.allowed:.0%})" if measure.allowed else ""
    text = f"{measure.distance:.1e}{share}"
    return Text(text, style="" if measure.agrees else "red")
