"""The longest sequence that fits a memory: measured on the ranks of a run, and simulated for more of them.

What a rank needs at most in a step is a line in the sequence's length, and what ranks share out is divided by their
number: bytes = constant + (whole + shared / ranks) · length. The three are fitted to what was measured.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

# Of a rank: by numbers of ranks and of tokens.
Peaks = Mapping[tuple[int, int], float]


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a rank needs, in bytes.

    Attributes:
        constant: whatever the length: gradients for the most part.
        whole: for each token, on every rank.
        shared: for each token, shared out.
    """

    constant: float
    whole: float
    shared: float

    def __call__(self, num_ranks: int, length: float) -> float:
        """At most, in a step with a sequence of this length."""
        return self.constant + (self.whole + self.shared / num_ranks) * length

    def longest(self, num_ranks: int, memory: float) -> int:
        """The longest sequence with which that memory is enough."""
        return max(0, int((memory - self.constant) / (self.whole + self.shared / num_ranks)))


def fit(peaks: Peaks) -> Need:
    """The need that is nearest to measured peaks, in least squares of what they are off relative to themselves.

    Args:
        peaks: of at least two lengths, on at least two numbers of ranks.
    """
    rows = torch.tensor([[1, length, length / ranks] for ranks, length in peaks], dtype=torch.float64)
    found = torch.tensor(list(peaks.values()), dtype=torch.float64)
    scale = rows.amax(0)  # so that lengths and 1 weigh alike in the solution
    solution = torch.linalg.lstsq(rows / scale / found[:, None], torch.ones_like(found)[:, None]).solution[
        :, 0
    ]
    constant, whole, shared = (solution / scale).tolist()
    return Need(constant=constant, whole=whole, shared=shared)


def error(need: Need, peaks: Peaks) -> float:
    """How far the need is from a measured peak at most, relative to it."""
    return max(abs(need(*place) - peak) / peak for place, peak in peaks.items())


def search(peak: Callable[[int], float], *, start: int, unit: int, memory: float) -> int:
    """The longest sequence, in multiples of `unit`, whose measured peak is at most the memory; 0 where none is.

    Args:
        peak: measures; the longer the sequence, the more.
        start: where the search begins, near the result, for it goes on by a unit at a time.
    """

    def fits(count: int) -> bool:
        return peak(count * unit) <= memory

    count = max(1, start // unit)
    while count and not fits(count):
        count -= 1
    while fits(count + 1):
        count += 1
    return count * unit


def simulated(need: Need, memory: float, num_ranks: Iterable[int]) -> dict[str, Any]:
    """The need, and the longest sequence for each number of ranks, for the JSON."""
    return {"need": asdict(need), "longest": {str(each): need.longest(each, memory) for each in num_ranks}}
