"""Ring attention: keys and values travel round the ranks that hold parts of a sequence (arXiv:2310.01889).

Each rank keeps its queries, and combines their results of each block of keys as it comes by; in backward keys and
values go round again, and their gradients follow them home. Which keys a query sees is block_mask.py, how a block is
computed kernels.py, how tensors travel cluster/ring.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ...cluster.ring import round_trip, travel
from ..layers.sequence_axis import SequenceAxis, SequenceOrder
from . import flex
from .block_mask import BlockMask, GivenMask, Mask, Seen
from .kernels import View, is_fused, look, look_back

# B batch, S a rank's part of the sequence with padding, N query heads, M key and value heads, D head dim; Q queries

# Queries and keys of a piece where it has to be built which of them see which, or all of their scores.
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
    """Attention of this rank's queries to the whole sequence. Every rank of the axis must call, forward and backward.

    Forward each rank sends 2·B·S·M·D elements P−1 times, P the size of the axis; backward as many, and as many in
    float32, the gradients. Queries that see nothing get 0 and give no gradient, or what `Mask.levelled` says. Where
    it takes a mask as a tensor, or scores because no fused kernel fits, those of 1,024 queries and 1,024 keys are
    in memory at a time; on CUDA, functions of positions go to FlexAttention, which needs neither (flex.py).

    Args:
        q_BNSD, k_BMSD, v_BMSD: this rank's parts; M divides N. Values may be of another width.
        axis: over which the sequence is sharded.
        mask: for the whole sequence; a tensor as `GivenMask` has it. None: all is seen, or the past if `is_causal`.
        is_causal: read where there is no mask.
        scale: by which scores are multiplied.
        softcap: what they then come near to and never pass; no fused kernel takes it.
        dropout: the probability with which a key is left out; the random numbers differ from rank to rank.

    Returns:
        (B, S, N, D).

    Raises:
        ValueError: the mask is not for a sequence of this length.
    """
    _check(q_BNSD, k_BMSD, v_BMSD, axis)
    seed = int(torch.randint(2**62, ())) if dropout else 0
    view = View(Seen.ALL, scale=scale, softcap=softcap, dropout=dropout, seed=seed)
    call = _Call(_mask(mask, axis.length, is_causal=is_causal), axis, axis.length, view)
    kind = q_BNSD.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q_BNSD, k_BMSD, v_BMSD = q_BNSD.to(dtype), k_BMSD.to(dtype), v_BMSD.to(dtype)
    out: Tensor = _RingAttention.apply(q_BNSD.contiguous(), k_BMSD, v_BMSD, call)
    return out


class Piece(NamedTuple):
    """Some queries of one rank and some keys of another.

    Attributes:
        rows, columns: where they lie in the parts of the two.
        queries, keys: their positions in the whole sequence.
        seen: what is seen, never nothing: see `Mask.block`.
        is_level: whether every score counts as 0, see `View`.
    """

    rows: slice
    columns: slice
    queries: range
    keys: range
    seen: Seen | Tensor | flex.FlexMask
    is_level: bool = False


def pieces(
    mask: Mask, order: SequenceOrder, length: int, *, rank: int, source: int, size: int
) -> Iterator[Piece]:
    """The pieces of one rank's queries and another's keys. Padding behind the sequence is in none of them.

    Args:
        mask: what is seen.
        order: who holds what.
        length: of the sequence, without padding.
        rank: of the queries.
        source: of the keys.
        size: the largest number of queries, and of keys, of a piece.
    """
    for queries, row in _ranges(order, length, rank, size):
        for keys, column in _ranges(order, length, source, size):
            rows, columns = slice(row, row + len(queries)), slice(column, column + len(keys))
            seen = mask.block(queries, keys)
            if seen is not Seen.NOTHING:
                yield Piece(rows, columns, queries, keys, seen)
            levelled = mask.levelled(queries)
            if levelled is not None:
                yield Piece(rows, columns, queries, keys, levelled.unsqueeze(-1), is_level=True)


def _ranges(order: SequenceOrder, length: int, rank: int, size: int) -> Iterator[tuple[range, int]]:
    """Positions that a rank holds, side by side, and where in its part they begin."""
    offset = 0
    for stretch in order.stretches(rank, length):
        end = min(stretch.stop, length)
        for start in range(stretch.start, end, size):
            yield range(start, min(start + size, end)), offset + start - stretch.start
        offset += len(stretch)


class OnlineSoftmax:
    """Results of attention to the keys seen so far, kept in float32 or wider.

    Args:
        q_BNQD: the queries.
        width: of values.

    Attributes:
        out_BNQD: the results; 0 for queries that have seen nothing.
        lse_BNQ: the logarithm of the sum of the exponentials of their scores; minus infinity where nothing was seen.
    """

    def __init__(self, q_BNQD: Tensor, width: int) -> None:
        dtype = torch.promote_types(q_BNQD.dtype, torch.float32)
        self.out_BNQD = q_BNQD.new_zeros((*q_BNQD.shape[:3], width), dtype=dtype)
        self.lse_BNQ = q_BNQD.new_full(q_BNQD.shape[:3], -torch.inf, dtype=dtype)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Let some queries see further keys, of which alone they would have had these results."""
        out_before, lse_before = self.out_BNQD[:, :, rows], self.lse_BNQ[:, :, rows]
        lse_after = torch.logaddexp(lse_before, lse)
        scale = lse_after.masked_fill(lse_after == -torch.inf, 0)  # infinity less infinity is no number
        out_before.mul_((lse_before - scale).exp_().unsqueeze(-1))
        out_before.add_(out * (lse - scale).exp_().unsqueeze(-1))
        lse_before.copy_(lse_after)


class _Call(NamedTuple):
    """State that forward and backward of one call share: its sequence's length, and the view but for what is seen."""

    mask: Mask
    axis: SequenceAxis
    length: int
    view_of_all: View

    def look(self, q: Tensor, v: Tensor) -> None:
        """Let the mask look at all blocks of this rank's queries at once: one read on the host, or none."""
        if not self._is_flex(q, v):
            order, size = self.axis.order, self._size(q, v)
            queries = [each for each, _ in _ranges(order, self.length, self.axis.rank, size)]
            keys = [each for rank in range(order.size) for each, _ in _ranges(order, self.length, rank, size)]
            self.mask.look(product(queries, keys))

    def pieces(self, q: Tensor, v: Tensor, source: int) -> Iterator[Piece]:
        """The pieces of this rank's queries and the keys of another."""
        if self._is_flex(q, v):
            own = slice(None)
            return iter([Piece(own, own, range(0), range(0), self._flex_mask(source, q.device))])
        order, rank, size = self.axis.order, self.axis.rank, self._size(q, v)
        return pieces(self.mask, order, self.length, rank=rank, source=source, size=size)

    def _size(self, q: Tensor, v: Tensor) -> int:
        """The largest number of queries, and of keys, of a piece."""
        return sys.maxsize if self.mask.is_plain and is_fused(q, v, self.view_of_all) else _TILE

    def _is_flex(self, q: Tensor, v: Tensor) -> bool:
        """Return True for masks that are functions of positions, where no kernel of plain ones will do."""
        if not isinstance(self.mask, BlockMask) or self.mask.levels or self.view_of_all.dropout:
            return False
        return self._size(q, v) == _TILE and flex.fits(q, v)

    def _flex_mask(self, source: int, device: torch.device) -> flex.FlexMask:
        """The mask of this rank's queries and the keys of another, made once."""
        assert isinstance(self.mask, BlockMask)
        made = self.mask.flex_masks
        if source not in made:
            stretches = (self.axis.order.stretches(rank, self.length) for rank in (self.axis.rank, source))
            queries, keys = (
                torch.cat([torch.arange(each.start, each.stop, device=device) for each in ranges])
                for ranges in stretches
            )
            made[source] = flex.flex_mask(self.mask, queries, keys)
        return made[source]

    def view(self, piece: Piece) -> View:
        """The arguments of the kernel for a piece."""
        # By the place in the whole sequence, so that ranks whose random state is the same drop other keys.
        seed = hash((self.view_of_all.seed, piece.queries.start, piece.keys.start)) % 2**63
        return replace(self.view_of_all, seen=piece.seen, seed=seed, is_level=piece.is_level)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        softmax = OnlineSoftmax(q, v.shape[-1])
        call.look(q, v)
        with torch.autocast(q.device.type, enabled=False):
            for source, both in travel(torch.cat([k, v], -1), call.axis.rings):
                keys, values = both.split([k.shape[-1], v.shape[-1]], -1)
                for piece in call.pieces(q, v, source):
                    at = piece.columns
                    found = look(q[:, :, piece.rows], keys[:, :, at], values[:, :, at], call.view(piece))
                    softmax.add(piece.rows, *found)
        out_BSND = softmax.out_BNQD.transpose(1, 2).to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, v, out_BSND, softmax.lse_BNQ)
        ctx.call = call
        return out_BSND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BSND: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out_BSND, lse = ctx.saved_tensors
        call: _Call = ctx.call
        gradient, out = gradient_BSND.contiguous().transpose(1, 2), out_BSND.transpose(1, 2)
        # Who sees nothing has probabilities of 0: exp(score − infinity).
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        widths = [k.shape[-1], v.shape[-1]]

        def visit(source: int, both: Tensor) -> Tensor:
            keys, values = both.split(widths, -1)
            dboth = torch.zeros_like(both, dtype=lse.dtype)
            dkeys, dvalues = dboth.split(widths, -1)
            for piece in call.pieces(q, v, source):
                rows, at = piece.rows, piece.columns
                parts = q[:, :, rows], keys[:, :, at], values[:, :, at], out[:, :, rows], lse[:, :, rows]
                found = look_back(gradient[:, :, rows], *parts, call.view(piece))
                for total, each in zip(
                    (dq[:, :, rows], dkeys[:, :, at], dvalues[:, :, at]), found, strict=True
                ):
                    total.add_(each)
            return dboth

        with torch.autocast(q.device.type, enabled=False):
            dk, dv = round_trip(torch.cat([k, v], -1), call.axis.rings, visit).split(widths, -1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _mask(mask: Mask | Tensor | None, length: int, *, is_causal: bool) -> Mask:
    if isinstance(mask, Tensor):
        return GivenMask(mask, length)
    if mask is None:
        function = causal_mask_function if is_causal else bidirectional_mask_function
        return BlockMask(function, (length, length))
    if mask.lengths != (length, length):
        raise ValueError(
            f"a mask for {mask.lengths[0]} queries and {mask.lengths[1]} keys for a sequence of {length}: ring "
            "attention is that of a sequence to itself, without a cache of keys (use_cache=False)"
        )
    return mask


def _check(q: Tensor, k: Tensor, v: Tensor, axis: SequenceAxis) -> None:
    own = axis.part_length
    if not q.shape[2] == k.shape[2] == v.shape[2] == own:
        raise AssertionError(
            f"parts of {q.shape[2]} queries, {k.shape[2]} keys and {v.shape[2]} values: of a sequence of {axis.length} "
            f"on {axis.order.size} ranks each holds {own}"
        )
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise AssertionError(f"{k.shape[1]} heads of keys, {v.shape[1]} of values, {q.shape[1]} of queries")
