"""Choice of recomputed layers. tests/contract compares gradients, except for transformers' own call, tested here."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from echelon.shardformer.layers import Linear1D_Row
from echelon.shardformer.recompute import (
    PipelineGradientCheckpointConfig,
    checkpoint_layers,
    recomputable_layers,
    recompute_errors,
)

from ..pool import Pool
from .compare import batch_for, build, loss_of, recompute_layers, require_same_training, split


def small_llama(num_layers: int = 5) -> LlamaForCausalLM:
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=num_layers))


def counted_runs(modules: Iterable[nn.Module]) -> Counter[nn.Module]:
    """Return a counter of the calls of modules."""
    runs: Counter[nn.Module] = Counter()
    for module in modules:
        module.register_forward_pre_hook(lambda module, _: runs.update([module]))
    return runs


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
    attentions = [layer.self_attn for layer in layers]
    counts = counted_runs(attentions)
    ids = torch.arange(6).view(1, 6)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert [counts[attention] for attention in attentions] == runs
    counts.clear()
    with torch.no_grad():
        model.eval()(input_ids=ids)
    assert {*counts.values()} == {1}, "nothing is recomputed in evaluation"


def test_layers_that_cannot_be_recomputed_are_reported() -> None:
    config = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[3, 1])
    layers = recomputable_layers(small_llama(4))
    (error,) = recompute_errors({0: layers[:2], 1: layers[2:]}, config)
    assert "asks for 3 layers of stage 0, which has 2" in error
    (error,) = recompute_errors({0: [nn.Linear(2, 2)] * 3, 1: [nn.Linear(2, 2)]}, config)  # reported once
    assert "Linear cannot be recomputed" in error


def test_unknown_modules_to_recompute_are_reported_with_the_known_ones() -> None:
    names = ("mlp", "atention", "model.layers", "self_attn.q_proj")
    config = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0, recompute_modules=names)
    errors = recompute_errors({0: recomputable_layers(small_llama(2))}, config)
    there = "use one or more of self_attn, mlp, mlp.act_fn, input_layernorm, post_attention_layernorm"
    assert errors == [
        f"recompute_modules: no layer has a {name!r} that can be recomputed: {there}" for name in names[1:]
    ]
    none = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.0, recompute_modules=names)
    assert not recompute_errors({0: recomputable_layers(small_llama(2))}, none)


def test_named_modules_run_twice_and_no_others() -> None:
    model = small_llama(3)
    paths = {module: path for path, module in model.named_modules()}
    runs = counted_runs(paths)
    config = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[2], recompute_modules=("mlp",))
    checkpoint_layers({0: recomputable_layers(model)}, config)
    ids = torch.arange(6).view(1, 6)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    twice = {paths[module] for module, count in runs.items() if count == 2}
    assert {path for path in twice if path.endswith("mlp")} == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert all(".mlp" in path for path in twice)


def enable(model: Any) -> nn.Module:
    recompute_layers(model)
    assert any(module._forward_hooks for module in model.modules()), "embeddings have transformers' own hook"
    return model


def train_with_layers_marked_before(name: str) -> None:
    """Shard a model with transformers' hooks on its embeddings; every layer must run twice."""
    model = enable(build(name, use_cache=False))
    copied, *_ = require_same_training(model, batch_for(model))
    layers = recomputable_layers(copied)
    row_parallel = [[m for m in layer.modules() if isinstance(m, Linear1D_Row)] for layer in layers]
    runs = counted_runs(first for first, *_ in row_parallel)
    loss_of(copied(**batch_for(copied))).backward()
    assert set(runs.values()) == {2} and len(runs) == len(layers)


def keep_the_hook() -> None:
    """The output of a frozen embedding must require a gradient until transformers removes its hook."""
    model: Any = split(enable(build("LlamaForCausalLM")))
    embedding, ids = model.get_input_embeddings(), torch.arange(6).view(1, 6)
    assert "Parallel" in type(embedding).__name__
    model.requires_grad_(False)
    assert embedding(ids).requires_grad
    model.disable_input_require_grads()
    assert not embedding(ids).requires_grad


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_layers_that_transformers_marked_before_are_recomputed_with_the_same_gradients(
    pool: Pool, name: str
) -> None:
    pool.run(2, train_with_layers_marked_before, name)


def test_a_split_embedding_keeps_transformers_own_hook(pool: Pool) -> None:
    pool.run(2, keep_the_hook)
