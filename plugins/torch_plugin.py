"""What the plugins on torch's own data parallelism share. How each wraps a model is its own file."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.trained import Trained
from ..cluster.faults import naming_failures
from ..cluster.mesh import ParallelMesh
from .base import Plugin, Returned
from .scaled_optimizer import ScaledOptimizer
from .torch_saved import trained_parameters


class TorchPlugin(Plugin):
    """Data parallelism over all ranks, by torch's own wrappers. No pipeline: call `model(**batch)`."""

    mesh: ParallelMesh
    _accumulates = False  # inside of no_sync, where ranks may run different numbers of backwards

    @property
    def dp_size(self) -> int:
        """Replicas that get different batches: all ranks."""
        return self.mesh.size("dp")

    @property
    def pp_size(self) -> int:
        """Stages of the pipeline: one."""
        return 1

    @property
    def tp_size(self) -> int:
        """Ranks over which each layer is split: one."""
        return 1

    @property
    def data_rank(self) -> tuple[int, int]:
        """This rank, of all."""
        return self.mesh.rank("dp"), self.mesh.size("dp")

    def trained(self, optimizer: Optimizer) -> Trained:
        """What this rank steps by a boosted optimizer."""
        return trained_parameters(require_boosted(optimizer, "saving and loading"))

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Compute gradients, averaged over the ranks while backward runs.

        Raises:
            ValueError: the optimizer is not what `booster.boost` returned.
        """
        scaled = require_boosted(optimizer, "booster.backward")
        with naming_failures("backward", () if self._accumulates else None):
            scaled.backward(loss)

    @contextmanager
    def _accumulating(self, no_sync: AbstractContextManager[None]) -> Iterator[None]:
        before, self._accumulates = self._accumulates, True
        try:
            with no_sync:
                yield
        finally:
            self._accumulates = before

    def execute_pipeline(
        self,
        data_iter: Iterator,
        model: nn.Module,
        criterion: Callable | None = None,
        optimizer: Any = None,
        return_loss: bool = True,
        return_outputs: Returned = False,
        *,
        average_loss: bool = True,
    ) -> dict[str, Any]:
        """Not offered by this plugin.

        Raises:
            RuntimeError: always; says what to call.
        """
        raise RuntimeError(
            f"{type(self).__name__} has no pipeline: call model(**batch) and booster.backward(loss, optimizer), or "
            "use HybridParallelPlugin or LowLevelZeroPlugin, where execute_pipeline works at any size"
        )


def require_boosted(optimizer: Optimizer, call: str) -> ScaledOptimizer:
    """The optimizer, as what `booster.boost` returned.

    Raises:
        ValueError: it is another one.
    """
    if not isinstance(optimizer, ScaledOptimizer):
        raise ValueError(
            f"{call} takes the optimizer that booster.boost returned, and not a {type(optimizer).__name__} of torch's"
        )
    return optimizer
