"""The longest sequence that fits a memory: measured on the ranks of a run, and simulated for more.

At each point of a step the memory of a rank is linear in the sequence length, and a part of it is sharded over the
ranks: bytes = constant + (whole + shared / ranks) · length. The peak is either between the layers and the loss, where
nearly all of it is sharded, or before the layers, where every rank has unsharded sequences. Both are measured, and
lines fitted to them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

# Peak bytes of a rank, by number of ranks and of tokens.
Peaks = Mapping[tuple[int, int], float]


@dataclass(frozen=True, kw_only=True)
class Need:
    """The memory of a rank, in bytes.

    Attributes:
        constant: independent of the length; mostly gradients.
        whole: per token, on every rank.
        shared: per token, sharded over the ranks.
    """

    constant: float
    whole: float
    shared: float

    def __call__(self, num_ranks: int, length: float) -> float:
        """Return the peak in a step with a sequence of this length."""
        return self.constant + (self.whole + self.shared / num_ranks) * length

    def longest(self, num_ranks: int, memory: float) -> int:
        """Return the longest sequence that fits a memory."""
        return max(0, int((memory - self.constant) / (self.whole + self.shared / num_ranks)))


def fit(peaks: Peaks) -> Need:
    """Fit a need to measured peaks, by least squares of relative errors.

    No part of it is below 0.

    Args:
        peaks: peaks of at least two lengths, on at least two numbers of ranks.
    """
    rows = torch.tensor([[1, length, length / ranks] for ranks, length in peaks], dtype=torch.float64)
    sizes = torch.tensor(list(peaks.values()), dtype=torch.float64)[:, None]
    weights = torch.zeros(3, dtype=torch.float64)
    used = [0, 1, 2]
    while used:
        columns = rows[:, used]
        scale = columns.amax(0)  # so that lengths and the constant have equal weight
        solution = torch.linalg.lstsq(columns / scale / sizes, torch.ones_like(sizes)).solution[:, 0] / scale
        if (solution >= 0).all():
            weights[used] = solution
            break
        used.pop(int((solution * scale).argmin()))
    constant, whole, shared = weights.tolist()
    return Need(constant=constant, whole=whole, shared=shared)


def error(needs: Iterable[Need], peaks: Peaks) -> float:
    """Return the largest relative distance of the greatest of these needs from a measured peak."""
    needs = list(needs)
    return max(abs(max(need(*place) for need in needs) - peak) / peak for place, peak in peaks.items())


def search(peak: Callable[[int], float], *, start: int, unit: int, memory: float) -> int:
    """Return the longest sequence, in multiples of `unit`, whose measured peak fits the memory; 0 if none does.

    Args:
        peak: measures the peak, which grows with the length.
        start: the start of the search, near the result, since it advances by a unit at a time.
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
    """Return the needs by name, and by number of ranks the longest sequence that satisfies all, for the JSON."""
    return {
        "needs": {name: asdict(need) for name, need in needs.items()},
        "longest": {
            str(ranks): min(need.longest(ranks, memory) for need in needs.values()) for ranks in num_ranks
        },
    }
