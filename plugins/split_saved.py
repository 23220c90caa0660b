"""Saving and loading what ShardFormer alone has split, with torch's own optimizer. Saving is checkpoint/'s."""

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.held_model import HeldModel
from ..checkpoint.names import TensorNames, saved_state
from ..checkpoint.saving import Save
from ..checkpoint.step_load import Resume, Resumed
from ..checkpoint.trained import Trained, TrainedPiece
from ..checkpoint.trial import save_faults
from ..cluster.mesh import ParallelMesh
from .hybrid_saved import held_like, held_tensors


class SplitCheckpoints:
    """Checkpoints of a model that ShardFormer has split over the tensor axis, as the booster's for whatever layout.

    Args:
        model: as `ShardFormer.optimize` returned it, without a pipeline.
        optimizer: torch's, of this rank's parameters.
        mesh: whose axes the groups of the ShardConfig are.

    Raises:
        ValueError: no checkpoint of them could be written; all reasons at once.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, mesh: ParallelMesh) -> None:
        if faults := save_faults(model, optimizer, None):
            raise ValueError("; ".join(faults))
        self._model = model
        self._optimizer = optimizer
        self._mesh = mesh
        self._checkpoints = Checkpoints(mesh)

    def save_checkpoint(
        self,
        directory: str | Path,
        step: int,
        *,
        lr_scheduler: LRScheduler | None = None,
        dataloader: DataLoader | None = None,
        user: Any = None,
        keep_last: int | None = None,
        use_async: bool = False,
        size_per_shard: float = 1024,
    ) -> Save:
        """See `Booster.save_checkpoint`."""
        return self._checkpoints.save_step(
            directory,
            step,
            model=self._held(),
            trained=self._trained(),
            lr_scheduler=lr_scheduler,
            dataloader=dataloader,
            user=user,
            keep_last=keep_last,
            size_per_shard=size_per_shard,
            use_async=use_async,
        )

    def load_checkpoint(
        self,
        directory: str | Path,
        *,
        lr_scheduler: LRScheduler | None = None,
        dataloader: DataLoader | None = None,
        resume: Resume = "auto",
        strict: bool = True,
    ) -> Resumed | None:
        """See `Booster.load_checkpoint`."""
        return self._checkpoints.load_step(
            directory,
            model=self._held(),
            trained=self._trained(),
            lr_scheduler=lr_scheduler,
            dataloader=dataloader,
            resume=resume,
            strict=strict,
        )

    def save_model(self, checkpoint: str | Path, *, size_per_shard: float = 1024) -> Save:
        """Write the whole model as a Hugging Face folder; see `Booster.save_model`."""
        return self._checkpoints.save_model(
            self._held(),
            checkpoint,
            shard=True,
            size_per_shard=size_per_shard,
            use_safetensors=True,
            use_async=False,
        )

    def _held(self) -> HeldModel:
        """What this rank holds; splitting keeps names and ties."""
        names, named = TensorNames.of(self._model), saved_state(self._model)
        return HeldModel(
            module=self._model,
            names=names,
            tensors=held_tensors({name: named[name] for name in names.needed}, self._mesh),
            loaded=lambda: None,
        )

    def _trained(self) -> Trained:
        """What this rank steps: all that it holds, but for what is frozen."""
        named = {parameter: name for name, parameter in self._model.named_parameters()}
        groups = [
            [
                TrainedPiece(named[each], each, partial(held_like, each, mesh=self._mesh))
                for each in group["params"]
                if each.requires_grad
            ]
            for group in self._optimizer.param_groups
        ]
        return Trained(
            inner=self._optimizer,
            groups=groups,
            has_masters=False,
            extra={"scaler": None, "skipped_steps": 0},  # as a plugin in float32 has them
            install=lambda state, extra: self._optimizer.load_state_dict(state),
        )
