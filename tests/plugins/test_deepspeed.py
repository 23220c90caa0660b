"""DeepSpeed configurations become arguments of LowLevelZeroPlugin."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import Booster, LowLevelZeroPlugin
from echelon.plugins.deepspeed import plugin_arguments
from echelon.plugins.low_level_zero import ZeroConfig

from ..pool import Pool

# As many scripts have it, with the values that Trainer would fill in.
CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "initial_scale_power": 12,
        "hysteresis": 3,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2**21,
        "contiguous_gradients": True,
    },
    "communication_data_type": "bfp16",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "_comment": "of a user",
}
ARGUMENTS = {
    "gradient_accumulation_steps": 2,
    "max_norm": 1.0,
    "precision": "fp16",
    "initial_scale": 2.0**12,
    "growth_interval": 500,
    "hysteresis": 3,
    "min_scale": 1,
    "stage": 2,
    "overlap_communication": True,
    "communication_dtype": "bf16",
    "reduce_bucket_size_in_m": 2.0,
    "cpu_offload": True,
}


def test_a_configuration_becomes_arguments(tmp_path: Path) -> None:
    assert plugin_arguments(CONFIG, num_replicas=2) == ARGUMENTS
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    assert plugin_arguments(path, num_replicas=2) == ARGUMENTS


def test_an_empty_configuration_is_deepspeeds_defaults() -> None:
    assert plugin_arguments({}, num_replicas=1) == {"stage": 0, "precision": "fp32"}
    assert plugin_arguments({"scheduler": {}}, num_replicas=1, without=("scheduler",))
    fp16 = plugin_arguments({"fp16": {"enabled": True}}, num_replicas=1)
    assert fp16 == {"stage": 0, "precision": "fp16", "initial_scale": 2.0**16}
    options = ZeroConfig(**fp16)
    assert (options.growth_interval, options.hysteresis, options.min_scale) == (1000, 2, 1)


def test_accumulation_steps_follow_from_both_batch_sizes_as_in_deepspeed() -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    assert plugin_arguments(sizes, num_replicas=8)["gradient_accumulation_steps"] == 2
    with pytest.raises(ValueError, match=r"train_batch_size=64 is no multiple of .*=4 × 3 processes"):
        plugin_arguments(sizes, num_replicas=3)


def test_sections_of_what_is_off_change_nothing() -> None:
    off = {"enabled": False}
    config = {
        "elasticity": off,
        "autotuning": off,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": False},
    }
    assert plugin_arguments(config, num_replicas=1) == {"stage": 0, "precision": "bf16"}


@pytest.mark.parametrize("name", ["bf16", "bfp16"])
def test_both_names_of_bfloat16_choose_the_communication_dtype(name: str) -> None:
    arguments = plugin_arguments({"communication_data_type": name}, num_replicas=1)
    assert arguments["communication_dtype"] == "bf16"


def test_one_section_may_be_left_out_by_its_name() -> None:
    assert plugin_arguments({"optimizer": {}}, num_replicas=1, without="optimizer")["stage"] == 0


def train_from_a_configuration() -> tuple[float, float, int]:
    """Return the weight's sum after two accumulated calls, the norm before clipping, and the size of the ZeRO axis."""
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    plugin = LowLevelZeroPlugin.from_config(config, without=("optimizer",), check_every=1)
    booster = Booster(plugin=plugin)
    model: Any = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for scale in (1.0, 3.0):
        loss = scale * model(torch.tensor([[3.0, 4.0]])).mean()
        booster.backward(loss, optimizer)
    optimizer.step()
    assert plugin.config.zero_stage == 2 and plugin.config.check_every == 1
    weight = booster.plugin.local_model(model).module.weight
    return float(weight.detach().sum()), float(optimizer.get_grad_norm()), plugin.mesh.size("dp")


def test_a_plugin_of_a_configuration_trains(pool: Pool) -> None:
    weights, norm, num_replicas = pool.run(2, train_from_a_configuration)[0]
    assert num_replicas == 2
    assert norm == pytest.approx(10.0)  # the mean of 1 and 3 times the norm of (3, 4)
    assert weights == pytest.approx(2 - 0.1 * 0.5 * 7 / 5)  # clipped to a norm of 0.5
