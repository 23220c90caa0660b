"""The command line that the examples share."""

import argparse
import inspect

import pytest

from echelon import HybridParallelPlugin

from .scripts import EXAMPLES, load

command_line = load(EXAMPLES / "command_line.py")


def parsed(*words: str) -> argparse.Namespace:
    parser = command_line.FirstRankParser()
    command_line.add_plugin_options(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("world_size", "sizes"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 1)), (4, (2, 2)), (6, (1, 2)), (8, (2, 2))]
)
def test_default_sizes_divide_the_number_of_processes(world_size: int, sizes: tuple[int, int]) -> None:
    assert command_line.default_sizes(world_size, None, None) == sizes
    assert command_line.default_sizes(4, 4, None) == (4, 1)
    assert command_line.default_sizes(4, None, 1) == (2, 1)
    assert command_line.default_sizes(4, 0, None) == (0, 2)  # for the plugin to refuse
    assert command_line.default_sizes(4, None, 0) == (2, 0)


def test_every_option_of_the_plugin_is_a_flag_but_objects() -> None:
    options = set(inspect.signature(HybridParallelPlugin).parameters)
    assert options - command_line.plugin_parameters().keys() == {
        "custom_policy",
        "gradient_checkpoint_config",
    }


def test_flags_read_values_of_all_kinds() -> None:
    words = "--tp_size 2 --max_norm 0.5 --num_layers_per_stage 3 1 --enable_flash_attention --pp_style zbv"
    assert command_line.given_options(parsed(*words.split())) == {
        "tp_size": 2,
        "max_norm": 0.5,
        "num_layers_per_stage": [3, 1],
        "enable_flash_attention": True,
        "pp_style": "zbv",
    }
    named = command_line.given_options(parsed("--enable_flash_attention", "sdpa_cudnn"))
    assert named == {"enable_flash_attention": "sdpa_cudnn"}


def test_the_help_quotes_the_plugin_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    reported = " ".join(capsys.readouterr().out.split())
    assert "--num_microbatches NUM_MICROBATCHES number of microbatches of a batch." in reported
    assert (
        "Other calls compare checksums, which are reduced with the gradient norm. (default: 100)" in reported
    )


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--plugin low_level_zero --tp_size 2 --zero_stage 1", "--tp_size"),
        ("--plugin torch_ddp --precision fp16 --max_norm 1 --pp_size 2", "--pp_size, --precision"),
    ],
)
def test_options_that_a_plugin_does_not_take_are_named(words: str, refused: str) -> None:
    (error,) = command_line.refused_options(parsed(*words.split()))
    assert f" does not take {refused}: leave out" in error


def test_only_the_first_process_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, prints in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            parsed("--tp_size", "two")
        assert end.value.code == 2
        assert ("invalid int value: 'two'" in capsys.readouterr().err) == prints
