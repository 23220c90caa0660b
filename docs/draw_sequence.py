r"""Draws docs/images/sequence_*.svg: the local part of a sequence on four ranks through a layer, by mode.

python docs/draw_sequence.py docs/images
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

NUM_RANKS = 4
NUM_STRETCHES = 2 * NUM_RANKS
# Colours of the other pictures, distinguishable in the three kinds of colour blindness.
BLUE, ORANGE, YELLOW, PURPLE = "#1f4db8", "#db541f", "#ebba4a", "#914799"
STEPS = (BLUE, ORANGE, YELLOW, PURPLE)
# Text remains text, and equal pictures give equal files.
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "echelon"}
_TEXT, _SMALL = 8.0, 7.0
_FAINT = "#666666"
_SIDE, _ACROSS, _DOWN = 1.0, 2.5, 1.15  # side of a square, and distances between squares


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A filled part of a unit square: the first dimension runs down (the sequence), the second to the right."""

    top: float = 0.0
    left: float = 0.0
    height: float = 1.0
    width: float = 1.0
    colour: str = BLUE
    alpha: float = 1.0
    text: str = ""


# The contents of a rank's square, by its number.
Holds = Callable[[int], Iterable[Patch]]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A column of the picture: the local activations of every rank at a point of the layer.

    Args:
        title: text above it.
        holds: contents of each rank's square.
        sent: text before it: the communication that leads to it.
    """

    title: str
    holds: Holds
    sent: str = ""


def everything(rank: int) -> list[Patch]:
    """Return the full sequence with all features."""
    return [Patch()]


def part(rank: int) -> list[Patch]:
    """Return a shard of the sequence with all features."""
    return [Patch(top=rank / NUM_RANKS, height=1 / NUM_RANKS)]


def own_features(rank: int) -> list[Patch]:
    """Return the full sequence with this rank's features or heads."""
    return [Patch(left=rank / NUM_RANKS, width=1 / NUM_RANKS)]


def part_and_passing(rank: int) -> list[Patch]:
    """Return a shard, and the rest of the sequence as temporary."""
    return [Patch(alpha=0.22), *part(rank)]


def stretches(rank: int) -> tuple[int, int]:
    """Return the two blocks of a rank in zigzag order."""
    return rank, NUM_STRETCHES - 1 - rank


def zigzag(rank: int) -> list[Patch]:
    """Return a rank's first and last blocks in zigzag order, with all features."""
    return [Patch(top=stretch / NUM_STRETCHES, height=1 / NUM_STRETCHES) for stretch in stretches(rank)]


def keys_by_step(rank: int) -> list[Patch]:
    """Return a rank's parts of causal attention, coloured by ring step; queries run down, keys to the right."""
    return [
        Patch(
            top=query / NUM_STRETCHES,
            left=key / NUM_STRETCHES,
            height=1 / NUM_STRETCHES,
            width=1 / NUM_STRETCHES,
            colour=STEPS[(rank - owner) % NUM_RANKS],
        )
        for owner in range(NUM_RANKS)
        for query in stretches(rank)
        for key in stretches(owner)
        if key <= query
    ]


def weights(*, gathered: tuple[int, ...] = (), arriving: tuple[int, ...] = ()) -> Holds:
    """Return three layers' weights beside each other: a rank's shard of each, and the gathered ones."""

    def holds(rank: int) -> list[Patch]:
        column = 1 / 3
        piece = {"top": rank / NUM_RANKS, "height": 1 / NUM_RANKS, "width": 0.9 * column}
        patches = []
        for layer in range(3):
            if layer in gathered or layer in arriving:
                alpha = 0.6 if layer in gathered else 0.22
                patches.append(Patch(left=layer * column, width=0.9 * column, colour=PURPLE, alpha=alpha))
            patches.append(Patch(left=layer * column, colour=PURPLE, **piece))
        return patches

    return holds


PICTURES: dict[str, tuple[Panel, ...]] = {
    "tensor": (
        Panel(title="norm, residual", holds=everything),
        Panel(title="in the region", holds=own_features),
        Panel(title="norm, residual", holds=everything, sent="all-reduce"),
    ),
    "split_gather": (
        Panel(title="norm, residual", holds=part),
        Panel(title="region's input", holds=everything, sent="all-gather"),
        Panel(title="in the region", holds=own_features),
        Panel(title="norm, residual", holds=part, sent="reduce-\nscatter"),
    ),
    "regather": (
        Panel(title="norm, residual", holds=part),
        Panel(title="region's input", holds=part_and_passing, sent="all-gather,\nin backward\nagain"),
        Panel(title="in the region", holds=own_features),
        Panel(title="norm, residual", holds=part, sent="reduce-\nscatter"),
    ),
    "all_to_all": (
        Panel(title="norm; q, k, v", holds=part),
        Panel(title="attention", holds=own_features, sent="all-to-all"),
        Panel(title="projection, MLP", holds=part, sent="all-to-all"),
    ),
    "ring_attn": (
        Panel(title="norm; q, k, v", holds=zigzag),
        Panel(title="queries ↓ × keys →, by step", holds=keys_by_step, sent="k, v in\nP−1 steps"),
        Panel(title="projection, MLP", holds=zigzag),
    ),
    "weights": (
        Panel(title="at rest", holds=weights()),
        Panel(title="first layer's forward", holds=weights(gathered=(0,), arriving=(1,)), sent="all-gather"),
        Panel(title="last layer's backward", holds=weights(gathered=(2,), arriving=(1,)), sent="all-gather"),
        Panel(title="gradients", holds=weights(), sent="reduce-\nscatter"),
    ),
}


def draw(panels: tuple[Panel, ...]) -> Figure:
    """Draw a mode: a row for each rank, a column for each panel."""
    width = (len(panels) - 1) * _ACROSS + _SIDE
    figure = Figure(figsize=(0.95 * (width + 1.4), 0.75 * (NUM_RANKS * _DOWN + 0.7)))
    figure.subplots_adjust(left=0, right=1, top=1, bottom=0)
    axes = figure.add_subplot(xlim=(-0.9, width + 0.5), ylim=(NUM_RANKS * _DOWN + 0.05, -0.65))
    axes.set_axis_off()
    for number, panel in enumerate(panels):
        left = number * _ACROSS
        axes.text(left + 0.5, -0.25, panel.title, fontsize=_TEXT, weight="bold", ha="center")
        middle = (NUM_RANKS * _DOWN - (_DOWN - _SIDE)) / 2
        if number:
            draw_arrow(axes, left, middle, panel.sent)
        for rank in range(NUM_RANKS):
            draw_square(axes, panel.holds(rank), left=left, top=rank * _DOWN)
    for rank in range(NUM_RANKS):
        axes.text(
            -0.12, rank * _DOWN + 0.5, f"rank {rank}", fontsize=_SMALL, color=_FAINT, ha="right", va="center"
        )
    return figure


def draw_arrow(axes: Axes, left: float, middle: float, sent: str) -> None:
    """Draw an arrow from the previous panel, with the communication above it."""
    start, end = left - _ACROSS + _SIDE + 0.1, left - 0.1
    axes.annotate(
        "", xy=(end, middle), xytext=(start, middle), arrowprops={"arrowstyle": "->", "color": _FAINT}
    )
    axes.text((start + end) / 2, middle - 0.12, sent, fontsize=_SMALL, ha="center", va="bottom")


def draw_square(axes: Axes, patches: Iterable[Patch], *, left: float, top: float) -> None:
    """Draw the memory of one rank at one point."""
    for patch in patches:
        axes.add_artist(
            Rectangle(
                (left + patch.left, top + patch.top),
                patch.width,
                patch.height,
                facecolor=patch.colour,
                alpha=patch.alpha,
                linewidth=0,
            )
        )
        if patch.text:
            axes.text(
                left + patch.left + patch.width / 2,
                top + patch.top + patch.height / 2,
                patch.text,
                fontsize=_SMALL,
                color="white" if patch.alpha == 1 else "black",
                ha="center",
                va="center",
            )
    frame = Rectangle((left, top), _SIDE, _SIDE, fill=False, edgecolor="#999999", linewidth=0.6)
    axes.add_artist(frame)


def main() -> None:
    folder = Path(sys.argv[1])
    with rc_context(SETTINGS):
        for name, panels in PICTURES.items():
            draw(panels).savefig(folder / f"sequence_{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
