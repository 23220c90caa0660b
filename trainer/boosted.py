"""The boosted model of a Trainer, as Trainer sees it: one model with the global batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..booster import Booster
from ..pipeline.image_rows import image_rows
from ..pipeline.microbatch import split
from ..pipeline.runner import Criterion
from ..plugins import HybridParallelPlugin
from ..plugins.microbatch_weights import Uncounted
from .batches import BatchSamples, rows
from .fused_head import remove_fused_head
from .replay import ModelInputs, Replayed, ReplayedLoss, address


class BoostedTraining:
    """A boosted model with its optimizer, in the place of the model that Trainer trains and evaluates.

    Boosts model and optimizer; collective over the world.

    Args:
        model: transformers' model, or peft's wrapper of it; changed in place.
        optimizer: over its parameters; None for evaluation alone.
        plugin: the layout.

    Attributes:
        model: what `boost` returned.
        stands_for: transformers' model, or peft's wrapper of it.
        num_parameters: those of the full model without embeddings.
        samples: of the batch that is computed, if it is the last one of all replicas; None for all others.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, plugin: HybridParallelPlugin
    ) -> None:
        self.stands_for, self.plugin = model, plugin
        self.num_parameters: int = model.num_parameters(exclude_embeddings=True)  # type: ignore[operator]
        _undo_checkpointing(model)
        remove_fused_head(model)
        self.booster = Booster(plugin=plugin)
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self._loss: Tensor | None = None
        self.samples: BatchSamples | None = None
        self._num_skipped = self._num_calls = 0  # steps skipped before this one; calls in this step
        self._is_deferred = False

    # Trainer's calls of a model.

    def train(self, mode: bool = True) -> "BoostedTraining":
        """Set the mode of the boosted model, and of peft's wrapper."""
        self.model.train(mode)
        self.stands_for.train(mode)
        return self

    def eval(self) -> "BoostedTraining":
        """Set the mode of evaluation."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._num_calls = 0
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parameters."""
        return self.model.parameters()

    def __call__(self, **inputs: Any) -> Any:
        """Return the model's outputs for a batch of this replica, on every rank. Collective over the world.

        Without gradients, their loss is that of the global batch.
        """
        if torch.is_grad_enabled():
            return self.run(inputs, criterion=None, returns_loss=False, returns_outputs=True)[1]
        batch, criterion = self.counting(inputs, _loss_if_any)
        loss, outputs = self.run(batch, criterion=criterion, returns_loss=True, returns_outputs=True)
        if getattr(outputs, "loss", None) is not None:
            outputs.loss = loss
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)

    # The pipeline.

    def run(
        self,
        inputs: Mapping[str, Any],
        *,
        criterion: Callable[..., Any] | None,
        returns_loss: bool,
        returns_outputs: bool,
        will_be_scaled: bool = False,
    ) -> tuple[Tensor | None, Any]:
        """Run a batch, with backward if gradients are enabled. Collective over the world.

        Args:
            inputs: the batch of this replica, by the model's arguments.
            criterion: see `Booster.execute_pipeline`.
            returns_loss, returns_outputs: what is returned.
            will_be_scaled: `scale_gradients` will multiply by another factor than 1. Gradients are then averaged over
                the replicas behind it, since those of several calls are added when they are averaged.

        Returns:
            The loss of the global batch, to be given to `scale_gradients` in training; and the outputs for this
            replica's batch. None each if not requested.
        """
        trains = torch.is_grad_enabled() and returns_loss
        self._is_deferred = trains and will_be_scaled
        deferring = self.booster.no_sync(self.model, self.optimizer) if self._is_deferred else nullcontext()
        with torch.set_grad_enabled(trains), deferring:
            result = self.booster.execute_pipeline(
                iter([dict(inputs)]),
                self.model,
                criterion,
                self.optimizer if trains else None,
                return_loss=returns_loss,
                return_outputs="all_ranks" if returns_outputs else False,
            )
        if not returns_loss:
            return None, result["outputs"]
        loss = result["loss"].detach().as_subclass(Tensor)
        self._loss = loss.clone().requires_grad_() if trains else loss
        return self._loss, result["outputs"]

    def scale_gradients(self, loss: Tensor) -> None:
        """Multiply the last call's gradients by the derivative of `loss` by the loss that `run` returned."""
        if self._loss is None:
            raise ValueError(
                "training_step gives accelerator.backward a loss that is not of self.compute_loss: call that once for "
                "each batch, and compute other losses in it"
            )
        if loss is not self._loss:
            factor = torch.autograd.grad(loss, self._loss)[0]
            if not self._is_deferred and self._num_calls and factor.item() != 1:
                raise ValueError(
                    f"training_step multiplies the loss by {factor.item():g} behind compute_loss, where gradients of "
                    "several calls are added already: multiply in compute_loss, or set loss_is_scaled_for_ga=False"
                )
            self.optimizer.gradient_factor = self.optimizer.gradient_factor * factor
        self._loss = None
        self._num_skipped = self.optimizer.skipped_steps
        self._num_calls += 1

    def was_skipped(self) -> bool:
        """Return True if the optimizer has skipped the last step."""
        return bool(self.optimizer.skipped_steps > self._num_skipped)

    def counting(
        self, inputs: Mapping[str, Any], criterion: Criterion
    ) -> tuple[Mapping[str, Any], Criterion]:
        """Return the batch of the pipeline, and a criterion that leaves out copies; see [Note: short last batch]."""
        if self.samples is None or self.samples.counted == self.samples.taken:
            return inputs, criterion
        batch = self.model.engine.to_compute(dict(inputs))  # once, so that slices have one address
        microbatches = split(batch, rows=image_rows(inputs, self.model.module.config), **self._cutting)
        copies = {address(microbatch) for microbatch in microbatches[self.samples.counted :]}

        def without_copies(outputs: Any, microbatch: Any) -> Any:
            result = criterion(outputs, microbatch)
            return Uncounted(result) if address(microbatch) in copies else result

        return batch, without_copies

    @property
    def _cutting(self) -> Any:
        return self.plugin.config.cutting

    def replayed(
        self,
        compute: Callable[..., Any],
        call: ModelInputs,
        inputs: Mapping[str, Any],
        count: Any,
        count_labels: Callable[[Mapping[str, Any]], Tensor | int],
        *,
        num_samples: int,
    ) -> tuple[dict[str, Any], ReplayedLoss]:
        """Return the batch of the pipeline, and the criterion that computes `compute_loss` on its microbatches.

        Args:
            num_samples: of a batch; more rows are several of a sample, which belong together.

        Raises:
            ValueError: rows of a sample would be divided among microbatches.
        """
        model_inputs = self.model.engine.to_compute(call.inputs)  # once, so that slices have one address
        count_of_rows = rows(model_inputs) or 0
        is_divisible = count_of_rows == rows(inputs) and count_of_rows <= num_samples
        if not is_divisible and self._cutting != {"num_microbatches": 1, "microbatch_size": None}:
            raise ValueError(
                f"compute_loss calls the model with {count_of_rows} rows for {min(num_samples, rows(inputs) or 0)} "
                "samples, so microbatches cannot be computed on their own: use num_microbatches=1, and smaller batches "
                "with gradient_accumulation_steps"
            )
        image = image_rows(call.inputs, self.model.module.config)
        microbatches = split(model_inputs, rows=image, **self._cutting)
        native_microbatches = (
            [dict(inputs)] if len(microbatches) == 1 else split(dict(inputs), rows=image, **self._cutting)
        )
        mesh, samples = self.plugin.mesh, self.samples
        counted = len(microbatches)
        total = count_of_rows * mesh.size("dp")
        if samples is not None:
            counted = counted if samples.counted == samples.taken else samples.counted
            total = count_of_rows * samples.total // samples.taken
        pairs = zip(microbatches, native_microbatches, strict=True)
        criterion = ReplayedLoss(
            compute,
            self.stands_for,
            {
                address(microbatch): Replayed(native, (rows(microbatch) or 0) / total, index < counted)
                for index, (microbatch, native) in enumerate(pairs)
            },
            count,
            other_call=None if mesh.size("pp") > 1 else self.model.module,
            count_labels=count_labels,
            weight_of=self._weight_of_own_loss,
        )
        return model_inputs, criterion

    def _weight_of_own_loss(self, loss: Any) -> Tensor | float | None:
        """Return what a mean counted that the model made of the last microbatch; 0 for a sum, None if it is unknown."""
        observed = self.model.engine.observed_losses
        if loss is None or observed is None:
            return None
        record = observed.record_of(loss)
        if record is not None:
            return 0.0 if record.denominator is None else record.denominator
        return 0.0 if any(record.denominator is None for record in observed.losses) else None


def _loss_if_any(outputs: Any, _: Any) -> Tensor:
    loss = getattr(outputs, "loss", None)
    return torch.zeros(()) if loss is None else loss


def _undo_checkpointing(model: nn.Module) -> None:
    """Turn off transformers' recomputation, which Trainer turns on before it wraps: the plugin has its own."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        # Two names: the first is new in transformers 5.2x.
        names = ("activation_checkpointing_disable", "gradient_checkpointing_disable")
        getattr(model, next(name for name in names if hasattr(model, name)))()
    if getattr(model, "_require_grads_hook", None) or getattr(model, "_require_grads_hooks", None):
        model.disable_input_require_grads()  # type: ignore[operator]
