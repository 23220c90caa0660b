"""Misuse of echelon.Trainer: one message on every rank, with what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.trainer.internals import checkpoint_of

from ..pool import Pool
from ..slow import slow_row
from .runs import QUIET, llama, texts


def quiet(folder: str, *, kind: Any = None, batch_size: int = 4, **settings: Any) -> Any:
    """Return TrainingArguments, or a subclass, of a run on CPUs that prints nothing."""
    from transformers import TrainingArguments

    sizes = dict(per_device_train_batch_size=batch_size, per_device_eval_batch_size=batch_size)
    return (kind or TrainingArguments)(folder, **sizes, **QUIET, **settings)


def refused(folder: str, settings: dict[str, Any], plugin: Any) -> str:
    """Return the error of constructing a trainer."""
    from echelon import Trainer

    args = quiet(folder, **settings)
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

    args = quiet(folder, max_steps=1, gradient_accumulation_steps=2)
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


def asked_on_one_rank(folder: str, plugin: dict[str, Any]) -> tuple[list[str], Any]:
    """Train with callbacks and metrics of which each rank has others; return what was done, and a metric."""
    import torch.distributed as dist
    from transformers import TrainerCallback

    from echelon import Trainer

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if dist.get_rank() == 1:
                control.should_log = state.global_step == 1
                control.should_evaluate = state.global_step == 2
                control.should_save = state.global_step == 3
                control.should_training_stop = state.global_step == 4

    def metrics(prediction: Any) -> dict[str, float]:
        return {"rows": len(prediction.label_ids)} if dist.get_rank() == 0 else {}

    args = quiet(folder, max_steps=6, save_strategy="no")
    data = dict(train_dataset=texts(64), eval_dataset=texts(8))
    trainer = Trainer(llama(), args, **data, compute_metrics=metrics, callbacks=[Asks()], plugin=plugin)
    trainer.train()
    history = trainer.state.log_history
    done = [f"{name} {entry['step']}" for entry in history for name in ("loss", "eval_loss") if name in entry]
    done += [path.name for path in Path(folder).glob("checkpoint-*")]
    return [*done, f"end {trainer.state.global_step}"], [e["eval_rows"] for e in history if "eval_rows" in e]


@pytest.mark.parametrize("plugin", [{}, slow_row(dict(pp_size=2, num_microbatches=2))], ids=str)
def test_what_a_callback_of_one_rank_asks_for_is_done_on_all(
    pool: Pool, tmp_path: Path, plugin: dict[str, Any]
) -> None:
    done = ["loss 1", "eval_loss 2", "checkpoint-3", "end 4"], [8]
    assert pool.run(2, asked_on_one_rank, str(tmp_path), plugin) == [done] * 2


def failing_on_one_rank(folder: str, kind: str, plugin: dict[str, Any]) -> None:
    """Train with metrics or data that fail on rank 1."""
    from itertools import islice

    import torch.distributed as dist

    from echelon import Trainer

    fails = dist.get_rank() == 1

    class ShortLoader(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            if fails and kind == "data" and self.state.global_step == 1:
                epoch_iterator = islice(epoch_iterator, 0)
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def metrics(prediction: Any) -> dict[str, float]:
        if fails and kind == "metrics":
            raise KeyError("no such metric")
        return {}

    args = quiet(folder, max_steps=3, eval_strategy="steps", eval_steps=2)
    data = dict(train_dataset=texts(64), eval_dataset=texts(8))
    ShortLoader(llama(), args, **data, compute_metrics=metrics, plugin=plugin).train()


def test_an_error_of_one_rank_is_named_on_the_others(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run_failing(2, failing_on_one_rank, str(tmp_path), "metrics", {})
    assert isinstance(second, KeyError)
    assert type(first).__name__ == "RankFailure" and "rank 1 failed: KeyError: 'no such metric'" in str(first)


@pytest.mark.slow
def test_a_rank_without_a_batch_is_named(pool: Pool, tmp_path: Path) -> None:
    errors = pool.run_failing(
        2, failing_on_one_rank, str(tmp_path), "data", dict(pp_size=2, num_microbatches=2)
    )
    assert all("the end of Trainer's data" in str(error) for error in errors)


def overwritten_in_part(folder: str) -> None:
    """Train twice into one folder; the second run fails between the weights and the optimizer."""
    from echelon import Trainer

    class Fails(Trainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            raise OSError("no space left")

    for kind in (Trainer, Fails):
        args = quiet(folder, max_steps=1, save_steps=1)
        kind(llama(), args, train_dataset=texts(8), plugin={}).train()


def test_a_checkpoint_that_a_second_run_has_overwritten_in_part_is_passed_over(
    pool: Pool, tmp_path: Path
) -> None:
    (error,) = pool.run_failing(1, overwritten_in_part, str(tmp_path))
    assert isinstance(error, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        checkpoint_of(True, str(tmp_path))


def constructed(folder: str, by_name: bool) -> str:
    """Return the folder of a trainer whose class has a constructor of its own."""
    import transformers

    from echelon.trainer import EchelonTrainerMixin

    class Derived(transformers.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class Boosted(EchelonTrainerMixin, Derived):
        pass

    args = quiet(folder)
    trainer = Boosted(model=llama(), args=args) if by_name else Boosted(llama(), args)
    return trainer.args.output_dir


def test_arguments_pass_through_constructors_of_derived_classes(pool: Pool, tmp_path: Path) -> None:
    for by_name in (True, False):
        assert pool.run(1, constructed, str(tmp_path), by_name) == [str(tmp_path)]
