"""Plots of sequence.py: bytes and times by length, and the longest sequence by ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "echelon", "font.size": 8.5}
_MARKS = "osD^vP*X"


def draw(
    path: Path,
    runs: Mapping[int, Mapping[str, Sequence[Mapping[str, float]]]],
    longest: Mapping[str, Mapping[int, float]],
) -> None:
    """Draw the results: a row for each number of ranks, and one for the longest sequences, if any.

    Args:
        path: a file with an extension of matplotlib.
        runs: by number of ranks and contender, the rows of each length: "length", "kept" bytes and "median" seconds.
        longest: by name, tokens by number of ranks; "simulated" is drawn as a line, others as points.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from error
    num_rows = len(runs) + bool(longest)
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(9.5, 3.4 * num_rows), layout="constrained")
        grid = figure.add_gridspec(num_rows, 2)
        for row, (num_ranks, contenders) in enumerate(runs.items()):
            for column, (value, scale, unit) in enumerate(
                (("kept", 2**-20, "MiB kept for backward"), ("median", 1.0, "s"))
            ):
                axes = figure.add_subplot(grid[row, column])
                _draw_lines(axes, contenders, value, scale)
                axes.set(xlabel="tokens", ylabel=unit, title=f"{num_ranks} ranks", xscale="log", yscale="log")
                axes.set_xscale("log", base=2)
            axes.legend(frameon=False, fontsize=6.5)
        if longest:
            _draw_longest(figure.add_subplot(grid[-1, :]), longest)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_lines(
    axes: Any, contenders: Mapping[str, Sequence[Mapping[str, float]]], value: str, scale: float
) -> None:
    for number, (name, rows) in enumerate(contenders.items()):
        axes.plot(
            [row["length"] for row in rows],
            [row[value] * scale for row in rows],
            marker=_MARKS[number % len(_MARKS)],
            markersize=3.5,
            linewidth=1,
            linestyle="-" if name.startswith("echelon") else "--",
            label=name,
        )
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_longest(axes: Any, longest: Mapping[str, Mapping[int, float]]) -> None:
    for name, by_ranks in longest.items():
        look = "-" if name == "simulated" else "o"
        axes.plot(list(by_ranks), list(by_ranks.values()), look, label=name)
    axes.set(xlabel="ranks", ylabel="tokens", title="longest sequence, ring attention")
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.legend(frameon=False)
