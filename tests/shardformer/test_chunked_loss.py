"""The causal loss in chunks of tokens, from the input of the head."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.shardformer.fused import FusedKernels
from echelon.shardformer.layers import chunked_loss
from echelon.shardformer.layers.chunked_loss import (
    chunk_length,
    chunked_cross_entropy,
    chunked_loss_errors,
    fused_chunk_loss,
    liger_chunk_loss,
    torch_chunk_loss,
)
from echelon.shardformer.layers.embedding import VocabRange
from echelon.verify.batch import make_batch
from echelon.verify.model_choice import ModelChoice

from ..models.stand_ins import installed
from ..plugins.training import boosted, hybrid
from ..pool import Pool
from .compare import Made

LLAMA = ModelChoice(model_type="llama", tied=True)


class LigerKernel:
    """Stand-in for Liger's Triton kernel with the same arguments, computed by plain torch."""

    def __init__(self, *without: str, more: tuple[str, ...] = ()) -> None:
        known = """X_ptr X_stride Y_ptr Y_stride weight_ptr loss_ptr z_loss_ptr loss_stride token_accuracy_ptr
            token_accuracy_stride predicted_tokens_ptr predicted_tokens_stride n_cols n_non_ignore sum_non_ignore_weight
            weight_sum ignore_index lse_square_scale label_smoothing reduction softcap RETURN_Z_LOSS
            RETURN_TOKEN_ACCURACY RETURN_PREDICTED_TOKENS BLOCK_SIZE HAS_WEIGHT HAS_SOFTCAPPING HAS_GRADIENTS"""
        self.arg_names = [name for name in known.split() if name not in without] + list(more)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._launch, *grid)

    def _launch(
        self,
        num_rows: int,
        *,
        X_ptr: Tensor,
        X_stride: int,
        Y_ptr: Tensor,
        Y_stride: int,
        loss_ptr: Tensor,
        loss_stride: int,
        n_cols: int,
        ignore_index: int,
        reduction: str,
        BLOCK_SIZE: int,
        HAS_GRADIENTS: bool = True,
        num_warps: int,
        **rest: Any,
    ) -> None:
        constants = {name for name in self.arg_names if name.isupper()}
        assert {*rest, "HAS_GRADIENTS", "BLOCK_SIZE"} >= constants
        scales = (*(name for name in rest if name.isupper()), "lse_square_scale", "label_smoothing")
        assert reduction == "sum" and not any(rest[name] for name in scales)
        assert BLOCK_SIZE & (BLOCK_SIZE - 1) == 0 and min(n_cols, 32768) <= BLOCK_SIZE <= 32768
        assert num_warps <= 32
        assert loss_ptr.shape == Y_ptr.shape == (num_rows,) and loss_ptr.dtype == torch.float32
        assert (X_stride, 1) == X_ptr.stride() and (Y_stride,) == Y_ptr.stride() and loss_stride == 1
        is_counted = Y_ptr != ignore_index
        labels = Y_ptr[is_counted]
        log_share = X_ptr[:, :n_cols].float()[is_counted].log_softmax(1)
        loss_ptr[is_counted] = -log_share.gather(1, labels[:, None])[:, 0]
        if HAS_GRADIENTS:
            X_ptr[~is_counted] = 0.0
            X_ptr[is_counted] = (log_share.exp() - F.one_hot(labels, n_cols)).to(X_ptr.dtype)


def installed_liger(kernel: LigerKernel) -> AbstractContextManager[None]:
    return installed(liger_kernel__ops__cross_entropy={"liger_cross_entropy_kernel": kernel})


@contextmanager
def computed_by(library: str) -> Iterator[torch.device]:
    """Return the device for this library: Liger's own kernel runs on a GPU or in Triton's interpreter."""
    device = "cpu"
    if library == "liger_kernel":
        if find_spec(library) is None:
            pytest.skip("liger_kernel is not installed")
        if torch.cuda.is_available():
            device = "cuda"
        elif os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("without a GPU Liger's kernel runs with TRITON_INTERPRET=1 in the environment")
    kernel = torch_chunk_loss if library == "torch" else liger_chunk_loss
    with (
        installed_liger(LigerKernel()) if library == "stand-in" else nullcontext(),
        patch.object(chunked_loss, "fused_chunk_loss", lambda *_: kernel),
    ):
        yield torch.device(device)


@pytest.mark.parametrize("library", ["torch", "stand-in", "liger_kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "vocab_size"), [(37, 8, 50), (16, 32, 7), (1, 4, 9), (96, 16, 130)]
)
def test_sum_and_gradients_are_torchs_and_no_tensor_is_as_large_as_all_logits(
    num_tokens: int, hidden: int, vocab_size: int, dtype: torch.dtype, library: str
) -> None:
    torch.manual_seed(0)
    length = chunk_length(num_tokens, hidden, vocab_size)
    tensors = [torch.randn(shape) for shape in ((num_tokens, hidden), (vocab_size, hidden), (vocab_size,))]
    labels_N = torch.randint(vocab_size, (num_tokens,)).index_fill(0, torch.arange(1, num_tokens, 5), -100)
    labels_N[length : 2 * length] = -100
    entries = VocabRange(vocab_size=vocab_size, first=0, width=vocab_size, valid=vocab_size)
    with computed_by(library) as device, Made() as made:
        tensors, labels_N = [tensor.to(device, dtype) for tensor in tensors], labels_N.to(device)
        inputs, plain = ([tensor.clone().requires_grad_() for tensor in tensors] for _ in range(2))
        loss = chunked_cross_entropy(*inputs, labels_N, entries=entries)
        loss.backward(torch.tensor(0.25, device=device))
        with torch.no_grad(), patch.object(torch, "mm", side_effect=AssertionError("a gradient's product")):
            without_gradients = chunked_cross_entropy(*inputs, labels_N, entries=entries)
    expected = F.cross_entropy(F.linear(*plain).float(), labels_N, reduction="sum")
    expected.backward(torch.tensor(0.25, device=device))
    assert length * vocab_size < max(2 * num_tokens * hidden, 2 * vocab_size)
    most = 2 * max(num_tokens * hidden, vocab_size * hidden)
    most *= 4 if library == "liger_kernel" else 1  # the interpreter copies as bytes
    assert max(shape.numel() for shape, _ in made.tensors) <= most
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(without_gradients, expected, rtol=1e-5, atol=1e-5)
    # In 16 bits gradients of logits are rounded; Triton's interpreter truncates them to bfloat16 instead.
    scale = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    for tensor, wanted in zip(inputs, plain, strict=True):
        assert tensor.grad is not None and wanted.grad is not None
        assert (tensor.grad - wanted.grad).abs().max() <= scale * wanted.grad.abs().max()


def test_ligers_kernel_computes_unsharded_heads_on_cuda_if_it_is_installed() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    group: Any = object()
    with patch.object(chunked_loss, "find_spec", lambda name: None):
        assert fused_chunk_loss(cuda, None) is torch_chunk_loss
    with installed_liger(LigerKernel()):
        assert fused_chunk_loss(cuda, None) is liger_chunk_loss
        assert fused_chunk_loss(cuda, group) is fused_chunk_loss(cpu, None) is torch_chunk_loss


@pytest.mark.parametrize(
    ("kernel", "is_refused"),
    [
        (LigerKernel(), False),
        (LigerKernel("predicted_tokens_ptr", "predicted_tokens_stride", "RETURN_PREDICTED_TOKENS"), False),
        (LigerKernel("HAS_WEIGHT"), True),
        (LigerKernel(more=("logit_scale",)), True),
    ],
    ids=["0.8.5", "0.7.0", "0.5.2", "another"],
)
def test_a_release_of_liger_with_other_arguments_is_refused_by_name(
    kernel: LigerKernel, is_refused: bool
) -> None:
    fused, cuda = FusedKernels(loss=True), torch.device("cuda")
    with installed_liger(kernel), patch.object(chunked_loss, "version", lambda name: f"9.9 of {name}"):
        errors = fused.errors(cuda, torch.bfloat16)
        assert fused.errors(torch.device("cpu"), None) == FusedKernels().errors(cuda, None) == []
    assert len(errors) == is_refused
    for error in errors:
        assert error.startswith("enable_fused_loss: liger-kernel 9.9") and "0.5.3 to 0.8.5" in error


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (ModelChoice(model_type="gemma2"), "scales, caps or converts"),
        (ModelChoice(model_type="cohere"), "scales, caps or converts"),
        (ModelChoice(model_type="bert"), "is not transformers' causal loss"),
        (ModelChoice(model_type="t5"), "is not transformers' causal loss"),
    ],
)
def test_a_model_whose_loss_is_another_is_refused(choice: ModelChoice, reason: str) -> None:
    (error,) = chunked_loss_errors(choice.build_on_meta())
    assert reason in error and error.endswith("leave enable_fused_loss out")


def answers(tp_size: int, *, parallel_output: bool) -> None:
    """Compare the outputs of a boosted model with those of a plain one. Collective over the world."""
    plain: Any = LLAMA.build()
    batch = make_batch(LLAMA, num_samples=2, seed=0)
    booster = hybrid(tp_size=tp_size, enable_fused_loss=True, parallel_output=parallel_output)
    model, _ = boosted(booster, LLAMA)
    for is_training in (True, False):
        expected, outputs = (module.train(is_training)(**batch) for module in (plain, model))
        torch.testing.assert_close(outputs.loss, expected.loss)
        logits: Any = outputs.logits
        if is_training and parallel_output:
            with pytest.raises(AttributeError, match="not computed, since the loss was computed in chunks"):
                logits.argmax(-1)
            logits = logits.gather()
        torch.testing.assert_close(logits, expected.logits)
    batch.pop("labels")
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)


@pytest.mark.parametrize(("tp_size", "parallel_output"), [(1, True), (2, True), (2, False)])
def test_only_training_calls_with_labels_leave_no_logits(
    pool: Pool, tp_size: int, parallel_output: bool
) -> None:
    pool.run(tp_size, answers, tp_size, parallel_output=parallel_output)
