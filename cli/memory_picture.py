"""Picture of the memory of pipeline ranks, by kind."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..pipeline.timeline_drawing import require_matplotlib
from .curve_picture import SETTINGS

# Distinct in the three kinds of colour blindness, and in shades of grey.
_COLOURS = ("#1f4db8", "#7fa3e8", "#914799", "#c9a0cf", "#db541f")
_GIB = 2**30


def draw_memory(path: Path, ranks: Sequence[Mapping[str, int]], *, limit: float, title: str) -> None:
    """Draw a bar for every pipeline rank, of its kinds of memory.

    Args:
        path: a file with an extension of matplotlib.
        ranks: bytes by kind.
        limit: GiB that are there, drawn as a line.
        title: above the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        figure = Figure(figsize=(7.2, 1.2 + 0.24 * len(ranks)), layout="constrained")
        axes = figure.subplots()
        starts = [0.0] * len(ranks)
        for kind, colour in zip(ranks[0], _COLOURS, strict=True):
            widths = [memory[kind] / _GIB for memory in ranks]
            axes.barh(range(len(ranks)), widths, left=starts, color=colour, label=kind, height=0.72)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.axvline(limit, color="#666666", linestyle="--", linewidth=0.9)
        axes.text(limit, -0.75, f" {limit:g} GiB", color="#666666", va="bottom", ha="left")
        axes.set(xlabel="GiB", ylabel="pipeline rank", yticks=range(len(ranks)))
        axes.set_xlim(0, 1.12 * max(limit, *starts))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title, loc="left", fontsize=9)
        figure.legend(loc="outside lower center", ncols=len(_COLOURS), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
