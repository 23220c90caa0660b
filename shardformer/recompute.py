"""Activation recomputation of layers, or of modules within them.

Full layers: arXiv:1604.06174. Selected modules with large activations and cheap forwards: arXiv:2205.05198, section 5.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..cluster.forward_random import SplitRandom
from ..cluster.transformers_api import (
    Conv1D,
    GradientCheckpointingLayer,
    set_checkpoint_function,
    set_recomputed,
)
from .layers.class_change import change_class
from .layers.linear import Linear1D_Row
from .layers.sequence_axis import axis_of
from .sequence.boundary import CheckpointWithLength

# Calls a function in forward and again in backward; tensors are positional arguments.
Checkpoint = Callable[..., Any]
RECOMPUTE: Checkpoint = partial(checkpoint, use_reentrant=False)


@dataclass(frozen=True, kw_only=True)
class PipelineGradientCheckpointConfig:
    """Number of recomputed layers of each pipeline stage: its first ones. Give a ratio or numbers.

    Args:
        gradient_checkpointing_ratio: share of each stage's layers, from 0 to 1, rounded down.
        num_ckpt_layers_per_stage: number of layers of each stage, with one entry for every stage of the pipeline.
        recompute_modules: recompute only these modules of the layers, by their paths in the layer, for example
            ("mlp",). None recomputes full layers.
    """

    gradient_checkpointing_ratio: float | None = None
    num_ckpt_layers_per_stage: Sequence[int] | None = None
    recompute_modules: Sequence[str] | None = None

    def errors(self, num_stages: int | None) -> list[str]:
        """List errors of the config for a pipeline with this many stages (None: any), each with advice."""
        return self._module_errors() + self._number_errors(num_stages)

    def _module_errors(self) -> list[str]:
        """List the error of `recompute_modules`; empty if it is valid."""
        names = self.recompute_modules
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if names is None or (is_list and names and all(isinstance(name, str) and name for name in names)):
            return []
        return [
            f"recompute_modules={names!r} must be a list of the names of modules in a layer, ('mlp',) for example: "
            "leave it out to recompute whole layers"
        ]

    def _number_errors(self, num_stages: int | None) -> list[str]:
        """List the error of the ratio or of the counts by stage; empty if they are valid."""
        ratio, counts = self.gradient_checkpointing_ratio, self.num_ckpt_layers_per_stage
        if (ratio is None) == (counts is None):
            mistake = "neither is given" if ratio is None else "both are given"
            return [
                "gradient_checkpoint_config takes gradient_checkpointing_ratio or num_ckpt_layers_per_stage, and "
                f"{mistake}: give one"
            ]
        if counts is None:
            is_share = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 <= ratio <= 1
            if is_share:
                return []
            return [f"gradient_checkpointing_ratio={ratio!r} must be a number from 0 to 1"]
        are_counts = isinstance(counts, Sequence) and all(
            isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts
        )
        if are_counts and num_stages in (None, len(counts)):
            return []
        many = "each stage" if num_stages is None else f"each of {num_stages} stages"
        return [
            f"num_ckpt_layers_per_stage={counts!r} must be a list of integers of at least 0, one for {many}"
        ]

    def num_layers(self, stage: int, num_layers: int) -> int:
        """Return the number of recomputed layers of a stage that has `num_layers`."""
        if self.num_ckpt_layers_per_stage is not None:
            return self.num_ckpt_layers_per_stage[stage]
        assert self.gradient_checkpointing_ratio is not None
        return int(self.gradient_checkpointing_ratio * num_layers + 1e-9)  # 0.7 * 90 is below 63


def recomputable_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers can recompute, in the order of the model."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_errors(
    layers: Mapping[int, Sequence[nn.Module]], config: PipelineGradientCheckpointConfig
) -> list[str]:
    """List reasons why the layers cannot be recomputed as requested; empty if they can.

    Args:
        layers: the layers of each stage, by its index in the pipeline.
        config: which layers, or modules in them, to recompute.
    """
    errors = []
    for stage, local in layers.items():
        count = config.num_layers(stage, len(local))
        if count > len(local):
            errors.append(
                f"num_ckpt_layers_per_stage asks for {count} layers of stage {stage}, which has {len(local)}: ask for "
                "at most that many"
            )
        unsupported = [
            type(layer).__name__
            for layer in local[:count]
            if config.recompute_modules is None and not isinstance(layer, GradientCheckpointingLayer)
        ]
        if unsupported:
            errors.append(
                f"{unsupported[0]} cannot be recomputed: it is not a GradientCheckpointingLayer of transformers. "
                "Give recompute_modules, or leave gradient_checkpoint_config out"
            )
    return list(dict.fromkeys(errors + _name_errors(_recomputed(layers, config), config)))


def _name_errors(layers: Sequence[nn.Module], config: PipelineGradientCheckpointConfig) -> list[str]:
    """List errors of requested modules that no recomputed layer has."""
    names = list(dict.fromkeys(path for layer in layers for path in _recomputable(layer)))
    return [
        (
            f"recompute_modules: no layer has a {requested!r} that can be recomputed: use one or more of "
            f"{', '.join(names)}"
        )
        for requested in config.recompute_modules or ()
        if layers and requested not in names
    ]


def _recomputable(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a layer that are worth recomputing, by path.

    These are all but containers, which have no forward, and linear layers, which save only their inputs.
    """
    no_forward = nn.Module.forward
    return {
        path: module
        for path, module in layer.named_modules()
        if path and type(module).forward is not no_forward and not isinstance(module, (nn.Linear, Conv1D))
    }


def _recomputed(
    layers: Mapping[int, Sequence[nn.Module]], config: PipelineGradientCheckpointConfig
) -> list[nn.Module]:
    """Return the layers of all stages that are recomputed, fully or in part."""
    return [
        layer for stage, local in layers.items() for layer in local[: config.num_layers(stage, len(local))]
    ]


def checkpoint_layers(
    layers: Mapping[int, Sequence[nn.Module]],
    config: PipelineGradientCheckpointConfig,
    checkpoint: Checkpoint = RECOMPUTE,
) -> None:
    """Enable recomputation of the first layers of each stage, or of modules in them, and disable all others; in place.

    Recomputation draws the same random numbers. Hooks of the named modules run again too.

    Args:
        layers: the layers of each stage, by its index in the pipeline; already sharded and fused.
        config: which of them to recompute; without `recompute_errors`.
        checkpoint: a non-reentrant checkpoint function, so that hooks of parameters fire as usual.
    """
    for layer in (layer for local in layers.values() for layer in local):
        set_recomputed(layer, is_on=False)
    for layer in _recomputed(layers, config):
        if config.recompute_modules is None:
            set_recomputed(layer, is_on=True)
            set_checkpoint_function(layer, checkpoint)
            continue
        layer_checkpoint = _checkpoint_in_layer(layer, checkpoint)
        for path, module in layer.named_modules():
            if path in config.recompute_modules:
                vars(module)["_recompute"] = layer_checkpoint
                change_class(module, _recomputed_class(type(module)))  # type: ignore[arg-type]  # a class is hashable


def _checkpoint_in_layer(layer: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint function for modules of a layer, whose recomputation finds the state of the forward.

    It restores the length of sharded sequences, and the random states of regions with dropout.
    """
    if (axis := axis_of(layer)) is not None:
        checkpoint = CheckpointWithLength(checkpoint, axis)
    rows = [module for module in layer.modules() if isinstance(module, Linear1D_Row)]
    randoms: list[SplitRandom] = [row.split_random for row in rows if row.split_random is not None]
    if not randoms:
        return checkpoint

    def restoring(function: Callable[..., Any], *args: Any) -> Any:
        """Checkpoint a function so that its recomputation begins with the current random states."""
        restorers = [random.restorer() for random in randoms]

        def restore_and_compute(*args: Any) -> Any:
            for restore in restorers:  # in forward they set the states that are there already
                restore()
            return function(*args)

        return checkpoint(restore_and_compute, *args)

    return restoring


@cache
def _recomputed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose calls are recomputed, hooks included, by the instance's function `_recompute`.

    Hooks are included because regions communicate in hooks.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the module with recomputation; a checkpoint function takes arguments by position only."""
        names, count = tuple(kwargs), len(args)

        def by_position(*values: Any) -> Any:
            return kind.__call__(self, *values[:count], **dict(zip(names, values[count:], strict=True)))

        return vars(self)["_recompute"](by_position, *args, *kwargs.values())

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
