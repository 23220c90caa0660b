"""Ring attention and Ulysses compared with dense attention in float64: results, gradients, bytes, memory."""

# B batch, S sequence, N query heads, M key-value heads, D width of a head

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.traffic import Traffic
from echelon.shardformer.layers.sequence_axis import SequenceAxis, SequenceOrder
from echelon.shardformer.sequence import kernels
from echelon.shardformer.sequence import ring_attention as ring
from echelon.shardformer.sequence.block_mask import BlockKind, BlockMask
from echelon.shardformer.sequence.config import double_ring
from echelon.shardformer.sequence.ulysses import HeadShare, attend_by_heads
from echelon.shardformer.sharder import StandInGroup

from ...pool import Pool
from ...slow import slow
from ..compare import Attention, Made, require_equal
from .masks import BATCH, KINDS, full_mask, in_blocks

SCALE = 0.4
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # for float64
SINGLE = {"rtol": 1e-5, "atol": 3e-6}  # for sums of some tens of float32 products in another order
# Results are rounded to 8 bits, and those of blocks before they are merged.
HALF = {"rtol": 4e-2, "atol": 4e-2}

Attend = Callable[[Tensor, Tensor, Tensor, SequenceAxis], Tensor]


def random_qkv(
    length: int,
    *,
    heads: tuple[int, int] = (4, 2),
    width: int = 8,
    value_width: int | None = None,
    **kind: Any,
) -> list[Tensor]:
    """Equal on all ranks."""
    generator = torch.Generator().manual_seed(length)
    shapes = (heads[0], width), (heads[1], width), (heads[1], value_width or width)
    kind = {"dtype": torch.float64, **kind}
    return [
        torch.randn(BATCH, count, length, head_width, generator=generator).to(**kind)
        for count, head_width in shapes
    ]


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, softcap: float | None, levels: bool) -> Tensor:
    """Dense attention, (B, S, N, D): queries that see no key get 0, or with `levels` the mean of all values."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = SCALE * q @ k.mT
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
    sees = (bias > -torch.inf).any(-1, keepdim=True)
    weights = (scores + bias.masked_fill(~sees, 0)).softmax(-1)
    # Eager attention adds the least number to all scores of a row: equal weights, but scores still have gradients.
    nothing = (scores - scores.detach()).softmax(-1) if levels else torch.zeros_like(weights)
    return (torch.where(sees, weights, nothing) @ v).transpose(1, 2)


def check(
    attend: Attend,
    axis: SequenceAxis,
    mask: Tensor,
    qkv: list[Tensor],
    *,
    tolerance: dict[str, float] = EXACT,
    softcap: float | None = None,
    levels: bool = False,
) -> None:
    """Compare this rank's shard of the results, and of the gradients of q, k and v, with dense attention."""
    inputs = [tensor.detach().cpu().double().requires_grad_() for tensor in qkv]
    expected = dense(*inputs, mask, softcap=softcap, levels=levels)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    gradients = torch.autograd.grad(expected, inputs, upstream)
    axis.length = qkv[0].shape[2]
    shards = [axis.shard(tensor, 2).requires_grad_() for tensor in qkv]
    out = attend(*shards, axis)
    local_gradients = torch.autograd.grad(out, shards, axis.shard(upstream, 1).to(out))
    assert out.dtype == shards[0].dtype
    names = ["results", *(f"gradient of {name}" for name in "qkv")]
    expected_shards = [axis.shard(expected, 1), *(axis.shard(gradient, 2) for gradient in gradients)]
    for name, one, other in zip(names, (out, *local_gradients), expected_shards, strict=True):
        assert_close(
            one.cpu(), other, check_dtype=False, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def by_ring(mask: Any, *, is_causal: bool = False, **settings: Any) -> Attend:
    return partial(ring.ring_attention, mask=mask, is_causal=is_causal, scale=SCALE, **settings)


def by_heads(mask: Tensor | None, *, is_causal: bool = False, **settings: Any) -> Attend:
    return partial(_attend_by_heads, mask=mask, scaling=SCALE, is_causal=is_causal, **settings)


def _attend_by_heads(
    q: Tensor, k: Tensor, v: Tensor, axis: SequenceAxis, *, mask: Tensor | None, **settings: Any
) -> Tensor:
    module = Attention(q.shape[1] // k.shape[1])
    return attend_by_heads(sdpa_attention_forward, module, q, k, v, mask, axis, **settings)


def axis_of_world(
    mesh: ParallelMesh | None = None, *, is_zigzag: bool = False, inner_ring: int | None = None
) -> SequenceAxis:
    mesh = mesh or ParallelMesh(sp=dist.get_world_size())
    order = SequenceOrder(size=mesh.size("sp"), is_zigzag=is_zigzag)
    return SequenceAxis(mesh.group("sp"), order, double_ring(mesh, inner_ring))


def axis_alone(length: int | None = None) -> SequenceAxis:
    group: Any = StandInGroup(0, 1)
    axis = SequenceAxis(group, SequenceOrder(size=1, is_zigzag=True))
    axis.length = length
    return axis


def tiles_of(size: int) -> Any:
    return patch.object(ring, "_TILE", size)


def causal(length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


# Blocks, masks and kernels, without processes.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id=""),
        pytest.param({"softcap": 0.5}, id="softcap", marks=pytest.mark.slow),
        pytest.param({"levels": True}, id="levels", marks=pytest.mark.slow),
    ],
)
def test_blocks_combine_to_dense_attention(kind: str, settings: dict[str, Any]) -> None:
    levels = settings.get("levels", False)
    for plain, heads, length, tile in ((False, (4, 1), 24, 1024), (True, (4, 2), 29, 4)):
        mask = in_blocks(kind, length, levels=levels)
        attend = by_ring(mask, **{key: setting for key, setting in settings.items() if key != "levels"})
        takes = (lambda *_: False) if plain else kernels.is_fused
        with tiles_of(tile), patch.object(kernels, "is_fused", takes), patch.object(ring, "is_fused", takes):
            check(attend, axis_alone(), full_mask(kind, length), random_qkv(length, heads=heads), **settings)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, SINGLE), (torch.bfloat16, HALF)], ids=["float32", "bfloat16"]
)
def test_short_formats_are_merged_in_float32(dtype: torch.dtype, tolerance: dict[str, float]) -> None:
    qkv = random_qkv(64, dtype=dtype)
    for mask in (in_blocks("padded", 64), full_mask("padded", 64)):
        with tiles_of(16):
            check(by_ring(mask), axis_alone(), full_mask("padded", 64), qkv, tolerance=tolerance)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert by_ring(None)(*qkv, axis_alone(64)).dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("is_causal", [True, False])
def test_flash_attention_on_a_gpu_combines_to_dense_attention(is_causal: bool) -> None:
    qkv = random_qkv(24, dtype=torch.bfloat16, device="cuda")
    with patch.object(kernels, "_plain", None):
        mask = causal(24) if is_causal else torch.ones_like(causal(24))
        check(by_ring(None, is_causal=is_causal), axis_alone(), mask, qkv, tolerance=HALF)


def test_the_first_kernel_that_can_is_chosen() -> None:
    q, _, v = random_qkv(8)
    view = kernels.View(BlockKind.ALL, scale=1)
    assert kernels.is_fused(q, v, view)
    assert not kernels.is_fused(q, v[..., :4], view)
    assert not kernels.is_fused(q, v, kernels.View(BlockKind.ALL, scale=1, dropout=0.1))


def test_dropout_leaves_out_the_same_keys_in_backward() -> None:
    """Results are linear in the values: their sum equals the sum of values times their gradients."""
    qkv = [tensor.requires_grad_() for tensor in random_qkv(20)]
    plain, drop = (partial(by_ring(None, dropout=rate), axis=axis_alone(20)) for rate in (0.0, 0.3))
    runs = []
    for call in (plain, drop, partial(checkpoint, drop, use_reentrant=False)):
        torch.manual_seed(0)
        with tiles_of(4):
            out = call(*qkv)
            runs.append((out, *torch.autograd.grad(out.sum(), qkv)))
    for undropped, dropped, again in zip(*runs, strict=True):
        assert torch.equal(dropped, again)
        assert not torch.allclose(dropped, undropped, rtol=0.01)
    assert_close(runs[1][0].sum(), (qkv[2] * runs[1][3]).sum(), rtol=1e-10, atol=0)


def test_ranks_of_one_random_state_drop_other_keys() -> None:
    nothing: Any = None
    call = ring._RingCall(nothing, nothing, 8, kernels.View(BlockKind.ALL, scale=1.0, dropout=0.5, seed=3))
    at = [ring.Piece(slice(4), slice(4), range(row, row + 4), range(4), BlockKind.ALL) for row in (0, 4)]
    assert call.view(at[0]).seed != call.view(at[1]).seed == call.view(at[1]).seed


def test_zigzag_gives_all_ranks_equally_many_scores() -> None:
    mask = BlockMask(causal_mask_function, (64, 64))
    for is_zigzag in (True, False):
        order = SequenceOrder(size=4, is_zigzag=is_zigzag)
        counts = [
            sum(
                (0.5 if piece.visible is BlockKind.TRIANGLE else 1.0) * len(piece.queries) * len(piece.keys)
                for source in range(4)
                for piece in ring.pieces(mask, order, 64, rank=rank, source=source, size=64)
            )
            for rank in range(4)
        ]
        assert (len(set(counts)) == 1) == is_zigzag
        assert sum(counts) == 64 * 64 / 2


@pytest.mark.parametrize("is_zigzag", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 12, 24])
def test_shards_make_up_the_sequence(size: int, length: int, *, is_zigzag: bool) -> None:
    order = SequenceOrder(size=size, is_zigzag=is_zigzag)
    x = torch.arange(1, 2 * length * 3 + 1).view(2, length, 3)
    shards = [order.shard(x, 1, rank) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1
    assert torch.equal(order.join(shards, 1, length), x)
    padded = torch.cat([x, torch.zeros(2, order.padded(length) - length, 3, dtype=x.dtype)], 1)
    for rank, shard in enumerate(shards):
        positions = [position for stretch in order.stretches(rank, length) for position in stretch]
        assert torch.equal(shard, padded[:, positions])


# Over ranks.

HEADS = ((4, 4), (6, 2), (4, 1), (8, 2), (12, 4))


def attend_round_rings() -> None:
    for number, (kind, length) in enumerate(
        product(("causal", "padded", "packed", "window", "empty row"), (19, 3))
    ):
        axis = axis_of_world(is_zigzag=number % 2 == 0)
        with tiles_of(3 if number % 3 else 1024):
            check(
                by_ring(in_blocks(kind, length)),
                axis,
                full_mask(kind, length),
                random_qkv(length, value_width=6),
            )
    axis = axis_of_world(is_zigzag=True)
    check(by_ring(None, is_causal=True), axis, causal(17), random_qkv(17))
    bias = torch.randn(1, 4, 19, 19, generator=torch.Generator().manual_seed(1))
    hidden = torch.zeros(causal(19).shape).masked_fill(~causal(19), torch.finfo(torch.float32).min)
    for attention_mask, mask in ((causal(19), causal(19)), (hidden, causal(19)), (bias, bias)):
        check(by_ring(attention_mask), axis, mask, random_qkv(19))
    if dist.get_world_size() == 4:
        axis = axis_of_world(is_zigzag=True, inner_ring=2)
        check(by_ring(in_blocks("padded", 27)), axis, full_mask("padded", 27), random_qkv(27))


def attend_with_own_heads() -> None:
    for heads, length in product(HEADS, (8, 7)):
        axis, qkv = axis_of_world(), random_qkv(length, heads=heads, value_width=6)
        check(by_heads(None, is_causal=True), axis, causal(length), qkv)
        check(by_heads(None), axis, torch.ones_like(causal(length)), qkv)
        generator = torch.Generator().manual_seed(1)
        drawn = torch.rand(BATCH, heads[0], length, length, generator=generator) < 0.6
        by_head = drawn | torch.eye(length, dtype=torch.bool)
        check(by_heads(by_head), axis, by_head, qkv)


@pytest.mark.parametrize("function", [attend_round_rings, attend_with_own_heads])
@pytest.mark.parametrize("ranks", [*slow(2, 3), 4])
def test_attention_over_ranks_is_dense_attention(pool: Pool, ranks: int, function: Any) -> None:
    pool.run(ranks, function)


def attend_with_sinks(heads: tuple[int, int]) -> None:
    """Attend with one logit per head as a parameter of the module, and one as an argument."""
    axis = axis_of_world()
    q, k, v = random_qkv(7, heads=heads)

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, s_aux: Tensor, **_: Any) -> Any:
        k, v = (tensor.repeat_interleave(module.num_key_value_groups, 1) for tensor in (k, v))
        sinks = module.sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1)
        weights = torch.cat([q @ k.mT, sinks], -1).softmax(-1)[..., :-1]
        return (weights @ v).transpose(1, 2) * s_aux.exp()[:, None], None

    results = []
    for is_unsharded in (True, False):
        module = Attention(heads[0] // heads[1])
        module.sinks = nn.Parameter(torch.linspace(-1, 1, heads[0], dtype=q.dtype))
        handed = module.sinks.detach().flip(0).requires_grad_()
        axis.length = 7
        if is_unsharded:
            out = axis.shard(attention(module, q, k, v, None, s_aux=handed)[0], 1)
        else:
            shards = [axis.shard(tensor, 2) for tensor in (q, k, v)]
            out = attend_by_heads(attention, module, *shards, None, axis, s_aux=handed)
        gradients = torch.autograd.grad(out.cos().sum(), [module.sinks, handed])
        for gradient in gradients:
            dist.all_reduce(gradient)
        results.append((out, *gradients))
    assert all(tensor.any() for tensor in results[1])
    assert_close(*results, **EXACT)


@pytest.mark.parametrize("heads", [(6, 1), (4, 4)])
def test_sinks_are_sharded_with_their_heads(pool: Pool, heads: tuple[int, int]) -> None:
    pool.run(2, attend_with_sinks, heads)


def drop_by_heads() -> tuple[Tensor, ...]:
    """Return attention weights after dropout, gradients, and numbers drawn afterwards; compare with recomputation."""
    axis = axis_of_world()
    axis.length = 16
    q = torch.zeros(1, 4, 16, 8)
    v = torch.eye(16).expand(1, 4, 16, 16).contiguous()  # so that the result is the weights
    q, v = (axis.shard(tensor, 2) for tensor in (q, v))
    drawn = []
    drop = by_heads(None, dropout=0.4)
    for call in (drop, partial(checkpoint, drop, use_reentrant=False)):
        torch.manual_seed(0)
        values = v.clone().requires_grad_()
        out = call(q, q, values, axis)
        common = torch.rand(4)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        drawn.append((out.detach(), values.grad, common))
    require_equal(*drawn)
    return drawn[0]


def test_dropout_differs_between_heads_and_is_equal_when_recomputed(pool: Pool) -> None:
    shards, _, commons = zip(*pool.run(2, drop_by_heads), strict=True)
    assert torch.equal(*commons)
    weights = torch.cat(shards, 1)
    kept = weights[weights > 0]
    assert_close(kept, torch.full_like(kept, 1 / 16 / 0.6))
    assert abs((weights == 0).float().mean().item() - 0.4) < 0.05
    assert len({tuple((weights[:, :, head] == 0).flatten().tolist()) for head in range(4)}) == 4


def sent(attend: Attend, heads: tuple[int, int], **order: Any) -> list[dict[tuple[str, str], float]]:
    """Return the bytes that this rank sends in forward and in backward, for 64 positions with padding."""
    mesh = ParallelMesh(sp=dist.get_world_size())
    axis = axis_of_world(mesh, **order)
    axis.length = 62
    shards = [
        axis.shard(tensor, 2).requires_grad_() for tensor in random_qkv(62, heads=heads, dtype=torch.float32)
    ]
    with Traffic(mesh) as forward:
        out = attend(*shards, axis)
    with Traffic(mesh) as backward:
        out.sum().backward()
    return [
        {key: count.sent for key, count in traffic.counts.items() if count.sent}
        for traffic in (forward, backward)
    ]


RING, ULYSSES = by_ring(None, is_causal=True), by_heads(None, is_causal=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formula(pool: Pool, ranks: int) -> None:
    position = BATCH * 64 * 8 * 4 * (ranks - 1) / ranks  # bytes of one head that leave a rank, times P
    of_ring = [{("sp", "send"): 2 * 2 * position}, {("sp", "send"): 2 * 2 * 2 * position}]
    for inner_ring in (None, 2) if ranks == 4 else (None,):
        counts = pool.run(ranks, sent, RING, (4, 2), is_zigzag=True, inner_ring=inner_ring)
        assert counts == [of_ring] * ranks
    length = SequenceOrder(size=ranks).padded(62)
    expected = {("sp", "all_to_all"): (2 * 8 + 2 * 4) * position * length / 64 / ranks}
    assert pool.run(ranks, sent, ULYSSES, (8, 4)) == [[expected, expected]] * ranks


def memory(length: int) -> tuple[int, int]:
    """Return the bytes that ring attention keeps for backward, and those of the largest tensor that it makes."""
    axis = axis_of_world(is_zigzag=True)
    axis.length = length
    shards = [axis.shard(tensor, 2).requires_grad_() for tensor in random_qkv(length, dtype=torch.float32)]
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with Made() as made:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = RING(*shards, axis)
        out.sum().backward()
    largest = max(shape.numel() * dtype.itemsize for shape, dtype in made.tensors)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept), largest


def test_a_rank_saves_only_its_shard_and_makes_no_tensor_larger_than_its_queries(pool: Pool) -> None:
    length, ranks, heads, kv_heads, width = 512, 2, 4, 2, 8
    for kept, largest in pool.run(ranks, memory, length):
        local_length = length // ranks
        assert kept == 4 * BATCH * local_length * (2 * heads * width + 2 * kv_heads * width + heads)
        assert largest <= 4 * BATCH * local_length * heads * width  # not even all keys of one head


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        ((8, 4), 2, (4, 2, 1)),
        ((8, 2), 4, (2, 1, 2)),
        ((8, 1), 8, (1, 1, 8)),
        ((12, 12), 5, (3, 3, 1)),
        ((32, 8), 6, (6, 3, 2)),
    ],
)
def test_few_key_value_heads_are_repeated_no_more_than_ranks_need(
    heads: tuple[int, int], size: int, expected: tuple[int, int, int]
) -> None:
    share = HeadShare.with_fewest_heads(*heads, size)
    assert (share.queries, share.keys, share.repeats) == expected
