"""The search: what it finds, what it leaves out, and the nearest layouts."""

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from echelon.cluster.gpus import GPUS
from echelon.planning.meta_model import build_on_meta, load_config
from echelon.planning.search import Job, Planner
from echelon.planning.shortened import _kind, shorten, stage_plan
from echelon.verify.layout_choice import Layout


def planner(memory: float, *, kind: str = "llama", world: int = 4, length: int = 64) -> Planner:
    sizes: dict[str, Any] = dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config: Any = transformers.CONFIG_MAPPING[kind](**sizes)
    model, task = build_on_meta(config, None)
    job = Job(world=world, memory=memory, global_batch=16, device=GPUS["h100"], precision="bf16")
    return Planner(model, task, length, job)


@pytest.mark.parametrize(("world", "tried"), [(2, 10), pytest.param(4, 20, marks=pytest.mark.slow)])
def test_what_fits_is_sorted_by_time_and_within_memory(world: int, tried: int) -> None:
    found = planner(1.0, world=world).search(6)
    assert len(found.plans) == 6 and found.num_tried > tried
    times = [plan.time.total for plan in found.plans]
    assert times == sorted(times)
    assert all(plan.peak <= 1.0 for plan in found.plans)
    assert all(plan.layout.world_size == world for plan in found.plans)
    assert len({(str(plan.layout), plan.layout.microbatches) for plan in found.plans}) == 6


def test_without_memory_the_nearest_is_the_one_with_the_smallest_peak() -> None:
    found = planner(1e-6, world=2).search(3)
    assert not found.plans and found.nearest is not None
    assert found.nearest.peak > 1e-6
    assert any("recomputed" in reason for reason in found.left_out)


def test_layers_are_recomputed_only_as_far_as_memory_asks() -> None:
    layout = Layout(microbatches=2, precision="bf16")
    whole = planner(80, world=1, length=512).predict(layout, 8)
    tight = planner(whole.peak * 0.8, world=1, length=512).search(40).plans
    assert {plan.layout.recompute for plan in tight if plan.samples == 8} <= {0.5, 1.0}
    assert all(plan.peak <= whole.peak * 0.8 for plan in tight)


def test_a_mixture_is_planned_with_expert_parallelism() -> None:
    search = planner(1.0, kind="mixtral")
    layouts = [layout for layout, _ in search.candidates(Counter())]
    assert {layout.ep for layout in layouts} == {1, 2, 4}
    alone, distributed = (
        search.predict(Layout(dp=4, ep=ep, microbatches=2, zero=1, precision="bf16"), 2) for ep in (1, 4)
    )
    assert distributed.memory[0].parameters < 0.5 * alone.memory[0].parameters
    assert distributed.memory[0].states == pytest.approx(alone.memory[0].states, rel=0.01)  # ZeRO shards both


def test_an_impossible_layout_is_refused_with_the_reasons_and_near_ones_fit() -> None:
    search = planner(1.0)
    layout = Layout(tp=2, pp=2, schedule="interleaved", chunks=3, microbatches=4, precision="bf16")
    assert any("6 stages" in error for error in search.errors(layout, 1))
    near = search.nearest_to(layout, 1)
    assert near and near[0].layout.tp == 2 and near[0].layout.pp == 2


def test_a_model_whose_layers_are_unknown_is_planned_without_a_pipeline() -> None:
    class Own(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.embed = nn.Embedding(512, 32)
            self.head = nn.Linear(32, 512)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.head(self.embed(input_ids))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    class OwnConfig(transformers.PreTrainedConfig):
        model_type = "own-plain"
        vocab_size = 512

    with torch.device("meta"):
        model = Own(OwnConfig())
    job = Job(world=2, memory=1, global_batch=4, device=GPUS["a100"], precision="fp32")
    search = Planner(model, "CAUSAL_LM", 16, job)
    plans = search.search(10).plans
    assert plans and {plan.layout.pp for plan in plans} == {1}
    assert any("--pp 1" in error for error in search.errors(Layout(pp=2, microbatches=2), 1))


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "deepseek_v3", "llama", "t5"])
def test_a_shortened_model_has_a_layer_like_every_layer(kind: str) -> None:
    model, _ = build_on_meta(load_config(kind), None)
    plan = stage_plan(model)
    assert plan is not None
    kinds = [_kind(model.get_submodule(path)) for path in plan.layer_paths(model)]
    like = shorten(model, plan)
    left = [_kind(model.get_submodule(path)) for path in plan.layer_paths(model)]
    assert len(left) < len(kinds) and [left[index] for index in like] == kinds


def test_a_head_is_chosen_by_task_or_class() -> None:
    config = load_config("bert")
    assert (
        type(build_on_meta(config, "sequence_classification")[0]).__name__ == "BertForSequenceClassification"
    )
    assert type(build_on_meta(config, "BertForMaskedLM")[0]).__name__ == "BertForMaskedLM"
