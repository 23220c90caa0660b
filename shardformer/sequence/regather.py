"""The input of a region in backward, where a rank keeps its part alone."""

from collections.abc import Callable

from torch import Tensor

from .regions import RegionSequence


class Regather:
    """Gathers what entered a region again, once for all layers that multiply with it.

    Args:
        sequence: how it is spread; with `overlap` the gather begins where the first of them is reached in backward.
        length: of the sequence.
    """

    def __init__(self, sequence: RegionSequence, length: int) -> None:
        self._sequence, self._length = sequence, length
        self._num_users = self._num_asked = 0
        self._under_way: Callable[[], Tensor] | None = None
        self._whole_NI: Tensor | None = None

    def use(self) -> None:
        """Say in forward that one more layer will ask for it."""
        self._num_users += 1

    def begin(self, kept: Tensor) -> None:
        """Begin to gather, if that may overlap. One all-gather."""
        if self._sequence.overlap and self._under_way is None and self._whole_NI is None:
            self._under_way = self._sequence.begin_whole(kept, self._length)

    def rows(self, kept: Tensor) -> Tensor:
        """The input (N, I). One all-gather, where it has not begun; the last layer that asks has it forgotten."""
        if self._whole_NI is None:
            end = self._under_way or self._sequence.begin_whole(kept, self._length)
            self._under_way, self._whole_NI = None, end().flatten(0, 1)
        whole_NI = self._whole_NI
        self._num_asked += 1
        if self._num_asked == self._num_users:
            self._whole_NI, self._num_asked = None, 0
        return whole_NI
