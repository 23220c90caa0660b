"""The cost of training on this rank: bytes sent by axis and kind, and bytes of local memory."""

from contextlib import AbstractContextManager
from types import TracebackType

from ..cluster.mesh import ParallelMesh
from ..cluster.traffic import Count, Traffic
from ..zero.memory import HeldBytes
from ..zero.optimizer import ShardedOptimizer

_MEBI = 2**20


class Ledger(AbstractContextManager["Ledger"]):
    """Counts communication while it is entered, and local memory whenever it is asked.

        with plugin.ledger(optimizer) as ledger:
            booster.execute_pipeline(...)
            optimizer.step()
        if rank == 0:
            print(ledger.table())

    Counting slows a step by some microseconds for every operation: time without it.

    Args:
        mesh: by whose axes messages are counted.
        optimizer: what `boost` returned; None leaves memory out.
    """

    def __init__(self, mesh: ParallelMesh, optimizer: ShardedOptimizer | None) -> None:
        self._optimizer = optimizer
        self._traffic = Traffic(mesh)

    def __enter__(self) -> "Ledger":
        self._traffic.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._traffic.__exit__(kind, error, traceback)

    @property
    def traffic(self) -> dict[tuple[str, str], Count]:
        """Messages of this rank by axis and kind, see `cluster.traffic.Traffic`."""
        return dict(self._traffic.counts)

    @property
    def held(self) -> HeldBytes | None:
        """The bytes that this rank holds now, but for activations."""
        return None if self._optimizer is None else self._optimizer.held_bytes()

    def table(self) -> str:
        """Both as text."""
        lines = [f"{'axis':8}{'kind':24}{'calls':>8}{'MiB':>12}{'MiB sent':>12}"]
        lines += [
            f"{axis:8}{kind:24}{count.calls:8}{count.nbytes / _MEBI:12.3f}{count.sent / _MEBI:12.3f}"
            for (axis, kind), count in sorted(self.traffic.items())
        ]
        if (held := self.held) is not None:
            lines += ["", f"{'held':32}{'MiB':>20}"]
            lines += [f"{name:32}{nbytes / _MEBI:20.3f}" for name, nbytes in held.items()]
        return "\n".join(lines)
