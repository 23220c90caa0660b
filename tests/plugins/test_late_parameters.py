"""`overlap_allgather` of the plugins: the same losses, a step that does not wait."""

from typing import Any

import pytest

from echelon import LowLevelZeroPlugin, PipelineGradientCheckpointConfig

from ..pool import Pool
from . import training

QUICK: list[tuple[str, dict[str, Any]]] = [
    ("hybrid", {"tp_size": 2, "zero_stage": 1}),
    ("hybrid", {"pp_size": 2, "zero_stage": 2, "pp_style": "zbv"}),
    ("zero", {"stage": 2, "precision": "bf16"}),
]
SLOW: list[dict[str, Any]] = [
    {"zero_stage": 1, "zero_size": 2},
    {"zero_stage": 2, "zero_size": 2, "precision": "bf16"},
    {"zero_stage": 2, "tp_size": 2, "cpu_offload": True, "precision": "bf16"},
    {"zero_stage": 1, "tp_size": 2, "precision": "fp16", "initial_scale": 2.0**22, "hysteresis": 1},
    {
        "zero_stage": 1,
        "sp_size": 2,
        "enable_sequence_parallelism": True,
        "sequence_parallelism_mode": "all_to_all",
    },
    {
        "zero_stage": 2,
        "tp_size": 2,
        "enable_sequence_parallelism": True,
        "sequence_parallelism_mode": "split_gather",
        "gradient_checkpoint_config": PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0),
    },
    {"zero_stage": 1, "wp_size": 2},
    {"zero_stage": 2, "wp_size": 2, "precision": "bf16"},
    {"zero_stage": 1, "pp_size": 2, "zero_bucket_size_in_m": 0.001, "communication_dtype": "bf16"},
]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*QUICK, *(pytest.param("hybrid", settings, marks=pytest.mark.slow) for settings in SLOW)],
    ids=str,
)
def test_losses_are_those_of_parameters_that_arrive_at_once(
    pool: Pool, kind: str, settings: dict[str, Any]
) -> None:
    plain, late = (
        pool.run(4, training.train, kind, settings | {"overlap_allgather": overlaps}, training.LLAMA)
        for overlaps in (False, True)
    )
    assert late == plain


def refuse(settings: dict[str, Any]) -> str:
    return training.refused(lambda: training.hybrid(**settings))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"overlap_allgather": "yes", "zero_stage": 1}, "overlap_allgather='yes' must be True or False"),
        ({"overlap_allgather": True}, "use zero_stage 1 or 2, or leave it out"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(pool: Pool, settings: dict[str, Any], told: str) -> None:
    assert pool.run(1, refuse, settings)[0].endswith(told)


def refuse_low_level(settings: dict[str, Any]) -> str:
    return training.refused(lambda: LowLevelZeroPlugin(**settings))


def test_a_plugin_tells_faults_by_its_own_names(pool: Pool) -> None:
    settings = {"stage": 3, "reduce_bucket_size_in_m": -1, "precision": "fp32"}
    told = pool.run(1, refuse_low_level, settings)[0]
    assert "stage=3 is not available" in told
    assert "zero_stage" not in told
    assert "reduce_bucket_size_in_m=-1 must be a positive number" in told
