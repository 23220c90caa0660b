"""Every argument of TrainingArguments: honoured, meaningless or refused by name, all at once."""

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from echelon.trainer.arguments import (
    HONOURED,
    MEANINGLESS,
    REFUSED,
    _option_errors,
    argument_errors,
    implied_options,
    log_unknown,
)
from echelon.trainer.internals import checkpoint_of

SET = {
    "optim": "lomo",
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "activation_checkpointing_kwargs": {"every_n_layers": 2},
    "torch_compile": True,
    "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0,
    "auto_find_batch_size": True,
    "eval_use_gather_object": True,
    "save_on_each_node": True,
    "enable_jit_checkpoint": True,
    "parallelism_config": object(),
    "dataloader_in_order": False,
    "train_sampling_strategy": "batch_rebalance",
    "fsdp": "full_shard",
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "debug": ["underflow_overflow"],
}


def arguments(tmp_path: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **settings)


def test_the_tables_have_every_argument_of_transformers_once() -> None:
    names = [*HONOURED, *MEANINGLESS, *REFUSED]
    assert {field.name for field in fields(TrainingArguments)} - set(names) == set()
    assert len(names) == len(set(names))


def test_the_defaults_are_accepted(tmp_path: Path) -> None:
    assert argument_errors(arguments(tmp_path)) == []


def test_all_refused_arguments_are_named_at_once(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    for name, value in SET.items():
        setattr(args, name, value)
    args.accelerator_config.split_batches = True
    args.accelerator_config.even_batches = False
    args.accelerator_config.use_seedable_sampler = False
    errors = argument_errors(args)
    assert {error.split("=")[0] for error in errors} == {
        *SET,
        "accelerator_config.split_batches",
        "accelerator_config.even_batches",
        "accelerator_config.use_seedable_sampler",
    }
    assert {*SET} == REFUSED.keys() - {"gradient_checkpointing_kwargs"}


def test_arguments_of_subclasses_are_refused_by_name(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    for name, value in dict(
        num_generations=8, packing=True, packing_strategy="bfd", padding_free=True
    ).items():
        setattr(args, name, value)
    errors = argument_errors(args)
    assert [error.split("=")[0] for error in errors] == [
        "padding_free",
        "num_generations",
        "packing_strategy",
    ]
    args.num_generations, args.packing_strategy, args.padding_free = None, "wrapped", False  # type: ignore[attr-defined]
    assert argument_errors(args) == []
    args.predict_with_generate = True  # type: ignore[attr-defined]
    assert _option_errors(args, {"pp_size": 1}) == []
    (error,) = _option_errors(args, {"pp_size": 2})
    assert error.startswith("predict_with_generate=True needs the model on one rank")


def test_a_launch_for_another_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert argument_errors(args) == [
        "ACCELERATE_USE_FSDP is set: this script was launched for FSDP. Start it by torchrun, or by accelerate launch "
        "without FSDP"
    ]


def test_options_that_contradict_the_arguments_are_named(tmp_path: Path) -> None:
    args = arguments(tmp_path, bf16=True, per_device_train_batch_size=2)
    options = dict(precision="fp32", max_norm=1.0, gradient_accumulation_steps=2, num_microbatches=4)
    errors = _option_errors(args, options | dict(loss_reduction="microbatch_mean"))
    assert [error.split("=")[0] for error in errors] == [
        "precision",
        "max_norm",
        "gradient_accumulation_steps",
        "loss_reduction",
        "per_device_train_batch_size",
    ]
    assert _option_errors(args, dict(precision="bf16", num_microbatches=2)) == []


def test_precision_and_recomputation_follow_from_the_arguments(tmp_path: Path) -> None:
    assert implied_options(arguments(tmp_path)) == {"precision": "fp32"}
    implied = implied_options(arguments(tmp_path, bf16=True, activation_checkpointing=True))
    assert implied["precision"] == "bf16"
    assert implied["gradient_checkpoint_config"].gradient_checkpointing_ratio == 1.0
    scale = implied_options(arguments(tmp_path, fp16=True))
    assert scale == {"precision": "fp16", "hysteresis": 1, "growth_interval": 2000}


def test_arguments_of_a_newer_transformers_are_logged_if_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Newer(TrainingArguments):
        quantum: int = 1
        gravity: bool = False

    monkeypatch.setattr("transformers.TrainingArguments", Newer)
    args = Newer(output_dir=str(tmp_path), use_cpu=True, report_to="none", quantum=2)
    with caplog.at_level(logging.WARNING, "echelon"):
        log_unknown(args)
    assert "do not know: quantum" in caplog.text or "does not know: quantum." in caplog.text
    assert "gravity" not in caplog.text


def test_the_last_checkpoint_is_the_last_complete_one(tmp_path: Path) -> None:
    states = {"4": "{}", "12": "{}", "20": '{"epoch": 1.0, "glob', "best": "{}"}
    for step, state in states.items():
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-30").mkdir()
    assert checkpoint_of(True, str(tmp_path)) == str(tmp_path / "checkpoint-12")
    assert checkpoint_of(None, str(tmp_path)) is None
