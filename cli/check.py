"""What `echelon verify` does: the parity check on local processes, and its report as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from torch import nn

from ..shardformer.sequence.config import WHOLE, SequenceParallelism
from ..shardformer.shard_former import policy_for
from ..shardformer.sharder import split_errors
from ..shardformer.weight_sharding import plan_weight_sharding
from ..verify.compare import Measure
from ..verify.layout import Layout
from ..verify.models import ModelChoice
from ..verify.parity import Report, parity
from ..verify.resume import Part, Relay, ResumeReport
from .console import table_console
from .local import run_on_processes
from .relay import run_relay


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


def report_of(
    choice: ModelChoice, parts: Sequence[Part], *, seed: int, timeout_seconds: float
) -> Report | str:
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
        plan_weight_sharding(model, found)
    if tp > 1 or num_stages > 1 or sequence.mode is not None:
        found += _policy_faults(model, tp=tp, num_stages=num_stages, sp=sp, sequence=sequence)
    return found


def _policy_faults(
    model: nn.Module, *, tp: int, num_stages: int, sp: int, sequence: SequenceParallelism
) -> list[str]:
    try:
        policy = policy_for(model, sequences_alone=tp == num_stages == 1)
    except ValueError as error:
        return [str(error)]
    return split_errors(model, policy, tp_size=tp, num_stages=num_stages, sp_size=sp, sequence=sequence)


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
