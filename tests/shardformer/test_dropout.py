"""Dropout in sharded models: equal for replicated activations, different for sharded heads, equal when recomputed."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from echelon.shardformer.offload import ActivationOffload
from echelon.shardformer.recompute import (
    PipelineGradientCheckpointConfig,
    checkpoint_layers,
    recomputable_layers,
    recompute_errors,
)

from ..pool import Pool
from ..slow import slow
from .compare import (
    batch_for,
    build,
    gradients,
    loss_of,
    named,
    pieces,
    recompute_layers,
    require_equal,
    require_equal_on_ranks,
    require_same_gradients,
    split,
)

BERT, GPT2, LLAMA, T5 = (
    "BertForSequenceClassification",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
)
HIDDEN = {
    BERT: dict(hidden_dropout_prob=0.1, classifier_dropout=0.1),
    GPT2: dict(resid_pdrop=0.1, embd_pdrop=0.1),
    T5: dict(dropout_rate=0.1),
}
ATTENTION: dict[str, dict[str, Any]] = {
    BERT: dict(attention_probs_dropout_prob=0.1),
    GPT2: dict(attn_pdrop=0.1),
    LLAMA: dict(attention_dropout=0.1, num_key_value_heads=2),
    T5: dict(dropout_rate=0.1),
}
BOTH = {name: HIDDEN.get(name, {}) | ATTENTION[name] for name in ATTENTION}
LAYERS = {BERT: "bert.encoder.layer", GPT2: "transformer.h", LLAMA: "model.layers", T5: "decoder.block"}
NATIVE = nn.functional.dropout
# In BERT a region begins in one of these modules and ends in another.
MODULES: dict[str, tuple[str, ...]] = {
    BERT: ("attention.self", "attention.output", "intermediate", "output.dropout"),
    GPT2: ("attn", "mlp"),
    LLAMA: ("self_attn", "mlp.act_fn", "input_layernorm"),
    T5: ("layer.0.SelfAttention", "layer.1", "layer.2.DenseReluDense"),
}
T5_WIDTH = 24  # width of the dropped activations inside T5's feed forward, on one rank of two


def train(model: nn.Module, *, steps: int = 1) -> list[float]:
    """Return the losses; gradients accumulate in the model."""
    torch.manual_seed(11)
    losses = []
    for _ in range(steps):
        loss = loss_of(model(**batch_for(model)))
        loss.backward()
        losses.append(loss.item())
    return losses


def hidden_dropout() -> None:
    """With dropout on hidden states only, results equal those of one process, in evaluation too."""
    for name, settings in HIDDEN.items():
        with named(name):
            model = build(name, **settings)
            for module in model.modules():  # T5 has one probability for all
                if type(module).__name__ == "T5Attention":
                    module.dropout = 0.0
                if type(module).__name__ == "T5DenseActDense":
                    module.dropout.p = 0.0
            copied = split(deepcopy(model))
            expected, sharded_losses = train(model, steps=2), train(copied, steps=2)
            assert expected[0] != expected[1], "no dropout"
            torch.testing.assert_close(sharded_losses, expected, rtol=1e-6, atol=1e-6)
            require_same_gradients(copied, model)
            with torch.no_grad():
                losses = [loss_of(module.eval()(**batch_for(module))) for module in (copied, model)]
            torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)


def require_equal_output(module: nn.Module, args: tuple, output: Any, *, what: str) -> None:
    """Forward hook."""
    require_equal_on_ranks(output[0] if isinstance(output, tuple) else output, what)


def attention_dropout() -> None:
    """Two ranks drop different entries inside regions, and the outputs of layers are equal."""
    counts = {}
    for name, settings in BOTH.items():
        copied = split(build(name, attention="eager", **settings))
        for index, layer in enumerate(copied.get_submodule(LAYERS[name]).children()):
            layer.register_forward_hook(partial(require_equal_output, what=f"{name}, layer {index}"))
        dropped: list[Tensor] = []

        def dropout(
            x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, into: Any = dropped
        ) -> Tensor:
            output = NATIVE(x, p, training, inplace)
            if x.dim() == 4 or x.shape[-1] == T5_WIDTH:  # (B, heads, S, S), or T5's feed forward
                into.append((output == 0) & (x != 0))
            return output

        with patch.object(nn.functional, "dropout", dropout):
            train(copied)
        require_equal_on_ranks(torch.rand(8), "what is drawn afterwards")
        counts[name] = len(dropped)
        for mask in dropped:
            assert mask.any()
            assert not torch.equal(*pieces(mask.to(torch.uint8))), f"{name}: both ranks dropped the same"
    # T5: self attention and feed forward of two layers, and with cross attention of three.
    assert counts == {BERT: 2, GPT2: 2, LLAMA: 2, T5: 2 * 2 + 3 * 3}


def by_transformers(model: Any, name: str) -> None:
    recompute_layers(model)


def by_modules(model: nn.Module, name: str) -> None:
    """Recompute some modules of all layers, with their inputs on the host."""
    config = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1, recompute_modules=MODULES[name])
    layers = {0: recomputable_layers(model)}
    assert not recompute_errors(layers, config)
    checkpoint_layers(layers, config, ActivationOffload(torch.device("cpu")).checkpoint)


def checkpointing(recompute: Callable[[nn.Module, str], None]) -> None:
    """Recomputation drops the same entries: gradients are bitwise equal.

    Without the cache, which checkpointing turns off: it copies keys and values, and sums come in another order.
    """
    for name, settings in BOTH.items():
        with named(name):
            plain, again = (split(build(name, use_cache=False, **settings)) for _ in range(2))
            recompute(again, name)
            assert train(plain, steps=2) == train(again, steps=2)
            assert all(gradient is not None for gradient in gradients(plain).values())
            require_equal(gradients(again), gradients(plain))
            require_equal_on_ranks(torch.rand(8), "what is drawn afterwards")


@pytest.mark.parametrize(
    ("ranks", "function"),
    [
        (2, hidden_dropout),
        (2, attention_dropout),
        *slow((2, partial(checkpointing, by_transformers))),
        (2, partial(checkpointing, by_modules)),
        *slow((4, partial(checkpointing, by_transformers))),
    ],
)
def test_dropout_is_that_of_one_process_where_nothing_is_split(pool: Pool, ranks: int, function: Any) -> None:
    pool.run(ranks, function)
