"""The plugins through the Booster, as scripts call them."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from echelon.data.loader import shared_loader
from echelon.verify.batch import make_batch

from ..pool import Pool
from . import training
from .training import BERT, LLAMA


def test_the_documented_call_trains_a_bert(pool: Pool) -> None:
    first, last = pool.run(2, training.documented_call)
    assert first["losses"] == last["losses"], "the loss is the same on every rank"
    assert last["losses"][-1] < last["losses"][0]
    assert (first["pp_size"], first["last"], last["last"]) == (2, False, True)
    assert first["lr"] == pytest.approx(1e-3 / 7)


def test_losses_do_not_depend_on_the_layout(pool: Pool) -> None:
    # One label per sample and microbatches of one size: a mean of means is the mean over the global batch.
    expected = pool.run(1, training.train, "hybrid", {"num_microbatches": 4}, BERT)[0]
    for sizes in ({"tp_size": 2, "pp_size": 2}, {"pp_size": 2, "zero_stage": 1}, {"zero_stage": 1}):
        assert pool.run(4, training.train, "hybrid", sizes, BERT)[0] == pytest.approx(expected, abs=1e-5)
    assert pool.run(2, training.train, "zero", {"precision": "fp32"}, BERT)[0] == pytest.approx(
        expected, abs=1e-5
    )


@pytest.mark.parametrize("plugin", ["hybrid", "ddp", "ddp_fp16"])
def test_a_plain_loop_gives_the_same_losses(pool: Pool, plugin: str) -> None:
    expected = pool.run(1, training.train, "hybrid", {"num_microbatches": 1}, BERT)[0]
    tolerance = 5e-3 if plugin == "ddp_fp16" else 1e-5
    assert pool.run(2, training.train_by_calls, plugin)[0] == pytest.approx(expected, abs=tolerance)


def test_calls_in_training_keep_no_keys_and_values_unless_they_ask(pool: Pool) -> None:
    assert pool.run(1, kept_caches) == [{"training": False, "asked": True, "answering": True}]


def kept_caches() -> dict[str, bool]:
    model, _ = training.boosted(training.hybrid(), LLAMA)
    ids = torch.arange(6).view(2, 3)
    return {
        "training": model.train()(input_ids=ids).past_key_values is not None,
        "asked": model(input_ids=ids, use_cache=True).past_key_values is not None,
        "answering": model.eval()(input_ids=ids).past_key_values is not None,
    }


def test_evaluation_with_other_batch_sizes_between_training_steps(pool: Pool) -> None:
    by_rank = pool.run(4, training.evaluate_between_steps)
    for step, num_samples in enumerate((4, 5, 3)):
        assert len({rank[step]["loss"] for rank in by_rank}) == 1
        assert [rank[step]["logits"] is None for rank in by_rank] == [True, True, False, False]
        assert by_rank[3][step]["logits"].shape == (num_samples, 13, 101)


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"tp_size": 2}, {"zero_stage": 1}], ids=str)
def test_a_weighted_criterion_is_exact_over_replicas_and_microbatches(pool: Pool, sizes: dict) -> None:
    expected = pool.run(1, training.weighted, {"num_microbatches": 1})[0]
    assert pool.run(4, training.weighted, {**sizes, "num_microbatches": 2})[0] == pytest.approx(
        expected, rel=1e-5
    )


def count_items(num_microbatches: int) -> tuple[float, float]:
    """The loss of a batch with a number of its items, and transformers' own for it."""
    booster = training.hybrid(num_microbatches=num_microbatches)
    model, optimizer = training.boosted(booster, LLAMA)
    batch = make_batch(LLAMA, num_samples=4, seed=1) | {"num_items_in_batch": 40}
    expected = LLAMA.build()(**batch).loss.item()
    return float(booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"]), expected


def test_a_number_of_items_is_taken_for_one_microbatch_and_refused_for_several(pool: Pool) -> None:
    ((found, expected),) = pool.run(1, count_items, 1)
    assert found == pytest.approx(expected, rel=1e-6)
    for error in pool.run_failing(2, count_items, 2):
        assert isinstance(error, ValueError)
        assert "by which each of its 2 microbatches would divide its part" in str(error)


@pytest.mark.parametrize("safe", [True, False])
def test_a_model_saved_under_one_layout_loads_under_another(pool: Pool, tmp_path: Path, safe: bool) -> None:
    path = tmp_path / "folder" / ("model.safetensors" if safe else "pytorch_model.bin")
    saver = {"tp_size": 2, "pp_size": 2}
    pool.run(4, training.save_then_load, path, saver, {"pp_size": 4}, safe=safe)
    LLAMA.config().save_pretrained(path.parent)
    whole, info = transformers.AutoModelForCausalLM.from_pretrained(path.parent, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert whole.model.embed_tokens.weight.shape == (101, 32)
    errors = pool.run_failing(2, load_into_bert, path)
    assert str(errors[0]) == str(errors[1]), "every rank lists the faults of all stages"
    with pytest.raises(
        ValueError, match=r"word_embeddings.weight is missing.*model.norm.weight is not in the model"
    ):
        raise errors[0]  # type: ignore[misc]


def test_a_tensor_of_another_shape_in_a_file_is_refused_and_nothing_changes(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(2, training.load_misshapen, tmp_path / "model.safetensors") == [True, True]


def load_into_bert(path: Path) -> None:
    booster = training.hybrid(pp_size=2)
    model, _ = training.boosted(booster)
    booster.load_model(model, path)


def test_two_weighted_batches_before_one_step_are_refused(pool: Pool) -> None:
    assert "was accumulated with another before optimizer.step()" in pool.run(2, training.weighted_twice)[0]


def test_a_criterion_may_weigh_in_training_and_not_in_evaluation(pool: Pool) -> None:
    for before, trained in pool.run(2, training.weighted_in_training_alone):
        assert trained == pytest.approx(before, rel=1e-6)


def test_a_dropped_weighted_batch_leaves_nothing_behind(pool: Pool) -> None:
    for plain, after_dropped in pool.run(2, training.norm_after_a_dropped_batch):
        assert after_dropped == pytest.approx(plain, rel=1e-6)


def test_weights_on_some_replicas_alone_are_refused_on_all(pool: Pool) -> None:
    for error in pool.run_failing(2, training.weighted_on_one_replica):
        assert "on 1 of 2 data-parallel ranks" in str(error)


MISUSES = {
    "criterion gives logits": "TypeError: the criterion must return a scalar tensor, or (loss_sum, weight)",
    "criterion gives none": "TypeError: the criterion must return a scalar tensor",
    "criterion detaches": "ValueError: the criterion's loss has no graph",
    "criterion stops": "RuntimeError: the model or the criterion raised StopIteration",
    "plain optimizer": "ValueError: execute_pipeline takes the optimizer that booster.boost returned",
    "no_sync of the plain optimizer": "ValueError: booster.no_sync takes the optimizer that booster.boost returned",
    "no_sync of the plain model": "ValueError: booster.no_sync takes the model that booster.boost returned",
    "a list of batches": "give iter(dataloader)",
    "boost twice": "ValueError: the model is already boosted",
    "copy of the model": "call booster.save_model(model, path)",
    "copy of the optimizer": "call booster.save_optimizer(optimizer, folder)",
    "argument types": "tp_size='2' must be a whole number\n- pp_size=1.5 must be a whole number",
    "argument values": "num_layers_per_stage=[0] must be a list of positive whole numbers",
}


@pytest.mark.parametrize("kind", MISUSES)
def test_a_slip_in_a_call_is_explained(pool: Pool, kind: str) -> None:
    assert MISUSES[kind] in pool.run(1, training.misuse, kind)[0]


@pytest.mark.parametrize("frozen", [False, True])
def test_models_that_differ_between_ranks_are_refused_on_all(pool: Pool, frozen: bool) -> None:
    for error in pool.run_failing(2, training.boost_unequal_models, frozen):
        assert "the model of rank(s) [1] differs from that of rank 0" in str(error)


def test_a_worker_collates_with_other_randomness_each_epoch() -> None:
    loader = shared_loader(
        training.Numbers(),
        8,
        rank=0,
        size=1,
        shuffle=False,
        seed=0,
        drop_last=False,
        collate_fn=training.random_collate,
        num_workers=1,
    )
    first, second = ([batch["drawn"].tolist() for batch in loader] for _ in range(2))
    assert first != second


def test_a_random_collator_gives_one_batch_to_all_ranks_of_a_replica(pool: Pool) -> None:
    by_rank = pool.run(4, training.collated)
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    assert by_rank[0] != by_rank[2]
    drawn = [int(number) for rank in (0, 2) for batch in by_rank[rank] for number in batch]
    assert sorted(drawn) == list(range(16))


REFUSALS = {
    "refuse_sizes": (
        "does not divide the world size 2",
        "precision='fp8'",
        "zero_stage=3 is not available: use TorchFSDPPlugin, which shards parameters too, or zero_stage 0, 1 or 2",
        "pp_style: there is no schedule 'zigzag'",
    ),
    "refuse_without_microbatches": ("needs num_microbatches", "cannot have num_model_chunks=3"),
    "refuse_sequences_on_two_axes": (
        "over the tensor axis, and tp_size is 1",
        "sp_size=2 with sequence_parallelism_mode='split_gather'",
        "inner_ring_size=2 is for sequence_parallelism_mode='ring_attn'",
    ),
    "refuse_ranks_without_sequences": (
        "sp_size=2 without enable_sequence_parallelism=True",
        "enable_sequence_overlap=True without",
        "inner_ring_size=3 without",
    ),
    "refuse_a_mode_that_is_off": (
        "sequence_parallelism_mode='split_gather' without enable_sequence_parallelism=True",
        "wp_size=2 with tp_size=2",
    ),
    "refuse_a_switch_that_is_none": ("enable_sequence_parallelism='no' must be True or False",),
    "refuse_missing_packages": (
        "needs the package xformers",
        "needs num_microbatches",
        "ask for one of them",
    ),
    "refuse_attention": (
        "BloomForCausalLM cannot compute attention",
        "slow_but_exact=True in the model's config does not go with tensor parallelism",
    ),
    "refuse_width_and_foreign_optimizer": (
        "25 entries along dim 1 are not divisible by 2 ranks",
        "parameters that are not the model's",
    ),
    "refuse_few_layers": ("1 layers and the pipeline 2 stages",),
    "refuse_unknown_model": (
        "no table says how to split a Sequential (model_type=None), nor does transformers",
    ),
    "refuse_sequences_of_an_unknown_model": (
        "sequence parallelism needs a table, and a Sequential (model_type=None) has none: leave enable_sequence",
    ),
    "refuse_call_under_pipeline": ("booster.execute_pipeline(data_iter, model, criterion, optimizer)",),
}


def test_what_stands_on_another_stage_leaves_the_memory(pool: Pool) -> None:
    first, second = pool.run(2, training.kept_under_two_stages)
    assert first and second and not first & second


def part_at_the_device() -> float:
    """The part of a model that is there when it is moved to the device."""
    model = LLAMA.build()
    parameters, whole = model.parameters, sum(each.numel() for each in model.parameters())
    found = []

    def to(device: torch.device) -> torch.nn.Module:
        found.append(sum(each.numel() for each in parameters()) / whole)
        return model

    with patch.object(model, "to", to):
        training.hybrid(pp_size=2).boost(model)
    assert len(found) == 1
    return found[0]


def test_a_model_is_cut_into_stages_before_it_reaches_the_device(pool: Pool) -> None:
    first, second = pool.run(2, part_at_the_device)
    assert first < 0.7 and second < 0.7


@pytest.mark.parametrize("name", REFUSALS)
def test_a_bad_configuration_is_refused_alike_on_every_rank_all_faults_at_once(pool: Pool, name: str) -> None:
    messages = pool.run(2, getattr(training, name))
    assert messages[0] == messages[1]
    for part in REFUSALS[name]:
        assert part in messages[0]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("small", r"num_microbatches=3 is more than the 2 samples of the batch on rank\(s\) \[0, 1, 2, 3\]"),
        ("ends", r"the dataloader has ended on rank\(s\) \[2\]"),
        ("differs", r"replica 0: rank\(s\) \[3\]"),
        ("hidden", r"output_hidden_states=True in the batch"),
    ],
)
def test_a_fault_in_the_data_is_told_alike_on_every_rank(pool: Pool, fault: str, message: str) -> None:
    errors = pool.run_failing(4, training.feed, fault)
    assert all(isinstance(error, ValueError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(ValueError, match=message):
        raise errors[0]  # type: ignore[misc]


def test_data_that_ends_on_every_rank_ends_the_loop(pool: Pool) -> None:
    assert all(isinstance(error, StopIteration) for error in pool.run_failing(2, training.end_of_data))


@pytest.mark.parametrize("how", ["raises", "is killed"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2, "pp_size": 2},
        *(
            pytest.param(
                {"pp_size": 4, "pp_style": style, "num_model_chunks": chunks}, marks=pytest.mark.slow
            )
            for style, chunks in (("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2))
        ),
    ],
    ids=str,
)
def test_every_rank_names_the_one_that_failed_in_a_step(pool: Pool, sizes: dict[str, Any], how: str) -> None:
    errors = pool.run_failing(4, training.die_in_a_step, 1, how, sizes, timeout=60.0)
    assert isinstance(errors[1], ZeroDivisionError) or type(errors[1]).__name__ == "RankDied"
    for rank in (0, 2, 3):
        assert type(errors[rank]).__name__ == "RankFailure", errors[rank]
        assert "rank 1 " in str(errors[rank])
        if "tp_size" not in sizes:  # where another axis may be what a rank waits for
            assert re.search(
                r"lost rank \d \(pipeline stage \d\) while .* of microbatch \d at", str(errors[rank])
            )
