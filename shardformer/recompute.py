"""Layers that forget their activations in forward and compute them again in backward (arXiv:1604.06174)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True, kw_only=True)
class PipelineGradientCheckpointConfig:
    """Number of layers of each pipeline stage that are recomputed: its first ones. Give one of the two.

    Args:
        gradient_checkpointing_ratio: the share of each stage's layers, from 0 to 1, rounded down.
        num_ckpt_layers_per_stage: how many layers of each stage, counted over the whole pipeline.
    """

    gradient_checkpointing_ratio: float | None = None
    num_ckpt_layers_per_stage: Sequence[int] | None = None

    def errors(self, num_stages: int | None) -> list[str]:
        """All that is wrong with it for a pipeline of so many stages (None: any), each with what would work."""
        ratio, counts = self.gradient_checkpointing_ratio, self.num_ckpt_layers_per_stage
        if (ratio is None) == (counts is None):
            given = "neither is given" if ratio is None else "both are given"
            return [
                "gradient_checkpoint_config takes gradient_checkpointing_ratio or num_ckpt_layers_per_stage, and "
                f"{given}: give one"
            ]
        if counts is None:
            is_share = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 <= ratio <= 1
            return (
                [] if is_share else [f"gradient_checkpointing_ratio={ratio!r} must be a number from 0 to 1"]
            )
        are_counts = isinstance(counts, Sequence) and all(
            isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts
        )
        if are_counts and num_stages in (None, len(counts)):
            return []
        many = "each stage" if num_stages is None else f"each of {num_stages} stages"
        return [
            f"num_ckpt_layers_per_stage={counts!r} must be a list of whole numbers of at least 0, one for {many}"
        ]

    def num_layers(self, stage: int, num_layers: int) -> int:
        """Number of a stage's layers that are recomputed."""
        if self.num_ckpt_layers_per_stage is not None:
            return self.num_ckpt_layers_per_stage[stage]
        assert self.gradient_checkpointing_ratio is not None
        return int(self.gradient_checkpointing_ratio * num_layers)


def recomputable_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers can recompute, in the order of the model."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_errors(
    layers: Mapping[int, Sequence[nn.Module]], config: PipelineGradientCheckpointConfig
) -> list[str]:
    """Why the layers of some stages cannot be recomputed as asked for; empty when they can.

    Args:
        layers: the layers of each stage, by its index in the pipeline.
        config: what is asked for.
    """
    found = []
    for stage, local in layers.items():
        count = config.num_layers(stage, len(local))
        if count > len(local):
            found.append(
                f"num_ckpt_layers_per_stage asks for {count} layers of stage {stage}, which has {len(local)}: ask for "
                "at most that many"
            )
        other = [
            type(layer).__name__
            for layer in local[:count]
            if not isinstance(layer, GradientCheckpointingLayer)
        ]
        if other:
            found.append(
                f"{other[0]} cannot be recomputed: it is no GradientCheckpointingLayer of transformers. Leave "
                "gradient_checkpoint_config out"
            )
    return list(dict.fromkeys(found))


def checkpoint_layers(
    layers: Mapping[int, Sequence[nn.Module]], config: PipelineGradientCheckpointConfig
) -> None:
    """Let the first layers of each stage be recomputed in backward, and no others.

    Without re-entrance, so that hooks of parameters fire as ever; random numbers are the same again.
    """
    for stage, local in layers.items():
        count = config.num_layers(stage, len(local))
        for index, layer in enumerate(local):
            layer.gradient_checkpointing = index < count  # type: ignore[assignment]
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
