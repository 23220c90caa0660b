"""Predicted peak memory of every rank and time of a step, from a trace and a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

from ..cluster.gpus import Gpu
from ..cluster.layout import SUB_AXES, MeshLayout
from ..pipeline.action import Action, Op
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


class _Activations(NamedTuple):
    """Bytes of a stage for a microbatch: what its forward keeps, and the peaks of forward and backward."""

    kept: int
    forward_peak: int
    backward_peak: int


class Prediction:
    """Memory and time of one layout.

    Args:
        layout: valid for the model and the number of GPUs.
        trace: of a microbatch under its axes.
        bounds: the first layer of each stage, and the number of layers.
        schedule: the computations of every pipeline rank, of a few microbatches: enough that more of them repeat it.
        mesh: the sizes of all axes.
        device: the GPU.
    """

    def __init__(
        self,
        layout: Layout,
        trace: Trace,
        bounds: Sequence[int],
        *,
        schedule: Sequence[Sequence[Action]],
        mesh: MeshLayout,
        device: Gpu,
    ) -> None:
        self._layout, self._trace, self._bounds, self._device = layout, trace, tuple(bounds), device
        self._mesh, self._schedule = mesh, schedule
        self._bandwidths: dict[str, float] = {}
        self._stages_of_ranks = [sorted({action.stage for action in actions}) for actions in schedule]

    @property
    def stages(self) -> list[list[Section]]:
        """The sections of every stage."""
        return _stages(self._trace, self._bounds, self._layout.recompute)

    @cached_property
    def memory(self) -> list[Memory]:
        """The peak of every pipeline rank."""
        return [
            self._memory_of(stages, actions)
            for stages, actions in zip(self._stages_of_ranks, self._schedule, strict=True)
        ]

    def _memory_of(self, stages: Sequence[int], actions: Sequence[Action]) -> Memory:
        local = self.parameters_of(stages)
        is_float32 = self._layout.precision == "fp32"
        count = sum(parameter.numel for parameter in local)
        stepped = sum(self._num_stepped(parameter) for parameter in local)
        shards_gradients = self._layout.zero == 2 and stepped < count
        bucket = bucket_size_on_gpus(self._mesh.size("data"))
        pooled = min(count, POOLED_BUCKETS * bucket)
        return Memory(
            parameters=sum(parameter.nbytes for parameter in local),
            gradients=GRADIENT_BYTES * (stepped + pooled if shards_gradients else count),
            masters=0 if is_float32 else MASTER_BYTES * stepped,
            states=STATE_BYTES * stepped,
            activations=self._peak_activations(actions),
        )

    def parameters_of(self, stages: Sequence[int]) -> list[LocalParameters]:
        """Return the parameters of these stages."""
        return _parameters(self._trace, self._bounds, tuple(stages))

    def _num_stepped(self, parameter: LocalParameters) -> int:
        """Return how many elements of a parameter this rank steps."""
        return (
            parameter.numel if self._layout.zero == 0 else -(-parameter.numel // self._num_shards(parameter))
        )

    def _num_shards(self, parameter: LocalParameters) -> int:
        """Return the number of ranks over which ZeRO shards a parameter's states."""
        replicas = self._replicas[parameter.axis]
        return min(replicas, self._mesh.zero) if self._mesh.zero > 0 else replicas

    @cached_property
    def _replicas(self) -> dict[str | None, int]:
        """The number of ranks of data with the same shard of a parameter, by its axis."""
        data = self._mesh.size("data")
        return {None: data} | {axis: data // self._mesh.size(axis) for axis in SUB_AXES}

    def _peak_activations(self, actions: Sequence[Action]) -> int:
        """Return the maximum of activations and temporary tensors over a rank's actions, in bytes."""
        kept = peak = 0
        activations = self._activations
        for action in actions:
            stage = activations[action.stage]
            if action.op is Op.FORWARD:
                peak = max(peak, kept + stage.forward_peak)
                kept += stage.kept
            elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                peak = max(peak, kept - stage.kept + stage.backward_peak)
            if action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                kept -= stage.kept
        return peak

    @property
    def _activations(self) -> list[_Activations]:
        """The activations of every stage."""
        return _stage_activations(self._trace, self._bounds, self._layout.recompute)

    @cached_property
    def time(self) -> StepTime:
        """The time of a step, without the input of data."""
        timeline = simulate(self._schedule, self._costs)
        # The schedule has some of the microbatches; each further one takes as long as the busiest rank computes it.
        further = self._layout.microbatches - self._num_scheduled
        total = timeline.end + further * max(self._busy)
        busy = self._layout.microbatches * sum(self._busy)
        flops = sum(
            operation.flops
            for section in self._trace.stage(0, self._bounds[-1])
            for direction in (FORWARD, BACKWARD)
            for operation in section.operations[direction]
        )
        return StepTime(
            total=total + self._exposed,
            bubble=(total * len(self._schedule) - busy) / busy,
            exposed=self._exposed,
            flops=flops * self._layout.microbatches * self._mesh.size("dp", "sp", "tp"),
        )

    @cached_property
    def shortest_time(self) -> float:
        """Seconds that a step takes at least: the work of the busiest rank."""
        return self._layout.microbatches * max(self._busy) + self._exposed

    @property
    def _num_scheduled(self) -> int:
        return 1 + max(action.microbatch for action in self._schedule[0])

    @cached_property
    def _busy(self) -> list[float]:
        """Seconds that every pipeline rank computes for a microbatch."""
        return [
            sum(self._costs[stage].forward + self._backward(stage) for stage in stages)
            for stages in self._stages_of_ranks
        ]

    def _backward(self, stage: int) -> float:
        return self._costs[stage].backward_input + self._costs[stage].backward_weight

    @cached_property
    def _costs(self) -> list[Costs]:
        """The costs of every stage's actions, in seconds."""
        return [self._costs_of(stage) for stage in range(len(self.stages))]

    @cached_property
    def _exposed(self) -> float:
        """Seconds of update and messages that no computation hides, on the rank with most."""
        return max(map(self._exposed_of, self._stages_of_ranks))

    def _costs_of(self, stage: int) -> Costs:
        forward, backward = (
            self._seconds(self.stages[stage], direction) for direction in (FORWARD, BACKWARD)
        )
        return Costs(
            forward=forward,
            backward_input=backward / 2,
            backward_weight=backward / 2,
            send=LATENCY + self.stages[stage][-1].output / self._bandwidth("pp"),
        )

    def _seconds(self, sections: Sequence[Section], direction: str) -> float:
        """Return the time of sections, which compute and exchange messages in turn: neither hides the other."""
        seconds = 0.0
        for section in sections:
            seconds += _operation_seconds(section, direction, self._device)
            for (axis, kind), count in section.traffic[direction].items():
                # Links send and receive at once; a collective receives about what it sends. `recv` sends nothing.
                moved = count.nbytes if kind == "recv" else count.sent
                seconds += count.calls * LATENCY + moved / self._bandwidth(axis)
        return seconds

    def _bandwidth(self, axis: str) -> float:
        """Return the bytes per second of a group of an axis: those of the network, if it spans several nodes."""
        if axis not in self._bandwidths:
            is_local = len({rank // self._device.per_node for rank in self._mesh.line(axis)}) == 1
            speed = self._device.link if is_local else self._device.network
            self._bandwidths[axis] = LINKS * 1e9 * speed
        return self._bandwidths[axis]

    def _exposed_of(self, stages: Sequence[int]) -> float:
        """Return the time of a rank's update, and of messages on the data axis that backward does not hide."""
        local = self.parameters_of(stages)
        stepped = sum(map(self._num_stepped, local))
        # masters, two states and gradients are read, and all but the gradients and the parameters written
        update = stepped * 2 * (MASTER_BYTES + STATE_BYTES) / (MEMORY * self._device.bandwidth * 1e9)
        reduced = gathered = 0.0
        for parameter in local:
            replicas = self._replicas[parameter.axis]
            share = (replicas - 1) / replicas
            reduced += GRADIENT_BYTES * parameter.numel * share * (1 if self._layout.zero else 2)
            gathered += parameter.nbytes * share if self._layout.zero else 0
        bandwidth = self._bandwidth("data")
        backward = sum(map(self._backward, stages))
        # At stage 2 every backward reduces, and hides its own messages.
        num_reductions = self._layout.microbatches if self._layout.zero == 2 else 1
        beyond = max(0.0, reduced / bandwidth - backward)
        return update + num_reductions * beyond + gathered / bandwidth


# Many layouts differ in schedule, ZeRO stage and number of microbatches alone. They share what these functions return.


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
def _operation_seconds(section: Section, direction: str, device: Gpu) -> float:
    """Return the time of the operations of a section: by products, by memory, or by launches, what takes longest."""
    seconds = 0.0
    for operation in section.operations[direction]:
        products = operation.flops / (PRODUCTS * device.teraflops * 1e12)
        moved = operation.nbytes / (MEMORY * device.bandwidth * 1e9)
        seconds += max(LAUNCH, products, moved)
    return seconds
