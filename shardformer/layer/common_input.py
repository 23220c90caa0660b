"""A tensor that regions of several layers take beside their first input, as an encoder's states in cross attention.

The regions themselves are region.py.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class CommonInput:
    """Lets such a tensor enter once in a forward, so that its regions share one reduction in backward.

    It is kept from the first of the regions to the last; where a forward does not come to all of them (a stage of a
    pipeline has some), until another tensor enters.
    """

    def __init__(self) -> None:
        self.num_regions = 0
        self._given: Tensor | None = None
        self._version = 0
        self._entered: Tensor | None = None
        self._left = 0  # regions that have not come yet

    def enter(self, xs: Sequence[Tensor], enter: Callable[[Sequence[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Let tensors enter a region: its first input, and of the others those that did not enter before."""
        first, *others = xs
        known = [self.known(x) for x in others]
        coming = [x for x, before in zip(others, known, strict=True) if before is None]
        entered, *came = enter([first, *coming])
        for x, whole in zip(coming, came, strict=True):
            self.keep(x, whole)
        left = iter(came)
        return [entered, *(next(left) if before is None else before for before in known)]

    def known(self, x: Tensor) -> Tensor | None:
        """What this tensor became when it entered; None where it is to enter now."""
        is_same = self._given is x and self._version == x._version
        if not is_same or _is_in_backward() or not torch.is_grad_enabled():
            return None
        entered = self._entered
        self._left -= 1
        if self._left == 0:
            self._given = self._entered = None
        return entered

    def keep(self, x: Tensor, entered: Tensor) -> None:
        """Keep what it became for the regions to come, where there is a gradient to reduce."""
        if self.num_regions > 1 and entered.requires_grad and not _is_in_backward():
            self._given, self._version, self._entered = x, x._version, entered
            self._left = self.num_regions - 1


def _is_in_backward() -> bool:
    """Whether a layer is being recomputed, one by one: what it makes then has no part in the sum of gradients."""
    return torch._C._current_graph_task_id() != -1
