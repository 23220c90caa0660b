"""`echelon verify`: the parity check on local processes, as a table. Going on from a checkpoint is relay.py."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import nn

from ..shardformer.sequence.config import WHOLE, SequenceParallelism
from ..shardformer.shard_former import policy_for
from ..shardformer.weight_split import weight_split_or_faults
from ..verify.compare import Measure
from ..verify.layout import Layout
from ..verify.models import ModelChoice
from ..verify.parity import Report, parity
from ..verify.resume import Part, Relay, ResumeReport
from .console import refuse, table_console
from .local import run_on_processes
from .relay import further_options, run_relay


def verify(
    model: Annotated[str, typer.Option(help="Model type of transformers: llama, bert, t5, ...")] = "llama",
    head: Annotated[
        str | None, typer.Option(help="causal, classification, seq2seq, ...; the usual one of the model")
    ] = None,
    tied: Annotated[bool, typer.Option(help="Share the embedding's weight with the head.")] = False,
    layers: Annotated[int, typer.Option(help="Layers of the small model; of encoder and decoder each.")] = 4,
    tp: Annotated[int, typer.Option(help="Ranks over which layers are split.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Replicas with different batches.")] = 1,
    sp: Annotated[
        int, typer.Option(help="Ranks over which sequences are spread: all_to_all, ring_attn.")
    ] = 1,
    sp_mode: Annotated[
        str | None,
        typer.Option(help="split_gather or ring (over --tp), all_to_all or ring_attn (over --sp)."),
    ] = None,
    wp: Annotated[int, typer.Option(help="Ranks that share out the weights of linear layers.")] = 1,
    zero: Annotated[int, typer.Option(help="ZeRO stage: 0, 1 or 2.")] = 0,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved, zbh1 or zbv.")] = "1f1b",
    chunks: Annotated[int, typer.Option(help="Pipeline stages per rank: interleaved and gpipe.")] = 1,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a batch, of unequal size.")] = 3,
    recompute: Annotated[float, typer.Option(help="Share of each stage's layers computed again.")] = 0.0,
    max_norm: Annotated[float, typer.Option(help="Clip gradients to this norm; 0 does not.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds until a process that hangs is given up.")] = 300.0,
    then: Annotated[
        list[str] | None,
        typer.Option(
            help='Save, and go on in new processes under this layout, "--pp 2 --zero 1" for example; any number of '
            "times. Precision, microbatches and steps stay where they are not given."
        ),
    ] = None,
) -> None:
    """Train a small model under a layout and in one process, and compare every step.

    Starts tp * pp * dp * sp local processes. Exit status: 0 all agree, 1 something departs (the first is named) or
    a process failed, 2 bad arguments.
    """
    choice = ModelChoice(model_type=model, head=head, tied=tied, num_layers=layers)
    first = {
        **dict(tp=tp, pp=pp, dp=dp, sp=sp, sp_mode=sp_mode, wp=wp, zero=zero, precision=precision),
        **dict(schedule=schedule, chunks=chunks, microbatches=microbatches, max_norm=max_norm),
        **dict(recompute=recompute, steps=steps),
    }
    options = typer.Typer(add_completion=False)
    options.command()(verify)
    further, faults = further_options(options, then or (), first)
    parts = [Part(layout=layout_of(each), num_steps=each["steps"]) for each in (first, *further)]
    refuse("verify", faults + part_faults(choice, parts))
    report = _report(choice, parts, seed=seed, timeout_seconds=timeout)
    if isinstance(report, str):
        typer.echo(report, err=True)
        raise typer.Exit(1)
    layouts = ", then ".join(str(part.layout) for part in parts)
    comma = "," if further else ""
    show(report, title=f"{model} ({choice.described_head}) under {layouts}{comma} beside one process")
    raise typer.Exit(0 if report.agrees else 1)


def layout_of(options: Mapping[str, Any]) -> Layout:
    """The layout that options ask for, by the names of `verify`'s arguments; others are left out."""
    sequence = options["sp_mode"] or ("all_to_all" if options["sp"] > 1 else None)
    same = ("tp", "pp", "dp", "sp", "wp", "zero", "precision", "schedule", "chunks", "microbatches")
    return Layout(
        **{name: options[name] for name in (*same, "max_norm", "recompute")},
        sequence=sequence,
    )


def part_faults(choice: ModelChoice, parts: Sequence[Part]) -> list[str]:
    """All that is wrong with a model and the parts of its run; what is wrong with the model once."""
    first, *further = parts
    faults = argument_faults(choice, first.layout, first.num_steps)
    if choice.faults():
        return faults
    return faults + [
        f"--then number {number}: {fault}"
        for number, part in enumerate(further, start=1)
        for fault in argument_faults(choice, part.layout, part.num_steps)
    ]


def _report(choice: ModelChoice, parts: Sequence[Part], *, seed: int, timeout_seconds: float) -> Report | str:
    """What the check found, or how a process failed."""
    if len(parts) > 1:
        relay = Relay(choice=choice, parts=tuple(parts), seed=seed)
        return run_relay(relay, timeout_seconds=timeout_seconds)
    only = parts[0]
    return run_local(
        choice, only.layout, num_steps=only.num_steps, seed=seed, timeout_seconds=timeout_seconds
    )


def argument_faults(choice: ModelChoice, layout: Layout, num_steps: int) -> list[str]:
    """All that is wrong with what was asked for, found without starting a process."""
    layout_faults = layout.faults()
    faults = [*layout_faults, *([] if num_steps >= 1 else [f"steps={num_steps} must be at least 1"])]
    model_faults = choice.faults()
    if layout_faults or model_faults:
        return faults + model_faults
    return faults + split_faults(
        choice,
        tp=layout.tp,
        num_stages=layout.num_stages,
        sp=layout.sp,
        wp=layout.wp,
        sequence=layout.sequence_settings,
    )


def split_faults(
    choice: ModelChoice,
    *,
    tp: int = 1,
    num_stages: int = 1,
    sp: int = 1,
    wp: int = 1,
    sequence: SequenceParallelism = WHOLE,
) -> list[str]:
    """Why this model cannot be split this way."""
    if tp == num_stages == wp == 1 and sequence.mode is None:
        return []
    model = choice.build_on_meta()
    found = list[str]()
    if wp > 1:
        weight_split_or_faults(model, found)
    if tp > 1 or num_stages > 1 or sequence.mode is not None:
        found += _policy_faults(model, tp=tp, num_stages=num_stages, sp=sp, sequence=sequence)
    return found


def _policy_faults(
    model: nn.Module, *, tp: int, num_stages: int, sp: int, sequence: SequenceParallelism
) -> list[str]:
    try:
        policy = policy_for(model)
    except ValueError as error:
        return [str(error)]
    policy.set_model(model)
    found = policy.faults(tp_size=tp, num_stages=num_stages)
    return found or policy.sequence_faults(sequence, tp_size=tp, sp_size=sp)


def run_local(
    choice: ModelChoice, layout: Layout, *, num_steps: int, seed: int, timeout_seconds: float
) -> Report | str:
    """The report of a parity check on local processes, or how a process failed."""
    reports = run_on_processes(
        _check,
        (choice, layout, num_steps, seed),
        num_processes=layout.world_size,
        timeout_seconds=timeout_seconds,
    )
    return reports if isinstance(reports, str) else reports[0]


def _check(rank: int, choice: ModelChoice, layout: Layout, num_steps: int, seed: int) -> Report:
    return parity(choice, layout, num_steps=num_steps, seed=seed)


def show(report: Report, *, title: str) -> None:
    """Print a report as a table, a row for each step: distances, each with its share of what is allowed."""
    handovers = report.handovers if isinstance(report, ResumeReport) else ()
    table = Table(title=title, title_justify="left")
    for heading in ("step", "loss", "reference", "loss off by", "norm off by"):
        table.add_column(heading, justify="right")
    table.add_column("worst gradient off by", overflow="fold")
    table.add_column("worst weight off by", overflow="fold")
    for step in report.steps:
        loss, norm, gradient, weight = (
            step.measure(quantity) for quantity in ("loss", "norm", "gradient", "weight")
        )
        table.add_row(
            str(step.step),
            f"{step.loss:.6f}",
            f"{step.reference_loss:.6f}",
            _shown(loss),
            _shown(norm),
            f"{_shown(gradient)} {gradient.name}",
            f"{_shown(weight)} {weight.name}",
            end_section=step.step in {handover.step for handover in handovers},
        )
    console = table_console()
    console.print(table)
    for handover in handovers:
        console.print(str(handover), highlight=False, soft_wrap=True)
    console.print(
        "all agree" if report.agrees else f"departs: {report.departure}", highlight=False, soft_wrap=True
    )


def _shown(measure: Measure) -> str:
    share = f" ({measure.distance / measure.allowed:.0%})" if measure.allowed else ""
    text = f"{measure.distance:.1e}{share}"
    return text if measure.agrees else f"[red]{text}[/red]"
