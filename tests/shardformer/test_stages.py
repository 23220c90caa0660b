"""Models cut into stages and split over ranks at once: what each process holds, and that it computes the same."""

import itertools
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.cluster.collectives import all_gather
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.placement import Shard, placement_of
from echelon.pipeline.cut import Inbox, Stage, StandIn
from echelon.pipeline.stage_manager import PipelineStageManager
from echelon.shardformer import ShardConfig, ShardFormer, policy_for
from echelon.shardformer.layer import VocabParallelEmbedding1D, VocabParallelLMHead1D

from ..pool import Pool
from .compare import MULTIPLE, batch_for, build, loss_of, named

CASES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": dict(num_key_value_heads=1),
    "Qwen3ForCausalLM": dict(num_key_value_heads=2, head_dim=6),
    "GPT2LMHeadModel": {},
    "BertForPreTraining": {},
    "BertForSequenceClassification": {},
}


class StageAlone:
    """The place of a stage manager, for one stage without processes."""

    def __init__(self, stage: int, bounds: list[int]) -> None:
        self.stage, self.num_stages = stage, len(bounds) - 1
        self.num_layers_per_stage = [stop - start for start, stop in itertools.pairwise(bounds)]
        self._bounds = bounds

    def bounds(self, num_layers: int) -> list[int]:
        assert num_layers == self._bounds[-1]
        return self._bounds

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        return self.stage == self.num_stages - 1


def inbox_of(model: nn.Module) -> Inbox:
    return next(module.inbox for module in model.modules() if isinstance(module, StandIn))


def cut(
    model: nn.Module, stage: int, bounds: list[int], **settings: Any
) -> tuple[nn.Module, list[dict[int, Tensor]]]:
    manager: Any = StageAlone(stage, bounds)
    config = ShardConfig(pipeline_stage_manager=manager, make_vocab_size_divisible_by=MULTIPLE, **settings)
    return ShardFormer(config).optimize(model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_on_one_stage_under_its_own_name_and_a_tied_one_on_two(
    name: str, tied: bool
) -> None:
    model = build(name, num_hidden_layers=5, tie_word_embeddings=tied, **CASES[name])
    shapes = {key: parameter.shape for key, parameter in model.named_parameters(remove_duplicate=False)}
    bounds, held = [0, 1, 3, 5], []
    for stage in range(3):
        part, shared = cut(deepcopy(model), stage, bounds)
        held.append(dict(part.named_parameters(remove_duplicate=False)))
        assert {key: parameter.shape for key, parameter in held[-1].items()}.items() <= shapes.items()
        is_tied = tied and name != "BertForSequenceClassification"
        assert [sorted(one) for one in shared] == ([[0, 2]] if is_tied else [])
        for one in shared:
            (tensor,) = {id(tensor): tensor for tensor in one.values()}.values()
            assert (stage in one) == any(tensor is parameter for parameter in part.parameters())
    listed = [key for each in held for key in each]
    assert sorted(listed) == sorted(shapes), "a parameter is missing or doubled"


def train_stages(name: str, tied: bool) -> None:
    """Two stages of two ranks each, by hand, against the whole model."""
    mesh = ParallelMesh(tp=2, pp=2)
    manager = PipelineStageManager(mesh, [1, 2])
    model = build(name, num_hidden_layers=3, tie_word_embeddings=tied, **CASES[name])
    batch = batch_for(model)
    config = ShardConfig(
        tensor_parallel_process_group=mesh.group("tp"),
        pipeline_stage_manager=manager,
        make_vocab_size_divisible_by=MULTIPLE,
    )
    part, shared = ShardFormer(config).optimize(deepcopy(model))
    stage = Stage(part, inbox_of(part), index=manager.stage, num_stages=2)
    peer = mesh.global_ranks("pp")[1 - manager.stage]
    expected = loss_of(model(**batch))
    expected.backward()
    if stage.is_first:
        (sent,) = stage.forward(batch, ())
        dist.send(sent.detach().contiguous(), peer)
        gradient = torch.empty_like(sent)
        dist.recv(gradient, peer)
        sent.backward(gradient)
    else:
        received = torch.empty(*_shape(batch), 32).requires_grad_()
        dist.recv(received.detach(), peer)
        loss = loss_of(stage.forward(batch, (received,)))
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        loss.backward()
        assert received.grad is not None
        dist.send(received.grad, peer)
    for one in shared:  # summed over the stages that hold it
        (tensor,) = {id(tensor): tensor for tensor in one.values()}.values()
        dist.all_reduce(tensor.grad, group=mesh.group("pp"))
    _require_gradients(part, model, mesh)


def _shape(batch: dict[str, Tensor]) -> tuple[int, ...]:
    return tuple(batch["input_ids"].shape)


def _require_gradients(part: nn.Module, model: nn.Module, mesh: ParallelMesh) -> None:
    largest = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
    whole = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in part.named_parameters():
        expected = whole[name].grad
        if expected is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        placement = placement_of(parameter)
        parts = all_gather(parameter.grad[None], mesh.group("tp"), 0).unbind(0)
        if isinstance(placement, Shard):
            parts = [sum(parts)] * 2 if placement.copies == 2 else parts
            found = placement.whole(parts)
        else:
            found = parts[0] if placement is None else sum(parts)
        tolerance = max(1e-5 * expected.abs().max().item(), 2**-23 * largest)
        torch.testing.assert_close(
            found, expected, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def train_all() -> None:
    for name in CASES:
        for tied in (True, False):
            with named(f"{name}, tied={tied}"):
                train_stages(name, tied)


def test_two_stages_of_two_ranks_have_the_loss_and_gradients_of_the_whole_model(pool: Pool) -> None:
    pool.run(4, train_all)


def kinds() -> list[str]:
    """Which ends of the model this rank holds split."""
    mesh = ParallelMesh(tp=2, pp=2)
    config = ShardConfig(
        tensor_parallel_process_group=mesh.group("tp"), pipeline_stage_manager=PipelineStageManager(mesh)
    )
    model, _ = ShardFormer(config).optimize(build("LlamaForCausalLM", tie_word_embeddings=True))
    assert isinstance(model.model.embed_tokens, VocabParallelEmbedding1D) == (mesh.rank("pp") == 0)
    assert isinstance(model.lm_head, VocabParallelLMHead1D) == (mesh.rank("pp") == 1)
    return [name for name, parameter in model.named_parameters() if parameter.shape[0] == 64]


def test_a_tied_embedding_is_split_on_the_first_and_on_the_last_stage(pool: Pool) -> None:
    assert pool.run(4, kinds) == [["model.embed_tokens.weight"]] * 2 + [["lm_head.weight"]] * 2


def test_get_held_layers_are_those_of_the_stage() -> None:
    model = build("LlamaForCausalLM", num_hidden_layers=4)
    for stage, expected in ((0, ["LlamaDecoderLayer"] * 1), (1, ["LlamaDecoderLayer"] * 3)):
        policy: Any = policy_for(model)
        policy.set_model(model)
        manager: Any = StageAlone(stage, [0, 1, 4])
        policy.set_shard_config(ShardConfig(pipeline_stage_manager=manager))
        held = [type(module).__name__ for module in policy.get_held_layers()]
        assert held[:1] == (["Embedding"] if stage == 0 else ["LlamaDecoderLayer"])
        assert [name for name in held if name == "LlamaDecoderLayer"] == expected
