"""InternEvo configurations become arguments of the plugin."""

import json
import logging
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import HybridParallelPlugin, PipelineGradientCheckpointConfig
from echelon.plugins.internevo import plugin_arguments, with_configuration_keys

from .training import sequence

ISSUE = {
    "zero1": {"size": 8, "fsdp": False},
    "tensor": {"size": 2, "mode": "isp"},
    "pipeline": {"size": 1, "interleaved_overlap": True},
    "weight": {"size": 4, "overlap": True, "memory_pool": True},
}
ISP = sequence("all_to_all", tp_size=1, pp_size=1, sp_size=2, wp_size=4, wp_overlap=True, zero_stage=1)
ISP["zero_size"] = 32  # neighbours: every fourth of them has the same weights, 8 in total
NO_LAYOUT = {"tp_size": 1, "pp_size": 1, "zero_stage": 1, "zero_size": -1}
# A file like InternEvo's: constants, imports, sections that use them, and many keys that no plugin uses.
FILE = """
import os
from pathlib import Path

JOB_NAME = "small"
SEQ_LEN = 2048
_half = 0.5


def folder(name):
    return os.path.join("data", name)


ckpt = dict(enable_save_ckpt=False, auto_resume=False)
data = dict(seq_len=SEQ_LEN, micro_num=4, micro_bsz=2, train_folder=folder("train"), gradient_accumulation=4)
grad_scaler = dict(
    fp16=dict(initial_scale=2**14, min_scale=1, growth_interval=500),
    growth_factor=4, backoff_factor=_half, max_scale=2**24, hysteresis=3,
)
hybrid_zero_optimizer = dict(
    overlap_sync_grad=True, overlap_sync_param=False, reduce_bucket_size=512 * 1024 * 1024, clip_grad_norm=1.0,
    use_split_tensor_optim=True,
)
loss = dict(label_smoothing=0)
adam = dict(lr=1e-4, adam_beta1=0.9)
model_type = "INTERNLM2"
use_fp32_norm = False
model = dict(
    checkpoint=0.25, num_chunks=2, num_layers=32, hidden_size=4096, parallel_output=True, embed_grad_scale=1,
    dtype="torch.bfloat16", use_flash_attn=True,
)
parallel = dict(
    zero1=dict(size=-1),
    tensor=dict(size=4, mode="fsp"),
    pipeline=dict(size=2, interleaved_overlap=True, mode="1F1B"),
    weight=dict(size=1, overlap=True, memory_pool=True),
)
cudnn_deterministic = False
"""
OF_FILE = dict(
    **dict(tp_size=4, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"),
    **dict(enable_sequence_regather=True, enable_sequence_overlap=True),
    **dict(pp_size=2, pp_style="interleaved", num_model_chunks=2, overlap_p2p=True, num_microbatches=4),
    **dict(zero_stage=1, zero_size=-1, overlap_communication=True, overlap_allgather=False),
    **dict(zero_bucket_size_in_m=512, max_norm=1.0, precision="bf16", parallel_output=True),
    gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.25),
    **dict(enable_flash_attention=True, initial_scale=2**14, min_scale=1, max_scale=2**24, hysteresis=3),
    **dict(growth_interval=500, growth_factor=4, backoff_factor=0.5),
)


def test_the_arguments_are_those_of_the_plugin() -> None:
    assert (ISP.keys() | OF_FILE.keys()) <= signature(HybridParallelPlugin).parameters.keys()


def test_a_python_file_is_accepted_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "config.py"
    path.write_text(FILE)
    with caplog.at_level(logging.INFO, logger="echelon"):
        assert plugin_arguments(str(path)) == OF_FILE
    (record,) = caplog.records
    left = "hybrid_zero_optimizer.use_split_tensor_optim, model.num_layers, model.hidden_size, ckpt, adam, model_type"
    for name in (*left.split(", "), "data.seq_len", "data.micro_bsz", "cudnn_deterministic"):
        assert name in record.getMessage()
    assert "SEQ_LEN" not in record.getMessage()


def test_a_json_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"parallel": ISSUE, "model": {"dtype": "torch.half"}, "JOB_NAME": "small"}))
    assert plugin_arguments(path) == ISP | {"precision": "fp16"}


REGIONS = sequence("split_gather", enable_sequence_overlap=True)
SEQUENCES = sequence("all_to_all")
ISP_OF_2 = {"tensor": {"size": 2, "mode": "isp"}}
CHUNKED = {"pp_size": 2, "pp_style": "interleaved"}
# A configuration, and the arguments that differ from those of an empty one.
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (ISSUE, ISP),
    ({"parallel": ISSUE}, ISP),
    # Modes.
    ({"tensor": {"size": 2, "mode": "mtp"}}, {"tp_size": 2}),
    ({"tensor": {"size": 2, "mode": "msp"}}, {"tp_size": 2} | REGIONS),
    ({"tensor": {"size": 2, "mode": "fsp"}}, {"tp_size": 2, "enable_sequence_regather": True} | REGIONS),
    (ISP_OF_2, {"sp_size": 2} | SEQUENCES),
    ({"tensor": {"size": 1, "mode": "fsp"}}, {}),
    ({"tensor": {"size": 1, "mode": "isp"}}, {"sp_size": 1}),
    # zero1 up to 0 is the full group, and counts ranks with the same weights.
    ({"parallel": {}}, {}),
    ({"zero1": 0}, {}),
    ({"zero1": {"size": 1}}, {"zero_size": 1}),
    ({"zero1": 8}, {"zero_size": 8}),
    ({"zero1": 2} | ISP_OF_2, {"sp_size": 2, "zero_size": 2} | SEQUENCES),
    # Pipelines.
    (
        {"zero1": 8, "tensor": 4, "pipeline": 2},
        {"tp_size": 4, "pp_size": 2, "pp_style": "1f1b", "zero_size": 8},
    ),
    ({"pipeline": {"size": 2, "mode": "ZBH1"}}, {"pp_size": 2, "pp_style": "zbh1"}),
    ({"pipeline": {"size": 2, "mode": "ZBV"}, "num_chunks": 2}, {"pp_size": 2, "pp_style": "zbv"}),
    ({"pipeline": {"size": 2, "mode": "1F1B"}, "num_chunks": 3}, CHUNKED | {"num_model_chunks": 3}),
    (
        {"parallel": {"pipeline": {"size": 2, "interleaved_overlap": False}}, "model": {"num_chunks": 2}},
        CHUNKED | {"num_model_chunks": 2, "overlap_p2p": False, "precision": "fp16"},
    ),
    ({"pipeline": {"size": 1, "interleaved_overlap": True}, "num_chunks": 2}, {}),
    # The default number of microbatches is 1, as in InternEvo.
    ({"data": {"micro_bsz": 8}}, {"num_microbatches": 1}),
    (
        {"pipeline": 2, "data": {"micro_num": 8, "gradient_accumulation": 1}},
        {"pp_size": 2, "pp_style": "1f1b", "num_microbatches": 8},
    ),
    ({"model": {"dtype": torch.float32}}, {"precision": "fp32"}),
]


@pytest.mark.parametrize(("config", "expected"), TAKEN, ids=str)
def test_a_configuration_becomes_arguments(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert plugin_arguments(config) == NO_LAYOUT | expected


def test_zero1_counts_ranks_with_the_same_weights() -> None:
    for size, zero_size in {-1: -1, 0: -1, 1: 1, 2: 8, 4: 16}.items():
        assert plugin_arguments({"zero1": size, "weight": 4} | ISP_OF_2)["zero_size"] == zero_size


def test_sections_and_arguments_can_be_given_besides() -> None:
    besides = {"hybrid_zero_optimizer": {"overlap_sync_grad": False, "overlap_sync_param": True}}
    arguments = plugin_arguments(ISSUE, **besides, num_chunks=1, zero_size=4, dp_size=2)
    expected = {"overlap_communication": False, "overlap_allgather": True, "zero_size": 4, "dp_size": 2}
    assert arguments == ISP | expected


@pytest.mark.parametrize(("text", "reported"), [("{", "is not JSON"), ("[1]", "must hold an object")])
def test_other_json_is_refused(tmp_path: Path, text: str, reported: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=reported):
        plugin_arguments(path)


def test_errors_of_the_plugin_name_the_keys_of_the_configuration() -> None:
    arguments = plugin_arguments(ISSUE)
    assert with_configuration_keys("zero_size=32 must divide the 8 ranks", arguments) == (
        "zero_size=32 must divide the 8 ranks\nin InternEvo's configuration zero_size=32 is zero1.size=8 times "
        "weight.size=4"
    )
    assert with_configuration_keys("sp_size=2, wp_size=4", arguments).endswith(
        "\nin InternEvo's configuration sp_size=2 is tensor.size, wp_size=4 is weight.size"
    )
    assert with_configuration_keys("precision='fp9'", arguments) == "precision='fp9'"
    for argument, key in (("max_norm", "clip_grad_norm"), ("overlap_communication", "overlap_sync_grad")):
        words = with_configuration_keys(f"{argument}=-1 must be", {argument: -1})
        assert words.endswith(f"configuration {argument}=-1 is hybrid_zero_optimizer.{key}")
