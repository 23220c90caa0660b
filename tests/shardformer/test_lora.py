"""LoRA in sharded models: dropout of the adapters. tests/booster compares losses and gradients."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from echelon.shardformer import policy_for
from echelon.shardformer.sequence.config import SequenceParallelism
from echelon.shardformer.sharder import split_errors

from ..pool import Pool
from ..slow import slow
from .compare import (
    build,
    gradients,
    pieces,
    recompute_layers,
    require_equal,
    require_equal_on_ranks,
    split,
)
from .test_dropout import train

LINEAR = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
# With dropout among the heads too, so that the region around q and k has a random state of its own; and without.
REGIONS = ({"attention_dropout": 0.1}, {"attention_dropout": 0.0})


def adapted(class_name: str = "LlamaForCausalLM", *, lora: dict[str, Any], **settings: Any) -> Any:
    """Return the transformers model with adapters inside."""
    return in_peft(class_name, lora=lora, **settings).get_base_model()


def in_peft(class_name: str = "LlamaForCausalLM", *, lora: dict[str, Any], **settings: Any) -> Any:
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.23 has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(build(class_name, **settings), LoraConfig(r=3, **lora))


def dropping(**settings: Any) -> Any:
    """Build a model that is equal on all ranks; B is not zero, so that dropout before A has an effect."""
    model = adapted(lora={"target_modules": LINEAR, "lora_dropout": 0.5}, use_cache=False, **settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.1)
    return model


def note(module: nn.Module, args: tuple[Tensor], output: Tensor, *, masks: list[Tensor]) -> None:
    masks.append(((output == 0) & (args[0] != 0)).to(torch.uint8))


def masks_of_adapters() -> None:
    for settings in REGIONS:
        model = split(dropping(**settings))
        layer = model.model.layers[0]
        masks: dict[str, list[Tensor]] = {name: [] for name in LINEAR}
        for name, noted in masks.items():
            owner = layer.self_attn if name[0] in "qko" else layer.mlp
            dropout = owner.get_submodule(name).lora_dropout.default
            dropout.register_forward_hook(partial(note, masks=noted))
        train(model)
        for name, (mask,) in masks.items():
            assert 0.3 < mask.float().mean() < 0.7, name
            first, second = pieces(mask)
            is_replicated = name in ("q_proj", "k_proj", "up_proj")
            assert torch.equal(first, second) == is_replicated, f"{name} with {settings}"
        assert not torch.equal(*masks["q_proj"], *masks["k_proj"]), "two layers drop the same"
        require_equal_on_ranks(torch.rand(8), "what is drawn afterwards")


def recomputation() -> None:
    """Recomputation drops the same entries: gradients are bitwise equal."""
    for settings in REGIONS:
        plain, again = (split(dropping(**settings)) for _ in range(2))
        recompute_layers(again)
        assert train(plain, steps=2) == train(again, steps=2)
        expected = gradients(plain)
        assert all((gradient is not None) == ("lora_" in path) for path, gradient in expected.items())
        require_equal(gradients(again), expected)


@pytest.mark.parametrize("function", [masks_of_adapters, *slow(recomputation)])
def test_adapters_with_replicated_inputs_drop_equal_entries(pool: Pool, function: Any) -> None:
    pool.run(2, function)


@pytest.mark.parametrize(("mode", "tp_size"), [("split_gather", 2), ("ring", 2), ("all_to_all", 1)])
def test_dropout_of_adapters_is_refused_where_the_tensor_axis_has_sequences(mode: str, tp_size: int) -> None:
    model = adapted(lora={"target_modules": ["q_proj"], "lora_dropout": 0.1})
    sequence = SequenceParallelism(mode=mode)
    errors = split_errors(model, policy_for(model), tp_size=tp_size, sp_size=2 // tp_size, sequence=sequence)
    assert len(errors) == tp_size - 1
    assert all("use lora_dropout=0" in error and error.startswith("model.layers.0 (and ") for error in errors)
