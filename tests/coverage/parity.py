"""Parity of every model type that trains: three steps of SGD on real ranks, beside one process.

    python -m tests.coverage.parity [--part 3/16] [--only TYPE ...] [--failed] [--date 2026-11-27] [--count 40]
    python -m tests.coverage.parity --layouts five|sequences|heads [...]

A type is tried under tp2·pp2 and under pp3, whose stages have unequal numbers of layers; under what it does not refuse
with data parallelism and ZeRO-1 otherwise. Or under the layouts of `LISTED`: five of three axes for the types that
ColossalAI has policies for and 40 drawn by the date; sequence parallelism and ZeRO-2 for all, these first. Or each
other class of a type under tp2·pp2. The order is drawn by a date, so a run that was ended has a fair sample, and goes
on. An outcome is "agrees", "refused", "fails" (an error), or "departs": a silent departure, of which there must be
none. One process for each type builds the small copy and derives stages and splits; the ranks are forked from it.
"""

import signal
import time
from functools import partial
from math import isfinite
from typing import Any

from echelon.verify.layout_choice import Layout, Training
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import Report, parity

from .ranks import Failure, run_forked
from .records import run_options, run_types, trained_types

CPU_SECONDS, WALL_SECONDS, MEMORY = 90, 400, 10 << 30
# The record of each choice of layouts, which `--layouts` names.
RECORDS = {"two": "parity", "five": "five", "sequences": "sequences", "heads": "heads"}
_clipped = partial(Layout, max_norm=1.0)
# Choices of layouts that are the same for all types.
LISTED = {
    "five": (
        _clipped(tp=2),
        _clipped(pp=2),
        _clipped(pp=3),
        _clipped(tp=2, pp=2),
        _clipped(tp=2, dp=2, zero=1),
    ),
    "sequences": (
        *(_clipped(tp=2, sequence=mode) for mode in ("split_gather", "ring")),
        *(_clipped(sp=2, sequence=mode) for mode in ("all_to_all", "ring_attn")),
        _clipped(dp=2, zero=2),
    ),
}
# The types of ColossalAI's policies. That of DeepSeek-MoE, whose code is remote, is for DeepSeek-V2 here.
SEEDS = (
    *("bert", "blip-2", "bloom", "chatglm", "cohere", "deepseek_v2", "deepseek_v3", "falcon", "gpt2", "gptj"),
    *("llama", "mistral", "mixtral", "opt", "qwen2", "qwen3", "sam", "t5", "vit", "whisper"),
)
DRAWN, NUM_DRAWN = "2026-11-28", 40  # by this date, so many others
# Causes of failures and departures that the ranks cannot report, for the page.
CAUSES = {
    "owlv2": "rounding in float32 of a small copy whose loss falls from 723 to 50 in a step; in float64 the losses "
    "and gradients of these steps, clipped alike, agree within 1e-9 under this mode",
    "fun_asr_nano": "rounding in float32: the steps are the same at stage 0, and in float64 (but for clipping) they "
    "agree, with gradients 3 to 28 times nearer",
}
_LONGEST_TEXT = 240


def ordered_types(date: str = DRAWN) -> list[str]:
    """Return all types that train: the seeds, others in an order drawn by a date, and the convolutional ones."""
    others = [name for name in trained_types(date) if name not in SEEDS]
    return [*SEEDS, *others, *trained_types(convolutional=True)]


def drawn_types(date: str = DRAWN) -> list[str]:
    """Return the types for five layouts: the seeds, and others drawn by a date."""
    return ordered_types(date)[: len(SEEDS) + NUM_DRAWN]


def other_heads(date: str = DRAWN) -> list[str]:
    """Return "type/head" for each class but the usual one, of all types but those whose heads tests compare."""
    from echelon.derive.tasks import tasks_of

    names = []
    for choice in (ModelChoice(model_type=name) for name in ordered_types(date)):
        if choice.is_generic:
            head_of = {kind: task.lower() for task, kind in reversed(tasks_of(choice.model_type).items())}
            others = [head for head in head_of.values() if head != choice.head_name]
            names += [f"{choice.model_type}/{head}" for head in reversed(others)]
    return names


def compared(name: str, *, layouts: str = "two") -> dict[str, Any]:
    """Return the row of a model type: what it refuses, and the outcome under each of the layouts.

    Args:
        name: a type of transformers, or "type/head".
        layouts: a key of `RECORDS`.
    """
    model_type, _, head = name.partition("/")
    choice = ModelChoice(model_type=model_type, head=head or None)
    if errors := choice.errors():
        return {"parity": "refused", "why": _shortened(errors[0]), "layouts": []}
    _derive_once()
    choose = {"two": _two_layouts, "heads": _crossed_layouts}.get(layouts, partial(_listed, layouts=layouts))
    possible, refused = choose(choice)
    rows = [_under(choice, layout) for layout in possible]
    # A trial that lacked memory is no refusal.
    out_of_memory = {name: why for name, why in refused.items() if "can't allocate memory" in why}
    rows += [{"layout": name, "outcome": "fails", "why": why} for name, why in out_of_memory.items()]
    refused = {name: why for name, why in refused.items() if name not in out_of_memory}
    outcomes = {row["outcome"] for row in rows}
    worst = next((name for name in ("departs", "fails", "refused", "agrees") if name in outcomes), "refused")
    why = next((row["why"] for row in rows if row["outcome"] == worst and "why" in row), "")
    return {"parity": worst, "why": why, "layouts": rows, "refused": refused}


def _refusal(choice: ModelChoice, layout: Layout) -> str | None:
    """Return why a layout is refused; None if it is not."""
    from echelon.cli.verify import sharding_errors

    errors = sharding_errors(choice, layout.config)
    return _shortened(errors[-1]) if errors else None  # behind those of transformers' plan, that of the trial


def _listed(choice: ModelChoice, *, layouts: str) -> tuple[list[Layout], dict[str, str]]:
    """Return the layouts of a choice in `LISTED` to try, and why others are refused, by layout."""
    by_name = listed_layouts(layouts)
    refusals = {name: _refusal(choice, layout) for name, layout in by_name.items()}
    possible = [by_name[name] for name, why in refusals.items() if why is None]
    return possible, {name: why for name, why in refusals.items() if why is not None}


def listed_layouts(layouts: str) -> dict[str, Layout]:
    """Return the layouts of a choice in `LISTED`, by name."""
    return {_name(layout): layout for layout in LISTED[layouts]}


def _two_layouts(choice: ModelChoice) -> tuple[list[Layout], dict[str, str]]:
    """Return `_crossed_layouts`, and with stages also a pipeline alone: of three stages if they are not refused."""
    layouts, refused = _crossed_layouts(choice)
    if any(layout.pp > 1 for layout in layouts):
        uneven = Layout(pp=3, max_norm=1.0)
        layouts.append(Layout(pp=2, max_norm=1.0) if _refusal(choice, uneven) else uneven)
    return layouts, refused


def _crossed_layouts(choice: ModelChoice) -> tuple[list[Layout], dict[str, str]]:
    """Return tp2·pp2, or in its place each axis that is not refused with dp2·zero1; and why others are, by layout."""
    crossed = Layout(tp=2, pp=2, max_norm=1.0)
    if not (why := _refusal(choice, crossed)):
        return [crossed], {}
    over_data = {"dp": 2, "zero": 1, "max_norm": 1.0}
    axes = {"tp2": {"tp": 2}, "pp2": {"pp": 2}}
    refusals = {name: _refusal(choice, Layout(**sizes)) for name, sizes in axes.items()}
    possible = [Layout(**axes[name], **over_data) for name, refusal in refusals.items() if not refusal]
    refused = {name: refusal for name, refusal in refusals.items() if refusal}
    return possible or [Layout(**over_data)], refused or {"tp2·pp2": why}


def _under(choice: ModelChoice, layout: Layout) -> dict[str, Any]:
    """Return the outcome of three steps under a layout, in a third of the time that this process has left."""
    started, left = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)[0] or WALL_SECONDS
    answers = run_forked(layout.world_size, _report, choice, layout, seconds=left // 3)
    row = {"layout": _name(layout), "seconds": round(time.monotonic() - started, 1)}
    if isinstance(answers, Failure):
        return row | {"outcome": "refused" if answers.is_refusal else "fails", "why": _shortened(answers.why)}
    report = answers[0]
    off = {name: max(step.measure(name).distance for step in report.steps) for name in ("gradient", "loss")}
    row |= {name: float(f"{distance:.1e}") for name, distance in off.items() if isfinite(distance)}
    if report.agrees:
        return row | {"outcome": "agrees"}
    return row | {"outcome": "departs", "why": report.departure}


def _name(layout: Layout) -> str:
    return str(layout).removesuffix("·fp32")


def _report(choice: ModelChoice, layout: Layout) -> Report:
    """Compare three steps with one process. Collective over the world."""
    return parity(choice, layout, training=Training(optimizer="sgd"))


def _derive_once() -> None:
    """Let all policies of a model class in this process, and in ranks forked from it, share what is derived and tried.

    Every rank of a real run derives the same for itself, from copies of equal seeds.
    """
    from echelon.shardformer import split_trial
    from echelon.shardformer.derived_policy import DerivedPolicy

    tried, errors = split_trial._try_mode, dict[tuple[type, str], tuple[str | None, bool]]()

    def tried_once(model: Any, policy: Any, mode: str) -> tuple[str | None, bool]:
        key = (type(model), mode)
        if key not in errors:
            errors[key] = tried(model, policy, mode)
        return errors[key]

    split_trial._try_mode = tried_once
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
    from ..models.chatglm import register_chatglm

    options = run_options(__doc__, layouts=tuple(RECORDS))
    register_chatglm()
    choice, date = options.layouts, options.date or DRAWN
    types = {"two": None, "five": drawn_types, "sequences": ordered_types, "heads": other_heads}[choice]
    run_types(
        RECORDS[choice],
        partial(compared, layouts=choice),
        options,
        types=types and types(date),
        cpu_seconds=CPU_SECONDS,
        wall_seconds=WALL_SECONDS,
        memory=MEMORY,
    )
