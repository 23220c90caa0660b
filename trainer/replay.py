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
from ..plugins.microbatch_weights import Uncounted
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


class ObservedUse(Tensor):
    """A value given to `compute_loss` that notes if a loss was computed with it."""

    was_used = False
    reads: frozenset[str] = frozenset()  # functions that do not make a loss of it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__imul__", "mul_") and isinstance(args[1], int) and args[1] == 1:  # Trainer's own
            return args[0]
        for arg in args:
            if isinstance(arg, ObservedUse) and name not in arg.reads:
                arg.was_used = True
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(Tensor) if isinstance(result, Tensor) else result


class OwnLoss(ObservedUse):
    """The model's own loss, which `compute_loss` may also log."""

    reads = frozenset(("item", "detach", "tolist", "numpy", "__float__", "__format__", "__repr__", "__get__"))


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
    is_fused = bool(arguments.pop(FUSED, False))
    return ModelInputs(_without_labels(arguments) if is_fused else arguments, is_fused)


def _without_labels(arguments: Mapping[str, Any]) -> dict[str, Any]:
    dropped = ("labels", "shift_labels", "num_items_in_batch", FUSED)
    return {name: value for name, value in arguments.items() if name not in dropped}


class Replayed(NamedTuple):
    """A microbatch on which `compute_loss` is run.

    Args:
        inputs: Trainer's.
        share: its rows of those in the batch of all replicas.
        is_counted: False for copies that complete a batch.
    """

    inputs: Mapping[str, Any]
    share: float
    is_counted: bool


class ReplayedLoss:
    """The criterion that runs `compute_loss` on the outputs of a microbatch; see [Note: replay].

    [Note: sums and means] A loss may have addends that were divided by `num_items_in_batch`, in it or in the model,
    and others that are means over a microbatch. Only the former add up over microbatches. So `compute_loss` gets these
    divided by the microbatch's share of the batch: then all are means, of which a microbatch weighs its share.

    Args:
        compute: the subclass's `compute_loss`.
        model: the transformers model, or peft's wrapper of it.
        microbatches: by the address of their first tensor.
        count: `num_items_in_batch`, or None.
        other_call: computes another call of the model; None refuses it.
        count_labels: returns the number of labels of a microbatch.
        weight_of: returns what the model's own loss counted, 0 for a sum, or None if it is unknown.
    """

    def __init__(
        self,
        compute: Compute,
        model: nn.Module,
        microbatches: Mapping[int, Replayed],
        count: Any,
        *,
        other_call: Callable[..., Any] | None,
        count_labels: Callable[[Mapping[str, Any]], Tensor | int],
        weight_of: Callable[[Any], Tensor | float | None],
    ) -> None:
        self._compute, self._model, self._microbatches, self._count = compute, model, microbatches, count
        self._other_call, self._count_labels, self._weight_of = other_call, count_labels, weight_of

    def __call__(self, outputs: Any, microbatch: Mapping[str, Any]) -> Any:
        """Return the loss of a microbatch, or its sum and weight; `Uncounted` for copies."""
        replayed = self._microbatches[address(microbatch)]
        result = self._result(outputs, replayed)
        if replayed.is_counted:
            return result
        # Not of the loss itself, which may be NaN where all labels are ignored.
        return Uncounted((_zero(outputs), 0.0) if isinstance(result, tuple) else result)

    def _result(self, outputs: Any, replayed: Replayed) -> Any:
        """Return the loss of a microbatch, or its sum and weight.

        A loss that is the model's own is returned as it is, and weighs what the model counted. One with sums weighs its
        share of the batch, see [Note: sums and means]. Any other weighs what its loss function counted, what the
        model's own loss counted of which it was made, or else its labels.
        """
        native_loss = getattr(outputs, "loss", None)
        own_weight = self._weight_of(native_loss)
        is_sum = self._count is not None and isinstance(own_weight, float)
        own_loss = None
        if native_loss is not None:
            own_loss = (native_loss / replayed.share if is_sum else native_loss.clone()).as_subclass(OwnLoss)
        count = self._count
        if count is not None:
            count = (torch.as_tensor(count) * replayed.share).as_subclass(ObservedUse)
        answers = _Answers(outputs, own_loss, self._other_call)
        observer = LossObserver()
        with observer:
            loss = self._compute(
                ModelStandIn(self._model, answers), dict(replayed.inputs), num_items_in_batch=count
            )
        if own_loss is not None and loss is own_loss:
            return native_loss
        is_of_own = own_loss is not None and own_loss.was_used
        if is_sum and is_of_own and replayed.share < 1 and getattr(outputs, "aux_loss", None) is not None:
            raise ValueError(
                "compute_loss changes the loss of a model with an auxiliary loss of experts, which is no sum over "
                "microbatches as the rest is: compute the loss from outputs.logits and outputs.aux_loss"
            )
        if (count is not None and count.was_used) or (is_sum and is_of_own):
            return loss * replayed.share, replayed.share
        record = observer.record_of(loss)
        weight: Any = None if record is None else record.denominator
        if weight is None and is_of_own and isinstance(own_weight, Tensor):
            weight = own_weight
        if weight is None:
            weight = self._count_labels(replayed.inputs)
        return loss * weight, weight


def _zero(outputs: Any) -> Tensor:
    """Return 0 with the graph of a model's outputs."""
    values = outputs.values() if hasattr(outputs, "values") else outputs
    tensors = [gathered(value) for value in values if isinstance(value, Tensor)]
    value = next((tensor for tensor in tensors if tensor.requires_grad), tensors[0])
    return value.float().sum() * 0


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
            if not arguments.get(FUSED):
                return self._other_call(**arguments)
            return FusedOutputs(gathered(self._other_call(**_without_labels(arguments)).logits), arguments)
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
