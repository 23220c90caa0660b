"""TorchFSDPPlugin beside a plain torch loop in one process over the same global batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from echelon.plugins.torch_fsdp import FSDPConfig
from echelon.verify.models import ModelChoice
from echelon.verify.reference import StepRecord

from ..pool import Pool
from ..zero.helpers import assert_equal
from . import fsdp
from .fsdp import GPT2, LLAMA

# Sums in another order: gradients to float32's last bits, which AdamW (eps 1e-5, lr 1e-3) makes 1e-2 times smaller.
GRADIENTS = {"rtol": 1e-5, "atol": 1e-6}
WEIGHTS = {"rtol": 1e-5, "atol": 1e-6}
OFFLOAD = {"cpu_offload": True}


def assert_same_steps(by_rank: list[list[StepRecord]], expected: list[StepRecord]) -> None:
    """Loss, norm, every gradient and every weight of each step."""
    for found in by_rank:
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, abs=2e-6)
            assert ours.norm == pytest.approx(theirs.norm, rel=1e-5)
            assert_equal(ours.gradients, theirs.gradients, **GRADIENTS)
            assert_equal(ours.weights, theirs.weights, **WEIGHTS)


@pytest.mark.parametrize("choice", [LLAMA, GPT2], ids=lambda choice: choice.model_type)
@pytest.mark.parametrize(("ranks", "settings"), [(2, {}), (4, {"shard_size": 2})], ids=["fsdp2", "hsdp2x2"])
def test_training_equals_one_process(
    pool: Pool, choice: ModelChoice, ranks: int, settings: dict[str, Any]
) -> None:
    assert_same_steps(pool.run(ranks, fsdp.steps, choice, settings), fsdp.reference(choice, ranks))


@pytest.mark.parametrize(
    ("settings", "case"),
    [
        ({}, {"max_norm": 0.5}),
        ({}, {"change": "frozen"}),
        ({}, {"change": "unused"}),
        ({}, {"count": 2}),
        (OFFLOAD, {"max_norm": 0.5, "count": 2}),
        ({"reshard_after_forward": False}, {}),
        ({"reshard_after_forward": True}, {"change": "frozen"}),
    ],
    ids=str,
)
def test_each_case_equals_one_process(pool: Pool, settings: dict[str, Any], case: dict[str, Any]) -> None:
    assert_same_steps(pool.run(2, fsdp.steps, GPT2, settings, **case), fsdp.reference(GPT2, 2, **case))


def test_recomputed_layers_equal_one_process(pool: Pool) -> None:
    assert_same_steps(pool.run(2, fsdp.steps, LLAMA, {}, change="recomputed"), fsdp.reference(LLAMA, 2))


def test_microbatches_under_hybrid_sharding_equal_one_process(pool: Pool) -> None:
    case: dict[str, Any] = {"count": 2, "max_norm": 0.5}
    assert_same_steps(
        pool.run(4, fsdp.steps, LLAMA, {"shard_size": 2}, **case), fsdp.reference(LLAMA, 4, **case)
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("count", [1, 2])
def test_16_bit_training_is_as_near_to_float32_as_one_process_is(
    pool: Pool, precision: str, count: int
) -> None:
    exact = fsdp.reference(LLAMA, 2, count=count)
    peer = fsdp.reference(LLAMA, 2, count=count, precision=precision)
    for found in pool.run(2, fsdp.steps, LLAMA, {"precision": precision}, count=count):
        for ours, theirs, true in zip(found, peer, exact, strict=True):
            assert ours.weights.keys() == true.weights.keys()
            assert all(weight.dtype is torch.float32 for weight in ours.weights.values())
            assert (
                0
                < distance(ours.gradients, true.gradients)
                <= 1.5 * distance(theirs.gradients, true.gradients)
            )
            assert 0 < distance(ours.weights, true.weights) <= 1.5 * distance(theirs.weights, true.weights)


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Over all tensors together."""
    return sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs) ** 0.5


def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Pool) -> None:
    assert pool.run(2, fsdp.overflow_on_one_rank, {}) == [(False, True, 2.0**15, 1)] * 2


def test_an_overflow_under_hybrid_sharding_skips_in_all_groups_by_the_chosen_scale(pool: Pool) -> None:
    settings = {
        "shard_size": 2,
        "initial_scale": 2.0**12,
        "backoff_factor": 0.125,
        "growth_factor": 4.0,
        "growth_interval": 1,
    }
    # 2**12 / 8 after the overflow, and four times that after the next step.
    assert pool.run(4, fsdp.overflow_on_one_rank, settings) == [(False, True, 2.0**11, 1)] * 4


@pytest.mark.parametrize(
    ("ranks", "settings", "parts"),
    [(2, {}, 2), (4, {"shard_size": 2}, 2), (4, {}, 4), (2, OFFLOAD, 2)],
    ids=str,
)
def test_each_rank_holds_its_part_alone(pool: Pool, ranks: int, settings: dict[str, Any], parts: int) -> None:
    by_rank = pool.run(ranks, fsdp.held, settings)
    total = by_rank[0]["whole"]
    groups = [by_rank[first : first + parts] for first in range(0, ranks, parts)]
    for group in groups:
        assert sum(rank["parameters"] for rank in group) == total
        assert sum(rank["gradients"] for rank in group) == total
        assert sum(rank["states"] for rank in group) == 2 * total, "both moments of AdamW"
        assert {rank["rows"] for rank in group} == {48 // parts}
    for rank in by_rank:
        assert rank["sharded"] == ["FSDPLlamaForCausalLM", *["FSDPLlamaDecoderLayer"] * 2]
        assert rank["groups"] == [(16, 0.01), (5, 0.0)]


def test_an_evaluation_before_a_step_leaves_no_old_weights_behind(pool: Pool) -> None:
    with_evaluation, without = pool.run(2, fsdp.evaluate_before_a_step)[0]
    assert with_evaluation == without


def test_gradients_that_were_never_reduced_are_told_and_can_be_dropped(pool: Pool) -> None:
    for told, after_dropping, alone in pool.run(2, fsdp.drop_accumulated):
        assert "step() after booster.no_sync alone" in told
        assert after_dropping == alone


def test_a_saved_model_loads_bit_for_bit_and_in_transformers(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, fsdp.save_then_load, tmp_path / "model.safetensors") == [True, True]
    GPT2.config().save_pretrained(tmp_path)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_a_file_of_another_model_is_refused_and_nothing_changes(pool: Pool, tmp_path: Path) -> None:
    for text, unchanged in pool.run(2, fsdp.refuse_to_load, tmp_path / "model.safetensors"):
        assert "transformer.wpe.weight is missing" in text  # wte is tied to lm_head, which is there
        assert unchanged


def test_bad_arguments_are_told_at_once(pool: Pool) -> None:
    texts = pool.run(2, fsdp.refuse_arguments)
    assert texts[0] == texts[1]
    for part in (
        "11 errors",
        "'fp8'",
        "shard_size=3 does not divide",
        "cpu_offload='yes'",
        "reshard_after_forward=2",
        "initial_scale=0: it must be above 0",
        "growth_factor=1",
        "backoff_factor=1",
        "growth_interval=0",
        "hysteresis=2 is not available",
        "min_scale=1 is not available",
        "max_scale=4 is not available",
    ):
        assert part in texts[0]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("stepped", "AdamW already has state for"),
        ("adafactor", "Adafactor is not element-wise"),
        ("muon", "Muon could not be tried"),
        ("adagrad", "Adagrad already has state for"),
        ("foreign", "parameters that are not the model's"),
        ("scalar and hook", "2 errors"),
        ("boosted model", "already boosted"),
        ("boosted inside", "already boosted"),
        ("boosted optimizer", "the optimizer is already boosted"),
        ("plain model", "takes the model that booster.boost returned"),
        ("no_sync of another", "booster.no_sync takes the optimizer that booster.boost returned"),
        ("backward by another", "booster.backward takes the optimizer that booster.boost returned"),
        ("pipeline", "TorchFSDPPlugin has no pipeline"),
        ("mixed_precision", "give TorchFSDPPlugin precision='bf16'"),
    ],
)
def test_misuse_is_refused_on_every_rank(pool: Pool, kind: str, text: str) -> None:
    assert [text in told for told in pool.run(2, fsdp.refuse_models, kind)] == [True, True]


def test_the_pipeline_is_refused_under_the_plugin_s_own_name(pool: Pool) -> None:
    assert "TorchDDPPlugin has no pipeline" in pool.run(1, fsdp.refuse_pipeline_under_ddp)[0]


def test_a_step_without_scaled_gradients_is_told_and_a_later_one_works(pool: Pool) -> None:
    for told, changed in pool.run(2, fsdp.step_without_scaled_gradients):
        for call, text in told.items():
            assert f"{call} in fp16 takes gradients of a scaled loss, and there are none" in text
        assert changed


@pytest.mark.parametrize("scale", ["x", None, True, float("nan"), float("inf"), -1])
def test_a_first_scale_that_is_no_number_above_0_is_a_fault(scale: Any) -> None:
    (error,) = FSDPConfig(initial_scale=scale).errors(2)
    assert error == f"initial_scale={scale!r}: it must be above 0 and finite"


def test_ddp_takes_its_own_optimizer_alone(pool: Pool) -> None:
    assert "booster.no_sync takes the optimizer that" in pool.run(1, fsdp.refuse_no_sync_under_ddp)[0]


def test_every_rank_gets_batches_of_its_own(pool: Pool) -> None:
    by_rank = pool.run(4, fsdp.dealt)
    assert sorted(number for rank in by_rank for number in rank) == list(range(8))
