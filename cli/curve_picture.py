"""Plot of loss curves that should be equal, and of their differences."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from ..pipeline.timeline_drawing import require_matplotlib

# The colours of the pipeline's pictures, which stay distinct in the three kinds of colour blindness.
_COLOURS = ("#1f4db8", "#db541f", "#914799")
_DASHES = ("-", "--", ":")
# Text stays text, and equal curves give equal files.
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "echelon", "font.size": 8.5}


def draw_curves(
    path: Path,
    reference: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    *,
    level: tuple[str, float] | None = None,
    unit: str = "loss",
) -> None:
    """Draw the losses by step, and below them their relative differences from the reference.

    Args:
        path: a file with an extension of matplotlib.
        reference: drawn as a broad line below the others.
        curves: losses by name.
        level: a name and a loss, drawn as a horizontal line.
        unit: label of the losses.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    steps = range(1, len(reference) + 1)
    with rc_context(SETTINGS):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        upper.plot(steps, reference, color="#cccccc", linewidth=5, label="plain torch, one process")
        if level is not None:
            upper.axhline(level[1], linestyle="-.", linewidth=0.8, color="#666666", label=level[0])
        for (name, losses), colour, dash in zip(
            curves.items(), cycle(_COLOURS), cycle(_DASHES), strict=False
        ):
            differences = [abs(a - b) / (abs(b) or 1.0) for a, b in zip(losses, reference, strict=True)]
            label = f"{name}, at most {max(differences):.0e} off"
            upper.plot(steps, losses, dash, color=colour, linewidth=1.2, label=label)
            lower.plot(steps, differences, ".", color=colour, markersize=2.5)
        upper.set_ylabel(unit)
        upper.legend(frameon=False)
        lower.set(xlabel="step", ylabel="relative difference\n(0 is not shown)", yscale="log")
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, linewidth=0.5)
        lower.set_xlim(0, len(reference) + 1)
        lower.set_ylim(bottom=1e-8)  # below the rounding of float32
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
