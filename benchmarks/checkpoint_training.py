"""A training run that is saved, by Echelon and by torch alone. How long that takes is checkpoint.py's."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from echelon_batch import EchelonBatch
from rounds import step
from torch import Tensor
from workload import Workload

from echelon.checkpoint.background import Save


class SavedTraining(EchelonBatch):
    """A layout of HybridParallelPlugin that can be saved. All methods are collective over the world.

    Args:
        name, workload, layout: as of `EchelonBatch`.
    """

    def __init__(self, name: str, workload: Workload, **layout: Any) -> None:
        super().__init__(name, workload, **layout)
        step(self)  # states are made in the first

    def save(self, directory: Path, *, use_async: bool) -> Save:
        """A whole checkpoint of it."""
        return self.booster.save_checkpoint(
            directory, 1, model=self._model, optimizer=self._optimizer, use_async=use_async
        )

    def save_plainly(self, directory: Path) -> None:
        """The same tensors by `torch.distributed.checkpoint.save` as it comes, each rank what it holds."""
        dcp.save(self._own(), checkpoint_id=directory)

    def _own(self) -> dict[str, Tensor]:
        """Tensors equal on all ranks under one name, of which torch saves one, and pieces under names of their own."""
        plugin, own = self.booster.plugin, f"rank {dist.get_rank()}"
        found = {}
        for name, held in plugin.local_model(self._model).tensors.items():
            is_whole = [part.box.size for part in held.parts] == [held.shape]
            for number, part in enumerate(held.parts):
                found[name if is_whole else f"{name} {number} of {own}"] = part.local.contiguous()
        for piece in plugin.trained(self._optimizer).pieces:
            if piece.local(piece.name, piece.key.detach()).may_save:
                states = self._optimizer.inner.state[piece.key]
                found |= {f"{key} of {piece.name} of {own}": value for key, value in states.items()}
        return found
