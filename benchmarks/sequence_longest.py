"""The longest sequence that fits a memory: measured on the ranks of a run, and simulated for more of them.

At each point of a step what a rank needs is a line in the sequence's length, of which a part is shared out over the
ranks: bytes = constant + (whole + shared / ranks) · length. The most is needed either between the layers and the loss,
where nearly all is shared out, or in front of the layers, where every rank has whole sequences. Both are measured, and
lines fitted to them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

# Of a rank: by numbers of ranks and of tokens.
Peaks = Mapping[tuple[int, int], float]


@dataclass(frozen=True, kw_only=True)
class Need:
    """Needs of a rank, in bytes.

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

    No part of it is below 0.

    Args:
        peaks: of at least two lengths, on at least two numbers of ranks.
    """
    rows = torch.tensor([[1, length, length / ranks] for ranks, length in peaks], dtype=torch.float64)
    found = torch.tensor(list(peaks.values()), dtype=torch.float64)[:, None]
    weights = torch.zeros(3, dtype=torch.float64)
    used = [0, 1, 2]
    while used:
        columns = rows[:, used]
        scale = columns.amax(0)  # so that lengths and 1 weigh alike in the solution
        solution = torch.linalg.lstsq(columns / scale / found, torch.ones_like(found)).solution[:, 0] / scale
        if (solution >= 0).all():
            weights[used] = solution
            break
        used.pop(int((solution * scale).argmin()))
    constant, whole, shared = weights.tolist()
    return Need(constant=constant, whole=whole, shared=shared)


def error(needs: Iterable[Need], peaks: Peaks) -> float:
    """Largest distance of the greatest of these needs from a measured peak, relative to it."""
    needs = list(needs)
    return max(abs(max(need(*place) for need in needs) - peak) / peak for place, peak in peaks.items())


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


def simulated(needs: Mapping[str, Need], memory: float, num_ranks: Iterable[int]) -> dict[str, Any]:
    """The needs by their names, and for each number of ranks the longest sequence that satisfies all, for the JSON."""
    return {
        "needs": {name: asdict(need) for name, need in needs.items()},
        "longest": {
            str(each): min(need.longest(each, memory) for need in needs.values()) for each in num_ranks
        },
    }
