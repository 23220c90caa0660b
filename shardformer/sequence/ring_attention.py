"""Ring attention: keys and values circulate among the ranks of a sequence axis (arXiv:2310.01889).

Each rank keeps its queries, attends to each received block of keys, and combines the results. In backward keys and
values circulate again, together with their gradients, which end on the rank of the keys. Masks are in block_mask.py,
kernels for one block in kernels.py, communication in cluster/ring.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...cluster.collectives import once_differentiable
from ...cluster.ring import circulate, round_trip
from ...cluster.transformers_api import bidirectional_mask_function, causal_mask_function
from ..layers.sequence_axis import SequenceAxis, SequenceOrder
from . import flex
from .block_mask import BlockKind, BlockMask, Mask, TensorMask
from .kernels import View, attend_to_block, attend_to_block_backward, is_fused

# B batch, S a rank's shard of the sequence with padding, N query heads, M key and value heads, D head dim; Q queries

# Queries and keys of a piece if its mask, or all of its scores, must be materialized.
_TILE = 1024


def ring_attention(
    q_BNSD: Tensor,
    k_BMSD: Tensor,
    v_BMSD: Tensor,
    axis: SequenceAxis,
    *,
    mask: Mask | Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend from this rank's queries to the full sequence. Every rank of the axis must call, forward and backward.

    In forward each rank sends 2·B·S·M·D elements P−1 times, P the size of the axis; in backward the same again, and
    float32 gradients of the same number of elements. Queries that see no key get 0 and have no gradient, unless
    `Mask.uniform_queries` returns them. If the mask is a tensor, or no fused kernel supports the call, the mask and
    scores of 1,024 queries and 1,024 keys are materialized at a time. On CUDA, mask functions of positions go to
    FlexAttention, which materializes neither (flex.py).

    Args:
        q_BNSD, k_BMSD, v_BMSD: this rank's shards; M divides N. Values may have another head dim.
        axis: the axis over which the sequence is sharded.
        mask: for the full sequence; a tensor as in `TensorMask`. None: all keys are visible, or with `is_causal` the
            keys up to the query.
        is_causal: used only without a mask.
        scale: factor of the scores.
        softcap: bound of the scores, see `View`; no fused kernel supports it.
        dropout: the probability of dropping a key; the random numbers differ between ranks.

    Returns:
        (B, S, N, D).

    Raises:
        ValueError: the mask is not for a sequence of this length.
    """
    _check_shapes(q_BNSD, k_BMSD, v_BMSD, axis)
    seed = int(torch.randint(2**62, ())) if dropout else 0
    view = View(BlockKind.ALL, scale=scale, softcap=softcap, dropout=dropout, seed=seed)
    call = _RingCall(_as_mask(mask, axis.length, is_causal=is_causal), axis, axis.length, view)
    device_type = q_BNSD.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        q_BNSD, k_BMSD, v_BMSD = q_BNSD.to(dtype), k_BMSD.to(dtype), v_BMSD.to(dtype)
    out: Tensor = _RingAttention.apply(q_BNSD.contiguous(), k_BMSD, v_BMSD, call)
    return out


class Piece(NamedTuple):
    """A block of queries of one rank and keys of another.

    Attributes:
        rows, columns: slices of the queries and keys in the shards of the two ranks.
        queries, keys: their positions in the full sequence.
        visible: visible keys as returned by `Mask.block`, never NOTHING.
        is_uniform: True if all keys have the same weight, see `View`.
    """

    rows: slice
    columns: slice
    queries: range
    keys: range
    visible: BlockKind | Tensor | flex.FlexMask
    is_uniform: bool = False


def pieces(
    mask: Mask, order: SequenceOrder, length: int, *, rank: int, source: int, size: int
) -> Iterator[Piece]:
    """Yield the pieces of one rank's queries and another rank's keys, without padding.

    Args:
        mask: visible keys.
        order: the positions of each rank.
        length: length of the sequence, without padding.
        rank: the rank of the queries.
        source: the rank of the keys.
        size: the largest number of queries, and of keys, in a piece.
    """
    for queries, row in _ranges(order, length, rank, size):
        for keys, column in _ranges(order, length, source, size):
            rows, columns = slice(row, row + len(queries)), slice(column, column + len(keys))
            visible = mask.block(queries, keys)
            if visible is not BlockKind.NOTHING:
                yield Piece(rows, columns, queries, keys, visible)
            uniform_queries = mask.uniform_queries(queries)
            if uniform_queries is not None:
                yield Piece(rows, columns, queries, keys, uniform_queries.unsqueeze(-1), is_uniform=True)


def _ranges(order: SequenceOrder, length: int, rank: int, size: int) -> Iterator[tuple[range, int]]:
    """Yield contiguous ranges of a rank's positions, each with its offset in the shard."""
    offset = 0
    for stretch in order.stretches(rank, length):
        end = min(stretch.stop, length)
        for start in range(stretch.start, end, size):
            yield range(start, min(start + size, end)), offset + start - stretch.start
        offset += len(stretch)


class OnlineSoftmax:
    """Combined attention to the blocks of keys added so far, in float32 or wider.

    Args:
        q_BNQD: the queries.
        width: head dim of the values.

    Attributes:
        out_BNQD: the outputs; 0 for queries that have seen no key.
        lse_BNQ: the logarithm of the sum of the exponentials of the scores; minus infinity without a visible key.
    """

    def __init__(self, q_BNQD: Tensor, width: int) -> None:
        dtype = torch.promote_types(q_BNQD.dtype, torch.float32)
        self.out_BNQD = q_BNQD.new_zeros((*q_BNQD.shape[:3], width), dtype=dtype)
        self.lse_BNQ = q_BNQD.new_full(q_BNQD.shape[:3], -torch.inf, dtype=dtype)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Add a block of keys for some queries, by the outputs and lse of attention to this block only."""
        out_before, lse_before = (
            self.out_BNQD[:, :, rows],
            self.lse_BNQ[:, :, rows],
        )  # views, updated in place
        lse_after = torch.logaddexp(lse_before, lse)
        scale = lse_after.masked_fill(lse_after == -torch.inf, 0)  # infinity minus infinity is NaN
        out_before.mul_((lse_before - scale).exp_().unsqueeze(-1))
        out_before.add_(out * (lse - scale).exp_().unsqueeze(-1))
        lse_before.copy_(lse_after)


class _RingCall(NamedTuple):
    """State shared by forward and backward of one call.

    Attributes:
        mask: for the full sequence.
        axis: the sequence axis.
        length: the length of the sequence, without padding.
        settings: the kernel's arguments for all keys; `view` adds the mask and the seed of a piece.
    """

    mask: Mask
    axis: SequenceAxis
    length: int
    settings: View

    def classify_blocks(self, q: Tensor, v: Tensor) -> None:
        """Determine the kinds of all blocks of this rank's queries at once, and keep them in the mask.

        One host read, two for eager attention; `pieces` then needs none.
        """
        if self._uses_flex(q, v):
            return  # its kernel evaluates the mask
        order, size = self.axis.order, self._size(q, v)
        queries = [positions for positions, _ in _ranges(order, self.length, self.axis.rank, size)]
        keys = [
            positions
            for rank in range(order.size)
            for positions, _ in _ranges(order, self.length, rank, size)
        ]
        self.mask.classify(product(queries, keys))

    def pieces(self, q: Tensor, v: Tensor, source: int) -> Iterator[Piece]:
        """Yield the blocks of this rank's queries and another rank's keys that each need one call of a kernel.

        Args:
            q, v: this rank's queries and values, (B, N, S, D).
            source: the rank of the keys.
        """
        if self._uses_flex(q, v):  # one call for all queries and keys
            mask = self._flex_mask(source, q.device)
            no_positions = range(0)  # they seed dropout, which FlexAttention does not support here
            return iter([Piece(slice(None), slice(None), no_positions, no_positions, mask)])
        order, rank, size = self.axis.order, self.axis.rank, self._size(q, v)
        return pieces(self.mask, order, self.length, rank=rank, source=source, size=size)

    def _size(self, q: Tensor, v: Tensor) -> int:
        """Return the largest number of queries, and of keys, in a piece."""
        return sys.maxsize if self.mask.is_plain and is_fused(q, v, self.settings) else _TILE

    def _uses_flex(self, q: Tensor, v: Tensor) -> bool:
        """Return True for masks that are functions of positions and that no fused kernel supports."""
        if not isinstance(self.mask, BlockMask) or self.mask.is_eager or self.settings.dropout:
            return False
        return self._size(q, v) == _TILE and flex.fits(q, v)

    def _flex_mask(self, source: int, device: torch.device) -> flex.FlexMask:
        """Return the cached FlexAttention mask of this rank's queries and another rank's keys."""
        assert isinstance(self.mask, BlockMask)

        def positions_of(rank: int) -> Tensor:
            stretches = self.axis.order.stretches(rank, self.length)
            return torch.cat(
                [torch.arange(stretch.start, stretch.stop, device=device) for stretch in stretches]
            )

        masks = self.mask.flex_masks
        if source not in masks:
            queries, keys = positions_of(self.axis.rank), positions_of(source)
            masks[source] = flex.flex_mask(self.mask, queries, keys)
        return masks[source]

    def view(self, piece: Piece) -> View:
        """Return the arguments of the kernel for a piece."""
        # The seed depends on global positions, so that ranks with equal random states drop different keys.
        seed = hash((self.settings.seed, piece.queries.start, piece.keys.start)) % 2**63
        return replace(self.settings, visible=piece.visible, seed=seed, is_uniform=piece.is_uniform)


class _RingAttention(Function):
    """The autograd node of `ring_attention`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _RingCall) -> Tensor:
        """Attend to the keys of every rank while they circulate, and combine the results; q, k, v are (B, N, S, D)."""
        softmax = OnlineSoftmax(q, v.shape[-1])
        call.classify_blocks(q, v)
        with torch.autocast(q.device.type, enabled=False):
            for source, keys_and_values in circulate(torch.cat([k, v], -1), call.axis.rings):
                keys, values = keys_and_values.split([k.shape[-1], v.shape[-1]], -1)
                for piece in call.pieces(q, v, source):
                    rows, columns = piece.rows, piece.columns
                    out, lse = attend_to_block(
                        q[:, :, rows], keys[:, :, columns], values[:, :, columns], call.view(piece)
                    )
                    softmax.add(rows, out, lse)
        out_BSND = softmax.out_BNQD.transpose(1, 2).to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, v, out_BSND, softmax.lse_BNQ)
        ctx.call = call
        return out_BSND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BSND: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Visit the keys of every rank again; the gradients of keys and values travel with them to their rank."""
        q, k, v, out_BSND, lse = ctx.saved_tensors
        call: _RingCall = ctx.call
        gradient, out = gradient_BSND.contiguous().transpose(1, 2), out_BSND.transpose(1, 2)
        # Queries that see no key have probabilities of 0: exp(score − infinity).
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        widths = [k.shape[-1], v.shape[-1]]

        def visit(source: int, keys_and_values: Tensor) -> Tensor:
            """Add to this rank's dq; return its addends to the gradients of another rank's keys and values."""
            keys, values = keys_and_values.split(widths, -1)
            dkeys_and_values = torch.zeros_like(keys_and_values, dtype=lse.dtype)
            dkeys, dvalues = dkeys_and_values.split(widths, -1)
            for piece in call.pieces(q, v, source):
                rows, columns = piece.rows, piece.columns
                piece_dq, piece_dkeys, piece_dvalues = attend_to_block_backward(
                    gradient[:, :, rows],
                    q[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    out[:, :, rows],
                    lse[:, :, rows],
                    call.view(piece),
                )
                dq[:, :, rows].add_(piece_dq)
                dkeys[:, :, columns].add_(piece_dkeys)
                dvalues[:, :, columns].add_(piece_dvalues)
            return dkeys_and_values

        with torch.autocast(q.device.type, enabled=False):
            dk, dv = round_trip(torch.cat([k, v], -1), call.axis.rings, visit).split(widths, -1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _as_mask(mask: Mask | Tensor | None, length: int, *, is_causal: bool) -> Mask:
    """Return the mask argument of `ring_attention` as a `Mask`; raise ValueError if it is for another length."""
    if isinstance(mask, Tensor):
        return TensorMask(mask, length)
    if mask is None:
        function = causal_mask_function if is_causal else bidirectional_mask_function
        return BlockMask(function, (length, length))
    if mask.lengths != (length, length):
        raise ValueError(
            f"a mask for {mask.lengths[0]} queries and {mask.lengths[1]} keys for a sequence of {length}: "
            "ring attention supports only self-attention without a key-value cache (use_cache=False)"
        )
    return mask


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, axis: SequenceAxis) -> None:
    """Raise AssertionError for shapes that are not of shards of the axis' sequence."""
    shard_length = axis.shard_length
    if not q.shape[2] == k.shape[2] == v.shape[2] == shard_length:
        raise AssertionError(
            f"got {q.shape[2]} queries, {k.shape[2]} keys and {v.shape[2]} values: of a sequence of "
            f"{axis.length} on {axis.order.size} ranks each rank has {shard_length}"
        )
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise AssertionError(f"{k.shape[1]} heads of keys, {v.shape[1]} of values, {q.shape[1]} of queries")
