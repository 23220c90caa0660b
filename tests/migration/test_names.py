"""Scripts import ColossalAI's names from `echelon`; those without a counterpart raise when they are constructed."""

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon
from echelon.migration import names
from echelon.migration.adam import CPUAdam, FusedAdam, HybridAdam
from echelon.migration.lr_scheduler import CosineAnnealingWarmupLR, LinearWarmupLR

# What ColossalAI's examples for BERT, GPT and Llama import.
COUNTERPARTS = {
    "accelerator.get_accelerator": "cluster.accelerator.get_accelerator",
    "booster.Booster": "Booster",
    "booster.plugin.HybridParallelPlugin": "HybridParallelPlugin",
    "booster.plugin.LowLevelZeroPlugin": "LowLevelZeroPlugin",
    "booster.plugin.TorchDDPPlugin": "TorchDDPPlugin",
    "booster.plugin.TorchFSDPPlugin": "TorchFSDPPlugin",
    "booster.plugin.dp_plugin_base.DPPluginBase": "Plugin",
    "booster.plugin.hybrid_parallel_plugin.HybridParallelPlugin": "HybridParallelPlugin",
    "booster.plugin.low_level_zero_plugin.LowLevelZeroPlugin": "LowLevelZeroPlugin",
    "cluster.DistCoordinator": "DistCoordinator",
    "initialize.launch_from_torch": "launch_from_torch",
    "lazy.LazyInitContext": "LazyInitContext",
    "nn.HybridAdam": "migration.adam.HybridAdam",
    "nn.optimizer.HybridAdam": "migration.adam.HybridAdam",
    "nn.optimizer.hybrid_adam.HybridAdam": "migration.adam.HybridAdam",
    "shardformer.layer.Linear1D_Col": "shardformer.layers.Linear1D_Col",
    "nn.lr_scheduler.CosineAnnealingWarmupLR": "migration.lr_scheduler.CosineAnnealingWarmupLR",
    "shardformer.PipelineGradientCheckpointConfig": "PipelineGradientCheckpointConfig",
    "shardformer.policies.base_policy.Policy": "shardformer.Policy",
    "utils.get_current_device": "cluster.accelerator.get_current_device",
}
REFUSED = (
    "booster.plugin.GeminiPlugin",
    "booster.plugin.MoeHybridParallelPlugin",
    "booster.plugin.gemini_plugin.GeminiPlugin",
    "booster.plugin.moe_hybrid_parallel_plugin.MoeHybridParallelPlugin",
    "booster.plugin.no_such",
    "booster.mixed_precision.FP16TorchMixedPrecision",
    "cluster.process_group_mesh.ProcessGroupMesh",
    "cluster.ProcessGroupMesh",
    "inference.config.InferenceConfig",
    "launch_from_slurm",
    "legacy.core.global_context",
    "legacy.nn.layer.base_layer.ParallelLayer",
    "nn.loss.CrossEntropyLoss1D",
    "nn.optimizer.Lamb",
    "nn.optimizer.nvme_optimizer.NVMeOptimizer",
    "shardformer.layer.FusedRMSNorm",
    "shardformer.layer.utils.split_batch_zigzag",
    "shardformer.policies.auto_policy.get_autopolicy",
    "pipeline.schedule.v_schedule.PipelineGraph",
    "utils.free_storage",
    "utils.memory.colo_device_memory_capacity",
    "zero.GeminiDDP",
    "zero.low_level.LowLevelZeroOptimizer",
)


def imported(path: str) -> Any:
    """Return what `from echelon.MODULE import NAME` does."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"echelon.{module}".rstrip(".")), name)


@pytest.mark.parametrize("path", COUNTERPARTS)
def test_a_name_with_a_counterpart_is_that(path: str) -> None:
    assert imported(path) is imported(COUNTERPARTS[path])


def test_all_counterparts_exist() -> None:
    listed = [
        f"{module}.{name}".lstrip(".")
        for module, homes in names._COUNTERPARTS.items()
        for name in homes
        if module
    ]
    assert len(listed) > 30
    for path in listed:
        assert not isinstance(imported(path), names._Refusal)


@pytest.mark.parametrize("path", REFUSED)
def test_a_name_without_one_is_imported_and_raises_when_it_is_used(path: str) -> None:
    refused = imported(path)
    assert not isinstance(0, refused)
    inheriting: Any = type("Inheriting", (refused,), {})
    for use in (refused, inheriting, lambda: refused.attribute):
        with pytest.raises((NotImplementedError, AttributeError), match=rf"^colossalai\.{path} has no .*: "):
            use()


@pytest.mark.parametrize("path", ["no_such", "cluster.no_such", "zero.no_such", "utils._private"])
def test_a_name_that_neither_has_is_an_attribute_error(path: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{path.rpartition('.')[2]}'"):
        imported(path)
    with pytest.raises(ModuleNotFoundError):
        import_module("echelon.no_such.module")


@pytest.mark.parametrize("kind", [HybridAdam, CPUAdam, FusedAdam])
@pytest.mark.parametrize(
    ("adamw_mode", "peer"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)], ids=["adamw", "adam"]
)
def test_an_adam_of_colossalai_is_that_of_torch_without_weight_decay(
    kind: Any, adamw_mode: bool, peer: Any
) -> None:
    weights = []
    for settings in ({}, {"weight_decay": 0.1}):
        for make in (
            lambda parameters, options: kind(parameters, adamw_mode=adamw_mode, **options),
            lambda parameters, options: peer(parameters, **{"weight_decay": 0.0} | options),
        ):
            torch.manual_seed(0)
            weight = torch.nn.Parameter(torch.randn(4, 3))
            optimizer = make([weight], settings)
            for _ in range(3):
                (weight**2).sum().backward()
                optimizer.step()
            weights.append(weight.detach())
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    "use",
    [
        lambda parameters: HybridAdam(parameters, bias_correction=False),
        lambda parameters: HybridAdam(parameters, nvme_offload_fraction=0.5),
        lambda parameters: FusedAdam(parameters, amsgrad=True),
    ],
)
def test_settings_of_an_adam_that_are_not_available_are_refused(use: Any) -> None:
    with pytest.raises(ValueError, match="leave"):
        use([torch.nn.Parameter(torch.ones(2))])


def test_schedulers_of_colossalai_warm_up_from_their_first_step_on() -> None:
    def rates(make: Any) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
        scheduler, learning_rates = make(optimizer), []
        for _ in range(8):
            learning_rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return learning_rates

    linear = rates(lambda optimizer: LinearWarmupLR(optimizer, total_steps=8, warmup_steps=3))
    assert linear == pytest.approx([0.5, 1.0, 1.5, 2.0, 1.6, 1.2, 0.8, 0.4])
    cosine = rates(
        lambda optimizer: CosineAnnealingWarmupLR(optimizer, total_steps=6, warmup_steps=2, eta_min=0.5)
    )
    assert cosine[:3] == pytest.approx([1.0, 2.0, 2.0])
    assert cosine[4] == pytest.approx(1.25) and cosine[6] == pytest.approx(0.5)


def test_the_logger_takes_ranks(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    logger = imported("logging.get_dist_logger")("a script")
    logger.log_to_file(str(tmp_path))
    with caplog.at_level(logging.INFO, "a script"):
        logger.info("on the first", ranks=[0])
        logger.warning("on another", ranks=[1])
    assert [record.message for record in caplog.records] == ["on the first"]
    assert (tmp_path / "rank_0.log").read_text() == "on the first\n"


def test_the_accelerator_is_the_device_of_the_process() -> None:
    accelerator = echelon.accelerator.get_accelerator()
    assert accelerator.get_current_device().type == accelerator.name
    assert accelerator.max_memory_allocated() == 0 or accelerator.name != "cpu"
    accelerator.synchronize()
    accelerator.manual_seed(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
