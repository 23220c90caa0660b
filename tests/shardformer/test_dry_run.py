"""The dry run: it has the same result as sharding, changes nothing, and uses no process group."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from echelon.cluster.errors import raise_errors
from echelon.cluster.placement import placements_of
from echelon.shardformer import ShardConfig, ShardFormer, policy_for
from echelon.shardformer.policy import Errors
from echelon.shardformer.sharder import plan_parallelism, split_errors
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from ..slow import slow
from .compare import build


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return all state that sharding could change: modules, tensors, hooks, and attributes that are numbers."""
    modules = dict(model.named_modules())
    return {
        "modules": {path: (module, type(module)) for path, module in modules.items()},
        "tensors": {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()},
        "hooks": {
            path: len(module._forward_pre_hooks) + len(module._forward_hooks)
            for path, module in modules.items()
        },
        "numbers": {
            f"{path}.{name}": value
            for path, module in modules.items()
            for name, value in vars(module).items()
            if isinstance(value, int)
        },
        "placements": [placements_of(parameter) for parameter in model.parameters()],
    }


def leave_the_default_group() -> None:
    """Make a dry run on the first of two ranks only: if it communicated, it would wait for the other rank."""
    group = dist.group.WORLD
    model = build("LlamaForCausalLM")
    before = state_of(model)
    if dist.get_rank() == 0:
        config = ShardConfig(tensor_parallel_process_group=group)
        split = plan_parallelism(model, policy_for(model), config)
        assert any(placements_of(parameter) for parameter in split.parameters())
        assert split_errors(model, policy_for(model), tp_size=3) == []
        assert split_errors(build("LlamaForCausalLM", intermediate_size=25), policy_for(model), tp_size=2)
    assert state_of(model) == before
    assert dist.group.WORLD is group
    assert dist.get_world_size() == 2
    assert len(dist.distributed_c10d._world.pg_map) == 1


def test_the_default_group_and_the_model_stay_as_they_are(pool: Pool) -> None:
    pool.run(2, leave_the_default_group)


def test_no_default_group_is_needed_or_made() -> None:
    model = build("LlamaForCausalLM")
    assert split_errors(model, policy_for(model), tp_size=2, num_stages=2) == []
    assert not dist.is_initialized()


def split_as_planned(choice: ModelChoice) -> None:
    model = choice.build()
    shard_former = ShardFormer(ShardConfig(tensor_parallel_process_group=dist.group.WORLD))
    plan = plan_parallelism(model, policy_for(model), shard_former.shard_config)
    split, _ = shard_former.optimize(model)
    assert described(plan) == described(split)


def described(model: nn.Module) -> list[object]:
    """Return classes, shapes and placements of a sharded model."""
    tensors = (
        (name, parameter.shape, placements_of(parameter)) for name, parameter in model.named_parameters()
    )
    return [*((path, type(module)) for path, module in model.named_modules()), *tensors]


@pytest.mark.parametrize(
    "model_type", ["llama", "t5", "swin", "mixtral", *slow("gpt2", "falcon", "albert", "sam")]
)
def test_a_dry_run_has_the_same_result_as_sharding(pool: Pool, model_type: str) -> None:
    pool.run(2, split_as_planned, ModelChoice(model_type=model_type))


def refuse_before_anything_changed() -> None:
    """Only the last layer cannot be sharded; the first must not be changed."""
    model: Any = build("LlamaForCausalLM")
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, output: output)
    before = state_of(model)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj: this Linear has hooks"):
        ShardFormer(ShardConfig(tensor_parallel_process_group=dist.group.WORLD)).optimize(model)
    assert state_of(model) == before


def test_a_refusal_comes_before_anything_is_changed(pool: Pool) -> None:
    pool.run(2, refuse_before_anything_changed)


def test_errors_that_modules_have_in_common_are_reported_once_with_the_first_path() -> None:
    errors = Errors()
    for layer in range(3):
        with errors.at(f"language_model.layers.{layer}"):
            raise_errors(["too wide", "too long"])
    with pytest.raises(RuntimeError), errors.at("head"):
        raise RuntimeError("no refusal")
    errors.add("", "no layers")
    assert errors.messages() == [
        "language_model.layers.0 (and 2 more like it): too wide",
        "language_model.layers.0 (and 2 more like it): too long",
        "no layers",
    ]
