"""Two models of one process that share a config, a layer or a weight."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, Phi3ForCausalLM

from echelon.verify.batch import loss_of
from echelon.verify.model_choice import ModelChoice

from ..pool import on_ranks
from ..slow import slow_row
from .training import RING, ULYSSES, boosted, hybrid, sgd, share, steps

LLAMA, PHI3 = ModelChoice(model_type="llama"), ModelChoice(model_type="phi3")
CLASSES: dict[str, Any] = {"llama": LlamaForCausalLM, "phi3": Phi3ForCausalLM}
SEQUENCES = {"sp_size": 2, "enable_sequence_parallelism": True}


def first_loss(booster: Any, plain: nn.Module, choice: ModelChoice) -> float:
    model, optimizer = boosted(booster, plain, sgd)
    return next(steps(booster, model, optimizer, share(booster, choice, 0)))


@pytest.mark.parametrize(
    "choice, settings",
    [
        (LLAMA, RING),
        slow_row(LLAMA, ULYSSES),
        (LLAMA, {"enable_flash_attention": True}),
        (PHI3, {"tp_size": 2}),
    ],
)
@on_ranks(2)
def test_boosting_leaves_the_config_to_the_next_model(choice: ModelChoice, settings: dict[str, Any]) -> None:
    """Two equal models of one config object have the same first loss, and the object does not change."""
    booster, config, losses = hybrid(**settings), choice.config(), []
    first = CLASSES[choice.model_type](config)
    before, kernel = config.to_dict(), config._attn_implementation
    second = CLASSES[choice.model_type](config)
    second.load_state_dict(first.state_dict())
    for plain in (first, second):
        losses.append(first_loss(booster, plain, choice))
        assert config.to_dict() == before and config._attn_implementation == kernel
        assert plain.config is not config and plain.config is plain.model.config
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def with_layer_of(first: Any) -> nn.Module:
    second: Any = LLAMA.build(1)
    second.model.layers[1] = first.model.layers[1]
    return second


def with_weight_of(first: Any) -> nn.Module:
    second: Any = LLAMA.build(1)
    second.model.layers[0].mlp.up_proj.weight = first.model.layers[0].mlp.up_proj.weight
    return second


SHARED = {"layers.1": with_layer_of, "layers.0.mlp.up_proj.weight": with_weight_of}


@on_ranks(1)
def test_models_that_share_a_layer_can_be_evaluated() -> None:
    booster, first = hybrid(), LLAMA.build()
    second = with_layer_of(first)
    booster.boost(first, sgd(first), loss_of)
    model, *_ = booster.boost(second)
    with torch.no_grad():
        booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of)


@on_ranks(2)
def test_models_may_share_an_activation() -> None:
    """As transformers' `gelu_pytorch_tanh` is."""
    booster, activation = hybrid(tp_size=2), nn.SiLU()
    losses = []
    for _ in range(2):
        plain: Any = LLAMA.build()
        for layer in plain.model.layers:
            layer.mlp.act_fn = activation
        losses.append(first_loss(booster, plain, LLAMA))
    assert losses[0] == losses[1], losses
