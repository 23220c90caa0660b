"""Every row of docs/features.md has quick tests here: public calls, compared with plain torch."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from echelon import Booster

from ..booster import test_arguments, test_gather_for_metrics, test_metrics, test_nonfinite, test_traces
from ..cli import test_doctor, test_plan
from ..cluster import test_flight_recorder, test_hang_report
from ..migration import test_names
from ..planning import test_predict
from ..plugins import test_deepspeed, test_experts, test_out_of_memory
from ..pool import Pool
from ..refusals import test_refusals
from ..trainer import test_trainer
from . import test_divergences, test_misuses, test_model_features, test_old_checkpoints, test_parity
from .script import LLAMA, SCRIPTS, hybrid

FEATURES = Path(__file__).parents[2] / "docs" / "features.md"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_the_losses_of_plain_torch(pool: Pool, name: str) -> None:
    script = SCRIPTS[name]
    assert set(pool.run(script.num_ranks, script.departure)) == {None}


def adapted(folder: Path) -> list[str]:
    """Train adapters under tensor parallelism and save them in peft's format."""
    from peft import LoraConfig

    booster = Booster(plugin=hybrid(tp_size=2))
    model = booster.enable_lora(LLAMA.build(), lora_config=LoraConfig(r=2, target_modules=["q_proj"]))
    model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.save_lora_as_pretrained(model, folder)
    return sorted(path.name for path in folder.iterdir())


# A warning of transformers about an attribute that peft still uses.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_saved_as_peft_reads_them(pool: Pool, tmp_path: Path) -> None:
    from peft import PeftModel

    pool.run(2, adapted, tmp_path)
    peft_model = PeftModel.from_pretrained(LLAMA.build(), tmp_path)
    shapes = {tuple(parameter.shape) for name, parameter in peft_model.named_parameters() if "lora_" in name}
    assert shapes == {(2, 32), (32, 2)}


PARITY, SCRIPT = (
    test_parity.test_a_model_trains_as_one_process_does,
    test_a_script_has_the_losses_of_plain_torch,
)
# Quick tests in this file by the first column of the page's table.
# fmt: off
PROOFS: dict[str, list[Callable[..., None]]] = {
    "tensor parallelism": [PARITY],
    "without a booster": [SCRIPT],
    "pipeline": [PARITY, SCRIPT],
    "activation checkpointing": [PARITY],
    "sequence and context parallelism": [PARITY],
    "expert parallelism": [PARITY, test_experts.test_adapters_of_experts_train_as_in_one_process],
    "weight parallelism": [PARITY, SCRIPT],
    "data parallelism": [PARITY, SCRIPT],
    "precision": [PARITY],
    "loss": [SCRIPT],
    "images of texts": [PARITY],
    "fused kernels": [test_model_features.test_a_model_trains_as_without_the_feature],
    "compiled layers": [PARITY],
    "lazy initialization": [SCRIPT],
    "checkpoints": [test_old_checkpoints.test_resumes_under_its_own_layout,
        test_old_checkpoints.test_resumes_in_one_process],
    "LoRA": [test_adapters_are_saved_as_peft_reads_them],
    "profiles": [test_traces.test_actions_calls_layers_waits_and_collectives_have_names],
    "errors": [test_misuses.test_every_misuse_has_one_clear_message_on_every_rank_and_its_suggestion_runs,
        test_refusals.test_a_call_of_several_ranks_is_refused_on_all],
    "transformers' Trainer": [test_trainer.test_losses_norms_metrics_and_weights_are_those_of_one_process],
    "scripts of other frameworks": [test_names.test_a_name_with_a_counterpart_is_that,
        test_gather_for_metrics.test_every_sample_is_gathered_once_in_its_order,
        test_deepspeed.test_a_plugin_of_a_configuration_trains],
    "planning": [test_predict.test_operations_are_those_of_torchs_counter,
        test_plan.test_layouts_are_listed_with_memory_and_a_picture],
    "measuring": [test_metrics.test_records_are_read_at_an_interval_and_average_over_steps_and_ranks,
        test_arguments.test_all_errors_are_reported_once_by_the_first_rank],
    "explaining": [test_hang_report.test_every_waiting_rank_raises_the_report_soon_after_the_timeout,
        test_divergences.test_a_rank_that_departs_is_diagnosed_on_both_ranks,
        test_out_of_memory.test_a_pipeline_stage_says_what_holds_its_memory_and_the_other_rank_is_told,
        test_flight_recorder.test_a_rank_that_does_not_join_is_named,
        test_nonfinite.test_the_first_module_that_is_not_finite_is_named_on_every_rank,
        test_doctor.test_the_report_names_releases_devices_and_limits],
}
# fmt: on


def test_every_row_of_the_page_has_a_quick_test() -> None:
    table = FEATURES.read_text().partition("## Parallelism and training")[2]
    rows = re.findall(r"^\| ([^|]+?) \|", table, flags=re.M)
    assert set(rows) - {"", "---"} == PROOFS.keys()
    for row, proofs in PROOFS.items():
        marks = [mark.name for proof in proofs for mark in getattr(proof, "pytestmark", [])]
        assert "slow" not in marks, row
