"""TRL's SFTTrainer with LoRA against echelon.trainer.SFTTrainer: losses, norms, TRL's metrics, and the adapters."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ..pool import Pool
from .runs import QUIET, WORDS, Run, differences, llama, result, set_environment, tokenizer
from .test_trainer import LAYOUTS, TOLERANCE

pytest.importorskip("trl")
ARGUMENTS = QUIET | dict(num_train_epochs=1, gradient_accumulation_steps=2, learning_rate=0.1, optim="sgd")
ARGUMENTS |= dict(max_grad_norm=0.3, logging_steps=1, bf16=False)


def prompts(number: int, seed: int) -> Any:
    """Return prompts and completions of different lengths."""
    from datasets import Dataset

    draw = torch.Generator().manual_seed(seed)

    def text() -> str:
        length = int(torch.randint(2, 9, (), generator=draw))
        return " ".join(WORDS[index] for index in torch.randint(len(WORDS), (length,), generator=draw))

    return Dataset.from_list([dict(prompt=f"{text()} ", completion=text()) for _ in range(number)])


def tuned(folder: str, plugin: dict[str, Any] | None, dp: int = 1) -> dict[str, Any] | None:
    """Train adapters, on one process without `plugin`; return the numbers on the first rank."""
    set_environment(plugin)
    os.environ["HF_HUB_OFFLINE"] = "1"  # TRL writes a model card, and sends counts
    import trl
    from peft import LoraConfig

    import echelon.trainer

    trainer_class = trl.SFTTrainer if plugin is None else echelon.trainer.SFTTrainer
    torch.manual_seed(0)
    batches = dict(per_device_train_batch_size=8 // dp, per_device_eval_batch_size=8 // dp)
    trainer = trainer_class(
        llama(),
        trl.SFTConfig(output_dir=folder, eval_strategy="epoch", **ARGUMENTS, **batches),
        train_dataset=prompts(27, 1),
        eval_dataset=prompts(13, 2),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]),
        **({} if plugin is None else {"plugin": plugin}),
    )
    return result(trainer, Run(folder))


def without(history: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if not any(name in k for name in names)} for entry in history]


@pytest.fixture(scope="module")
def reference(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return pool.run(1, tuned, str(tmp_path_factory.mktemp("one")), None)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's and peft's own
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2 zero1", "tp2 pp2 dp2 zero1"])
def test_adapters_are_tuned_as_on_one_process(
    pool: Pool, reference: Any, tmp_path: Path, layout: str
) -> None:
    tried = LAYOUTS[layout]
    other = pool.run(tried.world, tuned, str(tmp_path), tried.plugin, tried.dp, timeout=240)[0]
    # Means over microbatches, and counts of padded rows: see docs/coming-from-trainer.md.
    names = ["num_tokens", "total_flos"] if tried.dp > 1 else []
    names += ["entropy", "accuracy", "num_tokens"] if "num_microbatches" in tried.plugin else []
    one = {**reference, "history": without(reference["history"], *names)}
    assert "adapter_model.safetensors" in one["files"] and len(one["weights"]) == 4 * 3 * 2
    assert differences(one, other, tolerance=TOLERANCE) == []


def preferred(folder: str, plugin: dict[str, Any] | None, dp: int = 1) -> dict[str, Any] | None:
    """Train a model on pairs of answers, on one process without `plugin`; return the numbers on the first rank."""
    set_environment(plugin)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import trl

    import echelon.trainer

    trainer_class = trl.DPOTrainer if plugin is None else echelon.trainer.DPOTrainer
    torch.manual_seed(0)
    pairs = (
        prompts(15, 1).rename_column("completion", "chosen").add_column("rejected", prompts(15, 2)["prompt"])
    )
    trainer = trainer_class(
        llama(),
        ref_model=llama(),
        args=trl.DPOConfig(output_dir=folder, per_device_train_batch_size=4 // dp, **ARGUMENTS),
        train_dataset=pairs,
        processing_class=tokenizer(),
        **({} if plugin is None else {"plugin": plugin}),
    )
    return result(trainer, Run(folder))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_preferences_are_learned_as_on_one_process(pool: Pool, tmp_path: Path) -> None:
    one = pool.run(1, preferred, str(tmp_path / "one"), None)[0]
    for plugin in (dict(tp_size=2), dict(pp_size=2, num_microbatches=1), dict(zero_stage=1)):
        dp = 2 if "zero_stage" in plugin else 1
        other = pool.run(2, preferred, str(tmp_path / "other"), plugin, dp, timeout=240)[0]
        reference = {
            **one,
            "history": without(one["history"], *["total_flos"] * (dp > 1)),
        }  # by padded lengths
        assert differences(reference, other, tolerance=TOLERANCE) == []
    divided = dict(pp_size=2, num_microbatches=2)
    with pytest.raises(ValueError, match=r"8 rows for 4 samples.*use num_microbatches=1"):
        pool.run(2, preferred, str(tmp_path / "divided"), divided)
