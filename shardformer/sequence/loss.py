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
from ..layers.sequence_axis import SequenceAxis, gather_sequence, times_num_ranks
from ..layers.vocabulary_loss import ShardedLogits, has_labels, route_causal_loss


@dataclass(frozen=True)
class SequenceParallelLogits(ShardedLogits):
    """`ShardedLogits` of this rank's positions.

    Args:
        local: logits of this rank's positions, which may be sharded over the tensor axis too.
        axis: the axis of the sequence.
        length: length of the full sequence.
    """

    local: Tensor | ShardedLogits
    axis: SequenceAxis
    length: int
    _description = "sharded over the sequence"

    def gather(self) -> Tensor:
        """Return all logits, (B, S, V), with gradients. All-gather over the sequence axis, and the tensor axis."""
        local = self.local.gather() if isinstance(self.local, ShardedLogits) else self.local
        return gather_sequence(local, self.axis, self.length, is_on_sequence_axis=True)


def keep_sharded(model: nn.Module, axis: SequenceAxis) -> None:
    """Keep sequences sharded after the last layer in training calls with labels; for a policy with `keeps_sequences`.

    Args:
        model: a sharded model with its head.
        axis: the axis of its last layer.
    """
    local_loss: Any = model.loss_function

    def is_sharded(arguments: Mapping[str, Any]) -> bool:
        """Return True for a training call with labels that keeps the logits of all positions."""
        kept = arguments.get("logits_to_keep")  # 0 is all positions in transformers; a tensor lists positions
        keeps_all = kept is None or (isinstance(kept, int) and kept == 0)
        return model.training and has_labels(arguments) and keeps_all

    route_causal_loss(
        model,
        # The attribute that tells the last layer to gather; False during these calls.
        (axis, "gathers_after_last_layer"),
        total=partial(_sum_over_shards, axis=axis, local_loss=local_loss),
        finish=lambda local: SequenceParallelLogits(local, axis, axis.length),
        is_sharded=is_sharded,
    )


def _sum_over_shards(
    logits: Tensor,
    shift_labels: Tensor,
    *,
    vocab_size: int,
    ignore_index: int,
    axis: SequenceAxis,
    local_loss: Callable[..., Tensor],
) -> Tensor:
    """Return the loss sum over all sequence shards, from this rank's logits; a `LossSum`. One all-reduce."""
    labels = axis.shard(shift_labels, 1, padding=ignore_index)
    with unobserved():  # no term of the loss, which is the sum over all shards
        local_sum = local_loss(
            logits, labels, vocab_size, num_items_in_batch=1, ignore_index=ignore_index, shift_labels=labels
        )
    return paired(
        local_sum,
        lambda local_sum: all_reduce(local_sum, axis.group),
        lambda gradient: times_num_ranks(gradient, axis),
    )
