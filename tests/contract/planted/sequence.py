"""Faults in sequence parallelism: shards of a sequence, their positions, and their weights in the gradient."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.cluster.collectives import InFlight
from echelon.cluster.placement import Replicated
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from ...shardformer.sequence.test_flex import (
    attend_round_rings,
    test_a_block_mask_is_the_dense_one,
)
from ..models import EagerChoice
from ..mutations import around, fault

LLAMA, GPT2, BERT = (ModelChoice(model_type=name) for name in ("llama", "gpt2", "bert"))
ULYSSES, RING_ATTENTION = Layout(sp=2, sequence="all_to_all"), Layout(sp=2, sequence="ring_attn")


def positions_of_the_first(shard: Callable[..., Tensor], self: Any, tensor: Tensor) -> Tensor:
    has_positions = "position_ids" in self._full_call[1]
    return self._axis.order.shard(tensor, -1, 0) if has_positions else shard(self, tensor)


def tokens_of_the_first(shard: Callable[..., Tensor], self: Any, tensor: Tensor) -> Tensor:
    has_positions = "position_ids" in self._full_call[1]
    return shard(self, tensor) if has_positions else self._axis.order.shard(tensor, -1, 0)


def labels_cut_before_they_are_shifted(
    shard: Callable[..., Tensor], self: Any, x: Tensor, dim: int, *, padding: int = 0
) -> Tensor:
    if padding != -100:
        return shard(self, x, dim, padding=padding)
    unshifted = F.pad(x, (1, 0), value=padding)[..., :-1]
    cut = shard(self, unshifted, dim, padding=padding)
    return F.pad(cut, (0, 1), value=padding)[..., 1:].contiguous()


def local_rows_alone(rows: Tensor, group: Any) -> InFlight[Tensor]:
    """Scatter a region's output without the sum."""
    return InFlight(None, rows[group.rank()].contiguous())


def from_the_end(self: Any, kept: Tensor) -> Tensor:
    """Gather a region's input again in another order."""
    gathered: Tensor = self._begin(kept).wait()
    return gathered.flip(1).flatten(0, 1)


def with_local_keys(mask: Callable[..., Any], self: Any, source: Any, device: Any) -> Any:
    """Mask keys that came round the ring as if they were at the local positions: another causal mask."""
    return mask(self, self.axis.rank, device)


def seeing_padding(placed: Callable[..., Any], self: Any, *positions: Tensor) -> Any:
    other = copy(self)
    other._padding_BS = None
    return placed(other, *positions)


def without_gradients_of_the_lse(
    look: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a part of the keys as if it were all of them."""
    out, lse = look(*args, **kwargs)
    if lse.requires_grad:
        lse.register_hook(torch.zeros_like)
    return out, lse


SEQUENCE = "shardformer.sequence"
SPLIT_GATHER = "shardformer.layers.split_gather"
REGATHER = Layout(tp=2, sequence="split_gather", options=("enable_sequence_regather",))
OVERLAP = Layout(tp=2, sequence="split_gather", options=("enable_sequence_overlap",))
PARTIAL = "shardformer.layer_split:PartialGrad"
SHARD = f"{SEQUENCE}.before_layers:ShardedCalls._shard"

# fmt: off
FAULTS = {
    "a region's end is scattered without its sum": fault(f"{SPLIT_GATHER}:begin_sum_of_rows", local_rows_alone, LLAMA,
        Layout(tp=2, sequence="split_gather")),
    "a region's input is gathered again in another order": fault("shardformer.layers.deferred_linear:Regather.rows",
        from_the_end, LLAMA, REGATHER),
    "overlapped products at a region's end are halved": fault(f"{SPLIT_GATHER}:linear",
        around(lambda product, x, weight: product(x, weight) / 2), LLAMA, OVERLAP),
    "gradients of norms are not summed": fault(PARTIAL, Replicated, LLAMA, Layout(tp=2, sequence="split_gather"),
        quick=True),
    "gradients of norms are not summed under ring, another name of split_gather": fault(PARTIAL, Replicated, BERT,
        Layout(tp=2, sequence="ring")),
    "gradients of a shard of the sequence are not scaled": fault("shardformer.layers.sequence_axis:times_num_ranks",
        lambda gradient, axis: gradient, GPT2, ULYSSES),
    "gradients of a rank's part of the loss are not scaled": fault(f"{SEQUENCE}.loss:times_num_ranks",
        lambda gradient, axis: gradient, LLAMA, RING_ATTENTION),
    "positions are those of the first rank": fault(SHARD, around(positions_of_the_first), LLAMA, ULYSSES),
    "tokens are those of the first rank": fault(SHARD, around(tokens_of_the_first), LLAMA, RING_ATTENTION),
    "labels are sharded before they are shifted": fault("shardformer.layers.sequence_axis:SequenceAxis.shard",
        around(labels_cut_before_they_are_shifted), LLAMA, ULYSSES),
    "sinks are those of the first rank's heads": fault(f"{SEQUENCE}.ulysses:HeadShare.local_entries",
        around(lambda local_entries, self, x, dim, rank: local_entries(self, x, dim, 0)),
        EagerChoice(model_type="gpt_oss"), ULYSSES),
    "parts of attention are merged as if equally heavy": fault(f"{SEQUENCE}.ring_attention:OnlineSoftmax.add",
        around(lambda add, self, rows, out, lse: add(self, rows, out, 0 * lse)), LLAMA, RING_ATTENTION),
    "FlexAttention takes the keys of other ranks for local ones": fault(
        f"{SEQUENCE}.ring_attention:_RingCall._flex_mask", around(with_local_keys), attend_round_rings,
        notice="^AssertionError: results: "),
    "FlexAttention sees padding": fault(f"{SEQUENCE}.block_mask:BlockMask.at_positions", around(seeing_padding),
        attend_round_rings, notice="^AssertionError: results: "),
    "FlexAttention takes partial blocks for full ones": fault(f"{SEQUENCE}.flex:_count_blocks",
        around(lambda count, seen: (count(seen) > 0) * 128**2),
        partial(test_a_block_mask_is_the_dense_one, "padded left"), num_ranks=1, notice="^AssertionError"),
    "FlexAttention gives no gradients of the lse": fault(f"{SEQUENCE}.flex:attend_to_block",
        around(without_gradients_of_the_lse), attend_round_rings, notice="^AssertionError: gradient of "),
}
# fmt: on
