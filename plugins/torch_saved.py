"""What a rank holds of a model under torch's own data parallelism, as checkpoints see it. Saving is checkpoint/'s."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint.held import HeldTensor, held_dtensor, held_piece
from ..checkpoint.held_model import HeldModel
from ..checkpoint.lora import Adapter
from ..checkpoint.names import TensorNames, saved_state
from ..checkpoint.trained import Trained, TrainedPiece
from .scaled_optimizer import ScaledOptimizer


def held_module(module: nn.Module, adapters: Sequence[Adapter]) -> HeldModel:
    """Its parameters and persistent buffers, whole or in torch's rows; a tied one once."""
    names, named = TensorNames.of(module), saved_state(module)
    return HeldModel(
        module=module,
        names=names,
        tensors={name: _held(name, named[name]) for name in names.needed},
        adapters=tuple(adapters),
        loaded=lambda: None,
    )


def trained_parameters(optimizer: ScaledOptimizer) -> Trained:
    """What this rank steps: whole parameters, or rows of them."""
    parameters = [parameter for group in optimizer.optim.param_groups for parameter in group["params"]]
    groups = [
        [
            TrainedPiece(optimizer.names[parameter], parameter, _held)
            for parameter in group["params"]
            if parameter.requires_grad and parameter.numel()
        ]
        for group in optimizer.optim.param_groups
    ]
    return Trained(
        inner=optimizer.optim,
        groups=groups,
        has_masters=False,
        extra={"scaler": optimizer.scaler_state(), "skipped_steps": optimizer.skipped_steps},
        install=partial(_install, optimizer),
        is_whole=not any(isinstance(each, DTensor) for each in parameters),
    )


def _held(name: str, tensor: Tensor) -> HeldTensor:
    if isinstance(tensor, DTensor):
        return held_dtensor(name, tensor)
    return held_piece(name, tensor, None, 0)


def _install(optimizer: ScaledOptimizer, state: dict[str, Any], extra: Mapping[str, Any]) -> None:
    optimizer.optim.load_state_dict(state)
    optimizer.load_scaler_state(extra["scaler"])
    optimizer.skipped_steps = extra["skipped_steps"]
