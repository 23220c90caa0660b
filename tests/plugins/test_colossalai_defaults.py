"""Defaults of ColossalAI 0.5: Echelon has the same ones, or docs/coming-from-colossalai.md names the argument."""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    ShardConfig,
    TorchDDPPlugin,
    launch_from_torch,
)
from echelon.plugins.colossalai import DDP, HYBRID, ZERO, Unavailable

from ..pool import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-colossalai.md"
REQUIRED = inspect.Parameter.empty
SCALE: dict[str, Any] = dict(
    min_scale=1, growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2
)
SCALE |= dict(max_scale=2**32, max_norm=0)
# The arguments of ColossalAI 0.5.0 in its order, with their defaults.
HYBRID_DEFAULTS: dict[str, Any] = dict(
    **dict(tp_size=REQUIRED, pp_size=REQUIRED, sp_size=None, precision="fp16", zero_stage=0),
    **dict(enable_all_optimization=False, enable_fused_normalization=False, enable_flash_attention=False),
    **dict(enable_jit_fused=False, enable_sequence_parallelism=False, sequence_parallelism_mode=None),
    **dict(parallel_output=True, num_microbatches=None, microbatch_size=None, initial_scale=2**16, **SCALE),
    **dict(broadcast_buffers=True, ddp_bucket_cap_mb=25, find_unused_parameters=False, check_reduction=False),
    **dict(gradient_as_bucket_view=False, static_graph=False, zero_bucket_size_in_m=12, cpu_offload=False),
    **dict(communication_dtype=None, overlap_communication=True, custom_policy=None, pp_style="1f1b"),
    **dict(
        num_model_chunks=1, scheduler_nodes=None, num_layers_per_stage=None, gradient_checkpoint_config=None
    ),
    **dict(enable_metadata_cache=True, make_vocab_size_divisible_by=64, dp_outside=True, overlap_p2p=True),
    **dict(overlap_allgather=False, fp8_communication=False, use_fp8=False, inner_ring_size=None),
)
ZERO_DEFAULTS: dict[str, Any] = dict(
    **dict(
        stage=1, precision="fp16", initial_scale=2**32, **SCALE, norm_type=2.0, reduce_bucket_size_in_m=12
    ),
    **dict(communication_dtype=None, overlap_communication=True, overlap_allgather=False, cpu_offload=False),
    **dict(master_weights=True, verbose=False, cast_inputs=True, fp8_communication=False, use_fp8=False),
    **dict(extra_dp_size=1),
)
DDP_DEFAULTS: dict[str, Any] = dict(
    **dict(broadcast_buffers=True, bucket_cap_mb=25, find_unused_parameters=False, check_reduction=False),
    **dict(gradient_as_bucket_view=False, static_graph=False, fp8_communication=False),
)
DATA_DEFAULTS: dict[str, Any] = dict(
    **dict(
        dataset=REQUIRED, batch_size=REQUIRED, shuffle=False, seed=1024, drop_last=False, pin_memory=False
    ),
    **dict(num_workers=0, distributed_sampler_cls=None),
)
PLUGINS: tuple[tuple[Callable[..., Any], dict[str, Any], Mapping[str, Unavailable]], ...] = (
    (HybridParallelPlugin.__init__, HYBRID_DEFAULTS, HYBRID),
    (LowLevelZeroPlugin.__init__, ZERO_DEFAULTS, ZERO),
    (TorchDDPPlugin.__init__, DDP_DEFAULTS, DDP),
    (HybridParallelPlugin.prepare_dataloader, DATA_DEFAULTS, {}),
)
CALLS: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
    (launch_from_torch, dict(seed=1024)),
    (Booster.execute_pipeline, dict(optimizer=None, return_loss=True, return_outputs=False)),
    (Booster.save_model, dict(shard=False, gather_dtensor=True, prefix=None, size_per_shard=1024)),
    (Booster.save_model, dict(use_safetensors=False, use_async=False)),
    (Booster.load_model, dict(strict=True)),
    (Booster.enable_lora, dict(pretrained_dir=None, lora_config=None, quantize=False)),
    (Booster.save_lora_as_pretrained, dict(use_safetensors=False)),
)


def parameters_of(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {
        name: parameter for name, parameter in inspect.signature(call).parameters.items() if name != "self"
    }


def differing(
    call: Callable[..., Any], theirs: Mapping[str, Any], others: Mapping[str, Unavailable]
) -> set[str]:
    """Return the arguments whose default is not ColossalAI's, which is not accepted as without effect either."""
    names = set()
    for name, default in theirs.items():
        accepted = others[name].accepted if name in others else (parameters_of(call)[name].default,)
        if default is not REQUIRED and default not in accepted:
            names.add(name)
    return names


def named_on_the_page() -> set[str]:
    """Return the names in the first column of the table of differing defaults."""
    (table,) = re.findall(r"^## Defaults that differ\n(.*?)^## ", PAGE.read_text(), flags=re.M | re.S)
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_default_is_colossalais_or_on_the_page() -> None:
    names = set().union(
        *(differing(*row) for row in PLUGINS), *(differing(call, theirs, {}) for call, theirs in CALLS)
    )
    assert {"precision", "zero_bucket_size_in_m", "pin_memory", "use_safetensors"} <= names
    assert names - named_on_the_page() == set()


@pytest.mark.parametrize(("call", "theirs"), [row[:2] for row in PLUGINS], ids=lambda value: str(value)[:40])
def test_arguments_by_place_have_colossalais_order(call: Callable[..., Any], theirs: dict[str, Any]) -> None:
    by_place = [
        name
        for name, parameter in parameters_of(call).items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    shared = by_place[: len(theirs)]
    assert shared == list(theirs)[: len(shared)]


def test_the_page_keeps_the_weight_decay_of_colossalais_optimizers() -> None:
    text = PAGE.read_text()
    assert torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"] != 0  # ColossalAI's default is 0
    (script,) = [
        line
        for line in text.splitlines()
        if line.startswith("optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, ")
    ]
    (row,) = [line for line in text.splitlines() if "`colossalai.nn.optimizer.HybridAdam`" in line]
    assert "weight_decay=0)" in script and "weight_decay=0" in row
    assert "weight_decay" in named_on_the_page()


@on_ranks(1)
def test_a_mode_of_sequence_parallelism_that_is_off_changes_nothing() -> None:
    """Accept a mode of sequence parallelism that is off, and shard nothing."""
    for mode in ("split_gather", "ring", "all_to_all", "ring_attn"):
        plugin = HybridParallelPlugin(sequence_parallelism_mode=mode)
        assert plugin.sp_size == 1 and plugin.config.sequence.mode is None
        config = ShardConfig(sequence_parallelism_mode=mode)
        assert config.sequence_split is None and not config.fused.is_ring


@on_ranks(1)
def test_no_seed_leaves_the_random_states_as_they_are() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    launch_from_torch(seed=None)
    assert torch.equal(torch.rand(3), expected)
