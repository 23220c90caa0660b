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
    def least(num_queries: int, num_keys: int, size: int) -> "HeadShare":
        """Return the share with the fewest heads to send."""
        best = HeadShare(size=size, num_queries=num_queries, num_keys=num_keys)
        groups = best.groups
        for repeats in range(2, groups + 1):  # a loop, which torch.compile can follow
            share = replace(best, repeats=repeats)
            if groups % repeats == 0 and share.queries + share.keys < best.queries + best.keys:
                best = share
        return best

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

    def own(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's slice of a tensor with an entry per query head along `dim`; a length of 1 suits all heads."""
        if x.shape[dim] == 1:
            return x
        if x.shape[dim] != self.num_queries:
            raise ValueError(
                f"attention got {tuple(x.shape)} for {self.num_queries} query heads: along dim {dim} there must be as "
                "many entries, or 1"
            )
        begin = min(rank * self.queries, self.num_queries)
        of_rank = x.narrow(dim, begin, min(self.queries, self.num_queries - begin))
        return _filled(of_rank, dim, self.queries)


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
    _check(module, query, key, axis)
    share = HeadShare.least(query.shape[1], key.shape[1], axis.group.size())
    full_sequences = _whole_sequences((query, key, value), share, axis)
    if position_bias is not None:
        kwargs["position_bias"] = _own_mask(position_bias, share, axis)
    if s_aux is not None:
        kwargs["s_aux"] = share.own(s_aux, 0, axis.rank)
    if isinstance(mask, Tensor):
        mask = _own_mask(mask, share, axis)
    view = _own_view(module, share, axis)
    with _own_random(axis, query.device, dropout):
        out_BLnD, _ = attend(view, *full_sequences, mask, dropout=dropout, **kwargs)
    padded = _filled(out_BLnD, 1, axis.order.padded(axis.length))
    out = all_to_all(padded, axis.group, split_dim=1, gather_dim=2)
    return out if out.shape[2] == share.num_queries else out[:, :, : share.num_queries]


def _check(module: nn.Module, query: Tensor, key: Tensor, axis: SequenceAxis) -> None:
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


def _whole_sequences(parts: tuple[Tensor, ...], share: HeadShare, axis: SequenceAxis) -> Iterator[Tensor]:
    """Return queries, keys and values of this rank's heads for the full sequence, (B, n or m, L, D). One all-to-all."""
    query, key, value = parts
    if share.repeats > 1:
        key, value = key.repeat_interleave(share.repeats, 1), value.repeat_interleave(share.repeats, 1)
    counts = share.queries, share.keys, share.keys
    padded = [
        _filled(heads, 1, share.size * count)
        for heads, count in zip((query, key, value), counts, strict=True)
    ]
    # (P, S/P, B, X), one slice for each rank: one copy, sent from its buffer; the result (S, B, X) is used in place.
    sent = [heads.unflatten(1, (share.size, -1)).permute(1, 3, 0, 2, 4).flatten(3) for heads in padded]
    arrived_SBX = all_to_all(torch.cat(sent, -1), axis.group, split_dim=0, gather_dim=1).squeeze(0)
    if len(arrived_SBX) != axis.length:
        arrived_SBX = arrived_SBX[: axis.length]
    received = arrived_SBX.split([heads.shape[-1] for heads in sent], -1)
    return (
        heads.unflatten(-1, (count, -1)).permute(1, 2, 0, 3)
        for heads, count in zip(received, counts, strict=True)
    )


def _filled(x: Tensor, dim: int, length: int) -> Tensor:
    """Pad `dim` with zeros at its end to this length."""
    missing = length - x.shape[dim]
    return pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x


def _own_mask(mask: Tensor, share: HeadShare, axis: SequenceAxis) -> Tensor:
    """Return this rank's heads of a mask or bias for full sequences, if it has an entry for each head."""
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
    return share.own(mask, 1, axis.rank) if mask.ndim == 4 else mask


def _own_view(module: nn.Module, share: HeadShare, axis: SequenceAxis) -> AttributeView:
    """Return a view of the module with the numbers of heads and the sinks of this rank."""
    changed: dict[str, Any] = {}
    if hasattr(module, "num_key_value_groups"):
        changed["num_key_value_groups"] = share.groups
    if isinstance(sinks := getattr(module, "sinks", None), Tensor):
        changed["sinks"] = share.own(sinks, 0, axis.rank)
    return AttributeView(module, **changed)


@contextmanager
def _own_random(axis: SequenceAxis, device: torch.device, dropout: float) -> Iterator[None]:
    """Draw random numbers that differ between ranks inside the block, if there is dropout."""
    if not dropout:
        yield
        return
    random_of_rank = SplitRandom(axis.rank)
    random_of_rank.enter(device)
    try:
        yield
    finally:
        random_of_rank.leave()
