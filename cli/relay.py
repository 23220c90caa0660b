"""`echelon verify --then`: a run that goes on under further layouts, each in processes of its own."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from ..verify.resume import Relay, ResumeReport, judge, run_part
from .local import run_on_processes

# What a part has like the one before it, where its words do not say otherwise; all else is as `verify` has it.
KEPT = ("precision", "microbatches", "steps")
# What one process that never stops has once.
OF_THE_RUN = ("model", "head", "tied", "layers", "max_norm", "seed", "timeout", "then")


def further_options(
    options: typer.Typer, texts: Sequence[str], first: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The options of each further part, by the names of `verify`'s arguments, and all that is wrong with the texts.

    Args:
        options: whose only command is `verify`, which leaves with status 2 where a text has other words than its own.
        texts: what was given to each `--then`.
        first: the options of the first part.
    """
    command = typer.main.get_command(options)
    found: list[dict[str, Any]] = []
    faults: list[str] = []
    before = first
    for text in texts:
        try:
            words = shlex.split(text)
        except ValueError as error:
            faults.append(f"--then {text!r}: {error}")
            continue
        context = command.make_context("echelon verify --then", words)
        given = {
            name
            for name in context.params
            if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"
        }
        faults += [
            f"--then {text!r}: --{name.replace('_', '-')} is of the whole run: give it before --then"
            for name in OF_THE_RUN
            if name in given
        ]
        kept = {name: before[name] for name in KEPT if name not in given}
        before = {**context.params, **{name: first[name] for name in OF_THE_RUN if name in first}, **kept}
        found.append(before)
    return found, faults


def run_relay(relay: Relay, *, timeout_seconds: float) -> ResumeReport | str:
    """The report on a run in parts, on local processes that are new for each part; or how one of them failed."""
    answers: list[ResumeReport | None] | str = []
    with TemporaryDirectory(prefix="echelon-verify-") as folder:
        for number, part in enumerate(relay.parts):
            answers = run_on_processes(
                _run,
                (relay, number, Path(folder)),
                num_processes=part.layout.world_size,
                timeout_seconds=timeout_seconds,
            )
            if isinstance(answers, str):
                return f"part {number + 1}, under {part.layout}:\n{answers}"
    report = answers[0]
    assert isinstance(report, ResumeReport)
    return report


def _run(rank: int, relay: Relay, number: int, folder: Path) -> ResumeReport | None:
    run_part(relay, number, folder)
    is_last = number + 1 == len(relay.parts)
    return judge(relay, folder) if is_last and rank == 0 else None
