"""The plugin's options as flags of a script."""

import argparse
import contextlib
import io
from dataclasses import fields
from functools import partial
from typing import Any

import pytest

from echelon import ArgumentParser, add_plugin_arguments, plugin_from_arguments
from echelon.plugins.hybrid_config import HybridConfig

from ..pool import Pool


def parsed(words: str, **defaults: Any) -> argparse.Namespace:
    parser = ArgumentParser(prog="train.py")
    add_plugin_arguments(parser, **defaults)
    return parser.parse_args(words.split())


def test_every_option_is_a_flag_but_a_policy() -> None:
    options = {option.name for option in fields(HybridConfig)}
    assert options - set(parsed("").plugin_flags) == {"custom_policy"}


def test_flags_read_values_of_all_kinds() -> None:
    arguments = parsed(
        "--tp_size 2 --max_norm 0.5 --num_layers_per_stage 3 1 --enable_flash_attention --pp_style zbv "
        "--no-overlap_p2p --gradient_checkpoint_config 0.5 --communication_dtype bf16 --loss_reduction global"
    )
    assert {name for name in arguments.plugin_flags if getattr(arguments, name) is not None} == {
        *("tp_size", "max_norm", "num_layers_per_stage", "enable_flash_attention", "pp_style", "overlap_p2p"),
        *("gradient_checkpoint_config", "communication_dtype", "loss_reduction"),
    }
    assert arguments.num_layers_per_stage == [3, 1]
    assert arguments.enable_flash_attention is True and arguments.overlap_p2p is False
    assert arguments.gradient_checkpoint_config.gradient_checkpointing_ratio == 0.5
    assert parsed("--enable_flash_attention sdpa_cudnn").enable_flash_attention == "sdpa_cudnn"


def test_the_help_has_the_meaning_and_the_default_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help", num_microbatches=4)
    reported = " ".join(capsys.readouterr().out.split())
    for text in (
        "number of microbatches of a batch. A pipeline needs it, or microbatch_size. (default: 4)",
        "Other calls compare checksums, which are reduced with the gradient norm. (default: 100)",
    ):
        assert text in reported


def test_a_script_keeps_flags_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", type=int)
    add_plugin_arguments(parser, without=["precision"])
    arguments = parser.parse_args(["--precision", "3"])
    assert arguments.precision == 3 and "precision" not in arguments.plugin_flags


def test_a_default_of_no_option_is_refused() -> None:
    with pytest.raises(ValueError, match="no options of HybridParallelPlugin with a flag: custom_policy, tp"):
        parsed("", tp=2, custom_policy=None)


def test_only_the_first_rank_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, count in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            parsed("--tp_size two")
        assert end.value.code == 2
        assert capsys.readouterr().err.count("invalid int value: 'two'") == count


SIZES = {"tp_size": 2, "pp_size": 2, "num_microbatches": 4, "max_norm": 1.0, "precision": "fp32"}


def made(words: str, defaults: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the class of the plugin, and its layout, microbatches and precision."""
    plugin = plugin_from_arguments(parsed(words, **defaults))
    settings = {"tp": plugin.tp_size, "pp": plugin.pp_size, "dp": plugin.dp_size}
    settings["precision"] = plugin.precision
    if hasattr(plugin, "config"):
        settings |= plugin.config.cutting | {"max_norm": plugin.config.max_norm}
        settings["stage"] = plugin.config.zero_stage
    return type(plugin).__name__, settings


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        ("", "HybridParallelPlugin", {"tp": 2, "pp": 2, "num_microbatches": 4, "max_norm": 1.0}),
        ("--zero_stage 1 --max_norm 2", "HybridParallelPlugin", {"tp": 2, "stage": 1, "max_norm": 2.0}),
        ("--sp_size 1 --pp_size 4", "HybridParallelPlugin", {"tp": 1, "pp": 4, "dp": 1}),
        ("--microbatch_size 3", "HybridParallelPlugin", {"num_microbatches": None, "microbatch_size": 3}),
        ("--plugin low_level_zero --zero_stage 2", "LowLevelZeroPlugin", {"dp": 4, "stage": 2}),
        ("--plugin torch_ddp", "TorchDDPPlugin", {"dp": 4, "precision": "fp32"}),
        ("--plugin torch_ddp --precision bf16", "TorchDDPPlugin", {"dp": 4, "precision": "bf16"}),
        ("--plugin torch_fsdp --cpu_offload", "TorchFSDPPlugin", {"dp": 4, "precision": "fp32"}),
    ],
)
def test_a_flag_goes_before_the_script_s_defaults(
    pool: Pool, words: str, name: str, expected: dict[str, Any]
) -> None:
    for plugin_name, settings in pool.run(4, made, words, SIZES):
        assert plugin_name == name
        assert settings | expected == settings


def reported(words: str, **options: Any) -> tuple[int, str]:
    printed = io.StringIO()
    arguments = parsed(words)
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as end:
        plugin_from_arguments(arguments, **options)
    return end.value.code, printed.getvalue()  # type: ignore[return-value]


def test_all_errors_are_reported_once_by_the_first_rank(pool: Pool) -> None:
    (status, text), (other_status, other_text) = pool.run(2, reported, "--tp_size 3 --precision fp8")
    assert (status, other_status, other_text) == (2, 2, "")
    lines = text.splitlines()
    assert len(lines) == 2 and all(": error: " in line for line in lines)
    assert "precision='fp8'" in text and "3" in text
    (_, text), _ = pool.run(2, partial(reported, tp_size=2), "--tp_size 1")
    assert "tp_size is an option of the script and a flag or default" in text


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--plugin low_level_zero --tp_size 2 --zero_stage 1", "--tp_size"),
        ("--plugin torch_ddp --precision fp16 --max_norm 1 --pp_size 2", "--max_norm, --pp_size"),
    ],
)
def test_options_that_a_plugin_does_not_take_are_named(pool: Pool, words: str, refused: str) -> None:
    ((status, text),) = pool.run(1, reported, words)
    assert status == 2 and f" does not take {refused}: leave out" in text


def test_options_of_low_level_zero_are_renamed(pool: Pool) -> None:
    ((_, text),) = pool.run(1, reported, "--plugin low_level_zero --zero_stage 3")
    assert "stage=3" in text
