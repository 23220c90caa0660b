"""A Trainer's `compute_loss` as the criterion of a pipeline: its call of the model is recorded, then answered.

[Note: replay] `compute_loss(model, inputs)` calls a model and makes a loss of its outputs. Under a pipeline no rank has
the model, and a batch is several microbatches. So `compute_loss` first runs with a model that only records the
arguments of its call, and never returns: these are the pipeline's batch. On the last stage it then runs for every
microbatch, with a model that answers the same call with the outputs of the stage. So any subclass's `compute_loss`
works that calls the model once, or again with the same tensors. At pp_size=1 other calls go to the model itself.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..pipeline.counted_loss import LossObserver
from ..shardformer.layers.vocabulary_loss import ShardedLogits
from .fused_head import FUSED, FusedOutputs

Compute = Callable[..., Any]
# Arguments of a model that choose its loss, not its logits.
_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch", FUSED, "use_cache", "return_dict")


class _Recorded(BaseException):
    """Leaves `compute_loss`, which may catch exceptions, with the arguments of its call of the model."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__("the model was called")
        self.inputs = inputs


class ModelStandIn:
    """Stand-in for the model of a `compute_loss`: its calls are answered, all else is read from the model.

    Args:
        model: the transformers model, or peft's wrapper of it.
        answer: called with the arguments of a call by name.
    """

    def __init__(self, model: nn.Module, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.stands_for, self._answer = model, answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = inspect.signature(self.stands_for.forward).parameters
        return self._answer({**dict(zip(names, args, strict=False)), **kwargs})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)


class UsedCount(Tensor):
    """`num_items_in_batch` that notes if a loss was computed with it, and thus adds up over microbatches."""

    was_used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in args:
            if isinstance(arg, UsedCount):
                arg.was_used = True
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(Tensor) if isinstance(result, Tensor) else result


class ModelInputs(NamedTuple):
    """The arguments of a model's call, and whether it asks for TRL's fused outputs."""

    inputs: dict[str, Any]
    is_fused: bool


def recorded_call(compute: Compute, model: nn.Module, inputs: Mapping[str, Any], count: Any) -> ModelInputs:
    """Return the arguments with which `compute_loss` calls its model first.

    Raises:
        ValueError: it does not call it.
    """

    def record(arguments: dict[str, Any]) -> Any:
        raise _Recorded(arguments)

    try:
        compute(ModelStandIn(model, record), dict(inputs), num_items_in_batch=count)
    except _Recorded as call:
        arguments = call.inputs
    else:
        raise ValueError(
            "compute_loss makes a loss without calling the model that it was given: call model(**inputs) in it"
        )
    if not arguments.pop(FUSED, False):
        return ModelInputs(arguments, False)
    dropped = ("labels", "shift_labels", "num_items_in_batch")
    return ModelInputs({name: value for name, value in arguments.items() if name not in dropped}, True)


class ReplayedLoss:
    """The criterion that runs `compute_loss` on the outputs of a microbatch; see [Note: replay].

    Args:
        compute: the subclass's `compute_loss`.
        model: the transformers model, or peft's wrapper of it.
        microbatches: by the address of its first tensor, Trainer's inputs of each microbatch.
        count: `num_items_in_batch`, or None.
        num_losses: the microbatches of all replicas.
        other_call: computes another call of the model; None refuses it.
        count_labels: returns the number of labels of a microbatch.
    """

    def __init__(
        self,
        compute: Compute,
        model: nn.Module,
        microbatches: Mapping[int, Mapping[str, Any]],
        count: Any,
        *,
        num_losses: int,
        other_call: Callable[..., Any] | None,
        count_labels: Callable[[Mapping[str, Any]], Tensor | int],
    ) -> None:
        self._compute, self._model, self._microbatches = compute, model, microbatches
        self._count, self._num_losses = count, num_losses
        self._other_call, self._count_labels = other_call, count_labels

    def __call__(self, outputs: Any, microbatch: Mapping[str, Any]) -> Any:
        """Return the loss of a microbatch, or its sum and weight.

        A loss that is the model's own is returned as it is, and weighs what the model counted. One that was divided by
        `num_items_in_batch` adds up. Any other weighs what its loss function counted, or else its labels.
        """
        inputs = dict(self._microbatches[address(microbatch)])
        native_loss = getattr(outputs, "loss", None)
        answers = _Answers(outputs, None if native_loss is None else native_loss.clone(), self._other_call)
        count = self._count
        if count is not None:
            count = torch.as_tensor(count).as_subclass(UsedCount)
        observer = LossObserver()
        with observer:
            loss = self._compute(ModelStandIn(self._model, answers), inputs, num_items_in_batch=count)
        if loss is answers.loss:
            return native_loss
        if count is not None and count.was_used:
            return loss * self._num_losses, 1.0
        record = observer.record_of(loss)
        weight: Any = None if record is None else record.denominator
        if weight is None:
            weight = self._count_labels(self._microbatches[address(microbatch)])
        return loss * weight, weight


class _Answers:
    """Answers to the calls of one `compute_loss`: all with the same tensors get the outputs of the stage.

    Args:
        outputs: of the stage.
        loss: a copy of their loss, which a caller may change in place; None without.
        other_call: see `ReplayedLoss`.
    """

    def __init__(self, outputs: Any, loss: Tensor | None, other_call: Callable[..., Any] | None) -> None:
        self.loss, self._outputs, self._other_call = loss, outputs, other_call
        self._first: dict[str, Any] | None = None

    def __call__(self, arguments: dict[str, Any]) -> Any:
        call = {name: value for name, value in arguments.items() if name not in _OF_LOSS}
        if self._first is None:
            self._first = call
        if call.keys() != self._first.keys() or any(
            isinstance(value, Tensor) and value is not self._first[name] for name, value in call.items()
        ):
            if self._other_call is None:
                raise ValueError(
                    "compute_loss calls the model again with other inputs, which a pipeline cannot compute: use "
                    "pp_size=1, or make one call of both"
                )
            return self._other_call(**arguments)
        if arguments.get(FUSED):
            return FusedOutputs(gathered(self._outputs.logits), arguments)
        return _with(self._outputs, self.loss)


def _with(outputs: Any, loss: Tensor | None) -> Any:
    """Return a copy of a model's outputs with another loss, and all logits."""
    if not hasattr(outputs, "items"):
        return outputs
    values = {name: gathered(value) for name, value in outputs.items()}
    return type(outputs)(**{**values, **({} if loss is None else {"loss": loss})})


def gathered(value: Any) -> Any:
    """Return logits in full. All-gather over tp or sp if they are sharded."""
    return value.gather() if isinstance(value, ShardedLogits) else value


def address(microbatch: Mapping[str, Any]) -> int:
    """Return the address of the first tensor with rows, which a slice of a batch has for itself.

    Rows of an expanded tensor, whose stride is 0, share one address.
    """
    return next(
        value.data_ptr()
        for value in microbatch.values()
        if isinstance(value, Tensor) and value.dim() > 0 and value.stride(0) > 0
    )


def rows(batch: Mapping[str, Any]) -> int | None:
    """Return the rows of a batch's first tensor; None if it has none."""
    return next(
        (len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0), None
    )
