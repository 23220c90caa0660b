"""Trainer under a plugin, by its documented hooks; what depends on its internals stands in internals.py."""

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from ..cluster.failures import naming_failures
from ..cluster.gathering import gather_integers
from ..cluster.objects import broadcast_object
from ..pipeline.runner import Criterion
from ..plugins.microbatch_weights import model_loss
from .arguments import prepared_plugin
from .batches import CompletedBatch, samples_of
from .boosted import BoostedTraining
from .internals import TrainerInternals, checkpoint_of, reporting
from .replay import recorded_call


class EchelonTrainerMixin(TrainerInternals):
    """transformers' Trainer, or a subclass of it, that trains under a plugin, with the numbers of one process.

        class MyTrainer(EchelonTrainerMixin, SFTTrainer): ...
        MyTrainer(model, args, train_dataset=data, plugin=HybridParallelPlugin(tp_size=2))

    The batch of a step is per_device_train_batch_size × gradient_accumulation_steps × the plugin's replicas. Every
    rank calls the same methods. See docs/coming-from-trainer.md.

    Args:
        args, kwargs: those of the trainer.
        plugin: a HybridParallelPlugin or LowLevelZeroPlugin, or the options of a HybridParallelPlugin as a dict; None
            is data parallelism.

    Raises:
        ValueError: TrainingArguments that cannot be honoured, or that contradict the plugin; all at once, on every
            rank.
    """

    def __init__(self, *args: Any, plugin: Any = None, **kwargs: Any) -> None:
        bound = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        # Constructors of derived classes may take them as one of `*args`.
        candidates = (bound.get("args"), kwargs.get("args"), *args)
        arguments = next((value for value in candidates if isinstance(value, TrainingArguments)), None)
        if arguments is None:
            arguments = kwargs["args"] = TrainingArguments(output_dir="tmp_trainer")
        self.plugin = prepared_plugin(arguments, plugin)
        self._returns_outputs = True
        # On the object, so that they come before the methods of classes derived from this one, too.
        self.compute_loss = self.pipelined_loss
        for name in ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"):
            setattr(self, name, partial(self.loader_of_class, name))
        super().__init__(*args, **kwargs)

    def boost(self) -> BoostedTraining:
        """Boost the model and its optimizer, unless that was done. Collective over the world.

        Without a training data set, the model alone.
        """
        if self.boosted is not None and self.boosted.stands_for is self.model:
            return self.boosted
        if self.train_dataset is not None and self.optimizer is None:
            self.create_optimizer()
        self._set_signature_columns_if_needed()  # of the forward, before it is replaced
        self.boosted = self.accelerator.boosted = BoostedTraining(self.model, self.optimizer, self.plugin)
        self.optimizer, self.model_wrapped = self.boosted.optimizer, self.boosted
        return self.boosted

    @property
    def _compute_loss_of_class(self) -> Any:
        """The class's `compute_loss`; None if the model's own loss is all that it returns."""
        compute: Any = type(self).compute_loss  # type: ignore[misc]
        has_other_loss = self.compute_loss_func is not None or self.label_smoother is not None
        return None if compute is Trainer.compute_loss and not has_other_loss else MethodType(compute, self)

    def pipelined_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Run the batch, with backward if gradients are enabled; return the loss of the global batch.

        It takes the place of the class's `compute_loss`, which is run on the last stage for each microbatch; see
        [Note: replay].
        """
        boosted, count = self.boost(), num_items_in_batch
        boosted.samples = samples_of(inputs)
        compute = self._compute_loss_of_class
        batch: Mapping[str, Any]
        criterion: Criterion | None = None
        if compute is not None:
            call = recorded_call(compute, boosted.stands_for, inputs, count)
            batch, criterion = boosted.replayed(
                compute,
                call,
                inputs,
                count,
                self.label_count,
                num_samples=self._samples_of_batch,
            )
        else:
            counted = (
                {"num_items_in_batch": count} if count is not None and self.model_accepts_loss_kwargs else {}
            )
            batch, criterion = boosted.counting({**inputs, **counted}, model_loss)
        returns_outputs = return_outputs and self._returns_outputs
        loss, outputs = boosted.run(
            batch,
            criterion=criterion,
            returns_loss=True,
            returns_outputs=returns_outputs,
            will_be_scaled=self.divides_loss(count),
        )
        if boosted.model.training:
            boosted.samples = None
        return (loss, outputs if returns_outputs else {}) if return_outputs else loss

    @property
    def _samples_of_batch(self) -> int:
        """The samples of a replica's batch, of which the last one may have fewer."""
        is_training: bool = self.boost().model.training
        return self._train_batch_size if is_training else self.args.eval_batch_size

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the next batches of this replica, and the number of labels in those of all replicas."""
        batches = []
        for _ in range(num_batches):
            if (batch := next(epoch_iterator, None)) is None:
                break
            batches.append(self.completed(batch))
        if len(batches) < num_batches:
            self._compare_end_of_data(len(batches))
        return batches, self._get_num_items_in_batch(batches, device)

    @naming_failures("the end of Trainer's data")
    def _compare_end_of_data(self, number: int) -> None:
        """Raise if other ranks have another number of batches left. Collective over the world."""
        mesh = self.plugin.mesh
        numbers = [values[0] for values in gather_integers([number], mesh.side_group())]
        if len({*numbers}) > 1:
            raise ValueError(
                f"rank(s) {[rank for rank, n in enumerate(numbers) if n < max(numbers)]} have no more batches, but "
                "others have: give all ranks the same data set, of which each replica takes its samples"
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train. Collective over the world.

        Args:
            resume_from_checkpoint: a folder; or True for the last one in output_dir, without those that a run has
                not written to the end.
            args, kwargs: those of the trainer.
        """
        with reporting("Trainer.train"):
            self._look_for_callbacks_of_users()
            checkpoint = checkpoint_of(resume_from_checkpoint, str(self.args.output_dir))
            return super().train(checkpoint, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. Collective over the world."""
        with reporting("Trainer.evaluate"):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict. Collective over the world."""
        with reporting("Trainer.predict"):
            return super().predict(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Evaluate a batch; the loss is that of the global batch, outputs are those of this replica, on all ranks."""
        inputs = self.completed(inputs)
        boosted = self.boost()
        boosted.samples = samples_of(inputs)
        self._returns_outputs = not prediction_loss_only
        try:
            return super().prediction_step(boosted, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            self._returns_outputs = True

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of a step."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.plugin.dp_size)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the operations of a batch of this replica, on its first rank alone, since Trainer adds up ranks."""
        mesh, name = self.plugin.mesh, getattr(self.model, "main_input_name", "input_ids")
        if any(mesh.rank(axis) for axis in ("tp", "pp", "sp")) or name not in inputs:
            return 0
        inputs = inputs.real() if isinstance(inputs, CompletedBatch) else inputs
        return int(6 * inputs[name].numel() * self.boost().num_parameters)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log on every rank; metrics that TRL's `compute_loss` collects come from the last stage."""
        mesh = self.plugin.mesh
        if mesh.size("pp") > 1 and hasattr(self, "_metrics"):
            last = self.plugin.config.stage_ranks[-1]
            values = {name: getattr(self, name, None) for name in ("_metrics", "_total_train_tokens")}
            for name, value in broadcast_object(values, last, mesh.group("pp"), mesh.device).items():
                setattr(self, name, value)
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder for `from_pretrained`, or for peft the adapters. Collective over the world."""
        Path(self.args.output_dir if output_dir is None else output_dir).mkdir(parents=True, exist_ok=True)
        super().save_model(output_dir, _internal_call=_internal_call)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError: ranks do not search together."""
        raise ValueError(
            "hyperparameter_search is not available under a plugin: run one Trainer for each set of values"
        )
