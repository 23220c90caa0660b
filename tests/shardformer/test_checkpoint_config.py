"""Which layers are recomputed. That gradients stay the same is tests/verify."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from echelon.shardformer.checkpoint_config import (
    PipelineGradientCheckpointConfig,
    checkpoint_faults,
    checkpoint_layers,
    recomputable_layers,
)


def small_llama(num_layers: int = 5) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


@pytest.mark.parametrize(
    "config, runs",
    [
        ({"gradient_checkpointing_ratio": 0.5}, [2, 1, 2, 1, 1]),
        ({"gradient_checkpointing_ratio": 1.0}, [2, 2, 2, 2, 2]),
        ({"gradient_checkpointing_ratio": 0.0}, [1, 1, 1, 1, 1]),
        ({"num_ckpt_layers_per_stage": [0, 2]}, [1, 1, 2, 2, 1]),
        ({"num_ckpt_layers_per_stage": (1, 0)}, [2, 1, 1, 1, 1]),
    ],
)
def test_the_first_layers_of_each_stage_run_twice(config: dict[str, Any], runs: list[int]) -> None:
    model = small_llama()
    layers = recomputable_layers(model)
    checkpoint_layers({0: layers[:2], 1: layers[2:]}, PipelineGradientCheckpointConfig(**config))
    counts = [0] * len(layers)
    for index, layer in enumerate(layers):

        def count(*_: Any, index: int = index) -> None:
            counts[index] += 1

        layer.self_attn.register_forward_pre_hook(count)  # type: ignore[union-attr]
    ids = torch.arange(6).view(1, 6)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert counts == runs
    with torch.no_grad():
        model.eval()(input_ids=ids)
    assert counts == [number + 1 for number in runs], "nothing is recomputed in evaluation"


@pytest.mark.parametrize(
    "config, fault",
    [
        ({}, "neither is given"),
        ({"gradient_checkpointing_ratio": 0.5, "num_ckpt_layers_per_stage": [1, 1]}, "both are given"),
        (
            {"gradient_checkpointing_ratio": 1.5},
            "gradient_checkpointing_ratio=1.5 must be a number from 0 to 1",
        ),
        ({"gradient_checkpointing_ratio": "all"}, "gradient_checkpointing_ratio='all'"),
        ({"num_ckpt_layers_per_stage": [1]}, r"num_ckpt_layers_per_stage=\[1\].*one for each of 2 stages"),
        ({"num_ckpt_layers_per_stage": [1, -1]}, "whole numbers of at least 0"),
        ({"num_ckpt_layers_per_stage": 3}, "must be a list"),
    ],
)
def test_bad_settings_are_told(config: dict[str, Any], fault: str) -> None:
    (found,) = PipelineGradientCheckpointConfig(**config).faults(2)
    with pytest.raises(ValueError, match=fault):
        raise ValueError(found)


def test_what_the_model_cannot_do_is_told() -> None:
    config = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[3, 1])
    layers = recomputable_layers(small_llama(4))
    (found,) = checkpoint_faults({0: layers[:2], 1: layers[2:]}, config)
    assert "asks for 3 layers of stage 0, which has 2" in found
    (found,) = checkpoint_faults({0: layers[:3], 1: [nn.Linear(2, 2)]}, config)
    assert "Linear cannot be recomputed" in found
