"""A benchmark in which all contenders train the same model: checks, rounds and tables."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import report
import torch.distributed as dist
from arguments import settings_of
from contender import Contender, agreement, require_equal_training
from rounds import time_rounds
from stepped import OneProcess
from workload import Workload

from echelon.cluster.device import default_device

C = TypeVar("C", bound=Contender)


def compare(
    contenders: Sequence[C],
    workload: Workload,
    arguments: argparse.Namespace,
    *,
    main: str,
    layout: str,
    measure_more: Callable[[Sequence[C]], dict[str, Any]] = lambda contenders: {},
    show_more: Callable[[Mapping[str, Any]], None] = lambda results: None,
) -> None:
    """Check the contenders against one process, time them, and report the results. Collective over the world.

    Args:
        contenders: Echelon's own, and others.
        workload: the computation.
        arguments: the arguments of `common_parser`.
        main: the contender of the last line.
        layout: the axis of the ranks, for the title.
        measure_more: further measurements after the rounds, on every rank.
        show_more: shows their results, on one rank.
    """
    device = default_device()
    results: dict[str, Any] = {"machine": report.machine(), "settings": settings_of(arguments)}
    results["agreement"] = agreement(contenders, OneProcess(workload, device, works=True))
    results["seconds"] = time_rounds(
        contenders, rounds=arguments.rounds, warmup=arguments.warmup, device=device
    )
    results |= measure_more(contenders)
    results["loss_afterwards"] = require_equal_training(contenders)
    results["summary"] = summary(results["seconds"], main)
    if dist.get_rank() == 0:
        show_results(results, f"{workload}, {layout}", arguments, show_more)
    dist.destroy_process_group()


def summary(seconds: Mapping[str, Sequence[float]], main: str) -> dict[str, Any]:
    """Return the contenders' medians and ratios, and the number of the last line."""
    best_peer = report.fastest(seconds, [name for name in seconds if not name.startswith("echelon")])
    rows = report.compared(seconds, best_peer)
    return {
        "contenders": rows,
        "best_peer": best_peer,
        "ratio_to_best_peer": rows[main]["ratio_to_best_peer"],
    }


def show_results(
    results: Mapping[str, Any],
    title: str,
    arguments: argparse.Namespace,
    show_more: Callable[[Mapping[str, Any]], None],
) -> None:
    """Print the tables and the last line; write the requested files."""
    summarized = results["summary"]
    rows = [report.timing_cells(name, row) for name, row in report.by_median(summarized["contenders"])]
    note = report.conditions(results["machine"], arguments.rounds)
    report.show(title, report.timing_header(summarized["best_peer"]), rows, note=note)
    show_more(results)
    if arguments.json is not None:
        report.write_json(arguments.json, results)
    if arguments.plot is not None:
        line = (
            f"median of {summarized['best_peer']}",
            summarized["contenders"][summarized["best_peer"]]["median"],
        )
        report.plot(arguments.plot, results["seconds"], title=title, line=line)
    print(f"ratio_to_best_peer={summarized['ratio_to_best_peer']:.3f}")
