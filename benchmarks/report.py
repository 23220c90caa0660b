"""Report of a benchmark: the machine, medians and ratios, JSON and a plot."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import transformers


def machine() -> dict[str, Any]:
    """Return the machine and the versions that times depend on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads_per_rank": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "load_before": os.getloadavg()[0],
    }


def ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the rounds' ratios of two contenders: slowdowns of a round cancel."""
    return median(ours / theirs for ours, theirs in zip(seconds, others, strict=True))


def spread(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    first, _, third = quantiles(seconds, n=4, method="inclusive")
    return first, third


def fastest(seconds: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """Return the name with the smallest median."""
    return min(names, key=lambda name: median(seconds[name]))


def compared(seconds: Mapping[str, Sequence[float]], best_peer: str) -> dict[str, dict[str, Any]]:
    """Return median, quartiles and `ratio_to_best_peer` of each contender, which may have the last rounds only."""
    return {
        name: {
            "median": median(times),
            "quartiles": spread(times),
            "ratio_to_best_peer": ratio(times, seconds[best_peer][-len(times) :]),
        }
        for name, times in seconds.items()
    }


def timing_header(best_peer: str) -> list[str]:
    """Return the headings of `timing_cells`, without the contender's."""
    return ["contender", "median ms", "quartiles ms", f"to {best_peer}"]


def timing_cells(name: str, row: Mapping[str, Any]) -> list[str]:
    """Return the table cells of a contender's row of `compared`."""
    quartiles = " – ".join(f"{quartile * 1e3:.1f}" for quartile in row["quartiles"])
    return [name, f"{row['median'] * 1e3:.1f}", quartiles, f"{row['ratio_to_best_peer']:.3f}"]


def by_median(rows: Mapping[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return contenders and their rows of `compared`, fastest first."""
    return sorted(rows.items(), key=lambda item: item[1]["median"])


def conditions(machine: Mapping[str, Any], rounds: int) -> str:
    """Return the lines below a table of times."""
    return (
        f"{rounds} rounds; {machine['processor']}, {machine['cores']} cores, one thread per rank, torch "
        f"{machine['torch']}, matmul {machine['matmul_precision']}"
    )


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, note: str = "") -> None:
    """Print a table; the first column is a name, the others are numbers."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}")
    for name, *numbers in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *cells]))
    if note:
        print(note)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write all results to a JSON file."""
    path.write_text(json.dumps(content, indent=1) + "\n")


def plot(path: Path, seconds: Mapping[str, Sequence[float]], *, title: str, line: tuple[str, float]) -> None:
    """Draw every step's time as a point and each contender's quartiles as a box.

    Args:
        path: a file with an extension of matplotlib.
        seconds: the time of each step, by contender.
        line: a name and a time, drawn as a line.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(seconds)), layout="constrained")
    axes = figure.add_subplot()
    names = sorted(seconds, key=lambda name: median(seconds[name]), reverse=True)
    times = [[duration * 1e3 for duration in seconds[name]] for name in names]
    axes.boxplot(times, orientation="horizontal", tick_labels=names, showfliers=False, widths=0.6)
    for place, values in enumerate(times, start=1):
        axes.plot(values, [place] * len(values), ".", alpha=0.4)
    axes.axvline(line[1] * 1e3, linestyle="--", color="grey", label=line[0])
    axes.set_xlabel("milliseconds per step, slowest rank")
    axes.set_title(title)
    axes.legend(loc="best")
    figure.savefig(path)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()
