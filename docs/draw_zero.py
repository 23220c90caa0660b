r"""Draws docs/images/zero.svg: the memory of each rank in forward, backward and step, by ZeRO stage.

python docs/draw_zero.py docs/images/zero.svg
"""

import sys
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

NUM_RANKS = 4
PHASES = ("forward", "backward", "step")
# Bytes per parameter in 16 bits with Adam, and the colours of the pipeline's pictures.
KINDS = {"parameters": 2, "gradients": 4, "masters": 4, "optimizer states": 8}
COLOURS = ("#1f4db8", "#db541f", "#ebba4a", "#914799")
# Text remains text, and equal pictures give equal files.
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "echelon", "hatch.linewidth": 0.5}
_TEXT, _SMALL = 8.5, 7.0
_FAINT = "#666666"
_ROW, _CELL = 0.8, 19.0  # the height of a rank, the width of a phase; a byte has width 1


class Hold(Enum):
    """Part of a kind of memory that a rank has."""

    NOTHING = "nothing"
    WHOLE = "held"
    OWN = "of this rank's samples alone"
    PASSING = "for a bucket or a layer at a time"


# Memory of one kind on a rank: (outside its own slice, in it).
Place = tuple[Hold, Hold]
WHOLE: Place = (Hold.WHOLE, Hold.WHOLE)
SLICE: Place = (Hold.NOTHING, Hold.WHOLE)
OWN: Place = (Hold.OWN, Hold.OWN)
PASSING: Place = (Hold.PASSING, Hold.WHOLE)
LENT: Place = (Hold.PASSING, Hold.PASSING)
REDUCED: Place = (Hold.OWN, Hold.WHOLE)
NOTHING: Place = (Hold.NOTHING, Hold.NOTHING)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The row of a ZeRO stage.

    Args:
        name: text at its left.
        places: memory of each of KINDS, by phase.
        traffic: communication, by phase.
        formula: bytes per rank, without buckets and layers in flight.
    """

    name: str
    places: tuple[tuple[Place, ...], ...]
    traffic: tuple[str, str, str]
    formula: str

    @property
    def bytes_held(self) -> float:
        """Return the bytes per parameter on each of NUM_RANKS ranks in the step, without temporary memory."""
        widths = zip(KINDS.values(), self.places[-1], strict=True)
        return sum(width * share_held(place) for width, place in widths)


def share_held(place: Place) -> float:
    """Return the fraction of a kind that a rank stores permanently."""
    outside, inside = (float(hold in (Hold.WHOLE, Hold.OWN)) for hold in place)
    return (inside + (NUM_RANKS - 1) * outside) / NUM_RANKS


STAGES = (
    Stage(
        name="stage 0",
        places=((WHOLE, NOTHING, WHOLE, WHOLE), (WHOLE, OWN, WHOLE, WHOLE), (WHOLE, WHOLE, WHOLE, WHOLE)),
        traffic=("", "all-reduce of gradients", ""),
        formula="18 Ψ",
    ),
    Stage(
        name="stage 1",
        places=((WHOLE, NOTHING, SLICE, SLICE), (WHOLE, OWN, SLICE, SLICE), (WHOLE, REDUCED, SLICE, SLICE)),
        traffic=("", "reduce-scatter of gradients", "all-gather of parameters"),
        formula="6 Ψ + 12 Ψ/d",
    ),
    Stage(
        name="stage 2",
        places=((WHOLE, SLICE, SLICE, SLICE), (WHOLE, PASSING, SLICE, SLICE), (WHOLE, SLICE, SLICE, SLICE)),
        traffic=("", "reduce-scatter in every backward", "all-gather of parameters"),
        formula="2 Ψ + 16 Ψ/d",
    ),
    Stage(
        name="FSDP",
        places=((LENT, NOTHING, SLICE, SLICE), (LENT, PASSING, SLICE, SLICE), (NOTHING, SLICE, SLICE, SLICE)),
        traffic=("all-gather by layer", "all-gather, reduce-scatter by layer", ""),
        formula="16 Ψ/d",
    ),
)


def draw() -> Figure:
    """Draw all stages, below each other."""
    figure = Figure(figsize=(7.4, 4.9))
    figure.subplots_adjust(left=0.005, right=0.995, top=0.995, bottom=0.005)
    axes = figure.add_subplot(xlim=(-13, 3 * _CELL), ylim=(4 * 5.2 + 2.2, -1.8))
    axes.set_axis_off()
    for number, phase in enumerate(PHASES):
        axes.text(number * _CELL + 9, -1, phase, fontsize=_TEXT + 0.5, weight="bold", ha="center")
    for number, stage in enumerate(STAGES):
        draw_stage(axes, stage, top=number * 5.2)
    handles = [Patch(facecolor=colour, label=kind) for kind, colour in zip(KINDS, COLOURS, strict=True)]
    handles += [
        Patch(facecolor="white", edgecolor=_FAINT, hatch="/////", linewidth=0.5, label=Hold.OWN.value),
        Patch(facecolor="#dddddd", label=Hold.PASSING.value),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=_SMALL + 0.5)
    return figure


def draw_stage(axes: Axes, stage: Stage, *, top: float) -> None:
    """Draw a row: the name and the bytes, then each phase with its communication."""
    axes.text(-12.6, top + 0.9, stage.name, fontsize=_TEXT + 0.5, weight="bold", va="center")
    axes.text(-12.6, top + 1.9, stage.formula, fontsize=_TEXT, va="center")
    axes.text(-12.6, top + 2.8, f"= {stage.bytes_held:g} Ψ bytes", fontsize=_SMALL, color=_FAINT, va="center")
    for number, (places, traffic) in enumerate(zip(stage.places, stage.traffic, strict=True)):
        left = number * _CELL
        for rank in range(NUM_RANKS):
            draw_rank(axes, places, rank, left=left, top=top + rank * _ROW)
            if number == 0:
                axes.text(
                    -0.4,
                    top + (rank + 0.5) * _ROW,
                    f"rank {rank}",
                    fontsize=_SMALL - 1,
                    color=_FAINT,
                    ha="right",
                    va="center",
                )
        axes.text(left + 9, top + NUM_RANKS * _ROW + 0.55, traffic, fontsize=_SMALL, ha="center", va="center")


def draw_rank(axes: Axes, places: tuple[Place, ...], rank: int, *, left: float, top: float) -> None:
    """Draw a rank's four kinds beside each other; of a sharded kind its slice, one of NUM_RANKS."""
    for width, (outside, inside), colour in zip(KINDS.values(), places, COLOURS, strict=True):
        start, slice_width = left, width / NUM_RANKS
        holds = [inside if index == rank else outside for index in range(NUM_RANKS)]
        for hold, run in groupby(holds):
            length = slice_width * len(list(run))
            axes.add_artist(Rectangle((start, top), length, 0.85 * _ROW, **look(hold, colour)))
            start += length
        frame = Rectangle((left, top), width, 0.85 * _ROW, fill=False, edgecolor="#999999", linewidth=0.5)
        axes.add_artist(frame)
        left += width


def look(hold: Hold, colour: str) -> dict[str, object]:
    """Return the fill style of a rank's slice."""
    return {
        Hold.NOTHING: {"facecolor": "white", "linewidth": 0},
        Hold.WHOLE: {"facecolor": colour, "linewidth": 0},
        Hold.OWN: {"facecolor": "white", "edgecolor": colour, "hatch": "//////", "linewidth": 0},
        Hold.PASSING: {"facecolor": colour, "alpha": 0.22, "linewidth": 0},
    }[hold]


def main() -> None:
    path = Path(sys.argv[1])
    with rc_context(_SETTINGS):
        draw().savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=200)


if __name__ == "__main__":
    main()
