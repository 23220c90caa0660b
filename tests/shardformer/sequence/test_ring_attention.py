"""Ring attention against attention over the whole sequence in one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import causal_mask_function

from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.traffic import Traffic
from echelon.shardformer.layers.sequence_axis import SequenceAxis, SequenceOrder
from echelon.shardformer.sequence import kernels
from echelon.shardformer.sequence import ring_attention as ring
from echelon.shardformer.sequence.block_mask import BlockMask, Mask, Seen
from echelon.shardformer.sequence.config import double_ring
from echelon.shardformer.sequence.ring_attention import Piece, pieces

from ...pool import Pool
from .masks import BATCH, KINDS, in_blocks, whole

SCALE = 0.4
# Of sums of some tens of float32 products in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 3e-6}

QKV = tuple[Tensor, Tensor, Tensor]


def random_qkv(
    length: int, *, heads: int = 4, groups: int = 2, width: int = 8, batch: int = BATCH, **kind: Any
) -> QKV:
    """Equal on all ranks."""
    generator = torch.Generator().manual_seed(length)
    counts = heads, heads // groups, heads // groups
    q, k, v = (torch.randn(batch, each, length, width, generator=generator).to(**kind) for each in counts)
    return q, k, v


def full_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """(B, S, N, D) in float64; 0 where nothing is seen. The mask is booleans or numbers to add."""
    q, k, v = q.double(), *(each.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
    scores = SCALE * q @ k.mT + bias
    sees = (scores > -torch.inf).any(-1, keepdim=True)
    weights = scores.masked_fill(~sees, 0).softmax(-1) * sees
    return (weights @ v).transpose(1, 2)


def check(
    axis: SequenceAxis,
    mask: Mask | Tensor | None,
    expected_mask: Tensor,
    qkv: QKV,
    *,
    tolerance: dict[str, float] = TOLERANCE,
    **kwargs: Any,
) -> None:
    """Compare this rank's part of the results, and of the gradients of q, k and v, with one process's."""
    inputs = [each.double().requires_grad_() for each in qkv]
    expected = full_attention(*inputs, expected_mask)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    expected_gradients = torch.autograd.grad(expected, inputs, upstream)
    axis.length = qkv[0].shape[2]
    own = [axis.own(each, 2).requires_grad_() for each in qkv]
    out = ring.ring_attention(*own, axis, mask=mask, scale=SCALE, **{"is_causal": False, **kwargs})
    axis.length = 0  # another sequence comes before backward
    gradients = torch.autograd.grad(out, own, axis.own(upstream, 1).to(out.dtype))
    assert out.dtype == own[0].dtype and out.is_contiguous()
    close = partial(assert_close, check_dtype=False, **tolerance)
    close(out, axis.own(expected, 1), msg=lambda text: f"out: {text}")  # padding gets nothing
    for name, found, full in zip("qkv", gradients, expected_gradients, strict=True):
        close(found, axis.own(full, 2), msg=lambda text, name=name: f"gradient of {name}: {text}")


def axis_on(mesh: ParallelMesh, *, is_zigzag: bool, rings: Any = None) -> SequenceAxis:
    return SequenceAxis(mesh.group("sp"), SequenceOrder(size=mesh.size("sp"), is_zigzag=is_zigzag), rings)


@contextmanager
def tiles_of(size: int) -> Iterator[None]:
    with patch.object(ring, "_TILE", size):
        yield


def causal(length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_is_that_of_one_process(pool: Pool, ranks: int) -> None:
    pool.run(ranks, check_masks)


def check_masks() -> None:
    mesh = ParallelMesh(sp=torch.distributed.get_world_size())
    for is_zigzag in (True, False):
        axis = axis_on(mesh, is_zigzag=is_zigzag)
        for length in (24, 17, 3):
            qkv = random_qkv(length)
            check(axis, None, causal(length), qkv, is_causal=True)
            check(axis, None, torch.ones_like(causal(length)), qkv)
    for kind in ("padded", "bidirectional padded", "packed", "window", "empty row"):
        axis = axis_on(mesh, is_zigzag="bidirectional" not in kind)
        with tiles_of(3):
            check(axis, in_blocks(kind, 19), whole(kind, 19), random_qkv(19))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["fused", "plain"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_mask_in_every_order_with_every_group_of_heads(pool: Pool, ranks: int, kernel: str) -> None:
    pool.run(ranks, check_all, kernel)


def check_all(kernel: str) -> None:
    mesh = ParallelMesh(sp=torch.distributed.get_world_size())
    known = kernels._KERNELS if kernel == "fused" else (kernels._PLAIN,)
    exact = {"rtol": 1e-12, "atol": 1e-12}  # float64
    with patch.object(kernels, "_KERNELS", known):
        for is_zigzag in (True, False):
            axis = axis_on(mesh, is_zigzag=is_zigzag)
            for kind in KINDS:
                for length, tile in ((24, 1024), (29, 4)):
                    qkv = random_qkv(length, groups=1 if tile == 4 else 4, dtype=torch.float64)
                    with tiles_of(tile):
                        check(axis, in_blocks(kind, length), whole(kind, length), qkv, tolerance=exact)


def test_masks_given_as_tensors_count(pool: Pool) -> None:
    pool.run(2, check_given)


def check_given() -> None:
    axis = axis_on(ParallelMesh(sp=2), is_zigzag=True)
    seen = whole("packed", 19)
    bias = torch.randn(1, 4, 19, 19, generator=torch.Generator().manual_seed(1))
    hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with tiles_of(4):
        check(axis, seen, seen, random_qkv(19))
        check(axis, hidden, seen, random_qkv(19))
        check(axis, bias, bias, random_qkv(19))  # another one for each head


def test_two_rings_give_what_one_gives(pool: Pool) -> None:
    pool.run(4, check_double)


def check_double() -> None:
    mesh = ParallelMesh(sp=4)
    rings = double_ring(mesh, 2)
    assert rings is not None and double_ring(mesh, 4) is double_ring(mesh, 1) is None
    for is_zigzag in (True, False):
        axis = axis_on(mesh, is_zigzag=is_zigzag, rings=rings)
        check(axis, None, causal(27), random_qkv(27), is_causal=True)
        with tiles_of(3):
            check(axis, in_blocks("padded", 27), whole("padded", 27), random_qkv(27))


def test_values_may_be_of_another_width(pool: Pool) -> None:
    pool.run(2, check_width)


def check_width() -> None:
    axis = axis_on(ParallelMesh(sp=2), is_zigzag=True)
    q, k, v = random_qkv(15)
    check(axis, None, causal(15), (q, k, v[..., :6].contiguous()), is_causal=True)


def test_16_bit_formats_are_put_together_in_float32(pool: Pool) -> None:
    pool.run(4, check_half)


def check_half() -> None:
    axis = axis_on(ParallelMesh(sp=4), is_zigzag=True)
    # Results and gradients are rounded to 8 bits, and the blocks' before they are added up.
    check(
        axis,
        None,
        causal(64),
        random_qkv(64, dtype=torch.bfloat16),
        is_causal=True,
        tolerance={"rtol": 2e-2, "atol": 2e-2},
    )
    axis.length = 64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = [axis.own(each, 2) for each in random_qkv(64)]
        out = ring.ring_attention(*own, axis, mask=None, is_causal=True, scale=SCALE)
    assert out.dtype == torch.bfloat16


def test_dropout_comes_again_in_backward(pool: Pool) -> None:
    found = pool.run(2, drop_out)
    # Results are linear in the values: their sum is that of the values times its gradients.
    assert_close(sum(out for out, _ in found), sum(home for _, home in found), rtol=1e-10, atol=0)


def drop_out() -> tuple[Tensor, Tensor]:
    """The sum of results, and that of values times gradients."""
    axis = axis_on(ParallelMesh(sp=2), is_zigzag=False)
    axis.length = 20
    qkv = [axis.own(each, 2).requires_grad_() for each in random_qkv(20, dtype=torch.float64)]
    attend = partial(ring.ring_attention, axis=axis, mask=None, is_causal=False, scale=SCALE)
    drop = partial(attend, dropout=0.3)
    runs = []
    for call in (attend, drop, partial(checkpoint, drop, use_reentrant=False)):
        torch.manual_seed(0)
        with tiles_of(4):
            out = call(*qkv)
            runs.append((out, *torch.autograd.grad(out.sum(), qkv)))
    for undropped, dropped, again in zip(*runs, strict=True):
        assert torch.equal(dropped, again)
        assert not torch.allclose(dropped, undropped, rtol=0.01)
    return runs[1][0].sum().detach(), (qkv[2] * runs[1][3]).sum().detach()


def test_ranks_of_one_random_state_drop_other_keys() -> None:
    alike: dict[str, Any] = {
        "mask": None,
        "order": None,
        "length": 8,
        "rings": (),
        "scale": 1.0,
        "softcap": None,
    }
    call = ring._Call(**alike, rank=0, dropout=0.5, seed=3)
    at = [Piece(slice(4), slice(4), range(row, row + 4), range(4), Seen.ALL) for row in (0, 4)]
    assert call.view(at[0]).seed != call.view(at[1]).seed == call.view(at[1]).seed


def test_4096_positions_on_4_ranks_within_1e_5(pool: Pool) -> None:
    qkv = random_qkv(4096, batch=1)
    inputs = [each.double().requires_grad_() for each in qkv]
    expected = scaled_dot_product_attention(*inputs, is_causal=True, scale=SCALE, enable_gqa=True)
    wanted = [expected, *torch.autograd.grad(expected, inputs, expected.detach())]
    parts = pool.run(4, attend_long, qkv)
    for dim, full, own in zip((1, 2, 2, 2), wanted, zip(*parts, strict=True), strict=True):
        found = SequenceOrder(size=4, is_zigzag=True).whole(own, dim, 4096)
        full = full.transpose(1, 2) if dim == 1 else full
        assert_close(found, full, rtol=0, atol=1e-5, check_dtype=False)


def attend_long(qkv: QKV) -> list[Tensor]:
    """This rank's part of the results and of the gradients; that of the results is what they are."""
    axis = axis_on(ParallelMesh(sp=4), is_zigzag=True)
    axis.length = 4096
    own = [axis.own(each, 2).requires_grad_() for each in qkv]
    out = ring.ring_attention(*own, axis, mask=None, is_causal=True, scale=SCALE)
    return [out.detach(), *torch.autograd.grad(out, own, out.detach())]


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formula(pool: Pool, ranks: int) -> None:
    length, heads, width, share = 62, 2, 16, (ranks - 1) / ranks
    for is_double in (False, True) if ranks == 4 else (False,):
        for forward, backward in pool.run(ranks, sent, length, heads, width, is_double):
            once = 2 * BATCH * 64 * width * heads * share  # 62 positions are 64 with their padding
            assert forward == {("sp", "send"): 4 * once}
            assert backward == {("sp", "send"): 2 * 4 * once}


def sent(length: int, kv_heads: int, width: int, is_double: bool) -> list[dict[tuple[str, str], float]]:
    """Bytes that this rank sends, forward and backward."""
    mesh = ParallelMesh(sp=torch.distributed.get_world_size())
    axis = axis_on(mesh, is_zigzag=True, rings=double_ring(mesh, 2) if is_double else None)
    axis.length = length
    own = [axis.own(each, 2).requires_grad_() for each in random_qkv(length, groups=2, width=width)]
    assert own[1].shape[1] == kv_heads
    with Traffic(mesh) as forward:
        out = ring.ring_attention(*own, axis, mask=None, is_causal=True, scale=SCALE)
    with Traffic(mesh) as backward:
        out.sum().backward()
    return [
        {key: count.sent for key, count in each.counts.items() if count.sent} for each in (forward, backward)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_its_part_alone_and_never_makes_more_than_a_few(pool: Pool, ranks: int) -> None:
    length = 512
    for kept, largest in pool.run(ranks, held, length):
        part = length // ranks
        heads, kv_heads, width = 4, 2, 8
        assert kept == 4 * BATCH * part * (2 * heads * width + 2 * kv_heads * width + heads)
        assert largest <= 4 * BATCH * part * heads * width  # the queries: not even all keys of one head


def held(length: int) -> tuple[int, int]:
    """Bytes that are kept for backward, and bytes of the largest tensor that is made, forward or backward."""
    mesh = ParallelMesh(sp=torch.distributed.get_world_size())
    axis = axis_on(mesh, is_zigzag=True)
    axis.length = length
    own = [axis.own(each, 2).requires_grad_() for each in random_qkv(length)]
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = ring.ring_attention(*own, axis, mask=None, is_causal=True, scale=SCALE)
        out.sum().backward()
    return sum(each.untyped_storage().nbytes() for each in kept), largest.nbytes


class Largest(TorchDispatchMode):
    """The bytes of the largest result of what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.nbytes = max(self.nbytes, each.nbytes)
        return result


def test_zigzag_gives_each_rank_as_many_scores_to_compute() -> None:
    mask = BlockMask(causal_mask_function, (64, 64))
    for is_zigzag in (True, False):
        order = SequenceOrder(size=4, is_zigzag=is_zigzag)
        counts = dict.fromkeys(range(4), 0.0)
        for rank in range(4):
            for source in range(4):
                for piece in pieces(mask, order, 64, rank=rank, source=source, size=64):
                    half = 0.5 if piece.seen is Seen.TRIANGLE else 1.0
                    counts[rank] += half * len(piece.queries) * len(piece.keys)
        assert (len(set(counts.values())) == 1) == is_zigzag
        assert sum(counts.values()) == 64 * 64 / 2


def test_parts_that_are_not_those_of_the_sequence_are_noticed(pool: Pool) -> None:
    pool.run(2, check_refusals)


def check_refusals() -> None:
    axis = axis_on(ParallelMesh(sp=2), is_zigzag=False)
    axis.length = 8
    own = [axis.own(each, 2) for each in random_qkv(8)]
    attend = partial(ring.ring_attention, *own, axis, is_causal=True, scale=SCALE)
    with pytest.raises(ValueError, match="use_cache=False"):
        attend(mask=in_blocks("causal", 9))
    with pytest.raises(ValueError, match="a sequence of 8"):
        attend(mask=torch.ones(1, 1, 9, 9, dtype=torch.bool))
    axis.length = 10
    with pytest.raises(AssertionError, match="each holds 5"):
        attend(mask=None)
