"""Predicted peak memory of every rank and time of a step, from a trace and a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

from ..cluster.gpus import Gpu
from ..cluster.layout import AXES, JOINED, SUB_AXES, MeshLayout
from ..pipeline.action import Action, Op, Schedule
from ..pipeline.simulate import Costs, simulate
from ..verify.layout_choice import Layout
from ..zero.partition import bucket_size_on_gpus
from .sections import BACKWARD, FORWARD, LocalParameters, Section, Trace

# Shares of a GPU's figures that good kernels reach.
PRODUCTS, MEMORY, LINKS = 0.7, 0.8, 0.8
# Seconds that an operation takes at least, and a message before its first byte arrives.
LAUNCH, LATENCY = 4e-6, 1.5e-5
STATE_BYTES = 8  # AdamW, for every parameter that is stepped: two averages in float32
GRADIENT_BYTES = MASTER_BYTES = 4  # float32
POOLED_BUCKETS = 2  # of unsharded gradients that ZeRO-2 holds at once: one that fills, one in flight


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak memory of a rank by kind, in bytes."""

    parameters: int
    gradients: int
    masters: int
    states: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.parameters + self.gradients + self.masters + self.states + self.activations


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted time of a step, in seconds.

    Args:
        total: of the step.
        bubble: idle time divided by work, over all pipeline ranks.
        exposed: messages of gradients and parameters that no computation hides.
        flops: floating-point operations of all ranks, those of recomputation left out.
    """

    total: float
    bubble: float
    exposed: float
    flops: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineOrder:
    """The computations of every pipeline rank, which layouts of one schedule share.

    Args:
        actions: by rank, of a few microbatches: enough that more of them repeat it.
    """

    actions: Schedule

    @cached_property
    def stages(self) -> list[tuple[int, ...]]:
        """The stages of every rank."""
        return [tuple(sorted({action.stage for action in actions})) for actions in self.actions]

    @cached_property
    def num_microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max(action.microbatch for action in self.actions[0])

    @cached_property
    def fullest(self) -> "list[list[_Moment]]":
        """By rank, the moments at which it may keep most; see `_fullest`."""
        return [*map(_fullest, self.actions, self.stages)]


class _Moment(NamedTuple):
    """The beginning of an action: True for a forward, its stage, and by stage the microbatches that are kept."""

    is_forward: bool
    stage: int
    num_kept: Sequence[tuple[int, int]]


def _fullest(actions: Sequence[Action], stages: Sequence[int]) -> list[_Moment]:
    """Return the moments of a rank at which no other one keeps more of its last stage, and as much of the others."""
    counts = dict.fromkeys(stages, 0)
    most: dict[tuple[bool, int, tuple[int, ...]], int] = {}
    for action in actions:
        if action.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            *others, last = counts.values()
            key = (action.op is Op.FORWARD, action.stage, tuple(others))
            most[key] = max(last, most.get(key, 0))
        if action.op is Op.FORWARD:
            counts[action.stage] += 1
        elif action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            counts[action.stage] -= 1
    return [
        _Moment(is_forward, stage, [*zip(stages, (*others, last), strict=True)])
        for (is_forward, stage, others), last in most.items()
    ]


class _Activations(NamedTuple):
    """Bytes of a stage for a microbatch: what its forward keeps, and the peaks of forward and backward."""

    kept: int
    forward_peak: int
    backward_peak: int


class Prediction:
    """Memory and time of one layout.

    Args:
        layout: valid for the model and the number of GPUs.
        trace: of a microbatch under its axes, or of a part of one.
        times: the number of such parts, by which figures are multiplied.
        bounds: the first layer of each stage, and the number of layers.
        order: the computations of every pipeline rank.
        mesh: the sizes of all axes.
        device: the GPU.
    """

    def __init__(
        self,
        layout: Layout,
        trace: Trace,
        bounds: Sequence[int],
        *,
        times: int = 1,
        order: PipelineOrder,
        mesh: MeshLayout,
        device: Gpu,
    ) -> None:
        self._layout, self._trace, self._times, self._bounds = layout, trace, times, tuple(bounds)
        self._order, self._mesh, self._device = order, mesh, device

    @property
    def stages(self) -> list[list[Section]]:
        """The sections of every stage."""
        return _stages(_scaled(self._trace, self._times), self._bounds, self._layout.recompute)

    @cached_property
    def memory(self) -> list[Memory]:
        """The peak of every pipeline rank."""
        return [
            replace(memory, activations=nbytes)
            for memory, nbytes in zip(self._between_steps, self._peak_activations, strict=True)
        ]

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank, which a search asks of every layout, where few need the `memory` of each rank."""
        return max(
            memory.total + nbytes
            for memory, nbytes in zip(self._between_steps, self._peak_activations, strict=True)
        )

    @property
    def _between_steps(self) -> list[Memory]:
        """The memory of every pipeline rank without activations."""
        layout = self._layout
        return _memory_between_steps(
            self._trace, self._bounds, self._order, self._mesh, layout.zero, layout.precision
        )

    @property
    def _peak_activations(self) -> list[int]:
        """The maximum of activations and temporary tensors of every pipeline rank, in bytes."""
        peaks = _peak_activations(self._trace, self._bounds, self._layout.recompute, self._order)
        return [self._times * peak for peak in peaks]

    @cached_property
    def time(self) -> StepTime:
        """The time of a step, without the input of data."""
        timeline = simulate(self._order.actions, self._costs)
        # The schedule has some of the microbatches; each further one takes as long as the busiest rank computes it.
        further = self._layout.microbatches - self._order.num_microbatches
        total = timeline.end + further * max(self._busy)
        busy = self._layout.microbatches * sum(self._busy)
        flops = sum(
            operation.flops
            for section in _scaled(self._trace, self._times).stage(0, self._bounds[-1])
            for direction in (FORWARD, BACKWARD)
            for operation in section.operations[direction]
        )
        return StepTime(
            total=total + self._exposed,
            bubble=(total * len(self._order.actions) - busy) / busy,
            exposed=self._exposed,
            flops=flops * self._layout.microbatches * self._mesh.size("dp", "sp", "tp"),
        )

    @cached_property
    def shortest_time(self) -> float:
        """Seconds that a step takes at least: the work of the busiest rank."""
        return self._layout.microbatches * max(self._busy) + self._exposed

    @cached_property
    def _busy(self) -> list[float]:
        """Seconds that every pipeline rank computes for a microbatch."""
        return [
            sum(self._costs[stage].forward + self._backward(stage) for stage in stages)
            for stages in self._order.stages
        ]

    def _backward(self, stage: int) -> float:
        return self._costs[stage].backward_input + self._costs[stage].backward_weight

    @property
    def _costs(self) -> list[Costs]:
        """The costs of every stage's actions, in seconds."""
        trace = _scaled(self._trace, self._times)
        return _stage_costs(
            trace, self._bounds, self._layout.recompute, self._device, self._axes_within_nodes
        )

    @property
    def _axes_within_nodes(self) -> frozenset[str]:
        return _axes_within_nodes(self._mesh, self._device.per_node)

    @cached_property
    def _exposed(self) -> float:
        """Seconds of update and messages that no computation hides, on the rank with most."""
        return max(map(self._exposed_of, self._order.stages))

    def _exposed_of(self, stages: Sequence[int]) -> float:
        """Return the time of a rank's update, and of messages on the data axis that backward does not hide."""
        local = _parameters(self._trace, self._bounds, tuple(stages))
        mesh, zero = self._mesh, self._layout.zero
        stepped = sum(_num_stepped(parameter, mesh, zero) for parameter in local)
        # masters, two states and gradients are read, and all but the gradients and the parameters written
        update = stepped * 2 * (MASTER_BYTES + STATE_BYTES) / (MEMORY * self._device.bandwidth * 1e9)
        reduced = gathered = 0.0
        for parameter in local:
            replicas = _num_replicas(mesh, parameter.axis)
            share = (replicas - 1) / replicas
            reduced += GRADIENT_BYTES * parameter.numel * share * (1 if zero else 2)
            gathered += parameter.nbytes * share if zero else 0
        bandwidth = _bandwidth("data", self._device, self._axes_within_nodes)
        backward = sum(map(self._backward, stages))
        # At stage 2 every backward reduces, and hides its own messages.
        num_reductions = self._layout.microbatches if zero == 2 else 1
        beyond = max(0.0, reduced / bandwidth - backward)
        return update + num_reductions * beyond + gathered / bandwidth


def _num_stepped(parameter: LocalParameters, mesh: MeshLayout, zero: int) -> int:
    """Return how many elements of a parameter a rank steps."""
    if zero == 0:
        return parameter.numel
    replicas = _num_replicas(mesh, parameter.axis)
    return -(-parameter.numel // (min(replicas, mesh.zero) if mesh.zero > 0 else replicas))


@cache
def _num_replicas(mesh: MeshLayout, axis: str | None) -> int:
    """Return the number of ranks of data with the same shard of a parameter of an axis."""
    data = mesh.size("data")
    return data if axis is None else data // mesh.size(axis)


@cache
def _axes_within_nodes(mesh: MeshLayout, per_node: int) -> frozenset[str]:
    """Return the axes whose groups lie within a node."""
    axes = (*AXES, *JOINED, *SUB_AXES)
    return frozenset(axis for axis in axes if len({rank // per_node for rank in mesh.line(axis)}) == 1)


def _bandwidth(axis: str, device: Gpu, axes_within_nodes: frozenset[str]) -> float:
    """Return the bytes per second of a group of an axis: those of the network, if it spans several nodes."""
    return LINKS * 1e9 * (device.link if axis in axes_within_nodes else device.network)


# Many layouts differ in schedule, ZeRO stage and number of microbatches alone. They share what these functions return.


@cache
def _scaled(trace: Trace, times: int) -> Trace:
    """Return the trace of this many times as many samples."""
    return trace if times == 1 else trace.scaled(times)


@cache
def _stages(trace: Trace, bounds: tuple[int, ...], recompute: float) -> list[list[Section]]:
    """Return the sections of every stage."""
    return [
        trace.stage(start, stop, num_recomputed=int(recompute * (stop - start)))
        for start, stop in pairwise(bounds)
    ]


@cache
def _parameters(trace: Trace, bounds: tuple[int, ...], stages: tuple[int, ...]) -> list[LocalParameters]:
    """Return the parameters of some stages."""
    layers = {layer for stage in stages for layer in range(bounds[stage], bounds[stage + 1])}
    return [parameter for parameter in trace.parameters if parameter.layers & layers]


@cache
def _stage_activations(trace: Trace, bounds: tuple[int, ...], recompute: float) -> list[_Activations]:
    """Return the activations of every stage."""
    stages = _stages(trace, bounds, recompute)
    listed = []
    for stage, sections in enumerate(stages):
        kept = stages[stage - 1][-1].output if stage else 0  # received
        gradient = sections[-1].output if stage < len(stages) - 1 else 0
        forward_peak = backward_peak = 0
        for section in sections:
            forward_peak = max(forward_peak, kept + section.forward_peak)
            kept += section.kept
            backward_peak = max(backward_peak, kept + max(section.backward_peak, gradient))
        listed.append(_Activations(kept, forward_peak, backward_peak))
    return listed


@cache
def _peak_activations(
    trace: Trace, bounds: tuple[int, ...], recompute: float, order: PipelineOrder
) -> list[int]:
    """Return the maximum of activations and temporary tensors over each rank's actions, in bytes."""
    activations = _stage_activations(trace, bounds, recompute)
    return [max(_peak_at(moment, activations) for moment in moments) for moments in order.fullest]


def _peak_at(moment: _Moment, activations: Sequence[_Activations]) -> int:
    """Return the maximum during the action that begins at a moment."""
    kept = sum(number * activations[stage].kept for stage, number in moment.num_kept)
    stage = activations[moment.stage]
    return kept + (stage.forward_peak if moment.is_forward else stage.backward_peak - stage.kept)


@cache
def _memory_between_steps(
    trace: Trace, bounds: tuple[int, ...], order: PipelineOrder, mesh: MeshLayout, zero: int, precision: str
) -> list[Memory]:
    """Return the memory of every rank without activations."""
    bucket = bucket_size_on_gpus(mesh.size("data"))
    memories = []
    for stages in order.stages:
        local = _parameters(trace, bounds, stages)
        count = sum(parameter.numel for parameter in local)
        stepped = sum(_num_stepped(parameter, mesh, zero) for parameter in local)
        shards_gradients = zero == 2 and stepped < count
        pooled = min(count, POOLED_BUCKETS * bucket)
        memories.append(
            Memory(
                parameters=sum(parameter.nbytes for parameter in local),
                gradients=GRADIENT_BYTES * (stepped + pooled if shards_gradients else count),
                masters=0 if precision == "fp32" else MASTER_BYTES * stepped,
                states=STATE_BYTES * stepped,
                activations=0,
            )
        )
    return memories


@cache
def _stage_costs(
    trace: Trace,
    bounds: tuple[int, ...],
    recompute: float,
    device: Gpu,
    axes_within_nodes: frozenset[str],
) -> list[Costs]:
    """Return the costs of every stage's actions, in seconds."""
    costs = []
    for sections in _stages(trace, bounds, recompute):
        forward, backward = (
            _seconds(sections, direction, device, axes_within_nodes) for direction in (FORWARD, BACKWARD)
        )
        send = LATENCY + sections[-1].output / _bandwidth("pp", device, axes_within_nodes)
        costs.append(
            Costs(forward=forward, backward_input=backward / 2, backward_weight=backward / 2, send=send)
        )
    return costs


def _seconds(
    sections: Sequence[Section], direction: str, device: Gpu, axes_within_nodes: frozenset[str]
) -> float:
    """Return the time of sections, which compute and exchange messages in turn: neither hides the other."""
    seconds = 0.0
    for section in sections:
        seconds += _operation_seconds(section, direction, device)
        for (axis, kind), count in section.traffic[direction].items():
            # Links send and receive at once; a collective receives about what it sends. `recv` sends nothing.
            moved = count.nbytes if kind == "recv" else count.sent
            seconds += count.calls * LATENCY + moved / _bandwidth(axis, device, axes_within_nodes)
    return seconds


@cache
def _operation_seconds(section: Section, direction: str, device: Gpu) -> float:
    """Return the time of the operations of a section: by products, by memory, or by launches, what takes longest."""
    seconds = 0.0
    for operation in section.operations[direction]:
        products = operation.flops / (PRODUCTS * device.teraflops * 1e12)
        moved = operation.nbytes / (MEMORY * device.bandwidth * 1e9)
        seconds += max(LAUNCH, products, moved)
    return seconds
