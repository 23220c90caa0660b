"""A hand-written policy with pipeline stages. tests/docs shards one over ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from echelon.cluster.placement import PartialGrad, ReplicaKind, Replicated, Shard, place, placements_of
from echelon.pipeline.stage import local_stages
from echelon.pipeline.stage_plan import StagePlan
from echelon.shardformer import (
    ModulePolicyDescription,
    Policy,
    ShardConfig,
    ShardFormer,
    SubModuleReplacementDescription,
)
from echelon.shardformer.layers import Linear1D_Col, Linear1D_Row, Region
from echelon.shardformer.sharder import StandInGroup, plan_parallelism, split_errors

from .compare import numbers
from .test_stages import manager_alone

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_groups = 4
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def activation(self, x: Tensor) -> Tensor:
        return x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        grouped = self.activation(self.up(x)).unflatten(-1, (self.num_groups, -1))
        return x + self.scale * self.down((grouped / grouped.abs().sum(-1, keepdim=True)).flatten(-2))


class Tower(nn.Module):
    """A model that is not of transformers: without a config and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class TunedTower(Tower):
    """The class of a Tower after the policy was applied."""


def doubled(module: nn.Module) -> None:
    module.scale.data *= 2  # type: ignore[union-attr, operator]


def sine(self: Block, x: Tensor) -> Tensor:
    return x.sin()


class TowerPolicy(Policy):
    """A policy that uses every field of a description."""

    def preprocess(self) -> nn.Module:
        self.model.first.bias.data += 1  # type: ignore[union-attr, operator]
        return self.model

    def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
        ranks = self.shard_config.tensor_parallel_size
        replaced = (
            SubModuleReplacementDescription(suffix="up", target_module=Linear1D_Col),
            SubModuleReplacementDescription(suffix="down", target_module=Linear1D_Row),
            SubModuleReplacementDescription(
                suffix="gate", target_module=Linear1D_Col, ignore_if_not_exist=True
            ),
        )
        return {
            "Block": ModulePolicyDescription(
                attribute_replacement={"num_groups": 4 // ranks},
                param_replacement=(doubled,),
                method_replacement={"activation": sine},
                sub_module_replacement=replaced if ranks > 1 else (),
            )
        }

    def new_model_class(self) -> type[nn.Module]:
        return TunedTower

    def stage_plan(self) -> StagePlan:
        return StagePlan(layers="blocks", entry=("first",))

    def postprocess(self) -> nn.Module:
        self.model.last.bias.data -= 1  # type: ignore[union-attr, operator]
        return self.model


def by_hand(model: Tower) -> Tower:
    """Change a model as the policy does."""
    model.first.bias.data += 1
    model.last.bias.data -= 1
    for block in model.blocks:
        block.scale.data *= 2
        block.activation = torch.sin  # type: ignore[assignment]
    return model


def test_a_model_of_any_kind_is_cut_as_its_policy_says() -> None:
    reference, x = by_hand(Tower()), numbers(4, 5)
    expected = reference(x)
    received: tuple = ()
    names = []
    for index in range(2):
        manager = manager_alone(index, [0, 2, 3])
        policy = TowerPolicy()
        model, _ = ShardFormer(ShardConfig(pipeline_stage_manager=manager)).optimize(Tower(), policy)
        policy = TowerPolicy()
        policy.set_model(model)
        policy.set_shard_config(ShardConfig(pipeline_stage_manager=manager))
        local = [type(module).__name__ for module in policy.get_held_layers()]
        assert local == (["Linear", "Block", "Block"] if index == 0 else ["Block"])
        names += [name for name, _ in model.named_parameters()]
        received = local_stages(model)[index].forward((x,), received)
    assert torch.equal(received, expected)  # type: ignore[arg-type]
    assert sorted(names) == sorted(name for name, _ in reference.named_parameters())


def described(**kwargs: Any) -> type[TowerPolicy]:
    key = kwargs.pop("key", "Block")

    class Mistaken(TowerPolicy):
        def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
            return {key: ModulePolicyDescription(**kwargs)}

    return Mistaken


MISSING = SubModuleReplacementDescription(suffix="gate", target_module=Linear1D_Col)


class RegionPolicy(Policy):
    """Makes every block a region, and says nothing about its scale."""

    def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
        linear = (
            SubModuleReplacementDescription(suffix="up", target_module=Linear1D_Col),
            SubModuleReplacementDescription(suffix="down", target_module=Linear1D_Row),
        )
        region = SubModuleReplacementDescription(suffix="blocks.1", target_module=Region)
        return {
            Block: ModulePolicyDescription(sub_module_replacement=linear),
            Tower: ModulePolicyDescription(sub_module_replacement=(region,)),
        }


def test_every_parameter_of_a_region_needs_a_placement() -> None:
    errors = split_errors(Tower(), RegionPolicy(), tp_size=2)
    assert [error.partition(": ")[0] for error in errors] == ["blocks.1.scale"]
    assert "does not place it over the axis 'tp'" in errors[0]

    class Knowing(RegionPolicy):
        def replica(self, name: str, axis: str) -> type[PartialGrad]:
            return PartialGrad

    group: Any = StandInGroup(0, 2)
    split: Any = plan_parallelism(Tower(), Knowing(), ShardConfig(tensor_parallel_process_group=group))
    assert placements_of(split.blocks[1].scale) == {"tp": PartialGrad(size=2)}


def test_a_tied_parameter_that_is_declared_in_two_ways_is_an_error() -> None:
    class TwoWays(RegionPolicy):
        def replica(self, name: str, axis: str) -> ReplicaKind:
            return PartialGrad if "blocks.1" in name else Replicated

    model: Any = Tower()
    model.blocks[2].scale = model.blocks[1].scale
    (error,) = split_errors(model, TwoWays(), tp_size=2)
    assert error.startswith(
        "blocks.2.scale: shares a parameter with blocks.1.scale, where it is replicated, with partial gradients, and "
        "here replicated, with equal gradients: give it a copy of its own"
    )
    del model.blocks[2].scale
    model.blocks[2].scale = nn.Parameter(torch.ones(WIDTH))
    assert split_errors(model, TwoWays(), tp_size=2) == []


class OverWp(nn.Module):
    """Stands for a layer of an axis of its own."""

    @staticmethod
    def from_native_module(module: nn.Module, process_group: Any) -> nn.Module:
        for parameter in module.parameters():
            shard = Shard(size=process_group.size(), dim=0, blocks=(len(parameter),), axis="wp")
            place(parameter, shard, process_group.rank())
        return module


class TwoAxes(Policy):
    def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
        over_wp = SubModuleReplacementDescription(suffix="up", target_module=OverWp, axis="wp")
        over_tp = SubModuleReplacementDescription(suffix="up", target_module=Linear1D_Col)
        return {Block: ModulePolicyDescription(sub_module_replacement=(over_wp, over_tp))}


def test_a_policy_names_the_axis_of_a_replacement() -> None:
    groups: Any = {name: StandInGroup(1, 2) for name in ("tp", "wp")}
    config = ShardConfig(tensor_parallel_process_group=groups["tp"], axis_groups={"wp": groups["wp"]})
    rows = len(Tower().blocks[0].up.weight)
    split: Any = plan_parallelism(Tower(), TwoAxes(), config)
    for parameter in split.blocks[0].up.parameters():
        assert len(parameter) == rows // 4
        assert list(placements_of(parameter)) == ["wp", "tp"]
    assert [list(placements_of(parameter)) for parameter in split.first.parameters()] == [["tp"], ["tp"]]


def test_an_axis_without_a_group_is_an_error() -> None:
    layer = SubModuleReplacementDescription(suffix="up", target_module=Linear1D_Col, axis="ep")
    policy = described(sub_module_replacement=(layer,))()
    (error,) = split_errors(Tower(), policy, tp_size=2)
    assert "replaces 'up' by a Linear1D_Col over 'ep', an axis without a group" in error


def test_a_class_that_another_stage_holds_is_not_missing() -> None:
    manager = manager_alone(1, [0, 2, 3])
    model = Tower()
    model.first = nn.Sequential(model.first)  # type: ignore[assignment]

    class Policy_(TowerPolicy):
        def preprocess(self) -> nn.Module:
            return self.model

        def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
            return {nn.Sequential: ModulePolicyDescription()}

    ShardFormer(ShardConfig(pipeline_stage_manager=manager)).optimize(model, Policy_())


class Former(TowerPolicy):
    def faults(self, **sizes: int) -> list[str]:
        return []


class Plain(TowerPolicy):
    def stage_plan(self) -> None:  # type: ignore[override]
        return None


class Elsewhere(TowerPolicy):
    def stage_plan(self) -> StagePlan:
        return StagePlan(layers="layers", entry=("embed",))
