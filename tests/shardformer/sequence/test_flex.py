"""FlexAttention in ring attention: masks, results and gradients compared with dense attention.

It trains only on CUDA. Here torch's uncompiled code of the same functions, meant for debugging, replaces the kernel.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from echelon.shardformer.sequence import flex, kernels
from echelon.shardformer.sequence.block_mask import block_mask

from ...host_reads import host_reads
from ...pool import Pool
from .masks import KINDS, full_mask, in_blocks
from .test_parallel_attention import HALF, axis_alone, axis_of_world, by_ring, check, random_qkv, tiles_of


@contextmanager
def flex_on_cpu() -> Iterator[None]:
    """Use FlexAttention on the CPU, in any dtype and with gradients, instead of all other kernels."""
    with ExitStack() as stack:
        for module, name, replacement in (
            (flex, "fits", lambda q, v: True),
            (flex, "_compiled", lambda kind: torch_flex.flex_attention),
            (kernels, "_flash", None),
            (kernels, "_plain", None),
            (kernels, "_flash_backward", None),
            (kernels, "_plain_backward", None),
            (torch_flex, "_validate_device", lambda *_: None),
            (torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        ):
            stack.enter_context(patch.object(module, name, replacement))
        yield


# Masks that other fused kernels do not support.
MASKED = [kind for kind in KINDS if not in_blocks(kind, 24).is_plain]


def places(*ranges: tuple[int, int]) -> Tensor:
    return torch.cat([torch.arange(*bounds) for bounds in ranges])


@pytest.mark.parametrize("kind", MASKED)
def test_a_block_mask_is_the_dense_one(kind: str) -> None:
    length = 300
    queries, keys = places((64, 192), (256, 384)), places((0, 150), (200, 306))  # padding from 300 on
    with patch.object(flex, "_ENTRIES", 128 * 256):  # 128 rows at a time
        made = flex.flex_mask(in_blocks(kind, length), queries, keys)
    dense = full_mask(kind, length)
    expected = torch.zeros(len(dense), 1, 384, 384, dtype=torch.bool)  # padded to full blocks
    real = [positions < length for positions in (queries, keys)]
    among = dense[:, :, queries[real[0]]][..., keys[real[1]]]
    expected[:, :, : int(real[0].sum()), : int(real[1].sum())] = among
    mask_mod = torch_flex.create_mask(made.mask_mod, len(dense), 1, len(queries), len(keys), device="cpu")
    assert torch.equal(mask_mod, expected[:, :, : len(queries), : len(keys)])
    blocks = expected[:, :, :256, :256].unflatten(-1, (2, 128)).unflatten(-3, (2, 128))
    assert torch.equal(made.to_dense().bool().expand(len(dense), 1, 2, 2), blocks.any(-1).any(-2))
    assert made.full_kv_num_blocks is not None
    full = made.full_kv_num_blocks.expand(len(dense), 1, 2)
    assert torch.equal(full, blocks.all(-1).all(-2).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("kind", MASKED)
def test_blocks_combine_to_dense_attention(kind: str) -> None:
    with flex_on_cpu():
        check(by_ring(in_blocks(kind, 141)), axis_alone(), full_mask(kind, 141), random_qkv(141))


def test_it_caps_scores() -> None:
    with flex_on_cpu():
        attend, qkv = by_ring(in_blocks("padded left", 24), softcap=0.5), random_qkv(24, heads=(4, 1))
        check(attend, axis_alone(), full_mask("padded left", 24), qkv, softcap=0.5)


def test_short_formats_are_merged_in_float32() -> None:
    with flex_on_cpu():
        qkv = random_qkv(64, dtype=torch.bfloat16)
        check(by_ring(in_blocks("padded", 64)), axis_alone(), full_mask("padded", 64), qkv, tolerance=HALF)


@pytest.mark.slow
def test_kinds_of_calls_share_no_graphs() -> None:
    """torch compiles at most 8 graphs of one function, and then raises."""
    compiled, as_it_is = cache(flex._compiled.__wrapped__), partial(torch.compile, backend="eager")
    with flex_on_cpu(), patch.object(flex, "_compiled", compiled), patch("torch.compile", as_it_is):
        for kind, dtype in product(MASKED, (torch.float32, torch.bfloat16)):
            with torch.no_grad():
                by_ring(in_blocks(kind, 24))(*random_qkv(24, dtype=dtype), axis_alone(24))
    assert compiled.cache_info().currsize > 8


def attend_round_rings() -> None:
    with flex_on_cpu():
        for number, (kind, length) in enumerate((("padded", 19), ("packed", 19), ("empty row", 3))):
            axis = axis_of_world(is_zigzag=number % 2 == 0)
            qkv = random_qkv(length, value_width=6)
            check(by_ring(in_blocks(kind, length)), axis, full_mask(kind, length), qkv)


def test_attention_over_ranks_is_dense_attention(pool: Pool) -> None:
    pool.run(2, attend_round_rings)


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_nothing_is_read_on_the_host_however_many_layers(kind: str) -> None:
    mask, qkv = in_blocks(kind, 64), random_qkv(64)
    with flex_on_cpu(), host_reads() as reads, patch.object(flex, "flex_mask", wraps=flex.flex_mask) as made:
        for _ in range(2):
            run(mask, qkv)
    assert not reads
    assert made.call_count == 1


@pytest.mark.parametrize("levels", [False, True])
def test_tiles_are_evaluated_in_one_host_read(levels: bool) -> None:
    mask, qkv = in_blocks("padded left", 64, levels=levels), random_qkv(64)
    with tiles_of(8), host_reads() as reads:
        for _ in range(2):
            run(mask, qkv)
    kinds, blind = ("sequence/block_mask.py", "classify"), ("sequence/block_mask.py", "_find_uniform_queries")
    assert reads == ({kinds: 1, blind: 1} if levels else {kinds: 1})


def run(mask: Any, qkv: list[Tensor]) -> None:
    """Run forward and backward."""
    inputs = [tensor.requires_grad_() for tensor in qkv]
    torch.autograd.grad(by_ring(mask)(*inputs, axis_alone(qkv[0].shape[2])).sum(), inputs)


def test_a_mask_without_padding_uses_the_plain_kernel() -> None:
    with host_reads() as reads:
        mask = block_mask(2, 8, 8, attention_mask=torch.ones(2, 8, dtype=torch.bool))
    assert mask.is_plain and reads == {("sequence/block_mask.py", "__init__"): 1}
