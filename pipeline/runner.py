"""The one runner of all schedules: it does a rank's actions in order. What the order is, is schedules.py."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from .action import COMPUTES, Action, Op
from .microbatch import map_tensors, signature
from .simulate import Span
from .split_backward import WeightGradients
from .tensor_spec import takes_gradient
from .transport import Arrival, Transport

Criterion = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
_Place = tuple[int, int]  # stage, microbatch
_GIVE_GRADIENTS = COMPUTES - {Op.FORWARD}


class StageLike(Protocol):
    """One stage of a model: its index in the pipeline and its forward."""

    index: int
    is_first: bool
    is_last: bool

    def forward(self, microbatch: Any, received: tuple[Tensor, ...]) -> Any:
        """The tuple of tensors for the next stage, or on the last stage the model's outputs.

        Args:
            microbatch: what every stage is given.
            received: what the stage before returned; empty on the first.
        """
        ...


@dataclass(kw_only=True)
class RunResult:
    """What a step computed, on the rank of the last stage; empty on the others.

    Args:
        losses: what the criterion returned (without scale), detached, by microbatch.
        weights: the weights, where it returned (loss_sum, weight).
        outputs: the model's outputs by microbatch, detached, where they were to be kept.
    """

    losses: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] | None = None
    outputs: list[Any] | None = None


class Trace:
    """The computations of a rank, timed while they run.

    On CUDA the device's own clock is read, by events in the current stream, and nothing waits for it until
    `spans` is asked for.

    Args:
        device: of the computations.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._start: Any = None
        self._computed: list[tuple[Action, Any, Any]] = []  # each between two seconds, or two events

    def begin(self) -> None:
        """Start to time a computation, whose inputs are here."""
        self._start = self._now()

    def end(self, action: Action) -> None:
        """Note the end of the computation that began last."""
        self._computed.append((action, self._start, self._now()))

    def spans(self) -> list[Span]:
        """All computations in order, in seconds of `time.perf_counter()`, which processes of a machine share."""
        if not self._is_cuda:
            return [Span(*computed) for computed in self._computed]
        now = self._now()
        now.synchronize()
        seconds = time.perf_counter()
        return [
            Span(action, *(seconds - event.elapsed_time(now) / 1000 for event in (start, end)))
            for action, start, end in self._computed
        ]

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def run_schedule(
    actions: Sequence[Action],
    *,
    stages: Mapping[int, StageLike],
    microbatches: Sequence[Any],
    criterion: Criterion | None,
    transport: Transport | None,
    scale: Callable[[Tensor], Tensor],
    keep_outputs: bool = False,
    before_forward: Callable[[int, int], None] | None = None,
    weight_gradients: WeightGradients | None = None,
    around_backward: Callable[[Action, bool], AbstractContextManager] | None = None,
    trace: Trace | None = None,
) -> RunResult:
    """Do one rank's actions of a schedule, whose other ranks run at the same time.

    Gradients are added to the parameters of the stages. A schedule without backwards should run under
    `torch.no_grad()`. Communicates with the neighbouring stages; on return all sends are done.

    Args:
        actions: this rank's part of a valid schedule, sends and receives included.
        stages: the stages this rank holds, by index.
        microbatches: the same on every rank of the pipeline, of any sizes.
        criterion: from outputs and microbatch to the loss, or to (loss_sum, weight); None only without
            backwards.
        transport: the way to other ranks; None where all stages are here.
        scale: what is differentiated instead of the loss, as a function of it.
        keep_outputs: keep the last stage's outputs.
        before_forward: called with stage and microbatch before that forward computes.
        weight_gradients: where the stages' layers hold back weight gradients; None where they do not, and
            then input gradients bring the weight gradients with them.
        around_backward: a context for every action that gives gradients to a stage, by the action and whether it is
            the last for its stage.
        trace: notes when what was computed.

    Raises:
        ValueError: the actions do not fit stages, microbatches, criterion or transport.
        RuntimeError: a peer is lost; names it. Whatever a stage or the criterion raises passes through. After
            either the transport refuses further steps.
    """
    run = _Run(
        actions,
        stages=stages,
        microbatches=microbatches,
        criterion=criterion,
        transport=transport,
        scale=scale,
        keep_outputs=keep_outputs,
        before_forward=before_forward,
        weight_gradients=weight_gradients,
        around_backward=around_backward,
        trace=trace,
    )
    _run_to_the_end(run, actions, transport, weight_gradients)
    return run.result()


def _run_to_the_end(
    run: "_Run",
    actions: Sequence[Action],
    transport: Transport | None,
    weight_gradients: WeightGradients | None,
) -> None:
    """Do the actions and wait for all sends; after what breaks off the transport refuses further steps."""
    if transport is not None:
        transport.check_open()
    try:
        run.run(actions)
        if transport is not None:
            transport.flush()
    except BaseException as error:
        if transport is not None:
            transport.close(f"{type(error).__name__}: {error}")
        if weight_gradients is not None:
            weight_gradients.forget()
        if isinstance(error, StopIteration):  # or the caller would take it for the end of the data
            raise RuntimeError("the model or the criterion raised StopIteration") from error
        raise


class _Run:
    """The state of one step: what waits to be used by a later action."""

    def __init__(
        self,
        actions: Sequence[Action],
        *,
        stages: Mapping[int, StageLike],
        microbatches: Sequence[Any],
        criterion: Criterion | None,
        transport: Transport | None,
        scale: Callable[[Tensor], Tensor],
        keep_outputs: bool,
        before_forward: Callable[[int, int], None] | None,
        weight_gradients: WeightGradients | None,
        around_backward: Callable[[Action, bool], AbstractContextManager] | None,
        trace: Trace | None,
    ) -> None:
        self._stages = stages
        self._microbatches = microbatches
        self._criterion = criterion
        self._transport = transport
        self._scale = scale
        self._keep_outputs = keep_outputs
        self._before_forward = before_forward
        self._weight_gradients = weight_gradients
        self._around_backward = around_backward
        self._trace = trace
        self._trains = any(action.op in _GIVE_GRADIENTS for action in actions)
        self._check(actions)

        # Between an action and the one that uses its result:
        self._arriving: dict[Action, Arrival] = {}
        self._leaving: dict[_Place, tuple[Tensor, ...]] = {}  # outputs, detached, at the stage that made them
        self._gradients: dict[_Place, tuple[Tensor, ...]] = {}  # of its inputs, at the stage that made them
        # Between a forward and its backward. The graph of an output is kept by its edge, so that the output's
        # own memory is free once it was sent.
        self._received: dict[_Place, list[Tensor]] = {}
        self._edges: dict[_Place, list[GradientEdge | None]] = {}
        self._graphs: dict[_Place, Tensor] = {}
        # Until the end, by microbatch:
        self._keys: dict[int, Hashable] = {}
        self._losses: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}

    def run(self, actions: Sequence[Action]) -> None:
        """Do the actions in order."""
        last = {action.stage: action for action in actions if action.op in _GIVE_GRADIENTS}
        for action in actions:
            if action.op in _GIVE_GRADIENTS and self._around_backward is not None:
                with self._around_backward(action, last[action.stage] == action):
                    _METHODS[action.op](self, action)
            else:
                _METHODS[action.op](self, action)

    def result(self) -> RunResult:
        """What a finished run computed."""
        if self._weights and len(self._weights) != len(self._losses):
            raise TypeError(
                "the criterion returned a weight for some microbatches only: return one for all or none"
            )
        return RunResult(
            losses=[loss for _, loss in sorted(self._losses.items())],
            weights=[weight for _, weight in sorted(self._weights.items())] or None,
            outputs=[self._outputs[microbatch] for microbatch in sorted(self._outputs)] or None,
        )

    def forward(self, action: Action) -> None:
        """Run a stage on a microbatch; on the last stage the criterion too."""
        place = (action.stage, action.microbatch)
        stage, microbatch = self._stages[action.stage], self._microbatches[action.microbatch]
        received = () if stage.is_first else self._take_inputs(action)
        self._begin()
        if self._before_forward is not None:
            self._before_forward(*place)
        output = stage.forward(microbatch, received)
        if self._trains:
            self._received[place] = [tensor for tensor in received if takes_gradient(tensor.dtype)]
        if stage.is_last:
            self._finish(place, output)
        else:
            self._hand_on(place, output)
        self._end(action)

    def backward(self, action: Action) -> None:
        """Differentiate a stage for a microbatch, from its loss or from the gradients of its outputs."""
        place = (action.stage, action.microbatch)
        if self._stages[action.stage].is_last:
            self._begin()
            loss = self._scale(self._graphs.pop(place))
            _differentiate([loss], [torch.ones_like(loss)])
        else:
            gradients = self._take_gradients(action)
            self._begin()
            self._backward_from_outputs(place, gradients)
        received = self._received.pop(place)
        if not self._stages[action.stage].is_first:
            self._gradients[place] = tuple(
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in received
            )
        self._end(action)

    def backward_input(self, action: Action) -> None:
        """Differentiate a stage, holding back what only its weights need."""
        if self._weight_gradients is None:
            self.backward(action)
            return
        with self._weight_gradients.holding((action.stage, action.microbatch)):
            self.backward(action)

    def backward_weight(self, action: Action) -> None:
        """Compute the weight gradients that were held back."""
        self._begin()
        if self._weight_gradients is not None:
            self._weight_gradients.compute((action.stage, action.microbatch))
        self._end(action)

    def send_forward(self, action: Action) -> None:
        """Send a stage's outputs to the next."""
        tensors = self._leaving.pop((action.stage, action.microbatch))
        self._way().send_outputs(action, tensors, self._key(action))

    def receive_forward(self, action: Action) -> None:
        """Post the receive of a stage's inputs."""
        self._arriving[action] = self._way().receive_inputs(action, self._key(action))

    def send_backward(self, action: Action) -> None:
        """Send the gradients of a stage's inputs to the stage before."""
        self._way().send_gradients(action, self._gradients.pop((action.stage, action.microbatch)))

    def receive_backward(self, action: Action) -> None:
        """Post the receive of the gradients of a stage's outputs."""
        self._arriving[action] = self._way().receive_gradients(action, self._key(action))

    def _begin(self) -> None:
        if self._trace is not None:
            self._trace.begin()

    def _end(self, action: Action) -> None:
        if self._trace is not None:
            self._trace.end(action)

    def _take_inputs(self, action: Action) -> tuple[Tensor, ...]:
        _, stage, microbatch = action
        arrival = self._arriving.pop(Action(Op.RECV_FORWARD, stage, microbatch), None)
        tensors = arrival.wait() if arrival else self._leaving.pop((stage - 1, microbatch))
        if self._trains:
            for tensor in tensors:
                if takes_gradient(tensor.dtype):
                    tensor.requires_grad_()
        return tensors

    def _take_gradients(self, action: Action) -> tuple[Tensor, ...]:
        _, stage, microbatch = action
        arrival = self._arriving.pop(Action(Op.RECV_BACKWARD, stage, microbatch), None)
        return arrival.wait() if arrival else self._gradients.pop((stage + 1, microbatch))

    def _backward_from_outputs(self, place: _Place, gradients: tuple[Tensor, ...]) -> None:
        # The next stage answers every floating tensor; what a frozen stage does not need is dropped.
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(self._edges.pop(place), gradients, strict=True)
            if edge is not None
        ]
        if pairs:
            _differentiate(*zip(*pairs, strict=True))

    def _hand_on(self, place: _Place, output: Any) -> None:
        if not isinstance(output, tuple) or not all(isinstance(tensor, Tensor) for tensor in output):
            kinds = (
                [type(item).__name__ for item in output]
                if isinstance(output, tuple)
                else type(output).__name__
            )
            raise TypeError(
                f"stage {place[0]} is not the last and must return a tuple of tensors, not {kinds}"
            )
        self._leaving[place] = tuple(tensor.detach() for tensor in output)
        if self._trains:
            self._edges[place] = [
                get_gradient_edge(tensor) if tensor.requires_grad else None
                for tensor in output
                if takes_gradient(tensor.dtype)
            ]

    def _finish(self, place: _Place, output: Any) -> None:
        _, microbatch = place
        if self._keep_outputs:
            self._outputs[microbatch] = map_tensors(output, Tensor.detach)
        if self._criterion is None:
            return
        judged = self._criterion(output, self._microbatches[microbatch])
        loss, *weight = judged if isinstance(judged, tuple) else (judged,)
        if not _is_scalar(loss) or len(weight) > 1 or not all(map(_is_number, weight)):
            raise TypeError(
                f"the criterion must return a scalar tensor, or (loss_sum, weight), not {_told(judged)}"
            )
        if self._trains and not loss.requires_grad:
            raise ValueError(
                "the criterion's loss has no graph to differentiate: compute it from the outputs without detach() "
                "or item(), or evaluate under torch.no_grad()"
            )
        if weight:
            given = weight[0]
            # A number of Python would take torch's default format, which may be too short for it.
            dtype = given.dtype if isinstance(given, Tensor) else torch.float64
            self._weights[microbatch] = torch.as_tensor(given, dtype=dtype, device=loss.device).detach()
        self._losses[microbatch] = loss.detach()
        if self._trains:
            self._graphs[place] = loss

    def _key(self, action: Action) -> Hashable:
        """What both ends of a transfer know to decide its shapes; evaluation may differ from training."""
        if action.microbatch not in self._keys:
            self._keys[action.microbatch] = (self._trains, signature(self._microbatches[action.microbatch]))
        return self._keys[action.microbatch]

    def _way(self) -> Transport:
        assert self._transport is not None  # checked by _check
        return self._transport

    def _check(self, actions: Sequence[Action]) -> None:
        unknown = {action for action in actions if action.stage not in self._stages}
        if unknown:
            raise ValueError(
                f"the schedule has {sorted(unknown, key=repr)}, and this rank holds {list(self._stages)}"
            )
        used = {action.microbatch for action in actions}
        if used != set(range(len(self._microbatches))):
            raise ValueError(
                f"the schedule is for microbatches {sorted(used)}, and {len(self._microbatches)} are given: "
                "build it for that number"
            )
        if self._transport is None and not COMPUTES.issuperset(action.op for action in actions):
            raise ValueError("the schedule sends and receives: give a transport")
        if self._trains and self._criterion is None:
            raise ValueError("the schedule has backwards: give a criterion, or use forward_only(schedule)")


def _differentiate(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Add to all leaves' gradients. As `torch.autograd.backward`, whose checks cost more than a small stage."""
    _engine_run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


_METHODS: dict[Op, Callable[[_Run, Action], None]] = {
    Op.FORWARD: _Run.forward,
    Op.BACKWARD: _Run.backward,
    Op.BACKWARD_INPUT: _Run.backward_input,
    Op.BACKWARD_WEIGHT: _Run.backward_weight,
    Op.SEND_FORWARD: _Run.send_forward,
    Op.RECV_FORWARD: _Run.receive_forward,
    Op.SEND_BACKWARD: _Run.send_backward,
    Op.RECV_BACKWARD: _Run.receive_backward,
}


def _is_scalar(loss: Any) -> bool:
    return isinstance(loss, Tensor) and loss.numel() == 1


def _is_number(weight: Any) -> bool:
    return isinstance(weight, (int, float)) or _is_scalar(weight)


def _told(judged: Any) -> str:
    if isinstance(judged, tuple):
        return f"({', '.join(map(_told, judged))})"
    return f"a tensor of shape {tuple(judged.shape)}" if isinstance(judged, Tensor) else type(judged).__name__
