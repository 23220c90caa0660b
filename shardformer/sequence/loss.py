"""Causal losses of sequences that stay sharded after the last layer: no rank materializes logits of a full sequence.

Each rank of the sequence axis computes the loss of its own positions; labels are shifted before they are sharded.
Gradients follow [Note: gradients over the sequence axis] in layers/sequence_axis.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...cluster.collectives import all_reduce, paired
from ...pipeline.counted_loss import unobserved
from ...pipeline.plan import StagePlan, is_within
from ..layers.forward_code import is_by_position, is_by_position_after_loops, only_scales_result
from ..layers.loss import ShardedLogits, has_causal_loss, has_labels, route_causal_loss
from ..layers.sequence_axis import SequenceAxis, gather_sequence, times_num_ranks


@dataclass(frozen=True)
class SequenceParallelLogits(ShardedLogits):
    """`ShardedLogits` of this rank's positions, which may be sharded over the tensor axis too."""

    part: Tensor | ShardedLogits
    axis: SequenceAxis
    length: int
    _description = "sharded over the sequence"

    def gather(self) -> Tensor:
        """Return all logits, (B, S, V), with gradients. All-gather over the sequence axis, and the tensor axis."""
        part = self.part.gather() if isinstance(self.part, ShardedLogits) else self.part
        return gather_sequence(part, self.axis, self.length, is_on_sequence_axis=True)


def stays_sharded(model: nn.Module, plan: StagePlan, head: str | None) -> bool:
    """Return True if a model works by position from its last layer to the causal loss, which is transformers'.

    Args:
        model: the full model.
        plan: the paths of its layers.
        head: the path of its language-model head, or None.
    """
    if head is None or not has_causal_loss(model) or not only_scales_result(model, head):
        return False
    before = [*plan.kept_paths(model), head]
    behind = [
        module
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
        and not any(is_within(name, path) for path in before)
    ]
    outer = plan.layers.split(".")[:-1]  # the modules around the list of layers, the innermost last
    around = [model.get_submodule(".".join(outer[: depth + 1])) for depth in range(len(outer))]
    return all(map(is_by_position, behind)) and all(map(is_by_position_after_loops, around))


def keep_sharded(model: nn.Module, axis: SequenceAxis) -> None:
    """Keep sequences sharded after the last layer in training calls with labels; for models that pass `stays_sharded`.

    Args:
        model: a sharded model with its head.
        axis: the axis of its last layer.
    """
    inner: Any = model.loss_function

    def is_sharded(arguments: Mapping[str, Any]) -> bool:
        kept = arguments.get("logits_to_keep")  # 0 is all positions in transformers; a tensor lists positions
        keeps_all = kept is None or (isinstance(kept, int) and kept == 0)
        return model.training and has_labels(arguments) and keeps_all

    route_causal_loss(
        model,
        (
            axis,
            "gathers_after_last_layer",
        ),  # the attribute that tells the last layer to gather; off during these calls
        total=partial(_sum_of_parts, axis=axis, inner=inner),
        finish=lambda part: SequenceParallelLogits(part, axis, axis.length),
        is_sharded=is_sharded,
    )


def _sum_of_parts(
    logits: Tensor,
    shift_labels: Tensor,
    *,
    vocab_size: int,
    ignore_index: int,
    axis: SequenceAxis,
    inner: Callable[..., Tensor],
) -> Tensor:
    """Return the loss sum over all sequence shards, from this rank's logits; a `LossSum`. One all-reduce."""
    labels = axis.shard(shift_labels, 1, padding=ignore_index)
    with unobserved():  # no term of the loss, which is the sum over all shards
        share = inner(
            logits, labels, vocab_size, num_items_in_batch=1, ignore_index=ignore_index, shift_labels=labels
        )
    return paired(
        share, lambda share: all_reduce(share, axis.group), lambda gradient: times_num_ranks(gradient, axis)
    )
