"""This rank's shards of a model and its optimizer, as checkpoints save them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..checkpoint.background import Save
from ..checkpoint.call_checks import save_errors
from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.full_state import Resumed
from ..checkpoint.local_tensors import (
    Adapter,
    LocalModel,
    LocalTensor,
    TensorNames,
    local_dtensor,
    local_piece,
    local_shard,
    saved_state,
)
from ..checkpoint.optimizer_state import Trained, TrainedPiece
from ..cluster.errors import raise_errors
from ..cluster.forward_random import ForwardRandom
from ..cluster.mesh import ParallelMesh
from ..cluster.placement import shards_of
from ..shardformer.refusals import is_partial
from ..zero.optimizer import ShardedOptimizer
from ..zero.slot import Slot


@dataclass(frozen=True)
class ParameterNames:
    """Hugging Face's names of the full model's tensors, read before it is cut.

    Args:
        first: the first name of every parameter; a tied one has several.
        order: these names in the model's order.
        state: all names of parameters and buffers, for saving.
    """

    first: Mapping[Parameter, str]
    order: tuple[str, ...]
    state: TensorNames

    @staticmethod
    def of(model: nn.Module) -> "ParameterNames":
        """Read the names of a full model."""
        first = {parameter: name for name, parameter in model.named_parameters()}
        return ParameterNames(first=first, order=tuple(first.values()), state=TensorNames.of(model))

    def local(self, model: nn.Module) -> dict[str, Parameter]:
        """Return the parameters of a cut model, by their first name in the full model, in its order."""
        local = {self.first[parameter]: parameter for parameter in model.parameters()}
        return {name: local[name] for name in self.order if name in local}


def local_tensor(name: str, tensor: Tensor, *, like: Tensor, mesh: ParallelMesh) -> LocalTensor:
    """Describe this rank's shard of a tensor for checkpoints. Any rank may save a replicated one.

    Args:
        name: in the full model.
        tensor: this rank's shard: a parameter, or a state of the optimizer with its shape.
        like: the parameter, which has the placement; a DTensor has its own.
        mesh: all ranks.
    """
    if isinstance(tensor, DTensor):
        return local_dtensor(name, tensor)
    return local_shard(name, tensor, shards_of(like, mesh.layout))


def local_shards(tensors: Mapping[str, Tensor], mesh: ParallelMesh) -> dict[str, LocalTensor]:
    """Describe this rank's shards of a model's tensors, by name."""
    return {name: local_tensor(name, tensor, like=tensor, mesh=mesh) for name, tensor in tensors.items()}


def local_module(
    module: nn.Module,
    mesh: ParallelMesh,
    adapters: Sequence[Adapter] = (),
    random: ForwardRandom | None = None,
) -> LocalModel:
    """Describe this rank's parameters and persistent buffers of a model, for saving and loading.

    Args:
        module: has the names and ties of the plain model; tied tensors are described once.
        mesh: all ranks.
        adapters: its LoRA adapters.
        random: the random numbers of its forwards; None does not save them.
    """
    names, state = TensorNames.of(module), saved_state(module)
    return LocalModel(
        module=module,
        names=names,
        tensors=local_shards({name: state[name] for name in names.needed}, mesh),
        adapters=tuple(adapters),
        random=random,
        loaded=lambda: None,  # nothing else has copies of the tensors
    )


def trained_shards(optimizer: ShardedOptimizer, mesh: ParallelMesh) -> Trained:
    """Describe the tensors that this rank's optimizer updates, for saving and loading.

    With ZeRO these are flat slices of parameters, or of their tensor-parallel shards; without, full ones.
    """
    groups: list[list[TrainedPiece]] = [[] for _ in optimizer.param_groups]  # by parameter group
    for bucket in optimizer.buckets:
        for slot in bucket.slots:
            if slot.piece is not None:
                describe = local_shard if bucket.is_full else partial(_local_piece, slot=slot, mesh=mesh)
                piece = TrainedPiece(slot.managed.name, slot.piece, describe, is_full=bucket.is_full)
                groups[bucket.group_index].append(piece)
    return Trained(
        inner=optimizer.inner,
        groups=groups,
        has_masters=any(bucket.parameters.dtype != torch.float32 for bucket in optimizer.buckets),
        extra={"scaler": optimizer.scaler_state(), "skipped_steps": optimizer.skipped_steps},
        install=partial(_install, optimizer),
    )


def _local_piece(name: str, flat: Tensor, *, slot: Slot, mesh: ParallelMesh) -> LocalTensor:
    """Describe a flat tensor that belongs to this rank's slice of a parameter: the slice, or a state of it."""
    return local_piece(
        name,
        flat,
        slot.piece_start,
        slot.weight.shape,
        shards_of(slot.parameter, mesh.layout),
        may_save=slot.managed.is_primary,
    )


def _install(optimizer: ShardedOptimizer, state: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Load a state dict of the inner optimizer, the loss scale and the skipped steps. Collective over the data axis.

    The master weights are already filled in place.

    Args:
        optimizer: changed.
        state: the inner optimizer's, for the tensors of this rank.
        extra: "scaler" and "skipped_steps", as `trained_shards` saves them.
    """
    optimizer.load_state_dict(
        {
            **state,
            **optimizer.local_masters(),
            "scaler": extra["scaler"],
            "skipped_steps": extra["skipped_steps"],
        }
    )


def trained_parameters(
    optimizer: Optimizer,
    names: Mapping[Parameter, str],
    mesh: ParallelMesh,
    *,
    extra: Mapping[str, Any],
    install: Callable[[dict[str, Any], Mapping[str, Any]], None],
) -> Trained:
    """Describe the tensors that a torch optimizer without master weights updates on this rank: its local parameters.

    Args:
        optimizer: torch's.
        names: by parameter, its name in the full model.
        mesh: all ranks.
        extra: further values to save.
        install: loads a state dict of the optimizer and `extra`.
    """
    is_full = not any(isinstance(parameter, DTensor) or is_partial(parameter) for parameter in names)
    groups = [
        [
            TrainedPiece(
                names[parameter], parameter, partial(local_tensor, like=parameter, mesh=mesh), is_full=is_full
            )
            for parameter in group["params"]
            if parameter.requires_grad and parameter.numel()
        ]
        for group in optimizer.param_groups
    ]
    return Trained(
        inner=optimizer,
        groups=groups,
        has_masters=False,
        extra=extra,
        install=install,
    )


class SplitCheckpoints:
    """Checkpoints of a model that ShardFormer has sharded over the tensor axis, in the format of `Booster`.

    Args:
        model: the result of `ShardFormer.optimize`, without a pipeline.
        optimizer: torch's optimizer of this rank's parameters.
        mesh: the mesh whose groups the ShardConfig has.

    Raises:
        ValueError: no checkpoint of them can be written; all reasons at once.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, mesh: ParallelMesh) -> None:
        raise_errors(save_errors(model, optimizer, None))
        self._model, self._optimizer, self._mesh = model, optimizer, mesh
        self._checkpoints = Checkpoints(mesh)

    def save_checkpoint(self, directory: str | Path, step: int, **options: Any) -> Save:
        """Save a checkpoint; options as for `Booster.save_checkpoint`, without the model and its optimizer."""
        return self._checkpoints.save_step(directory, step, **self._model_and_optimizer(), **options)

    def load_checkpoint(self, directory: str | Path, **options: Any) -> Resumed | None:
        """Load a checkpoint; options as for `Booster.load_checkpoint`, without the model and its optimizer."""
        return self._checkpoints.load_step(directory, **self._model_and_optimizer(), **options)

    def save_model(self, checkpoint: str | Path, *, size_per_shard: float = 1024) -> Save:
        """Write the full model as a Hugging Face folder; see `Booster.save_model`."""
        return self._checkpoints.save_model(
            local_module(self._model, self._mesh),
            checkpoint,
            shard=True,
            size_per_shard=size_per_shard,
        )

    def _model_and_optimizer(self) -> dict[str, Any]:
        """Return the model and the optimizer as arguments of `Checkpoints`."""
        trained = trained_parameters(
            self._optimizer,
            {parameter: name for name, parameter in self._model.named_parameters()},
            self._mesh,
            extra={"scaler": None, "skipped_steps": 0},  # the values of a plugin in float32
            install=lambda state, extra: self._optimizer.load_state_dict(state),
        )
        return {"model": local_module(self._model, self._mesh), "optimizer": trained}
