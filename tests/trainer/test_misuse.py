"""Misuse of echelon.Trainer: one message on every rank, with what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ..pool import Pool
from .runs import llama, texts


def refused(folder: str, settings: dict[str, Any], plugin: Any) -> str:
    """Return the error of constructing a trainer."""
    from transformers import TrainingArguments

    from echelon import Trainer

    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", **settings)
    with pytest.raises(ValueError) as error:
        Trainer(llama(), args, train_dataset=texts(8), plugin=plugin)
    return str(error.value)


def test_arguments_are_refused_on_every_rank_at_construction(pool: Pool, tmp_path: Path) -> None:
    settings = dict(neftune_noise_alpha=5.0, auto_find_batch_size=True)
    plugin = dict(tp_size=2, precision="bf16", max_norm=1.0)
    one, other = pool.run(2, refused, str(tmp_path), settings, plugin)
    assert one == other and one.startswith("4 errors:")
    names = ("neftune_noise_alpha=5.0", "auto_find_batch_size=True", "precision='bf16'", "max_norm=1.0")
    assert all(name in one for name in names)


def misused(folder: str, kind: str) -> None:
    """Train with a `compute_loss` or `training_step` that cannot be replayed."""
    from transformers import TrainingArguments

    from echelon import Trainer

    class Twice(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            loss = model(**inputs).loss
            return loss + model(**{**inputs, "input_ids": inputs["input_ids"].flip(1)}).loss

    class Never(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            return torch.zeros(())

    class Rescaled(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss * 3)
            return loss.detach()

    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        max_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        dataloader_pin_memory=False,
    )
    classes = {"twice": Twice, "never": Never, "rescaled": Rescaled}
    plugin = dict(pp_size=2, num_microbatches=2) if kind == "twice" else {}
    trainer = classes[kind](llama(), args, train_dataset=texts(16), plugin=plugin)
    trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("twice", "compute_loss calls the model again with other inputs"),
        ("never", "without calling the model"),
        ("rescaled", "training_step multiplies the loss by 3"),
    ],
)
def test_a_loss_that_cannot_be_computed_is_refused_by_name(
    pool: Pool, tmp_path: Path, kind: str, message: str
) -> None:
    errors = pool.run_failing(2, misused, str(tmp_path), kind)
    assert all(errors) and any(message in str(error) for error in errors)
