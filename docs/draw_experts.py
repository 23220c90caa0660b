r"""Draws docs/images/experts.svg: tokens of four ranks on their way to four experts and back.

python docs/draw_experts.py docs/images
"""

import sys
from pathlib import Path

from draw_sequence import NUM_RANKS, SETTINGS, STEPS, Panel, Patch, draw
from matplotlib import rc_context

# The experts of each token, by rank: expert 0 has most of them, and no token of rank 0 chooses expert 3.
CHOICES = (
    ((0, 1), (2, 0), (0, 1), (1, 2)),
    ((3, 0), (0, 2), (1, 0), (0, 3)),
    ((0, 2), (0, 1), (2, 0), (3, 1)),
    ((1, 0), (0, 3), (0, 2), (0, 1)),
)
_ROW = 1 / 15  # height of a row in a square


def pairs(rank: int) -> list[int]:
    """Return the experts of a rank's pairs of a token and an expert, in the order of the tokens."""
    return [expert for chosen in CHOICES[rank] for expert in chosen]


def arrived(rank: int) -> list[int]:
    """Return the rows of a rank's expert, by the rank that sent them."""
    return [sender for sender in range(NUM_RANKS) for expert in pairs(sender) if expert == rank]


def rows(experts: list[int], *, alpha: float = 1.0) -> list[Patch]:
    """Return a row for each pair, in the colour of its expert."""
    return [
        Patch(top=place * _ROW, height=0.85 * _ROW, colour=STEPS[expert], alpha=alpha)
        for place, expert in enumerate(experts)
    ]


def sums(rank: int) -> list[Patch]:
    """Return a row for each token, of which every expert has contributed a half."""
    return [
        Patch(
            top=2 * place * _ROW,
            height=1.85 * _ROW,
            left=half / 2,
            width=0.5,
            colour=STEPS[expert],
            alpha=0.6,
        )
        for place, chosen in enumerate(CHOICES[rank])
        for half, expert in enumerate(chosen)
    ]


PANELS = (
    Panel(title="pairs of a token\nand an expert", holds=lambda rank: rows(pairs(rank))),
    Panel(title="sorted", holds=lambda rank: rows(sorted(pairs(rank))), sent="counts\nexchanged\nand read"),
    Panel(
        title="at the expert",
        holds=lambda rank: rows([rank] * len(arrived(rank))),
        sent="all-to-all\nof rows",
    ),
    Panel(
        title="results",
        holds=lambda rank: rows(sorted(pairs(rank)), alpha=0.6),
        sent="all-to-all\nof results",
    ),
    Panel(title="weighted sums", holds=sums, sent="at the\ntoken"),
)


def main() -> None:
    with rc_context(SETTINGS):
        draw(PANELS).savefig(Path(sys.argv[1]) / "experts.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
