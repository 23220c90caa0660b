"""Whether all ranks of the data axis are in the same call, and hold the same. What follows is reduction.py's."""

from collections.abc import Callable

import torch.distributed as dist

from ..cluster.small_numbers import begin_gathering

_CALLS = ("backward()", "reduce_gradients()", "step()")  # that communicate


class Meeting:
    """Ranks that tell each other where they are, and go on until they need to know it of the others.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._outcome: Callable[[], list[tuple[int, ...]]] | None = None

    def begin(self, call: str, state: int) -> None:
        """Tell the others, which all call it. All-gather of two integers.

        Args:
            call: where this rank is.
            state: what it holds of reduced gradients: 0 nothing, or the same number on all ranks that do as much.
        """
        self.end()
        if self._group.size() > 1:
            self._outcome = begin_gathering(
                (_CALLS.index(call), state), self._group, "optimizer.step or backward"
            )

    def end(self) -> set[int]:
        """The states of all ranks, once they are known; nothing where none were asked for since.

        Raises:
            RuntimeError: ranks are in different calls, or some forgot what others hold; on every rank.
        """
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return set()
        found = dict(zip(dist.get_process_group_ranks(self._group), outcome(), strict=True))
        if len({code for code, _ in found.values()}) > 1:
            told = ", ".join(f"rank {rank} in {_CALLS[code]}" for rank, (code, _) in found.items())
            raise RuntimeError(
                f"every backward averages its gradients, and the ranks are not in the same call: {told}. Every rank "
                "must call backward equally often between two steps; inside no_sync it averages nothing"
            )
        states = {state for _, state in found.values()}
        if len(states) > 1 and 0 in states:
            raise RuntimeError(
                f"rank(s) {[rank for rank, (_, state) in found.items() if not state]} hold no reduced gradients and "
                "other ranks do: call zero_grad on every rank alike"
            )
        return states
