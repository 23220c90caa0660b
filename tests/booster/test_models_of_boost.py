"""Refusals of models and policies by boost, shard_model and their configs, on every rank."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from echelon import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    ShardConfig,
    ShardFormer,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    shard_model,
)
from echelon.shardformer import Policy
from echelon.shardformer.refusals import unfit_model_errors
from echelon.shardformer.tables.decoders import GPT2, LLAMA
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from ..shardformer.compare import named

CHOICE = ModelChoice(model_type="llama", num_layers=2)


def hybrid(**settings: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(precision="fp32", num_microbatches=1, **settings)


PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "fsdp": TorchFSDPPlugin,
    "stages": lambda: hybrid(pp_size=2),
}


def refuse_what_is_boosted() -> None:
    """Give every plugin and ShardFormer a boosted model, as wrapper and as its inner model."""
    for first in PLUGINS:
        boosted = Booster(plugin=PLUGINS[first]()).boost(CHOICE.build())[0]
        for model in (boosted, boosted.unwrap()):
            for second in PLUGINS:
                with (
                    named(f"{first}, {second}"),
                    pytest.raises(ValueError, match="the model is already boosted, or"),
                ):
                    Booster(plugin=PLUGINS[second]()).boost(model)
            with (
                named(first),
                pytest.raises(ValueError, match="already boosted, or sharded by ShardFormer: give the plain"),
            ):
                shard_model(model)


def boost_a_copy() -> None:
    """Boost a copy of a boosted model, which counts as another model."""
    model = Booster(plugin=TorchDDPPlugin()).boost(CHOICE.build())[0].unwrap()
    Booster(plugin=hybrid(tp_size=2)).boost(copy.deepcopy(model))


def refuse_what_has_no_values() -> None:
    for plugin in PLUGINS:
        with named(plugin):
            with pytest.raises(
                ValueError, match=r"^model\.embed_tokens\.weight and \d+ more of the model are on the"
            ):
                Booster(plugin=PLUGINS[plugin]()).boost(CHOICE.build_on_meta())
            with pytest.raises(ValueError, match=r"a model is a torch\.nn\.Module, and this is a str"):
                Booster(plugin=PLUGINS[plugin]()).boost("llama")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="are on the meta device, without values: build or load the model in a Lazy"
    ):
        shard_model(CHOICE.build_on_meta())
    with pytest.raises(ValueError, match=r"a model is a torch\.nn\.Module, and this is a str"):
        shard_model("llama")  # type: ignore[arg-type]


def refuse_what_is_no_policy() -> None:
    for policy, reported in (
        ("llama", "'llama' and must be"),
        (Policy, "the class Policy and must be .* an instance of it"),
    ):
        with pytest.raises(ValueError, match=f"^policy is {reported}"):
            shard_model(CHOICE.build(), policy)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"custom_policy is {reported}"):
            hybrid(tp_size=2, custom_policy=policy)
    with pytest.raises(ValueError, match="ShardFormer takes a ShardConfig and got a dict"):
        ShardFormer({"tensor_parallel_size": 2})  # type: ignore[arg-type]


def take_a_table() -> None:
    """Give a plugin a table as policy, as ShardFormer takes it."""
    boosted = Booster(plugin=hybrid(tp_size=2, custom_policy=LLAMA)).boost(CHOICE.build())[0]
    assert boosted.unwrap().lm_head.weight.shape[0] < 101
    with pytest.raises(
        ValueError, match=r"the stage plan names 'model\.h', and this LlamaForCausalLM has no such"
    ):
        Booster(plugin=hybrid(tp_size=2, custom_policy=GPT2)).boost(CHOICE.build())


def refuse_a_call_of_a_stage() -> None:
    booster = Booster(plugin=hybrid(pp_size=2))
    boosted = booster.boost(CHOICE.build())[0]
    ids = torch.ones(1, 3, dtype=torch.long)
    model: Any = boosted.unwrap().eval()
    calls: tuple[Callable[[], Any], ...] = (lambda: model(ids), lambda: model.generate(ids, max_new_tokens=1))
    for call in calls:
        with pytest.raises(
            RuntimeError, match=r"has only stages \[[01]\] of 2, but was called directly or by generate"
        ):
            call()
    with torch.no_grad():
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), boosted)


@pytest.mark.parametrize(
    "function",
    [
        refuse_what_is_boosted,
        boost_a_copy,
        refuse_what_has_no_values,
        refuse_what_is_no_policy,
        take_a_table,
        refuse_a_call_of_a_stage,
    ],
)
def test_models_and_policies_are_taken_or_refused_on_all_ranks(
    pool: Pool, function: Callable[[], None]
) -> None:
    pool.run(2, function)


def test_a_module_without_values_is_reported_by_name() -> None:
    (reported,) = unfit_model_errors(nn.Linear(2, 2, bias=False, device="meta"))
    assert reported.startswith("weight of the model is on the meta device")


def test_a_config_of_other_types_is_refused() -> None:
    for settings, reported in (
        ({"make_vocab_size_divisible_by": "8"}, "make_vocab_size_divisible_by='8' must be an integer"),
        ({"tensor_parallel_process_group": 2}, "tensor_parallel_process_group=2 must be a process group"),
        ({"enable_jit_fused": "no"}, "enable_jit_fused='no' must be True or False"),
    ):
        with pytest.raises(ValueError, match=reported):
            ShardConfig(**settings)


def refuse_what_one_rank_cannot_wrap(plugin: str) -> str:
    """Give one rank alone a model without values, then boost a good one. Return the error."""
    booster = Booster(plugin=PLUGINS[plugin]())
    with pytest.raises(ValueError) as refused:
        booster.boost(CHOICE.build() if torch.distributed.get_rank() == 0 else CHOICE.build_on_meta())
    with pytest.raises(ValueError, match="optimizer") as wrong_type:
        booster.boost(CHOICE.build(), "adam" if torch.distributed.get_rank() == 1 else None)  # type: ignore[arg-type]
    assert str(wrong_type.value).endswith("(rank 1)")
    booster.boost(CHOICE.build())
    return str(refused.value)


@pytest.mark.parametrize("plugin", ["ddp", "stages"])
def test_an_error_of_one_rank_alone_is_raised_on_all_before_anything_changes(pool: Pool, plugin: str) -> None:
    errors = pool.run(2, refuse_what_one_rank_cannot_wrap, plugin)
    assert errors[0] == errors[1]
    assert "of the model are on the meta device" in errors[0] and errors[0].endswith("(rank 1)")
