"""Observe where the last stage computes its loss, and what each loss counted.

[Note: counted losses] The loss of a batch is the mean over everything that its microbatches counted, so a microbatch
weighs as much as it counted. That is known only where the loss is computed: labels may be shifted, and some ignored. A
`TorchFunctionMode` sees the calls of torch's loss functions between the last layer and the end of the forward; it never
slows down a layer. `Observed` has the loss tensors with what they counted, on the device, and nothing waits for it.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from .runner import StageLike


class Counted(NamedTuple):
    """A loss and the number that its mean divides by, 0-d; None for a sum, which is divided by nothing."""

    loss: Tensor
    number: Tensor | None


def divided(total: Tensor, count: Tensor | int, *, adds_up: bool = False) -> Tensor:
    """Return a summed loss over the number of its labels; 0 without labels while it is observed.

    Args:
        total: the sum, 0-d.
        count: of the labels, on all ranks that share the loss.
        adds_up: the count is the caller's, of more than this microbatch.
    """
    if has_torch_function_unary(total):
        return handle_torch_function(divided, (total,), total, count, adds_up=adds_up)
    return total / count


class Observed(TorchFunctionMode):
    """A context in which losses are recorded.

    Attributes:
        losses: the losses in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Counted] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; record the result of a loss function."""
        kwargs = kwargs or {}
        if func is divided:
            return self._divided(*args, **kwargs)
        if func not in _COUNTS:
            return func(*args, **kwargs)
        given = _signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        arguments = given.arguments
        if arguments["reduction"] == "none" or _divides_otherwise(func, arguments):
            return func(*args, **kwargs)
        loss, number = _evaluate(func, arguments)
        self.losses.append(Counted(loss, number))
        return loss

    def _divided(self, total: Tensor, count: Tensor | int, *, adds_up: bool) -> Tensor:
        if adds_up:
            loss = total / count
            self.losses.append(Counted(loss, None))
            return loss
        number = torch.as_tensor(count, device=total.device)
        loss = total / number.clamp_min(1)
        self.losses.append(Counted(loss, number))
        return loss

    def counted(self, loss: Any) -> Counted | None:
        """Return the record of this very tensor, None if it is no loss function's result."""
        return next((each for each in self.losses if each.loss is loss), None)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _divides_otherwise(function: Any, given: dict[str, Any]) -> bool:
    """Return True for weights per entry, by whose sum a regression divides, and for torch's deprecated arguments."""
    has_weights = function in _REGRESSIONS and given.get("weight") is not None
    return has_weights or given.get("size_average") is not None or given.get("reduce") is not None


def _evaluate(function: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Call a loss function. Without counted labels a mean is 0, not NaN."""
    if given["reduction"] == "sum":
        return function(**given), None
    if given["reduction"] == "batchmean":
        return function(**given), _number(given["input"], given["input"].shape[0])
    number = _COUNTS[function](given)
    if given.get("label_smoothing"):
        return function(**{**given, "reduction": "sum"}) / torch.where(number > 0, number, 1), number
    loss = function(**given)
    # The kernels skip ignored labels in backward, so that a gradient of 0 stays one.
    return torch.where(number > 0, loss, 0.0) if function in _WITH_LABELS else loss, number


def _labels(given: dict[str, Any]) -> Tensor:
    """Return the number of labels that are not ignored, or the sum of their class weights."""
    scores, target, weight = given["input"], given["target"], given["weight"]
    if target.is_floating_point():  # probabilities of classes
        return _number(scores, scores.numel() // scores.shape[min(1, scores.dim() - 1)])
    kept = target != given["ignore_index"]
    if weight is None:
        return kept.sum()
    return (weight[target.masked_fill(~kept, 0)] * kept).sum()


def _entries(given: dict[str, Any]) -> Tensor:
    shape = torch.broadcast_shapes(given["input"].shape, given["target"].shape)
    return _number(given["input"], shape.numel())


def _samples(given: dict[str, Any]) -> Tensor:
    scores = given["log_probs"]
    return _number(scores, scores.shape[1] if scores.dim() > 2 else 1)


def _number(like: Tensor, value: int) -> Tensor:
    return torch.full((), value, device=like.device)


_WITH_LABELS = {F.cross_entropy, F.nll_loss}
_REGRESSIONS = {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss}
# By function: the number that its mean divides by.
_COUNTS: dict[Any, Callable[[dict[str, Any]], Tensor]] = {
    **dict.fromkeys(_WITH_LABELS, _labels),
    **dict.fromkeys(_REGRESSIONS, _entries),
    **dict.fromkeys((F.kl_div, F.binary_cross_entropy, F.binary_cross_entropy_with_logits), _entries),
    **dict.fromkeys((F.soft_margin_loss, F.poisson_nll_loss), _entries),
    F.ctc_loss: _samples,
}


class ObservedStage:
    """The last stage, whose losses are observed.

    Args:
        stage: the stage.
        last_layer: the losses are computed after it; None observes the complete forward.

    Attributes:
        observed: the losses of the last forward.
    """

    def __init__(self, stage: StageLike, last_layer: nn.Module | None) -> None:
        self._stage = stage
        self.index, self.is_first, self.is_last = stage.index, stage.is_first, stage.is_last
        self.observed = Observed()
        self._waits_for, self._state = last_layer, ""
        if last_layer is not None:
            last_layer.register_forward_hook(_Begin(self))

    def forward(self, microbatch: Any, received: tuple[Tensor, ...]) -> Any:
        """Return the model's outputs."""
        self.observed, self._state = Observed(), "before"
        try:
            if self._waits_for is None:
                self._begin()
            return self._stage.forward(microbatch, received)
        finally:
            if self._state == "open":
                self.observed.__exit__(None, None, None)
            self._state = ""

    def _begin(self) -> None:
        if self._state == "before":  # not in a recomputation, nor in another call
            self._state = "open"
            self.observed.__enter__()


class _Begin:
    """Hook of the last layer; in a copy of the layer it does nothing."""

    def __init__(self, stage: ObservedStage | None = None) -> None:
        self._stage = None if stage is None else ref(stage)

    def __call__(self, *_: Any) -> None:
        if self._stage is not None and (stage := self._stage()) is not None:
            stage._begin()

    def __reduce__(self) -> tuple[type["_Begin"], tuple[()]]:
        return _Begin, ()
