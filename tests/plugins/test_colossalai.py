"""Arguments of ColossalAI 0.5: their values that ask for nothing are taken, others refused by name with advice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

from ..pool import Pool

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-colossalai.md"

DDP = {
    "broadcast_buffers": True,
    "find_unused_parameters": False,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "fp8_communication": False,
}
SCALE = {
    "precision": "fp32",
    "initial_scale": 2**16,
    "min_scale": 1,
    "growth_factor": 2,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
    "max_scale": 2**32,
    "max_norm": 0,
    "cpu_offload": False,
    "communication_dtype": None,
    "overlap_communication": True,
    "overlap_allgather": False,
    "use_fp8": False,
}
# Every argument of each plugin, with the value that asks for nothing.
OFF: dict[Callable[..., Any], dict[str, Any]] = {
    HybridParallelPlugin: {
        **DDP,
        **SCALE,
        **dict(tp_size=1, pp_size=1, sp_size=None, zero_stage=0, enable_all_optimization=False),
        **dict(enable_fused_normalization=False, enable_flash_attention=False, enable_jit_fused=False),
        **dict(
            enable_sequence_parallelism=False, sequence_parallelism_mode=None, enable_sequence_overlap=False
        ),
        **dict(parallel_output=True, num_microbatches=None, microbatch_size=None, ddp_bucket_cap_mb=25),
        **dict(zero_bucket_size_in_m=12, custom_policy=None, pp_style="1f1b", num_model_chunks=1),
        **dict(scheduler_nodes=None, num_layers_per_stage=None, gradient_checkpoint_config=None),
        **dict(enable_metadata_cache=True, make_vocab_size_divisible_by=64, dp_outside=False),
        **dict(overlap_p2p=True, inner_ring_size=None),
    },
    LowLevelZeroPlugin: {
        **SCALE,
        **dict(stage=1, norm_type=2.0, reduce_bucket_size_in_m=12, master_weights=True, verbose=False),
        **dict(cast_inputs=True, fp8_communication=False, extra_dp_size=1),
    },
    TorchDDPPlugin: {**DDP, "bucket_cap_mb": 25},
    TorchFSDPPlugin: {
        **dict(process_group=None, sharding_strategy=None, cpu_offload=None, auto_wrap_policy=None),
        **dict(backward_prefetch=None, mixed_precision=None, ignored_modules=None, param_init_fn=None),
        **dict(sync_module_states=False, fp8_communication=False),
    },
    Booster: {"device": None, "mixed_precision": None, "plugin": None},
}

# What is refused, and the advice.
ON: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *(
        (plugin, {"fp8_communication": True}, "leave it out; nothing is communicated in 8 bits")
        for plugin in (HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin)
    ),
    *(
        (plugin, {"use_fp8": True}, "use precision='bf16'")
        for plugin in (HybridParallelPlugin, LowLevelZeroPlugin)
    ),
    (HybridParallelPlugin, {"ddp_bucket_cap_mb": 50}, "use zero_bucket_size_in_m"),
    (HybridParallelPlugin, {"find_unused_parameters": True}, "unused parameters need no search"),
    (HybridParallelPlugin, {"check_reduction": True}, "a step waits for its reductions"),
    (HybridParallelPlugin, {"gradient_as_bucket_view": True}, "gradients are added up in buckets anyway"),
    (HybridParallelPlugin, {"static_graph": True}, "the graph may change between steps"),
    (HybridParallelPlugin, {"scheduler_nodes": [[]]}, "give a schedule of your own as pp_style"),
    (HybridParallelPlugin, {"dp_outside": True}, "ranks are ordered as pp, dp, sp, tp"),
    (LowLevelZeroPlugin, {"norm_type": 1.0}, "optimizer.clip_grad_by_norm(max_norm, norm_type)"),
    (LowLevelZeroPlugin, {"master_weights": False}, "16-bit weights always have float32 masters"),
    (LowLevelZeroPlugin, {"verbose": True}, "optimizer.skipped_steps counts overflows"),
    (LowLevelZeroPlugin, {"cast_inputs": False}, "floating inputs are cast to the precision"),
    (LowLevelZeroPlugin, {"extra_dp_size": 2}, "use zero_size"),
    (
        LowLevelZeroPlugin,
        {"stage": 3},
        "stage=3 is not available: use TorchFSDPPlugin, which shards parameters too",
    ),
    (TorchFSDPPlugin, {"process_group": object()}, "shard_size divides the ranks"),
    (TorchFSDPPlugin, {"sharding_strategy": "FULL_SHARD"}, "use shard_size and reshard_after_forward"),
    (TorchFSDPPlugin, {"auto_wrap_policy": len}, "transformer layers are wrapped one by one"),
    (TorchFSDPPlugin, {"backward_prefetch": "BACKWARD_PRE"}, "torch prefetches the next layer"),
    (TorchFSDPPlugin, {"mixed_precision": "bf16"}, "use precision='bf16' or 'fp16'"),
    (TorchFSDPPlugin, {"ignored_modules": []}, "all parameters are sharded"),
    (TorchFSDPPlugin, {"param_init_fn": len}, "build the model in a LazyInitContext"),
    (TorchFSDPPlugin, {"sync_module_states": True}, "boost refuses models that differ between ranks"),
    (
        Booster,
        {"device": "cuda"},
        "leave it out; it trains on the device of the process, as launch_from_torch",
    ),
]


def take_what_asks_for_nothing() -> None:
    for make, arguments in OFF.items():
        make(**arguments)


def refuse_what_asks_for_something() -> None:
    for make, arguments, advice in ON:
        ((name, value),) = arguments.items()
        with pytest.raises(ValueError) as refused:
            make(**arguments)
        assert f"{name}={value!r}" in str(refused.value) and advice in str(refused.value), str(refused.value)


def refuse_all_at_once_and_unknown_names_as_python_does() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)2 errors:\n- use_fp8=True of ColossalAI .*\n- precision='fp8'"
    ):
        HybridParallelPlugin(use_fp8=True, precision="fp8")
    for plugin, name in (
        (HybridParallelPlugin, "tp_sise"),
        (LowLevelZeroPlugin, "tp_size"),
        (TorchDDPPlugin, "precision"),
        (TorchFSDPPlugin, "shard_sise"),
    ):
        with pytest.raises(
            TypeError, match=rf"{plugin.__name__}\.__init__\(\) got an unexpected keyword argument '{name}'"
        ):
            plugin(**{name: 1})  # type: ignore[operator]


@pytest.mark.parametrize(
    "function",
    [
        take_what_asks_for_nothing,
        refuse_what_asks_for_something,
        refuse_all_at_once_and_unknown_names_as_python_does,
    ],
)
def test_arguments_of_colossalai(pool: Pool, function: Callable[[], None]) -> None:
    pool.run(1, function)


def test_the_page_lists_every_argument() -> None:
    text = PAGE.read_text()
    assert [name for names in OFF.values() for name in names if f"`{name}" not in text] == []
