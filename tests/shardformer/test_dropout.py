"""Dropout in split models: equal where activations are replicated, different where heads are, recomputed alike."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..pool import Pool
from .compare import (
    batch_for,
    build,
    loss_of,
    named,
    pieces,
    require_equal_on_ranks,
    require_same_gradients,
    split,
)

HIDDEN = dict(
    BertForSequenceClassification=dict(hidden_dropout_prob=0.1, classifier_dropout=0.1),
    GPT2LMHeadModel=dict(resid_pdrop=0.1, embd_pdrop=0.1),
)
ATTENTION = dict(
    BertForSequenceClassification=dict(attention_probs_dropout_prob=0.1),
    GPT2LMHeadModel=dict(attn_pdrop=0.1),
    LlamaForCausalLM=dict(attention_dropout=0.1, num_key_value_heads=2),
    T5ForConditionalGeneration=dict(dropout_rate=0.1),
)
BOTH = {name: HIDDEN.get(name, {}) | ATTENTION[name] for name in ATTENTION}
LAYERS = dict(
    BertForSequenceClassification="bert.encoder.layer",
    GPT2LMHeadModel="transformer.h",
    LlamaForCausalLM="model.layers",
    T5ForConditionalGeneration="decoder.block",
)
# Of what is dropped inside T5's feed forward, on one rank of two.
T5_WIDTH = 24


def train(model: nn.Module, *, steps: int = 1) -> list[float]:
    """Losses; gradients add up in the model."""
    torch.manual_seed(11)
    losses = []
    for _ in range(steps):
        loss = loss_of(model(**batch_for(model)))
        loss.backward()
        losses.append(loss.item())
    return losses


def hidden_dropout() -> None:
    for name, settings in HIDDEN.items():
        with named(name):
            model = build(name, **settings)
            copied = split(deepcopy(model))
            expected, found = train(model, steps=2), train(copied, steps=2)
            assert expected[0] != expected[1], "no dropout"
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-6)
            require_same_gradients(copied, model)


def hidden_dropout_of_t5() -> None:
    """T5 has one probability for all: here it is taken out of what is split."""
    model = build("T5ForConditionalGeneration", dropout_rate=0.1)
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.0
        if type(module).__name__ == "T5DenseActDense":
            module.dropout.p = 0.0
    copied = split(deepcopy(model))
    expected, found = train(model, steps=2), train(copied, steps=2)
    assert expected[0] != expected[1], "no dropout"
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    require_same_gradients(copied, model)


def replicated_activations() -> None:
    for name, settings in BOTH.items():
        copied = split(build(name, **settings))
        for index, layer in enumerate(copied.get_submodule(LAYERS[name]).children()):
            layer.register_forward_hook(partial(require_equal, what=f"{name}: the output of layer {index}"))
        train(copied, steps=2)
        require_equal_on_ranks(torch.rand(8), "what is drawn afterwards")


def require_equal(module: nn.Module, args: tuple, output: Any, *, what: str) -> None:
    """A forward hook."""
    require_equal_on_ranks(output[0] if isinstance(output, tuple) else output, what)


def dropped_inside(name: str, *, attention: bool = True) -> list[Tensor]:
    """The entries dropped on this rank among attention probabilities, or else inside T5's feed forwards."""
    model = build(name, attention="eager", **BOTH[name])
    copied = split(model)
    dropped: list[Tensor] = []
    native = nn.functional.dropout

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        output = native(input, p, training, inplace)
        is_attention = input.dim() == 4  # (B, heads, S, S)
        if is_attention if attention else input.shape[-1] == T5_WIDTH:
            dropped.append((output == 0) & (input != 0))
        return output

    nn.functional.dropout = dropout
    try:
        train(copied)
    finally:
        nn.functional.dropout = native
    return dropped


def attention_dropout() -> None:
    for name in ATTENTION:
        require_unlike(dropped_inside(name), f"{name}: attention")
    masks = dropped_inside("T5ForConditionalGeneration")
    assert len(masks) == 2 + 2 * 3, "self attention of two layers, self and cross attention of three"
    masks = dropped_inside("T5ForConditionalGeneration", attention=False)
    assert len(masks) == 2 + 3
    require_unlike(masks, "feed forward")


def require_unlike(masks: list[Tensor], what: str) -> None:
    """Two ranks drop other entries, everywhere."""
    for mask in masks:
        assert mask.any()
        first, second = pieces(mask.to(torch.uint8))
        assert not torch.equal(first, second), f"{what}: both ranks dropped the same"


def checkpointing() -> None:
    """Recomputation drops what was dropped before: bitwise the same gradients.

    Without the cache, which checkpointing turns off: it copies keys and values, and sums come in another order.
    """
    for name, settings in BOTH.items():
        with named(name):
            plain, again = (split(build(name, use_cache=False, **settings)) for _ in range(2))
            # The name before transformers 5.23, which warns of it.
            enable = (
                getattr(again, "activation_checkpointing_enable", None) or again.gradient_checkpointing_enable
            )
            enable()
            assert train(plain, steps=2) == train(again, steps=2)
            for (path, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
                assert one.grad is not None
                assert torch.equal(one.grad, other.grad), path
            require_equal_on_ranks(torch.rand(8), "what is drawn afterwards")


def evaluation() -> None:
    """Without training nothing is dropped, and evaluating between two steps changes no random number but its own."""
    for name, settings in BOTH.items():
        model = build(name, **settings)
        copied = split(deepcopy(model))
        with torch.no_grad():
            expected = loss_of(model.eval()(**batch_for(model)))
            found = loss_of(copied.eval()(**batch_for(model)))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        hidden_dropout,
        hidden_dropout_of_t5,
        replicated_activations,
        attention_dropout,
        checkpointing,
        evaluation,
    ],
)
def test_dropout_is_that_of_one_process_where_nothing_is_split(pool: Pool, function: Any) -> None:
    pool.run(2, function)


def test_four_ranks_recompute_alike(pool: Pool) -> None:
    pool.run(4, checkpointing)
