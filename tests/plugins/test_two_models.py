"""Two models of one process that share a config, a layer or a weight."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, Phi3ForCausalLM

from echelon.verify.batch import loss_of
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from .training import hybrid, sgd, share

LLAMA, PHI3 = ModelChoice(model_type="llama"), ModelChoice(model_type="phi3")
CLASSES: dict[str, Any] = {"llama": LlamaForCausalLM, "phi3": Phi3ForCausalLM}
SEQUENCES = {"sp_size": 2, "enable_sequence_parallelism": True}


def losses_of_one_config(choice: ModelChoice, settings: dict[str, Any]) -> list[float]:
    """Return the first loss of two equal models of one config object; require that the object does not change."""
    booster, config, losses = hybrid(**settings), choice.config(), []
    first = CLASSES[choice.model_type](config)
    before, kernel = config.to_dict(), config._attn_implementation
    second = CLASSES[choice.model_type](config)
    second.load_state_dict(first.state_dict())
    for plain in (first, second):
        model, optimizer, *_ = booster.boost(plain, sgd(plain), loss_of)
        batch = share(booster, choice, 0)
        losses.append(float(booster.execute_pipeline(batch, model, loss_of, optimizer)["loss"]))
        assert config.to_dict() == before and config._attn_implementation == kernel
        assert plain.config is not config and plain.config is plain.model.config
    return losses


@pytest.mark.parametrize(
    "choice, settings",
    [
        (LLAMA, SEQUENCES | {"sequence_parallelism_mode": "ring_attn"}),
        (LLAMA, SEQUENCES | {"sequence_parallelism_mode": "all_to_all"}),
        (LLAMA, {"enable_flash_attention": True}),
        (PHI3, {"tp_size": 2}),
    ],
)
def test_boosting_leaves_the_config_to_the_next_model(
    pool: Pool, choice: ModelChoice, settings: dict[str, Any]
) -> None:
    for first, second in pool.run(2, losses_of_one_config, choice, settings):
        assert first == pytest.approx(second, rel=1e-6)


def with_layer_of(first: Any) -> nn.Module:
    second: Any = LLAMA.build(1)
    second.model.layers[1] = first.model.layers[1]
    return second


def with_weight_of(first: Any) -> nn.Module:
    second: Any = LLAMA.build(1)
    second.model.layers[0].mlp.up_proj.weight = first.model.layers[0].mlp.up_proj.weight
    return second


SHARED = {"layers.1": with_layer_of, "layers.0.mlp.up_proj.weight": with_weight_of}


def test_models_that_share_a_layer_can_be_evaluated(pool: Pool) -> None:
    pool.run(1, evaluate_shared)


def evaluate_shared() -> None:
    booster, first = hybrid(), LLAMA.build()
    second = with_layer_of(first)
    booster.boost(first, sgd(first), loss_of)
    model, *_ = booster.boost(second)
    with torch.no_grad():
        booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of)


def losses_of_models_with_one_activation() -> list[float]:
    """Boost two models that share an activation, as transformers' `gelu_pytorch_tanh` is; return their losses."""
    booster, activation = hybrid(tp_size=2), nn.SiLU()
    losses = []
    for _ in range(2):
        plain: Any = LLAMA.build()
        for layer in plain.model.layers:
            layer.mlp.act_fn = activation
        model, optimizer, *_ = booster.boost(plain, sgd(plain), loss_of)
        batch = share(booster, LLAMA, 0)
        losses.append(float(booster.execute_pipeline(batch, model, loss_of, optimizer)["loss"]))
    return losses


def test_models_may_share_an_activation(pool: Pool) -> None:
    for first, second in pool.run(2, losses_of_models_with_one_activation):
        assert first == second
