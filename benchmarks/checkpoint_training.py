"""A training run that Echelon and torch alone can save, for checkpoint.py."""

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
        name, workload, layout: see `EchelonBatch`.
    """

    def __init__(self, name: str, workload: Workload, **layout: Any) -> None:
        super().__init__(name, workload, **layout)
        step(self)  # the first step creates the optimizer states

    def save(self, directory: Path, *, use_async: bool) -> Save:
        """Save a full checkpoint."""
        return self.booster.save_checkpoint(
            directory, 1, model=self._model, optimizer=self._optimizer, use_async=use_async
        )

    def save_plainly(self, directory: Path) -> None:
        """Save the same tensors by plain `torch.distributed.checkpoint.save`; each rank passes its shards."""
        dcp.save(self._local_entries(), checkpoint_id=directory)

    def _local_entries(self) -> dict[str, Tensor]:
        """Return replicated tensors under one name, which torch saves once, and slices under separate names."""
        plugin, owner = self.booster.plugin, f"rank {dist.get_rank()}"
        entries = {}
        for name, held in plugin.local_model(self._model).tensors.items():
            is_unsharded = [shard.box.size for shard in held.parts] == [held.shape]
            for number, shard in enumerate(held.parts):
                entries[name if is_unsharded else f"{name} {number} of {owner}"] = shard.local.contiguous()
        for piece in plugin.trained(self._optimizer).pieces:
            if piece.local(piece.name, piece.key.detach()).may_save:
                states = self._optimizer.inner.state[piece.key]
                entries |= {f"{key} of {piece.name} of {owner}": value for key, value in states.items()}
        return entries
