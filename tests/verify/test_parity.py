"""Parity of every layout with one process, and that the check can fail."""

from unittest.mock import patch

import pytest

from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import Report, parity

from ..pool import Pool

MODELS = {
    "bert-classification": ModelChoice(model_type="bert", head="classification"),
    "bert-masked": ModelChoice(model_type="bert", head="masked"),
    "bert-masked-tied": ModelChoice(model_type="bert", head="masked", tied=True),
    "gpt2": ModelChoice(model_type="gpt2"),
    "gpt2-tied": ModelChoice(model_type="gpt2", tied=True),
    "llama": ModelChoice(model_type="llama"),
    "llama-tied": ModelChoice(model_type="llama", tied=True),
}
LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(pp=4),
    Layout(tp=2, pp=2),
    Layout(dp=2, zero=1),
    Layout(tp=2, dp=2, zero=1),
    Layout(pp=2, dp=2, zero=1),
    Layout(tp=2, pp=2, dp=2, zero=1),
]


def check(pool: Pool, choice: ModelChoice, layout: Layout, **kwargs: object) -> Report:
    reports = pool.run(layout.world_size, parity, choice, layout, timeout=120.0, **kwargs)
    assert len({report.departure for report in reports}) == 1, "ranks disagree on the verdict"
    return reports[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_layout_trains_as_one_process_does(pool: Pool, model: str, layout: Layout) -> None:
    assert check(pool, MODELS[model], layout).departure is None


@pytest.mark.parametrize(
    "head", ["causal", "pretraining", "token", "question", "choice", "next_sentence", "base"]
)
def test_every_other_bert_head_trains_under_tensor_and_pipeline_parallelism(pool: Pool, head: str) -> None:
    assert check(pool, ModelChoice(model_type="bert", head=head), Layout(tp=2, pp=2)).departure is None


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(tp=4)], ids=str)
def test_the_llama_family_trains_also_with_fewer_key_value_heads_than_ranks(
    pool: Pool, model_type: str, layout: Layout
) -> None:
    assert check(pool, ModelChoice(model_type=model_type), layout).departure is None


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("head", ["classification", "token"])
def test_classification_heads_of_causal_models_stay_whole(pool: Pool, model_type: str, head: str) -> None:
    assert check(pool, ModelChoice(model_type=model_type, head=head), Layout(tp=2, pp=2)).departure is None


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", Layout(tp=2, pp=2, precision="bf16")),
        ("gpt2-tied", Layout(tp=2, dp=2, zero=1, precision="bf16")),
        ("bert-classification", Layout(pp=2, dp=2, zero=1, precision="fp16")),
        ("llama-tied", Layout(tp=2, pp=2, precision="fp16")),
    ],
    ids=str,
)
def test_16_bit_layouts_are_as_near_to_float32_as_one_process(pool: Pool, model: str, layout: Layout) -> None:
    assert check(pool, MODELS[model], layout).departure is None


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, schedule="gpipe"),
        Layout(pp=4, microbatches=2),
        Layout(pp=2, microbatches=1),
        Layout(tp=2, dp=2, zero=0, max_norm=0.1),
        Layout(pp=2, dp=2, zero=1, max_norm=0.1),
    ],
    ids=lambda layout: f"{layout}-{layout.schedule}-{layout.microbatches}-{layout.max_norm}",
)
def test_other_schedules_microbatch_counts_and_clipping_agree(pool: Pool, layout: Layout) -> None:
    assert check(pool, MODELS["llama-tied"], layout).departure is None


def test_uneven_layers_agree(pool: Pool) -> None:
    choice = ModelChoice(model_type="bert", num_layers=5)
    assert check(pool, choice, Layout(pp=4)).departure is None


def test_a_pipeline_alone_gives_equal_bits(pool: Pool) -> None:
    report = check(pool, MODELS["llama"], Layout(pp=2))
    assert [step.measure("gradient").distance for step in report.steps] == [0.0, 0.0, 0.0]
    assert [step.measure("loss").distance for step in report.steps] == [0.0, 0.0, 0.0]


# Mutations: the check must catch each of them.


def with_an_all_reduce_dropped(choice: ModelChoice, layout: Layout) -> Report:
    with patch("echelon.shardformer.layer.region.copy_to", lambda x, group: x):
        return parity(choice, layout)


def with_one_gradient_scaled(choice: ModelChoice, layout: Layout) -> Report:
    from echelon.zero.optimizer import ShardedOptimizer

    original = ShardedOptimizer.reduce_gradients

    def scaled(self: ShardedOptimizer) -> None:
        original(self)
        self.buckets[-1].own_gradients[-1] *= 1.001

    with patch.object(ShardedOptimizer, "reduce_gradients", scaled):
        return parity(choice, layout)


def with_a_tie_forgotten(choice: ModelChoice, layout: Layout) -> Report:
    with patch("echelon.pipeline.stage_manager.PipelineStageManager.tie_group", lambda self, ranks: None):
        return parity(choice, layout)


def with_replicas_not_averaged(choice: ModelChoice, layout: Layout) -> Report:
    with patch("echelon.zero.bucket.Bucket.reduce_", lambda self: None):
        return parity(choice, layout)


MUTATIONS = {
    "an all-reduce dropped": (with_an_all_reduce_dropped, "llama", Layout(tp=2)),
    "one gradient scaled": (with_one_gradient_scaled, "bert-classification", Layout(pp=2)),
    "a tie forgotten": (with_a_tie_forgotten, "gpt2-tied", Layout(pp=2)),
    "replicas not averaged": (with_replicas_not_averaged, "llama", Layout(dp=2, zero=1)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_check_catches(pool: Pool, mutation: str) -> None:
    function, model, layout = MUTATIONS[mutation]
    report = pool.run(layout.world_size, function, MODELS[model], layout)[0]
    assert report.departure is not None
    assert report.departure.startswith("step 1: gradient of ")


def curve(choice: ModelChoice, layout: Layout, num_steps: int) -> Report:
    return parity(choice, layout, num_steps=num_steps)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(dp=2, zero=1)], ids=str)
def test_200_steps_stay_on_the_reference_curve(pool: Pool, layout: Layout) -> None:
    report = pool.run(layout.world_size, curve, MODELS["llama-tied"], layout, 200, timeout=600.0)[0]
    worst = max(abs(step.loss - step.reference_loss) / step.reference_loss for step in report.steps)
    assert worst < 1e-3
