"""The search: what it finds, what it leaves out, and the nearest layouts."""

from collections import Counter
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

from echelon.cluster.gpus import GPUS
from echelon.planning.meta_model import build_on_meta, load_config
from echelon.planning.recording import Recording
from echelon.planning.search import Job, Planner
from echelon.planning.sections import Trace
from echelon.planning.shortened import _kind, shorten, stage_plan
from echelon.plugins.hybrid_config import HybridConfig
from echelon.verify.layout_choice import Layout

from ..slow import slow_except

LAYERS = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)


def planner(
    memory: float, *, kind: str = "llama", world: int = 4, length: int = 64, batch: int = 16, **others: Any
) -> Planner:
    sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=128, **LAYERS)
    config: Any = transformers.CONFIG_MAPPING[kind](**(others | sizes))
    model, task = build_on_meta(config, None)
    job = Job(world=world, memory=memory, global_batch=batch, device=GPUS["h100"], precision="bf16")
    return Planner(model, task, length, job)


@pytest.mark.parametrize(("world", "tried"), [(2, 10), pytest.param(4, 20, marks=pytest.mark.slow)])
def test_what_fits_is_sorted_by_time_and_within_memory(world: int, tried: int) -> None:
    result = planner(1.0, world=world, batch=8).search(6)
    assert len(result.plans) == 6 and result.num_tried > tried
    times = [plan.time.total for plan in result.plans]
    assert times == sorted(times)
    assert all(plan.peak <= 1.0 for plan in result.plans)
    assert all(plan.layout.world_size == world for plan in result.plans)
    assert len({(str(plan.layout), plan.layout.microbatches) for plan in result.plans}) == 6


def test_without_memory_the_nearest_is_the_one_with_the_smallest_peak() -> None:
    result = planner(1e-6, world=2).search(3)
    assert not result.plans and result.nearest is not None
    assert result.nearest.peak > 1e-6
    assert any("recomputed" in reason for reason in result.left_out)


def test_layers_are_recomputed_only_as_far_as_memory_asks() -> None:
    layout = Layout(microbatches=1, precision="bf16")
    whole = planner(80, world=1, length=512, batch=8).predict(layout, 8)
    tight = planner(whole.peak * 0.8, world=1, length=512, batch=8).search(40).plans
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


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_mixture_is_planned_in_every_precision(precision: str) -> None:
    layout = Layout(dp=4, ep=2, zero=1, microbatches=2, precision=precision)
    search = planner(1.0, kind="mixtral")
    assert search.errors(layout, 1) == []
    narrow = search.predict(Layout(dp=4, ep=2, zero=1, microbatches=2, precision="bf16"), 1)
    ratio = search.predict(layout, 1).memory[0].activations / narrow.memory[0].activations
    assert ratio == pytest.approx(1, rel=0.01) if precision == "fp16" else 1.3 < ratio < 2


def mixture_under(ep: int) -> HybridConfig:
    return Layout(dp=16, ep=ep, precision="bf16", microbatches=1).config


@cache
def recordings_of_a_mixture() -> dict[int, Recording]:
    """Return what is traced of a mixture, by size of the expert axis."""
    tracer = planner(1.0, kind="mixtral", num_local_experts=16)._tracer
    return {size: tracer._record(mixture_under(size), 1) for size in (2, 4, 8, 16)}


@pytest.mark.parametrize(("ep", "is_derived"), [(2, True), (4, True), (8, True), (16, False)])
def test_a_trace_of_a_mixture_follows_from_those_under_two_other_sizes(ep: int, is_derived: bool) -> None:
    known = sorted({2, 4, 8} - {ep})[:2]
    tracer, recordings = planner(1.0, kind="mixtral", num_local_experts=16)._tracer, recordings_of_a_mixture()
    recorded = mock.Mock(side_effect=lambda config, _: recordings[config.ep_size])
    with mock.patch.object(tracer, "_record", recorded) as record:
        traces = {size: tracer.trace(mixture_under(size), 1) for size in (*known, ep)}
    assert record.call_count == 3 - is_derived  # one expert per rank is traced
    traced = recordings[ep].trace(tracer._traced_of)
    assert as_values(traced) == as_values(traces[ep])


def as_values(trace: Trace) -> tuple[Any, ...]:
    """Return the numbers of a trace, whose sections compare by identity."""
    sections = [*trace.before, *(section for layer in trace.layers for section in layer)]
    return [vars(section) for section in sections], trace.parameters


def test_sizes_that_do_not_divide_the_rows_are_traced() -> None:
    search = planner(1.0, kind="mixtral", num_local_experts=48, num_experts_per_tok=1, length=20)
    for size in (2, 4, 8):  # 20 rows are not equally many for 8 ranks
        search._tracer.trace(Layout(dp=16, ep=size, precision="bf16", microbatches=1).config, 1)
    (recordings,) = search._tracer._recordings.values()
    assert [*recordings] == [2, 4, 8]


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
    classifier, masked = "BertForSequenceClassification", "BertForMaskedLM"
    for head, expected in (("sequence_classification", classifier), (masked, masked)):
        assert type(build_on_meta(config, head)[0]).__name__ == expected


VISION = dict(hidden_size=32, image_size=64, patch_size=8, num_hidden_layers=2, num_attention_heads=2)
GRIDS = dict(vision_config=dict(hidden_size=32, out_hidden_size=64, depth=2, num_heads=2))
GEMMA3 = dict(mm_tokens_per_image=16, architectures=["Gemma3ForConditionalGeneration"])
IMAGES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": GRIDS,
    "glm4v": GRIDS,
    "gemma3": dict(vision_config=VISION, **GEMMA3),
    "llava": dict(vision_config=VISION),
    "llava_next": dict(vision_config=VISION, image_grid_pinpoints=[[64, 128], [128, 64]]),
}


def planner_of_images(kind: str, length: int) -> Planner:
    """Return the planner of a small model with images and texts."""
    text: dict[str, Any] = dict(vocab_size=200_000, hidden_size=64, intermediate_size=128, **LAYERS)
    if IMAGES[kind] is GRIDS:
        sections = [4, 2, 2] if kind == "glm4v" else [2, 3, 3]
        text["rope_parameters"] = dict(rope_type="default", rope_theta=1e4, mrope_section=sections)
    model, task = build_on_meta(transformers.CONFIG_MAPPING[kind](text_config=text, **IMAGES[kind]), None)
    job = Job(world=2, memory=80, global_batch=4, device=GPUS["h100"], precision="bf16")
    return Planner(model, task, length, job)


@pytest.mark.parametrize("kind", slow_except(("qwen2_5_vl",), IMAGES))
def test_a_model_with_images_is_planned_with_the_tokens_of_one(kind: str) -> None:
    search = planner_of_images(kind, 512)
    layout = Layout(dp=2, zero=1, microbatches=1, precision="bf16")
    assert search.errors(layout, 2) == []
    inputs = search._tracer._inputs
    assert inputs is not None and inputs.num_placeholders
    assert sum(inputs.num_placeholders.values()) + inputs.length == 512
    one, two = (search.predict(layout, samples).memory[0].activations for samples in (1, 2))
    assert 1.5 * one < two < 2.5 * one


def test_a_text_that_is_shorter_than_an_image_is_refused_with_its_tokens() -> None:
    layout = Layout(dp=2, zero=1, microbatches=1, precision="bf16")
    (error,) = planner_of_images("llava_next", 128).errors(layout, 1)
    assert "accepts no sample of 128 tokens with an image (more: --seq)" in error and "features: 136" in error
