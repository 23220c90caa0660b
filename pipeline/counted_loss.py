"""Observe where the last stage computes its loss, and what each loss counted.

[Note: counted losses] The loss of a batch is the mean over everything that its microbatches counted, so a microbatch
weighs as much as it counted. That is known only where the loss is computed: labels may be shifted, and some ignored. A
`TorchFunctionMode` sees the calls of torch's loss functions between the last layer and the end of the forward; it never
slows down a layer. `LossObserver` has the loss tensors with what they counted, on the device, and nothing waits for it.

[Note: separate terms] A model may add several losses, even in place, and scale the sum. In `separate` mode the model
gets a copy of each loss, and the loss itself is kept as a term. The graph between them has the coefficients. Without
gradients a graph of these scalars alone is made. Counts are then recorded as functions of labels too; see
[Note: label functions] in label_functions.py.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_leaves, tree_map_only

from .label_functions import LabelEvaluator, LabelFunction, LabelFunctions, version_of
from .runner import StageLike


class CountedLoss(NamedTuple):
    """Record of one call of a loss function.

    Args:
        loss: the result that the model got, 0-d.
        denominator: what its mean divides by, 0-d: the number of labels, entries or samples; None for a sum.
        term: in `separate` mode the result itself, of which `loss` is a copy; else `loss`.
        version: the version counter of `loss`, which changes if another term is added in place.
        recount: returns `denominator` for another microbatch; None if it is not a function of labels.
        has_graph: the result had a graph; False if `separate` mode made a leaf of it.
        depends_on_batch: False if its target is known to be independent of the batch: positions of pairs.
    """

    loss: Tensor
    denominator: Tensor | None
    term: Tensor
    version: int
    recount: Callable[[LabelEvaluator], Tensor] | None = None
    has_graph: bool = True
    depends_on_batch: bool = True


def divide_by_count(total: Tensor, count: Tensor | int, *, adds_up: bool = False) -> Tensor:
    """Return a summed loss over the number of its labels; 0 without labels while it is observed.

    Args:
        total: the sum, 0-d.
        count: of the labels, on all ranks that share the loss.
        adds_up: the count is the caller's, of several microbatches, whose losses are added instead of averaged.
    """
    if has_torch_function_unary(total):
        return handle_torch_function(divide_by_count, (total,), total, count, adds_up=adds_up)
    return total / count


_IS_UNOBSERVED = ContextVar("_IS_UNOBSERVED", default=False)


@contextmanager
def unobserved() -> Iterator[None]:
    """Return a context in which no loss is recorded, for losses of slices that are added to one loss."""
    token = _IS_UNOBSERVED.set(True)
    try:
        yield
    finally:
        _IS_UNOBSERVED.reset(token)


class LossObserver(TorchFunctionMode):
    """A context in which the results of torch's loss functions are recorded; see [Note: counted losses].

    Args:
        microbatch: whose labels they count; needed with `separate`.
        separate: keep several losses separate; see [Note: separate terms].

    Attributes:
        losses: the records, in the order of the calls.
    """

    def __init__(self, microbatch: Any = None, *, separate: bool = False) -> None:
        super().__init__()
        self.losses: list[CountedLoss] = []
        self.separate = separate
        # Without gradients, a graph of the losses alone gives the coefficients of the terms.
        self._makes_graph = separate and not torch.is_grad_enabled()
        self._functions = LabelFunctions(microbatch) if separate else None

    @torch.compiler.disable  # a compiled model has a graph up to its loss, and another after it
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; if it is a loss function with a mean or a sum, record its result.

        In `separate` mode also record the functions by which a model makes targets of labels.
        """
        kwargs = kwargs or {}
        if func is divide_by_count:
            return self._divide_by_count(*args, **kwargs)
        if func not in _COUNTS:
            return func(*args, **kwargs) if self._functions is None else self._call_other(func, args, kwargs)
        if _IS_UNOBSERVED.get():
            return func(*args, **kwargs)
        bound = _SIGNATURES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        if arguments["reduction"] == "none" or _has_other_denominator(func, arguments):
            return func(*args, **kwargs)
        loss, denominator = _evaluate(func, arguments)
        target = arguments["target_lengths" if func is F.ctc_loss else "target"]
        label_function = self._function_of(target)
        if func in _WITH_LABELS and not target.is_floating_point():
            return self._add(
                loss, denominator, label_function, partial(_recount_labels, {**arguments, "input": None})
            )
        recount = None if denominator is None else partial(_in_proportion, denominator, target.numel())
        return self._add(loss, denominator, label_function, recount)

    def _call_other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that is not a loss function, in `separate` mode; record it if it makes labels of labels.

        Without gradients, functions of recorded losses run with gradients enabled, so that these get a graph.
        """
        assert self._functions is not None
        if _IS_UNOBSERVED.get():
            return func(*args, **kwargs)
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        if self._makes_graph and any(tensor.grad_fn is not None for tensor in tensors):
            with torch.inference_mode(False):  # enables gradients
                args, kwargs = tree_map_only(Tensor, _plain, (args, kwargs))
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._functions.record(func, args, kwargs, result)
        return result

    def _divide_by_count(self, total: Tensor, count: Tensor | int, *, adds_up: bool) -> Tensor:
        if adds_up:
            return self._add(total / count, None)
        denominator = torch.as_tensor(count, device=total.device)
        return self._add(total / denominator.clamp_min(1), denominator, self._function_of(count), _unchanged)

    def _function_of(self, tensor: Any) -> LabelFunction | None:
        return None if self._functions is None else self._functions.of(tensor)

    def _add(
        self,
        loss: Tensor,
        denominator: Tensor | None,
        label_function: LabelFunction | None = None,
        recount: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Record a loss; return what the model gets: the loss, or a copy of it in `separate` mode.

        Args:
            loss: the result of a loss function, 0-d.
            denominator: what its mean divides by; None for a sum.
            label_function: how its target was made of the batch; None if this is not known.
            recount: returns `denominator` for another target.
        """
        if not self.separate:
            self.losses.append(CountedLoss(loss, denominator, loss, version_of(loss)))
            return loss
        has_graph = loss.requires_grad
        with torch.inference_mode(False):  # enables gradients
            term = loss if has_graph else loss.clone().detach().requires_grad_()
            loss = term.clone()
        depends_on_batch = label_function is None or label_function.depends_on_batch
        recount_microbatch = None
        if label_function is not None and label_function.depends_on_batch and recount is not None:
            recount_microbatch = partial(_recounted, label_function, recount)
        self.losses.append(
            CountedLoss(
                loss, denominator, term, version_of(loss), recount_microbatch, has_graph, depends_on_batch
            )
        )
        return loss

    @property
    def has_only_added_graphs(self) -> bool:
        """True if losses have a graph only because `separate` mode made leaves of them: nothing is trained."""
        return self.separate and torch.is_grad_enabled() and not any(loss.has_graph for loss in self.losses)

    def record_of(self, loss: Any) -> CountedLoss | None:
        """Return the record of a loss function's result; None for any other tensor, and if it was changed in place."""
        records = (
            record for record in self.losses if record.loss is loss and version_of(loss) == record.version
        )
        return next(records, None)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _recounted(
    label_function: LabelFunction, count: Callable[[Tensor], Tensor], microbatch: LabelEvaluator
) -> Tensor:
    return count(microbatch(label_function))


def _unchanged(number: Tensor) -> Tensor:
    return number


def _recount_labels(arguments: dict[str, Any], target: Tensor) -> Tensor:
    return _labels({**arguments, "target": target})


def _in_proportion(denominator: Tensor, entries: int, target: Tensor) -> Tensor:
    """Return the denominator for a target of another size, to which it is proportional."""
    return denominator.double() * target.numel() / max(entries, 1)


def _has_other_denominator(function: Any, arguments: dict[str, Any]) -> bool:
    """Return True for weights per entry, by whose sum a regression divides, and for torch's deprecated arguments."""
    has_weights = function in _REGRESSIONS and arguments.get("weight") is not None
    return has_weights or arguments.get("size_average") is not None or arguments.get("reduce") is not None


def _evaluate(function: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Call a loss function; return its result and what its mean divides by, None for a sum.

    Without labels a mean is 0, not NaN, so that the microbatch adds nothing to the batch.
    """
    if arguments["reduction"] == "sum":
        return function(**arguments), None
    if arguments["reduction"] == "batchmean":
        return function(**arguments), _number(arguments["input"], arguments["input"].shape[0])
    count = _COUNTS[function](arguments)
    if arguments.get("label_smoothing"):
        return function(**{**arguments, "reduction": "sum"}) / torch.where(count > 0, count, 1), count
    loss = function(**arguments)
    # For ignored labels the kernels write gradients of 0, although the mean of none is NaN.
    return _ZeroIfEmpty.apply(loss, count) if function in _WITH_LABELS else loss, count


class _ZeroIfEmpty(torch.autograd.Function):
    """The mean `loss`, or 0 if `number`, its count of labels, is 0. Backward passes the gradient.

    It saves no tensor, which checkpointing of the loss alone would miss.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, number: Tensor) -> Tensor:
        return torch.where(number > 0, loss, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _labels(arguments: dict[str, Any]) -> Tensor:
    """Return the number of labels that are not ignored, or the sum of their class weights."""
    scores, target, weight = arguments["input"], arguments["target"], arguments["weight"]
    if target.is_floating_point():  # probabilities of classes
        return _number(scores, scores.numel() // scores.shape[min(1, scores.dim() - 1)])
    is_counted = target != arguments["ignore_index"]
    if weight is None:
        return is_counted.sum()
    return (weight[target.masked_fill(~is_counted, 0)] * is_counted).sum()


def _entries(arguments: dict[str, Any]) -> Tensor:
    shape = torch.broadcast_shapes(arguments["input"].shape, arguments["target"].shape)
    return _number(arguments["input"], shape.numel())


def _samples(arguments: dict[str, Any]) -> Tensor:
    scores = arguments["log_probs"]
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
_SIGNATURES = {function: inspect.signature(function) for function in _COUNTS}


class ObservedStage:
    """Wrapper of the model's last stage that observes the losses of its forwards. It hooks the last layer.

    Args:
        stage: the last stage.
        model: the boosted model. Several losses of a compiled one are not kept separate.
        last_layer: losses are computed after it; None observes the complete forward.

    Attributes:
        model: the boosted model.
        observed: the losses of the last forward.
        separate: if the next forwards keep several losses separate; set by `WeightedCriterion`.
    """

    def __init__(self, stage: StageLike, model: nn.Module, last_layer: nn.Module | None) -> None:
        self._stage, self.model = stage, model
        self.index, self.is_first, self.is_last = stage.index, stage.is_first, stage.is_last
        self.observed, self.separate = LossObserver(), False
        # "before" the last layer of a forward, "open" after it, and "" outside of a forward.
        self._last_layer, self._state = last_layer, ""
        if last_layer is not None:
            last_layer.register_forward_hook(_Begin(self))

    def forward(self, microbatch: Any, received: tuple[Tensor, ...]) -> Any:
        """Return the model's outputs; observe the loss functions that it calls after its last layer."""
        # A compiled graph ends where it gets a copy of a loss, so its losses stay as they are.
        separate = self.separate and self.model._compiled_call_impl is None
        self.observed, self._state = LossObserver(microbatch, separate=separate), "before"
        try:
            if self._last_layer is None:
                self._begin()
            return self._stage.forward(microbatch, received)
        finally:
            if self._state == "open":
                self.observed.__exit__(None, None, None)
            self._state = ""

    @torch.compiler.disable
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
