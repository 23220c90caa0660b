"""The causal loss by chunks of tokens, from what enters the head."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echelon import HybridParallelPlugin
from echelon.shardformer.layers.chunked_loss import chunk_length, chunked_cross_entropy, chunked_loss_errors
from echelon.shardformer.layers.embedding import VocabRange
from echelon.verify.batch import make_batch
from echelon.verify.models import ModelChoice
from echelon.verify.parity import make_optimizer

from ..pool import Pool

LLAMA = ModelChoice(model_type="llama", tied=True)


class Largest(TorchDispatchMode):
    """The most numbers that a tensor has which is made meanwhile."""

    found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.found = max(self.found, made.numel() if isinstance(made, Tensor) else 0)
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "vocab_size"), [(37, 8, 50), (16, 32, 7), (1, 4, 9), (96, 16, 130)]
)
def test_sum_and_gradients_are_torchs_and_no_tensor_is_as_large_as_all_logits(
    num_tokens: int, hidden: int, vocab_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    given = [
        torch.randn(shape).to(dtype) for shape in ((num_tokens, hidden), (vocab_size, hidden), (vocab_size,))
    ]
    labels_N = torch.randint(vocab_size, (num_tokens,)).index_fill(0, torch.arange(1, num_tokens, 5), -100)
    own, plain = ([each.clone().requires_grad_() for each in given] for _ in range(2))
    entries = VocabRange(vocab_size=vocab_size, first=0, width=vocab_size, valid=vocab_size)
    with Largest() as largest:
        loss = chunked_cross_entropy(*own, labels_N, entries=entries)
        loss.backward(torch.tensor(0.25))
    expected = F.cross_entropy(F.linear(*plain).float(), labels_N, reduction="sum")
    expected.backward(torch.tensor(0.25))
    assert chunk_length(num_tokens, hidden, vocab_size) * vocab_size < max(
        2 * num_tokens * hidden, 2 * vocab_size
    )
    assert largest.found <= 2 * max(num_tokens * hidden, vocab_size * hidden)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    scale = 2**-7 if dtype == torch.bfloat16 else 1e-6
    for found, wanted in zip(own, plain, strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert (found.grad - wanted.grad).abs().max() <= scale * wanted.grad.abs().max()


def test_a_label_outside_the_vocabulary_is_named() -> None:
    entries = VocabRange(vocab_size=5, first=0, width=5, valid=5)
    with pytest.raises(ValueError, match="label 5 is outside the vocabulary of 5"):
        chunked_cross_entropy(
            torch.randn(2, 3), torch.randn(5, 3), None, torch.tensor([0, 5]), entries=entries
        )


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (ModelChoice(model_type="gemma2"), "scales, caps or uses otherwise"),
        (ModelChoice(model_type="cohere"), "scales, caps or uses otherwise"),
        (ModelChoice(model_type="bert"), "is not the causal one"),
        (ModelChoice(model_type="t5"), "is not the causal one"),
    ],
)
def test_a_model_whose_loss_is_another_is_refused(choice: ModelChoice, reason: str) -> None:
    (error,) = chunked_loss_errors(choice.build_on_meta())
    assert reason in error and error.endswith("leave enable_fused_loss out")


def answers(tp_size: int, *, parallel_output: bool) -> None:
    """What calls of a boosted model return, beside those of a plain one. Collective over the world."""
    plain: Any = LLAMA.build()
    batch = make_batch(LLAMA, num_samples=2, seed=0)
    plugin = HybridParallelPlugin(
        tp_size=tp_size, precision="fp32", enable_fused_loss=True, parallel_output=parallel_output
    )
    model, *_ = plugin.configure(own := LLAMA.build(), make_optimizer(own))
    for is_training in (True, False):
        expected, found = (each.train(is_training)(**batch) for each in (plain, model))
        torch.testing.assert_close(found.loss, expected.loss)
        logits: Any = found.logits
        if is_training and parallel_output:
            with pytest.raises(
                AttributeError, match="not computed, since the loss was taken from what enters the head"
            ):
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
