"""Ulysses: each rank attends over full sequences with its share of the heads (arXiv:2309.14509).

attention.py chooses the attention that a model calls.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...cluster.collectives import all_to_all
from ...cluster.forward_random import SplitRandom
from ..layers.region import AttributeView
from ..layers.sequence_axis import SequenceAxis

# B batch, S sequence with padding, L without, N query heads, M key-value heads, D width of a head, P ranks;
# n, m: heads of one rank; X total width of one rank's heads


# An attention function of transformers; returns (B, Q, N, D) and the attention weights or None.
Attend = Callable[..., tuple[Tensor, Any]]


@dataclass(frozen=True, kw_only=True)
class HeadShare:
    """Heads of each rank during attention: `keys` key-value heads, with `groups` query heads each.

    Key-value heads are replicated `repeats` times, each replica for some of its query heads. Padded heads are added at
    the end of both. So all ranks have equally many heads, and every query head is on the rank of its key-value head.

    Args:
        size: number of ranks.
        num_queries: query heads of all ranks.
        num_keys: key-value heads of all ranks; divides the query heads.
        repeats: replicas of a key-value head; divides the query heads per key-value head.
    """

    size: int
    num_queries: int
    num_keys: int
    repeats: int = 1

    @staticmethod
    def with_fewest_heads(num_queries: int, num_keys: int, size: int) -> "HeadShare":
        """Return the share, over all possible `repeats`, with the fewest heads of a rank, which are sent."""
        fewest = HeadShare(size=size, num_queries=num_queries, num_keys=num_keys)
        groups = fewest.groups
        for repeats in range(2, groups + 1):  # a loop, which torch.compile can follow
            share = replace(fewest, repeats=repeats)
            if groups % repeats == 0 and share.queries + share.keys < fewest.queries + fewest.keys:
                fewest = share
        return fewest

    @property
    def groups(self) -> int:
        """Query heads per local key-value head."""
        return self.num_queries // (self.num_keys * self.repeats)

    @property
    def keys(self) -> int:
        """Key-value heads of one rank, including padded heads."""
        return -(-self.num_keys * self.repeats // self.size)

    @property
    def queries(self) -> int:
        """Query heads of one rank, including padded heads."""
        return self.keys * self.groups

    def local_entries(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's entries of a tensor with one per query head along `dim`, zeros for padded heads.

        A tensor with a length of 1 is for all heads, and returned as it is.
        """
        if x.shape[dim] == 1:
            return x
        if x.shape[dim] != self.num_queries:
            raise ValueError(
                f"attention got {tuple(x.shape)} for {self.num_queries} query heads: along dim {dim} there must be as "
                "many entries, or 1"
            )
        begin = min(rank * self.queries, self.num_queries)
        entries = x.narrow(dim, begin, min(self.queries, self.num_queries - begin))
        return _pad_to(entries, dim, self.queries)


def attend_by_heads(
    attend: Attend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    axis: SequenceAxis,
    *,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute attention over full sequences, with inputs and result sharded by sequence.

    Two all-to-alls forward, of queries, keys and values together and of the result, and two backward.

    Args:
        attend: attention function for full sequences.
        module: argument of `attend`, which sees the numbers of heads and the sinks of this rank's share.
        query: (B, N, S/P, D), this rank's shard of the sequence.
        key, value: (B, M, S/P, D), where M divides N; the width of value may differ.
        mask: for full sequences, (B or 1, N or 1, L or 1, L), or (B, L); a FlexAttention mask must suit all heads.
        axis: all its ranks must call; its `length` is L.
        dropout: probability; heads of different ranks drop different entries.
        position_bias: (B or 1, N or 1, L or 1, L), added to the scores.
        s_aux: (N,), the logit of each head for attending to nothing.
        **kwargs: further arguments of `attend`.

    Returns:
        (B, S/P, N, D).

    Raises:
        ValueError: a shape does not match the axis' sequence.
    """
    _check_shards(module, query, key, axis)
    share = HeadShare.with_fewest_heads(query.shape[1], key.shape[1], axis.group.size())
    full_sequences = _exchange_for_heads((query, key, value), share, axis)
    if position_bias is not None:
        kwargs["position_bias"] = _local_mask(position_bias, share, axis)
    if s_aux is not None:
        kwargs["s_aux"] = share.local_entries(s_aux, 0, axis.rank)
    if isinstance(mask, Tensor):
        mask = _local_mask(mask, share, axis)
    view = _local_view(module, share, axis)
    with _local_random_state(axis, query.device, dropout):
        out_BLnD, _ = attend(view, *full_sequences, mask, dropout=dropout, **kwargs)
    padded = _pad_to(out_BLnD, 1, axis.order.padded(axis.length))
    out = all_to_all(padded, axis.group, split_dim=1, gather_dim=2)
    return out if out.shape[2] == share.num_queries else out[:, :, : share.num_queries]


def _check_shards(module: nn.Module, query: Tensor, key: Tensor, axis: SequenceAxis) -> None:
    """Raise for shapes that are not of contiguous shards of the axis' sequence."""
    if axis.order.is_zigzag:
        raise AssertionError("all-to-all concatenates shards: each must be contiguous in the sequence")
    shard_length = axis.shard_length
    if query.shape[2] != shard_length or key.shape[2] != shard_length:
        raise ValueError(
            f"{type(module).__name__} attends from {query.shape[2]} to {key.shape[2]} positions, but this "
            f"rank has {shard_length} of a sequence of {axis.length}: for cross-attention or a key-value cache use a "
            "sequence_parallelism_mode of the tensor axis, 'split_gather' or 'ring'"
        )


def _exchange_for_heads(shards: tuple[Tensor, ...], share: HeadShare, axis: SequenceAxis) -> Iterator[Tensor]:
    """Exchange sequence shards of all heads for full sequences of this rank's heads. One all-to-all.

    Args:
        shards: queries (B, N, S/P, D), keys and values (B, M, S/P, D).
        share: the heads of each rank.
        axis: the sequence axis.

    Returns:
        Queries (B, n, L, D), keys and values (B, m, L, D).
    """
    query, key, value = shards
    if share.repeats > 1:
        key, value = key.repeat_interleave(share.repeats, 1), value.repeat_interleave(share.repeats, 1)
    counts = share.queries, share.keys, share.keys
    padded = [
        _pad_to(heads, 1, share.size * count)
        for heads, count in zip((query, key, value), counts, strict=True)
    ]
    # (P, S/P, B, X): the heads of each rank P, the layout in which they are sent; views until `cat` copies them.
    sent = [heads.unflatten(1, (share.size, -1)).permute(1, 3, 0, 2, 4).flatten(3) for heads in padded]
    arrived_SBX = all_to_all(torch.cat(sent, -1), axis.group, split_dim=0, gather_dim=1).squeeze(0)
    if len(arrived_SBX) != axis.length:
        arrived_SBX = arrived_SBX[: axis.length]
    received = arrived_SBX.split([heads.shape[-1] for heads in sent], -1)
    return (
        heads.unflatten(-1, (count, -1)).permute(1, 2, 0, 3)
        for heads, count in zip(received, counts, strict=True)
    )


def _pad_to(x: Tensor, dim: int, length: int) -> Tensor:
    """Pad `dim` with zeros at its end to this length."""
    missing = length - x.shape[dim]
    return pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x


def _local_mask(mask: Tensor, share: HeadShare, axis: SequenceAxis) -> Tensor:
    """Return a mask or bias for full sequences, sliced to this rank's heads if it has an entry for each head.

    Raises:
        ValueError: its shape is not that of a mask for the axis' sequence.
    """
    length = axis.length
    if (
        mask.ndim not in (2, 4)
        or mask.shape[-1] != length
        or (mask.ndim == 4 and mask.shape[2] not in (1, length))
    ):
        raise ValueError(
            f"attention got a mask or bias of shape {tuple(mask.shape)} for sequences of length {length}: it must be "
            f"(batch, heads or 1, {length} or 1, {length}), or (batch, {length})"
        )
    return share.local_entries(mask, 1, axis.rank) if mask.ndim == 4 else mask


def _local_view(module: nn.Module, share: HeadShare, axis: SequenceAxis) -> AttributeView:
    """Return a view of the module with the numbers of heads and the sinks of this rank."""
    overrides: dict[str, Any] = {}
    if hasattr(module, "num_key_value_groups"):
        overrides["num_key_value_groups"] = share.groups
    if isinstance(sinks := getattr(module, "sinks", None), Tensor):
        overrides["sinks"] = share.local_entries(sinks, 0, axis.rank)
    return AttributeView(module, **overrides)


@contextmanager
def _local_random_state(axis: SequenceAxis, device: torch.device, dropout: float) -> Iterator[None]:
    """Inside the block draw random numbers that differ between ranks, unless `dropout` is 0."""
    if not dropout:
        yield
        return
    random_of_rank = SplitRandom(axis.rank)
    random_of_rank.enter(device)
    try:
        yield
    finally:
        random_of_rank.leave()
