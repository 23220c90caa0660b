"""The contender for layouts of HybridParallelPlugin in which every rank gets the full batch."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from stepped import OneBatch
from torch import Tensor
from workload import Workload, adamw

from echelon import Booster, HybridParallelPlugin
from echelon.verify.parity import gather_full


class EchelonBatch(OneBatch):
    """A layout of HybridParallelPlugin in float32, without a pipeline, called as a user would.

    Args:
        name: its name in the tables.
        workload: the computation.
        layout: arguments of the plugin.
    """

    def __init__(self, name: str, workload: Workload, **layout: Any) -> None:
        self.name = name
        self._plugin = HybridParallelPlugin(precision="fp32", **layout)
        booster = self.booster = Booster(plugin=self._plugin)
        model = workload.model()
        boosted, optimizer, *_ = booster.boost(model, adamw(model))
        super().__init__(
            boosted,
            optimizer,
            backward=partial(booster.backward, optimizer=optimizer),
            batch=workload.data(self._plugin.mesh.device),
        )

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context in which a microbatch's backward accumulates gradients."""
        return self._optimizer.reducer.accumulating()

    def gradients(self) -> Mapping[str, Tensor]:
        """Return gradients by name, gathered on the first rank. Communicates over the world."""
        self._optimizer.reduce_gradients()
        return gather_full(self._optimizer.gradients(), self._model.local_parameters, self._plugin.mesh)
