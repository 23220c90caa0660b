"""Kernels for a block against products in float64."""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from echelon.shardformer.sequence import kernels
from echelon.shardformer.sequence.block_mask import Seen
from echelon.shardformer.sequence.kernels import Kernel, View, look, look_back
from echelon.shardformer.sequence.ring_attention import OnlineSoftmax

# 16 queries, and two blocks of keys.
BLOCKS = (slice(16), slice(16, 24))
SCALE = 0.3
NAMES = {kernel.forward.__name__: kernel for kernel in kernels._KERNELS}


def inputs(*, dtype: torch.dtype, device: str = "cpu", groups: int = 2) -> list[Tensor]:
    """Queries, keys, values and the gradient of the results."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 4, 16, 8), (2, 4 // groups, 24, 8), (2, 4 // groups, 24, 8), (2, 4, 16, 8))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def put_together(tensors: Sequence[Tensor], views: Sequence[View]) -> list[Tensor]:
    """Results, and gradients of q, k and v, from the blocks."""
    q, k, v, gradient = tensors
    softmax = OnlineSoftmax(q, v.shape[-1])
    for block, view in zip(BLOCKS, views, strict=True):
        softmax.add(slice(None), *look(q, k[:, :, block], v[:, :, block], view))
    out = softmax.out_BNQD.to(q.dtype)
    lse = softmax.lse_BNQ.masked_fill(softmax.lse_BNQ == -torch.inf, torch.inf)
    found = [
        look_back(gradient, q, k[:, :, block], v[:, :, block], out, lse, view)
        for block, view in zip(BLOCKS, views, strict=True)
    ]
    dq, dk, dv = zip(*found, strict=True)
    return [out, sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)]


def in_one(
    tensors: Sequence[Tensor], bias: Tensor, kept: Tensor | None = None, softcap: float | None = None
) -> list[Tensor]:
    """The same by products over all keys, in float64."""
    q, k, v, gradient = (each.detach().cpu().double() for each in tensors)
    for each in (q, k, v):
        each.requires_grad_()
    keys, values = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = SCALE * q @ keys.mT
    scores = (scores if softcap is None else softcap * (scores / softcap).tanh()) + bias
    sees = (scores > -torch.inf).any(-1, keepdim=True)
    weights = scores.masked_fill(~sees, 0).softmax(-1) * sees
    out = (weights if kept is None else weights * kept) @ values
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)]


def views_of(seen: Sequence[Seen | Tensor]) -> list[View]:
    return [View(each, scale=SCALE) for each in seen]


CASES: dict[str, list[Seen | Tensor]] = {
    "all": [Seen.ALL, Seen.ALL],
    "triangle": [Seen.TRIANGLE, Seen.ALL],
    "booleans": [torch.arange(16 * 16).view(1, 1, 16, 16) % 3 == 0, torch.arange(16).view(2, 1, 1, 8) > 2],
    "who sees nothing of a block, or of both": [
        torch.arange(16).view(1, 1, 16, 1).expand(1, 1, 16, 16) > 5,
        torch.arange(16).view(1, 1, 16, 1).expand(1, 1, 16, 8) < 2,
    ],
    "numbers": [torch.linspace(-9, 9, 4 * 256).view(1, 4, 16, 16), torch.zeros(1, 1, 1, 8)],
}


def bias_of(seen: Sequence[Seen | Tensor]) -> Tensor:
    """Numbers to add for both blocks."""
    whole = []
    for each, block in zip(seen, BLOCKS, strict=True):
        if each is Seen.ALL:
            each = torch.ones(16, block.stop - (block.start or 0), dtype=torch.bool)
        elif each is Seen.TRIANGLE:
            each = torch.ones(16, 16, dtype=torch.bool).tril()
        assert isinstance(each, Tensor)
        bias = each if each.is_floating_point() else torch.zeros(each.shape).masked_fill(~each, -torch.inf)
        whole.append(bias.expand(2, 4, 16, -1).double())
    return torch.cat(whole, -1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", ["_cpu_flash", "_plain"])
def test_blocks_make_up_the_whole(kernel: str, case: str, groups: int) -> None:
    expected = bias_of(CASES[case])
    with patch.object(kernels, "_KERNELS", (NAMES[kernel],)):
        for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 4e-2)):
            tensors = inputs(dtype=dtype, groups=groups)
            for found, wanted in zip(
                put_together(tensors, views_of(CASES[case])), in_one(tensors, expected), strict=True
            ):
                assert_close(found, wanted, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", ["all", "triangle"])
def test_blocks_on_a_gpu_make_up_the_whole(case: str) -> None:
    tensors = inputs(dtype=torch.bfloat16, device="cuda")
    assert chosen(tensors, views_of(CASES[case])[0]) is NAMES["_cuda_flash"]
    for found, wanted in zip(
        put_together(tensors, views_of(CASES[case])), in_one(tensors, bias_of(CASES[case])), strict=True
    ):
        assert_close(found.cpu(), wanted, rtol=4e-2, atol=4e-2, check_dtype=False)


def chosen(tensors: Sequence[Tensor], view: View) -> Kernel:
    return kernels._kernel(tensors[0], tensors[2], view)


def test_the_first_kernel_that_can_is_chosen() -> None:
    tensors = inputs(dtype=torch.float32)
    assert chosen(tensors, View(Seen.ALL, scale=1)) is NAMES["_cpu_flash"]
    assert chosen(tensors, View(Seen.ALL, scale=1, dropout=0.1)) is NAMES["_plain"]
    narrow = [tensors[0], tensors[1], tensors[2][..., :4]]
    assert chosen(narrow, View(Seen.ALL, scale=1)) is NAMES["_plain"]


@pytest.mark.parametrize("case", CASES)
def test_scores_are_capped_before_keys_are_hidden(case: str) -> None:
    tensors, softcap = inputs(dtype=torch.float64), 0.5
    views = [replace(view, softcap=softcap) for view in views_of(CASES[case])]
    assert chosen(tensors, views[0]) is NAMES["_plain"]
    expected = in_one(tensors, bias_of(CASES[case]), softcap=softcap)
    for found, wanted in zip(put_together(tensors, views), expected, strict=True):
        assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_dropout_leaves_out_the_same_keys_in_backward() -> None:
    views = [View(Seen.ALL, scale=SCALE, dropout=0.4, seed=seed) for seed in (5, 6)]
    tensors = inputs(dtype=torch.float64)
    widths = [16, 8]
    kept = [
        kernels._kept(torch.ones(2, 4, 16, width, dtype=torch.float64), view)
        for width, view in zip(widths, views, strict=True)
    ]
    share = torch.cat(kept, -1).count_nonzero() / (2 * 4 * 16 * 24)
    assert abs(share - 0.6) < 0.04  # of 3,072 draws: four standard deviations are 0.035
    assert not torch.equal(kept[0][..., :8], kept[1])
    bias = torch.zeros(1, 1, 16, 24, dtype=torch.float64)
    for found, wanted in zip(
        put_together(tensors, views), in_one(tensors, bias, torch.cat(kept, -1)), strict=True
    ):
        assert_close(found, wanted, rtol=1e-12, atol=1e-12)
