"""Parity of every model type that trains: three steps of SGD on real ranks, beside one process.

    python -m tests.coverage.parity [--part 3/16] [--only TYPE ...] [--failed] [--date 2026-11-27] [--count 40]

A type is tried under tp2·pp2 and under pp3, whose stages have unequal numbers of layers; under what it does not refuse
with data parallelism and ZeRO-1 otherwise. The order is drawn by a date, so a run that was ended has a fair sample, and
goes on. An outcome is "agrees", "refused", "fails" (an error), or "departs": a silent departure, of which there must be
none. One process for each type builds the small copy and derives stages and splits; the ranks are forked from it.
"""

import signal
import time
from math import isfinite
from typing import Any

from .records import run_types

CPU_SECONDS, WALL_SECONDS, MEMORY = 90, 400, 10 << 30
_LONGEST_TEXT = 240


def compared(model_type: str) -> dict[str, Any]:
    """Return the row of a model type: what it refuses, and the outcome under each layout."""
    from echelon.verify.model_choice import ModelChoice

    choice = ModelChoice(model_type=model_type)
    if errors := choice.errors():
        return {"parity": "refused", "why": _shortened(errors[0]), "layouts": []}
    _derive_once()
    layouts, refused = _chosen_layouts(choice)
    rows = [_under(choice, layout) for layout in layouts]
    worst = next(name for name in ("departs", "fails", "refused", "agrees") if _some(rows, name))
    why = next((row["why"] for row in rows if row["outcome"] == worst and "why" in row), "")
    return {"parity": worst, "why": why, "layouts": rows, "refused": refused}


def _some(rows: list[dict[str, Any]], outcome: str) -> bool:
    return any(row["outcome"] == outcome for row in rows)


def _chosen_layouts(choice: Any) -> tuple[list[Any], dict[str, str]]:
    """Return the layouts to try, and why others are refused, by layout."""
    from echelon.cli.verify import sharding_errors
    from echelon.verify.layout_choice import Layout

    refused: dict[str, str] = {}

    def is_possible(name: str, layout: Layout) -> bool:
        if errors := sharding_errors(choice, layout.config):
            refused[name] = _shortened(errors[-1])  # behind those of transformers' plan, that of the trial
        return not errors

    if is_possible("tp2·pp2", Layout(tp=2, pp=2)):
        layouts, has_stages = [Layout(tp=2, pp=2, max_norm=1.0)], True
    else:
        over_data = {"dp": 2, "zero": 1, "max_norm": 1.0}
        has_stages, has_split = is_possible("pp2", Layout(pp=2)), is_possible("tp2", Layout(tp=2))
        layouts = [Layout(tp=2, **over_data)] * has_split + [Layout(pp=2, **over_data)] * has_stages
        layouts = layouts or [Layout(**over_data)]
        if refused.keys() & {"pp2", "tp2"}:
            del refused["tp2·pp2"]
    if has_stages:
        is_uneven = is_possible("pp3", Layout(pp=3))
        refused.pop("pp3", None)
        layouts.append(Layout(pp=3 if is_uneven else 2, max_norm=1.0))
    return layouts, refused


def _under(choice: Any, layout: Any) -> dict[str, Any]:
    """Return the outcome of three steps under a layout, in a third of the time that this process has left."""
    from .ranks import Failure, run_forked

    started, left = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)[0] or WALL_SECONDS
    answers = run_forked(layout.world_size, _report, choice, layout, seconds=left // 3)
    row = {
        "layout": str(layout).removesuffix("·fp32"),
        "seconds": round(time.monotonic() - started, 1),
    }
    if isinstance(answers, Failure):
        return row | {
            "outcome": "refused" if answers.is_refusal else "fails",
            "why": _shortened(answers.why),
        }
    report = answers[0]
    off = {name: max(step.measure(name).distance for step in report.steps) for name in ("gradient", "loss")}
    row |= {name: float(f"{distance:.1e}") for name, distance in off.items() if isfinite(distance)}
    if report.agrees:
        return row | {"outcome": "agrees"}
    return row | {"outcome": "departs", "why": report.departure}


def _report(choice: Any, layout: Any) -> Any:
    """Compare three steps with one process. Collective over the world."""
    from echelon.verify.layout_choice import Training
    from echelon.verify.parity import parity

    return parity(choice, layout, training=Training(optimizer="sgd"))


def _derive_once() -> None:
    """Let all policies of a model class in this process, and in ranks forked from it, share what is derived.

    Every rank of a real run derives the same for itself, from copies of equal seeds.
    """
    from echelon.shardformer.derived_policy import DerivedPolicy

    kept: dict[tuple[type, str], tuple[Any, bool]] = {}

    def shared(name: str, derive: Any) -> property:
        def value(policy: Any) -> Any:
            key = (type(policy._full_model), name)
            if key not in kept:
                kept[key] = (derive(policy), policy._is_proposed)
            result, is_proposed = kept[key]
            policy._is_proposed = policy._is_proposed or is_proposed
            return result

        return property(value)

    for name in ("_copy", "_table_for_tensor_axis", "_derived_stages"):
        setattr(DerivedPolicy, name, shared(name, vars(DerivedPolicy)[name].func))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"


if __name__ == "__main__":
    run_types("parity", compared, __doc__, cpu_seconds=CPU_SECONDS, wall_seconds=WALL_SECONDS, memory=MEMORY)
