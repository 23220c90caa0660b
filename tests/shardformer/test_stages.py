"""Models cut into stages: parameters, layers and ties of each process. tests/contract compares their training."""

import itertools
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.cluster.mesh import ParallelMesh
from echelon.pipeline.stage import local_stages
from echelon.pipeline.stage_manager import PipelineStageManager
from echelon.pipeline.stand_ins import StandIn
from echelon.plugins.hybrid_model import managed_parameters
from echelon.plugins.state import ParameterNames
from echelon.shardformer import (
    ModelSharder,
    ModulePolicyDescription,
    ShardConfig,
    ShardFormer,
    SubModuleReplacementDescription,
    policy_for,
)
from echelon.shardformer.table_policy import TablePolicy
from echelon.shardformer.tables.table import table_for
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from .compare import build

CASES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": dict(num_key_value_heads=1),
    "Qwen3ForCausalLM": dict(num_key_value_heads=2, head_dim=6),
    "GPT2LMHeadModel": {},
    "BertForPreTraining": {},
    "BertForSequenceClassification": {},
}


class RankAlone:
    """Stand-in for a mesh, for one rank of a pipeline without processes."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.size = {"pp": rank}.__getitem__, {"pp": num_ranks}.__getitem__


def manager_alone(
    rank: int, bounds: list[int], stage_ranks: tuple[int, ...] | None = None
) -> PipelineStageManager:
    """Return the manager of one rank, without processes."""
    counts = [stop - start for start, stop in itertools.pairwise(bounds)]
    stage_ranks = stage_ranks or tuple(range(len(counts)))
    mesh: Any = RankAlone(rank, max(stage_ranks) + 1)
    return PipelineStageManager(mesh, stage_ranks, counts)


def cut(
    model: nn.Module, rank: int, bounds: list[int], stage_ranks: tuple[int, ...] | None = None
) -> tuple[nn.Module, list[dict[int, Tensor]]]:
    manager = manager_alone(rank, bounds, stage_ranks)
    return ShardFormer(ShardConfig(pipeline_stage_manager=manager)).optimize(model)


@pytest.mark.parametrize(
    "stage_ranks", [(0, 1, 2), (0, 1, 0), pytest.param((0, 0, 0), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_on_one_rank_under_its_own_name_and_ties_are_known(
    name: str, tied: bool, stage_ranks: tuple[int, ...]
) -> None:
    model = build(name, num_hidden_layers=5, tie_word_embeddings=tied, **CASES[name])
    shapes = {key: parameter.shape for key, parameter in model.named_parameters(remove_duplicate=False)}
    is_tied = tied and name != "BertForSequenceClassification"
    names = []
    for rank in range(max(stage_ranks) + 1):
        local_model, shared = cut(deepcopy(model), rank, [0, 1, 3, 5], stage_ranks)
        local = dict(local_model.named_parameters(remove_duplicate=False))
        names += local
        assert {key: parameter.shape for key, parameter in local.items()}.items() <= shapes.items()
        stages = manager_alone(rank, [0, 1, 3, 5], stage_ranks).stages
        assert tuple(local_stages(local_model)) == stages
        assert [sorted(one) for one in shared] == ([[0, 2]] if is_tied else [])
        for one in shared:
            (tensor,) = {id(tensor): tensor for tensor in one.values()}.values()
            is_local = any(tensor is parameter for parameter in local_model.parameters())
            assert is_local == bool({0, 2} & {*stages})
    assert sorted(names) == sorted(shapes), "a parameter is missing or doubled"


def test_a_ranks_stages_are_read_from_the_placement() -> None:
    manager = manager_alone(0, [0, 1, 2, 3, 4], (0, 1, 1, 0))
    assert (manager.stages, manager.num_stages, manager.num_ranks, manager.stage) == ((0, 3), 4, 2, 0)
    assert manager.is_first_stage() and manager.is_last_stage()
    other = manager_alone(1, [0, 1, 2, 3, 4], (0, 1, 1, 0))
    assert other.stages == (1, 2)
    assert not other.is_first_stage() and not other.is_last_stage()
    assert other.get_stage_index([1, 1, 1, 1]) == (1, 2)
    assert other.ranks_of([0, 3]) == [0]
    mesh: Any = RankAlone(1, 3)
    assert PipelineStageManager(mesh).stage_ranks == (0, 1, 2)


def manage_ties() -> list[tuple]:
    """Return for the tied embedding, across ranks and within a rank: is_primary and the sizes of its sum groups."""
    mesh = ParallelMesh(pp=3)
    ties = []
    for stage_ranks in ((0, 1, 2, 0), (2, 1, 0, 1)):
        manager = PipelineStageManager(mesh, stage_ranks)
        model = build("GPT2LMHeadModel", num_hidden_layers=4, tie_word_embeddings=True)
        name, _ = next(iter(model.named_parameters()))
        tied = model.get_parameter(name)
        names = ParameterNames.of(model)
        local_model, shared = ShardFormer(ShardConfig(pipeline_stage_manager=manager)).optimize(model)
        local = names.local(local_model)
        for one in managed_parameters(local, shared, mesh=mesh, stage_manager=manager, stages={}):
            if one.parameter is tied:
                ties.append((one.is_primary, *(group.size() for group in one.sum_groups)))
            else:
                assert one.is_primary and not one.sum_groups
    return ties


def test_a_tie_is_summed_over_ranks_and_not_over_the_stages_of_one(pool: Pool) -> None:
    assert pool.run(3, manage_ties) == [[(True,)], [(True, 2)], [(False, 2)]]


class Counted(nn.Module):
    """Replacement of a module that counts its calls."""

    def __init__(self, native: nn.Module) -> None:
        super().__init__()
        self.weight = native.weight
        self.calls = 0

    @staticmethod
    def from_native_module(native: nn.Module, group: object, **_: Any) -> nn.Module:
        return Counted(native)

    def forward(self, index: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.embedding(index, self.weight)


class BiasPolicy(TablePolicy):
    """Policy that replaces T5's position bias, which a rank may have without its layer."""

    def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
        bias = SubModuleReplacementDescription(
            suffix="layer.0.SelfAttention.relative_attention_bias",
            target_module=Counted,
            ignore_if_not_exist=True,
        )
        return {"T5Block": ModulePolicyDescription(sub_module_replacement=(bias,))}


@pytest.mark.parametrize(("stage_ranks", "rank", "calls"), [((0, 1, 1), 1, 2), ((0, 1, 0), 0, 2)])
def test_a_module_that_several_stages_share_is_replaced_once(
    stage_ranks: tuple[int, ...], rank: int, calls: int
) -> None:
    model = ModelChoice(model_type="t5", head="text_encoding", num_layers=3).build()
    table = table_for("t5")
    assert table is not None
    config = ShardConfig(pipeline_stage_manager=manager_alone(rank, [0, 1, 2, 3], stage_ranks))
    local_model, _ = ShardFormer(config).optimize(deepcopy(model), BiasPolicy(table))
    assert dict(local_model.named_parameters()).keys() <= dict(model.named_parameters()).keys()
    (counted,) = (module for module in local_model.modules() if isinstance(module, Counted))
    ids = {"input_ids": torch.arange(3, 15).view(2, 6)}
    received = (torch.zeros(2, 6, 32),)
    for stage in local_stages(local_model).values():
        stage.forward(ids, () if stage.is_first else received)
    assert counted.calls == calls


def test_modules_of_other_ranks_have_no_memory() -> None:
    model = ModelChoice(model_type="t5", tied=True).build()
    local_model, _ = cut(model, 1, [0, 1, 3, 5, 8], (0, 1, 2, 1))
    local = {id(parameter) for parameter in local_model.parameters()}
    natives = [module.native for module in local_model.modules() if isinstance(module, StandIn)]
    parameters = [parameter for native in natives for parameter in native.parameters()]
    assert parameters
    assert all(parameter.is_meta or id(parameter) in local for parameter in parameters)
    assert not any(parameter.is_meta for parameter in local_model.parameters())


@pytest.mark.parametrize("num_layers, num_stages", [(7, 2), (7, 4), (8, 4)])
def test_the_layers_of_a_stage_are_those_that_the_cut_leaves_it(num_layers: int, num_stages: int) -> None:
    """Also if the number of layers does not divide and they are assigned by size; recomputation relies on it."""
    counts = {}
    for rank in range(num_stages):
        model = build("LlamaForCausalLM", num_hidden_layers=num_layers, vocab_size=400)
        manager = PipelineStageManager(RankAlone(rank, num_stages))  # type: ignore[arg-type]
        sharder = ModelSharder(model, policy_for(model), ShardConfig(pipeline_stage_manager=manager))
        before = sharder.layers_by_stage()
        sharder.shard()
        assert local_stages(sharder.model)[rank].layers == before[rank]
        counts[rank] = len(before[rank])
    assert sum(counts.values()) == num_layers
