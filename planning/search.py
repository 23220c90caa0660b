"""Search of the layouts of a model on a number of GPUs, by predicted memory and time of a step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from inspect import signature
from itertools import product
from math import gcd, inf
from typing import Any

from torch import nn
from tqdm import tqdm

from ..cluster.errors import errors_of
from ..cluster.gpus import Gpu
from ..cluster.layout import MeshLayout, divisors
from ..pipeline.stage_manager import assign_layers, layer_bounds, layer_errors
from ..plugins.hybrid_config import HybridConfig
from ..shardformer.expert_sharding import interface_of
from ..verify.layout_choice import Layout
from ..zero.precision import DTYPES
from .predict import Memory, PipelineOrder, Prediction, StepTime
from .tracer import Example, Tracer

GIB = 2**30
SHOWN = 240  # characters of a reason
RECOMPUTED = (0.0, 0.5, 1.0)  # shares of the layers, of which the smallest that fits is taken
STYLES = (("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2))
LONG = 16_384  # tokens, from which on rings are tried
MOST_PER_RANK = 8  # samples of a microbatch that are tried
_NEEDS_MORE = "need more than {:g} GiB, with all layers recomputed"
NUM_NEAREST = 3  # layouts that are suggested for one that is impossible
REFINED = 2  # how many times as many layouts as are shown are predicted without scaling


@dataclass(frozen=True, kw_only=True)
class Job:
    """The training to plan for, and its GPUs.

    Args:
        world: number of GPUs.
        memory: GiB of a GPU that tensors may take.
        global_batch: samples of a step.
        device: the GPU.
        precision: of weights and activations.
    """

    world: int
    memory: float
    global_batch: int
    device: Gpu
    precision: str

    def errors(self) -> list[str]:
        """List all errors of the numbers, each with advice."""
        numbers = {"world": self.world, "global-batch": self.global_batch}
        errors = [f"--{name} {value} must be at least 1" for name, value in numbers.items() if value < 1]
        if not 0 < self.memory < inf:
            errors.append(
                f"--memory without --reserve is {self.memory:g} GiB: give the memory of a GPU, and a smaller --reserve"
            )
        if self.precision not in DTYPES:
            errors.append(f"--precision {self.precision!r} must be one of {', '.join(DTYPES)}")
        return errors


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout with its prediction.

    Args:
        layout: sizes and options.
        samples: of a microbatch.
        prediction: of a step.
    """

    layout: Layout
    samples: int
    prediction: Prediction

    @property
    def memory(self) -> list[Memory]:
        """The peak of each pipeline rank."""
        return self.prediction.memory

    @cached_property
    def peak(self) -> float:
        """GiB of the fullest rank."""
        return self.prediction.peak / GIB

    @cached_property
    def time(self) -> StepTime:
        """The time of a step."""
        return self.prediction.time

    def utilization(self, job: Job) -> float:
        """Return the model FLOPs utilization: arithmetic of the model, divided by what all GPUs could do meanwhile."""
        return self.time.flops / (self.time.total * job.world * job.device.teraflops * 1e12)


class _Setting:
    """Properties that layouts of the same axes, schedule and precision share."""

    def __init__(self, layout: Layout, world: int) -> None:
        self.config = layout.config
        self.errors = self.config.errors(world)
        self.mesh = MeshLayout(**self.config.sizes)

    @cached_property
    def num_stages(self) -> int:
        """The number of pipeline stages."""
        return len(self.config.stage_ranks)


def _same_axes(layout: Layout) -> Layout:
    return replace(layout, zero=0, recompute=0.0, microbatches=max(1, layout.pp))


@dataclass(frozen=True, kw_only=True)
class Result:
    """Layouts found.

    Args:
        plans: those that fit, the fastest first.
        nearest: of those that do not fit, the one with the smallest peak; None if all fit.
        left_out: how many layouts were left out, by reason.
        num_tried: how many layouts were predicted.
    """

    plans: Sequence[Plan]
    nearest: Plan | None
    left_out: Counter[str]
    num_tried: int


class Planner:
    """Predictions and searches for one model.

    Args:
        model: the full model on the meta device.
        task: see `derive.inputs.Inputs`.
        length: tokens of a text.
        job: what is to be trained.
    """

    IN_FLIGHT = 2  # microbatches for each pipeline rank, from which on a schedule repeats itself

    def __init__(self, model: nn.Module, task: str, length: int, job: Job) -> None:
        self._tracer, self._job, self.length = Tracer(model, task, length), job, length
        takes_text = "input_ids" in signature(model.forward).parameters
        self.tokens = length if takes_text else None  # of a sample
        self._settings: dict[Layout, _Setting] = {}
        self._orders: dict[tuple[Any, ...], PipelineOrder] = {}
        plan = self._tracer.plan
        self.num_layers = 0 if plan is None else plan.num_layers(model)
        self._stage_size = None if plan is None else plan.stage_size(model)
        self._are_alike = plan is None or plan.has_like_layers(model)
        self.num_experts = next(
            (
                int(getattr(module, interface.counts[0]))
                for module in model.modules()
                if (interface := interface_of(module)) is not None
            ),
            0,
        )

    def predict(self, layout: Layout, samples: int, *, scales: bool = False) -> Plan:
        """Predict a layout.

        Args:
            layout: its sizes must fit the world.
            samples: of a microbatch.
            scales: trace one sample and multiply its figures by `samples`: an estimate that shares the trace.

        Raises:
            ValueError: the layout is impossible for this model; all reasons at once.
        """
        setting = self._setting(_same_axes(layout))
        return self._predicted(layout, samples, setting, scales=scales)

    def _predicted(self, layout: Layout, samples: int, setting: _Setting, *, scales: bool) -> Plan:
        prediction = Prediction(
            layout,
            self._tracer.trace(setting.config, 1 if scales else samples),
            self._bounds(setting.num_stages),
            times=samples if scales else 1,
            order=self._order(layout),
            mesh=setting.mesh,
            device=self._job.device,
        )
        return Plan(layout=layout, samples=samples, prediction=prediction)

    def example(self) -> Example:
        """Return a batch of the form that is traced."""
        return self._tracer.example()

    def errors(self, layout: Layout, samples: int) -> list[str]:
        """List all reasons why a layout is impossible for this model; empty if it is possible."""
        errors = layout.config.errors(self._job.world)
        if not errors:
            return [*self._model_errors(layout, samples)]
        # Of the model as far as its axes are possible, whatever the world and the other options are.
        stages = [*self._stage_errors(layout.pp * layout.chunks)] if min(layout.pp, layout.chunks) > 0 else []
        axes = replace(
            layout, pp=1, schedule="1f1b", chunks=1, zero=0, zero_size=-1, max_norm=0.0, options=()
        )
        axes = replace(axes, recompute=0.0, recompute_modules=(), microbatches=1, overlap_allgather=False)
        is_possible = min(axes.tp, axes.dp, axes.sp, axes.wp, axes.ep) > 0 and not axes.errors()
        return [*errors, *stages, *(self._trace_errors(axes.config, samples) if is_possible else ())]

    def _model_errors(self, layout: Layout, samples: int) -> Iterator[str]:
        """Yield the reasons of the model, and of the axes and schedule, which many layouts have in common."""
        setting = self._setting(_same_axes(layout))
        if setting.errors:
            yield from setting.errors
            return
        yield from self._stage_errors(setting.num_stages)
        yield from self._trace_errors(setting.config, samples)

    def _stage_errors(self, num_stages: int) -> Iterator[str]:
        if self.num_layers:
            yield from layer_errors(self.num_layers, num_stages, None)
        elif num_stages > 1:
            yield "no pipeline stages of this model are known: use --pp 1"

    def _trace_errors(self, config: HybridConfig, samples: int) -> Iterator[str]:
        try:
            self._tracer.trace(config, samples)
        except ValueError as error:
            yield from errors_of(error)

    def search(self, top: int) -> Result:
        """Return the layouts that fit, by predicted time.

        All are predicted from traces of one sample; the fastest again from a trace of their whole microbatch.
        """
        fitting: list[Plan] = []
        nearest: Plan | None = None
        left_out: Counter[str] = Counter()
        num_tried = 0
        done: set[tuple[Layout, int]] = set()  # layouts that fit, with zero=0, and samples
        candidates = [*self.candidates(left_out)]
        for layout, samples in tqdm(candidates, desc="layouts", leave=False, disable=None):
            if (replace(layout, zero=0), samples) in done:  # fits at a lower ZeRO stage, which is faster
                continue
            if error := next(self._model_errors(layout, samples=1), None):  # the trace that `scales` uses
                left_out[_short(error)] += 1
                continue
            num_tried += 1
            plan = self._smallest_recomputation(layout, samples, scales=True)
            if plan.peak <= self._job.memory:
                fitting.append(plan)
                done.add((replace(layout, zero=0), samples))
            else:
                left_out[_NEEDS_MORE.format(self._job.memory)] += 1
                nearest = plan if nearest is None or plan.peak < nearest.peak else nearest
        exact: list[Plan] = []
        for plan in _fastest(fitting, REFINED * top):
            if error := next(self._model_errors(plan.layout, plan.samples), None):
                left_out[_short(error)] += 1
                continue
            plan = self._smallest_recomputation(
                replace(plan.layout, recompute=0.0), plan.samples, scales=False
            )
            if plan.peak <= self._job.memory:
                exact.append(plan)
            else:
                left_out[_NEEDS_MORE.format(self._job.memory)] += 1
                nearest = plan if nearest is None or plan.peak < nearest.peak else nearest
        return Result(plans=_fastest(exact, top), nearest=nearest, left_out=left_out, num_tried=num_tried)

    def nearest_to(self, layout: Layout, samples: int) -> list[Plan]:
        """Return the layouts that fit and differ least from one that is impossible or too large."""
        plans = []
        candidates = sorted(
            self.candidates(Counter()), key=lambda pair: _distance(pair[0], layout, pair[1], samples)
        )
        for candidate, candidate_samples in candidates:
            if next(self._model_errors(candidate, samples=1), None):
                continue
            plan = self._smallest_recomputation(candidate, candidate_samples, scales=True)
            if plan.peak > self._job.memory or next(self._model_errors(candidate, candidate_samples), None):
                continue
            plan = self._smallest_recomputation(candidate, candidate_samples, scales=False)
            if plan.peak <= self._job.memory:
                plans.append(plan)
            if len(plans) == NUM_NEAREST:
                break
        return plans

    def _smallest_recomputation(self, layout: Layout, samples: int, *, scales: bool) -> Plan:
        """Predict a layout with the fewest recomputed layers that fit, or with all of them if none fits."""
        setting = self._setting(_same_axes(layout))
        for share in RECOMPUTED if self.num_layers else RECOMPUTED[:1]:
            plan = self._predicted(replace(layout, recompute=share), samples, setting, scales=scales)
            if plan.peak <= self._job.memory:
                break
        return plan

    def _setting(self, layout: Layout) -> _Setting:
        if layout not in self._settings:
            self._settings[layout] = _Setting(layout, self._job.world)
        return self._settings[layout]

    def _order(self, layout: Layout) -> PipelineOrder:
        number = min(layout.microbatches, self.IN_FLIGHT * layout.pp)
        key = (layout.pp, layout.schedule, layout.chunks, number)
        if key not in self._orders:
            self._orders[key] = PipelineOrder(actions=layout.config.schedule(number))
        return self._orders[key]

    @cache  # noqa: B019  # the planner lives as long as the command
    def _bounds(self, num_stages: int) -> list[int]:
        if not self.num_layers:
            return [0, 1]
        counts = assign_layers(self.num_layers, num_stages, self._stage_size, are_alike=self._are_alike)
        return layer_bounds(counts)

    def candidates(self, left_out: Counter[str]) -> Iterator[tuple[Layout, int]]:
        """Yield layouts with the samples of their microbatches, and count those that are left out unseen."""
        job, node = self._job, self._job.device.per_node
        for tp, pp, sp in product(divisors(job.world), repeat=3):
            if job.world % (tp * pp * sp):
                continue
            if tp * sp > node:
                left_out[f"tp × sp beyond the {node} GPUs of a node"] += 1
                continue
            dp = job.world // (tp * pp * sp)
            if job.global_batch % dp:
                left_out[f"dp does not divide the global batch of {job.global_batch}"] += 1
                continue
            if self.num_layers < pp > 1:
                left_out[f"pp beyond the {self.num_layers} layers"] += 1
                continue
            for axes in self._axes(tp, sp, dp):
                for samples in divisors(job.global_batch // dp):
                    number = job.global_batch // dp // samples
                    if samples > MOST_PER_RANK or number < pp:
                        continue
                    yield from self._schedules(axes, dict(tp=tp, pp=pp, sp=sp, dp=dp), samples, number)

    def _axes(self, tp: int, sp: int, dp: int) -> Iterator[dict[str, Any]]:
        """Yield modes of sequence parallelism, and sizes of wp and ep."""
        if sp > 1:
            modes: Sequence[str | None] = ["all_to_all"] + ["ring_attn"] * (self.length >= LONG)
        else:
            modes = [None, *["split_gather"] * (tp > 1)]
        node, data = self._job.device.per_node, dp * sp
        most = gcd(data, self.num_experts) if self.num_experts else 1
        eps = sorted({1, gcd(most, node), most})  # within a node, and as many as there can be
        wps = [1] + [node] * (tp == 1 and data % node == 0 and not self.num_experts)
        for mode, ep, wp in product(modes, eps, wps):
            yield dict(sequence=mode, ep=ep, wp=wp)

    def _schedules(
        self, axes: dict[str, Any], sizes: dict[str, Any], samples: int, number: int
    ) -> Iterator[tuple[Layout, int]]:
        """Yield a layout under every schedule and ZeRO stage that may be worth it."""
        for style, chunks in STYLES if sizes["pp"] > 1 else STYLES[:1]:
            if self.num_layers < chunks * sizes["pp"] > 1:
                continue
            for zero in (1, 2) if sizes["dp"] * sizes["sp"] > 1 else (0,):
                yield (
                    Layout(
                        **sizes,
                        **axes,
                        zero=zero,
                        schedule=style,
                        chunks=chunks if style == "interleaved" else 1,
                        microbatches=number,
                        precision=self._job.precision,
                    ),
                    samples,
                )


def _short(error: str) -> str:
    """Return the beginning of an error, by which equal ones are counted."""
    return error if len(error) <= SHOWN else f"{error[:SHOWN].rpartition(' ')[0]} ..."


def _distance(left: Layout, right: Layout, left_samples: int, right_samples: int) -> tuple[float, ...]:
    """Return how far two layouts differ: first in modes and schedule, then in sizes."""
    names = ("sequence", "schedule", "zero")
    modes = sum(getattr(left, name) != getattr(right, name) for name in names)
    sizes = sum(
        abs(getattr(left, name) - getattr(right, name)) / max(getattr(left, name), getattr(right, name))
        for name in ("tp", "pp", "sp", "dp", "ep", "wp")
    )
    return (sizes + modes, abs(left_samples - right_samples))


def _fastest(plans: Sequence[Plan], count: int) -> list[Plan]:
    """Return the plans of the shortest time, in this order; those that cannot be among them are not simulated."""
    fastest: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: plan.prediction.shortest_time):
        if len(fastest) == count and plan.prediction.shortest_time >= fastest[-1].time.total:
            break
        fastest = sorted([*fastest, plan], key=lambda plan: plan.time.total)[:count]
    return fastest
