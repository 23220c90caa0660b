"""The runner of all schedules: executes a rank's actions in order."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from ..cluster.device import numbers_on
from ..cluster.profiling import is_profiled, named
from ..cluster.whereabouts import Described
from .action import COMPUTES, Action, Op
from .microbatch import map_tensors, signature
from .transport import PendingTransfer, Transport, takes_gradient
from .weight_gradients import WeightGradientQueue

Criterion = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
_StageAndMicrobatch = tuple[int, int]  # stage, microbatch
_COMPUTE_GRADIENTS = COMPUTES - {Op.FORWARD}


class StageLike(Protocol):
    """One stage of a model: its index in the pipeline and its forward."""

    index: int
    is_first: bool
    is_last: bool

    def forward(self, microbatch: Any, received: tuple[Tensor, ...]) -> Any:
        """Return the tuple of tensors for the next stage, or on the last stage the model's outputs.

        Args:
            microbatch: the same for every stage.
            received: the tensors that the previous stage returned; empty on the first.
        """
        ...


@dataclass(kw_only=True)
class RunResult:
    """The results of a step, on the rank of the last stage; empty on the others.

    Args:
        losses: results of the criterion (without scale), detached, by microbatch.
        weights: the weights, if the criterion returned (loss_sum, weight).
        outputs: the model's outputs by microbatch, detached, if requested.
    """

    losses: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] | None = None
    outputs: list[Any] | None = None


@dataclass(kw_only=True)
class ScheduleRun(Described):
    """One step of one rank; the other ranks run theirs at the same time.

    Args:
        stages: the stages of this rank, by index.
        microbatches: the same on every rank of the pipeline, of any sizes.
        criterion: a function of outputs and microbatch that returns the loss, or (loss_sum, weight); None only for
            a schedule without backwards.
        transport: the transport to other ranks; None if this rank has all stages.
        scale: a function from the loss to the tensor that is differentiated.
        keep_outputs: keep the last stage's outputs.
        before_forward: called with stage and microbatch before that forward computes.
        weight_gradients: defers and adds the gradients of the linear layers that have it; autograd adds all others.
        around_backward: a context for every action that computes gradients, made from the action and a bool: True for
            the last one of its stage.
        allocated: returns the bytes of all tensors on the device, or None where nobody counts them.
        kept_bytes: by stage, what its first forward in training kept, if bytes are counted; added here.
    """

    stages: Mapping[int, StageLike]
    microbatches: Sequence[Any]
    criterion: Criterion | None
    transport: Transport | None
    scale: Callable[[Tensor], Tensor]
    keep_outputs: bool = False
    before_forward: Callable[[int, int], None] | None = None
    weight_gradients: WeightGradientQueue = field(default_factory=WeightGradientQueue)
    around_backward: Callable[[Action, bool], AbstractContextManager] | None = None
    allocated: Callable[[], int | None] = lambda: None
    kept_bytes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trains = False
        self._action: Action | None = None  # the present one
        # From a computation or receive until the result is used. Keys: the stage that computes it, perhaps on another
        # rank, and the microbatch.
        self._stage_outputs: dict[_StageAndMicrobatch, tuple[Tensor, ...] | PendingTransfer] = {}  # detached
        self._gradients: dict[_StageAndMicrobatch, tuple[Tensor, ...] | PendingTransfer] = {}  # of its inputs
        # From a forward until its backward. An output's graph is kept by its edge, so that the memory of the output
        # is free after the send.
        self._received: dict[_StageAndMicrobatch, list[Tensor]] = {}
        self._output_edges: dict[_StageAndMicrobatch, list[GradientEdge | None]] = {}
        self._loss_graphs: dict[_StageAndMicrobatch, Tensor] = {}
        # Until the end of the step, by microbatch:
        self._keys: dict[int, Hashable] = {}  # equal for microbatches whose messages have equal shapes
        self._losses: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}

    def run(self, actions: Sequence[Action]) -> RunResult:
        """Execute this rank's actions of a valid schedule, sends and receives included.

        Gradients are added to the parameters of the stages. A schedule without backwards should run under
        `torch.no_grad()`. Communicates with the neighbouring stages; all sends are complete on return.

        Raises:
            RuntimeError: a peer is lost; names it. Exceptions of a stage or the criterion are raised unchanged. After
                either, the transport refuses further steps.
        """
        self._trains = any(action.op in _COMPUTE_GRADIENTS for action in actions)
        if self.transport is not None:
            self.transport.check_open()
        try:
            self._execute(actions)
            if self.transport is not None:
                self.transport.flush()
        except BaseException as error:
            if self.transport is not None:
                self.transport.close(f"{type(error).__name__}: {error}")
            self.weight_gradients.forget()
            if isinstance(error, StopIteration):  # the caller would regard it as the end of the data
                raise RuntimeError("the model or the criterion raised StopIteration") from error
            raise
        return self._result()

    def _execute(self, actions: Sequence[Action]) -> None:
        """Execute actions in order; those that compute gradients in the context of `around_backward`."""
        last = {action.stage: action for action in actions if action.op in _COMPUTE_GRADIENTS}
        run = self._run_named if is_profiled() else self._run_action
        for action in actions:
            self._action = action
            run(action, last.get(action.stage) is action)

    def _run_named(self, action: Action, is_last: bool) -> None:
        with named(action.label):
            self._run_action(action, is_last)

    def _run_action(self, action: Action, is_last: bool) -> None:
        """Execute an action; `is_last`: it is the last one of its stage that computes gradients."""
        if self.around_backward is None or action.op not in _COMPUTE_GRADIENTS:
            _METHODS[action.op](self, action)
        else:
            with self.around_backward(action, is_last):
                _METHODS[action.op](self, action)

    def describe(self) -> str:
        """Describe the present action."""
        return "before the first action" if self._action is None else self._action.label

    def in_flight(self) -> Counter[int]:
        """Count by stage the microbatches whose forward has run and whose backward has not, with their activations."""
        return Counter(stage for stage, _ in self._received)

    def _result(self) -> RunResult:
        """Return the results of the step, in the order of the microbatches; see `RunResult`."""
        return RunResult(
            losses=[loss for _, loss in sorted(self._losses.items())],
            weights=[weight for _, weight in sorted(self._weights.items())] or None,
            outputs=[self._outputs[microbatch] for microbatch in sorted(self._outputs)] or None,
        )

    def _forward(self, action: Action) -> None:
        """Run a stage on a microbatch, and on the last stage the criterion; keep what the backward needs."""
        stage, microbatch = self.stages[action.stage], self.microbatches[action.microbatch]
        received = () if stage.is_first else self._take_inputs(*action.place)
        if self.before_forward is not None:
            self.before_forward(action.stage, action.microbatch)
        before = self.allocated() if self._trains and action.stage not in self.kept_bytes else None
        output = stage.forward(microbatch, received)
        if self._trains:
            self._received[action.place] = [tensor for tensor in received if takes_gradient(tensor.dtype)]
        if stage.is_last:
            self._compute_loss(action, output)
        else:
            self._keep_stage_output(action, output)
        if before is not None and (after := self.allocated()) is not None:
            self.kept_bytes[action.stage] = max(after - before, 0)

    def _backward(self, action: Action) -> None:
        """Compute a stage's gradients for a microbatch, from its loss or from the gradients of its outputs.

        Those of parameters are accumulated; those of inputs are kept for the previous stage.
        """
        place = action.place
        if self.stages[action.stage].is_last:
            loss = self.scale(self._loss_graphs.pop(place))
            self._differentiate([loss], [torch.ones_like(loss)])
        else:
            gradients = _wait_for(self._gradients.pop((action.stage + 1, action.microbatch)))
            # The next stage sends a gradient for every floating tensor. Outputs without a graph, as of frozen layers,
            # have no edge, and their gradients are dropped.
            pairs = [
                (edge, gradient)
                for edge, gradient in zip(self._output_edges.pop(place), gradients, strict=True)
                if edge is not None
            ]
            if pairs:
                self._differentiate(*zip(*pairs, strict=True))
        received = self._received.pop(place)
        if not self.stages[action.stage].is_first:
            self._gradients[place] = tuple(
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in received
            )

    def _differentiate(self, roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> None:
        """Accumulate gradients in all leaves. `torch.autograd.backward` checks for longer than a small stage takes."""
        with self.weight_gradients.adding():
            _engine_run_backward(
                tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    def _backward_input(self, action: Action) -> None:
        """Compute the gradients of a stage's inputs, and defer those of its weights."""
        with self.weight_gradients.deferring(action.place):
            self._backward(action)

    def _backward_weight(self, action: Action) -> None:
        """Compute the deferred weight gradients."""
        self.weight_gradients.compute(action.place)

    def _send_forward(self, action: Action) -> None:
        self._peers.send_outputs(action, _wait_for(self._stage_outputs.pop(action.place)), self._key(action))

    def _receive_forward(self, action: Action) -> None:
        _, stage, microbatch = action
        self._stage_outputs[stage - 1, microbatch] = self._peers.receive_inputs(action, self._key(action))

    def _send_backward(self, action: Action) -> None:
        self._peers.send_gradients(action, _wait_for(self._gradients.pop(action.place)))

    def _receive_backward(self, action: Action) -> None:
        _, stage, microbatch = action
        self._gradients[stage + 1, microbatch] = self._peers.receive_gradients(action, self._key(action))

    def _take_inputs(self, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        """Wait for the outputs of the previous stage; return them as leaves of a new graph."""
        tensors = _wait_for(self._stage_outputs.pop((stage - 1, microbatch)))
        if self._trains:
            for tensor in tensors:
                if takes_gradient(tensor.dtype):
                    tensor.requires_grad_()
        return tensors

    def _keep_stage_output(self, action: Action, output: Any) -> None:
        """Keep a stage's outputs for the next stage, and their graph for the backward."""
        self._stage_outputs[action.place] = tuple([tensor.detach() for tensor in output])
        if self._trains:
            self._output_edges[action.place] = [
                get_gradient_edge(tensor) if tensor.requires_grad else None
                for tensor in output
                if takes_gradient(tensor.dtype)
            ]

    def _compute_loss(self, action: Action, output: Any) -> None:
        """Compute the criterion on the last stage's output, and keep the results of the microbatch.

        Raises:
            ValueError: the loss has no graph, and a backward will follow.
        """
        microbatch = action.microbatch
        if self.keep_outputs:
            self._outputs[microbatch] = map_tensors(output, Tensor.detach)
        if self.criterion is None:
            return
        loss, weight = loss_and_weight(self.criterion(output, self.microbatches[microbatch]))
        if self._trains and not loss.requires_grad:
            raise ValueError(
                "the criterion's loss has no graph to differentiate: compute it from the outputs without detach() "
                "or item(), or evaluate under torch.no_grad()"
            )
        if weight is not None:
            if not isinstance(weight, Tensor):
                # torch's default format may be too short for a Python number.
                (weight,) = numbers_on(loss.device, [weight], torch.float64)
            self._weights[microbatch] = weight.detach().to(loss.device)
        self._losses[microbatch] = loss.detach()
        if self._trains:
            self._loss_graphs[action.place] = loss

    def _key(self, action: Action) -> Hashable:
        """Return a key that determines the shapes of a transfer, equal on both ends.

        Training and evaluation have different keys, since shapes may differ.
        """
        if action.microbatch not in self._keys:
            self._keys[action.microbatch] = (self._trains, signature(self.microbatches[action.microbatch]))
        return self._keys[action.microbatch]

    @property
    def _peers(self) -> Transport:
        assert self.transport is not None, "the schedule sends and receives"
        return self.transport


_METHODS: dict[Op, Callable[[ScheduleRun, Action], None]] = {
    Op.FORWARD: ScheduleRun._forward,
    Op.BACKWARD: ScheduleRun._backward,
    Op.BACKWARD_INPUT: ScheduleRun._backward_input,
    Op.BACKWARD_WEIGHT: ScheduleRun._backward_weight,
    Op.SEND_FORWARD: ScheduleRun._send_forward,
    Op.RECV_FORWARD: ScheduleRun._receive_forward,
    Op.SEND_BACKWARD: ScheduleRun._send_backward,
    Op.RECV_BACKWARD: ScheduleRun._receive_backward,
}


def _wait_for(tensors: tuple[Tensor, ...] | PendingTransfer) -> tuple[Tensor, ...]:
    return tensors.wait() if isinstance(tensors, PendingTransfer) else tensors


def loss_and_weight(returned: Any) -> tuple[Tensor, Tensor | float | None]:
    """Return the loss that a criterion returned, and its weight: None if there is none.

    Raises:
        TypeError: it returned something else.
        ValueError: the weight has a graph, or is negative or not finite.
    """
    loss, *weights = returned if isinstance(returned, tuple) else (returned,)
    is_loss = isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex()
    if not is_loss or len(weights) > 1 or not all(map(_is_number, weights)):
        raise TypeError(
            f"the criterion must return a real scalar tensor, or (loss_sum, weight), not {_described(returned)}"
        )
    for weight in weights:
        if isinstance(weight, Tensor) and weight.requires_grad:
            raise ValueError(
                "the criterion's weight has a graph, which no gradient would follow: detach it, or return a loss "
                "that is divided by it, alone"
            )
        if not isinstance(weight, Tensor) and not 0 <= weight < inf:
            raise ValueError(
                f"the criterion returned the weight {weight}: return a finite number of at least 0, such as the "
                "number of labels"
            )
    return loss, weights[0] if weights else None


def _is_number(weight: Any) -> bool:
    return weight.numel() == 1 if isinstance(weight, Tensor) else isinstance(weight, Real)


def _described(returned: Any) -> str:
    """Describe what a criterion returned, for an error."""
    if isinstance(returned, tuple):
        return f"({', '.join(map(_described, returned))})"
    if isinstance(returned, Tensor):
        kind = "complex tensor" if returned.is_complex() else "tensor"
        return f"a {kind} of shape {tuple(returned.shape)}"
    return type(returned).__name__
