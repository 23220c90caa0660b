"""Trace of the forward and backward that one rank computes for one microbatch, without values and without processes.

The model is sharded by the same transforms as in boost, over stand-ins for groups that send nothing. It is not cut into
stages: its sections are put together to any stages later. Only the first layers are traced, until there is one of every
kind; the others are like them.
"""

import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import lcm
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg
from torch.utils._pytree import tree_leaves, tree_map_only

from ..cluster.layout import SUB_AXES
from ..cluster.traffic import Traffic
from ..cluster.transformers_api import as_untraced
from ..derive.build import ANSWERS, described
from ..derive.inputs import Inputs, loss_of
from ..pipeline.stage import takes
from ..pipeline.stage_manager import PipelineStageManager
from ..plugins.hybrid_config import HybridConfig
from ..shardformer.expert_sharding import interface_of
from ..shardformer.layers.expert_parallel import COMMON, Rows, exchange_counts
from ..shardformer.meta_copy import meta_copy
from ..shardformer.policy import Policy
from ..shardformer.policy_choice import policy_for
from ..shardformer.table_policy import expert_width_errors
from ..shardformer.transforms import ModelPlan, TransformOptions
from .cost import Measured, Meter
from .known_integers import KnownIntegers
from .recording import Recording, recording_of
from .result_cache import ResultCache
from .sections import BACKWARD, FORWARD, Trace
from .shortened import local_parameters, shorten, stage_plan

_LOG_OF_FAKES = logging.getLogger("torch._subclasses.fake_tensor")  # writes errors that are answered here
_IMAGES = {"pixel_values", "pixel_values_videos"}
_GRID_SIDE = 16  # tokens at the side of an image, where a model takes any size
_EXAMPLES = 16  # samples of an example: enough to tell constants from random numbers


class Example(NamedTuple):
    """A batch like the traced one, and settings without which the model cannot compute it.

    Args:
        batch: arguments of the forward, without an attention mask.
        samples: in it.
        unset: names of tokens that the config leaves open, and a script must set.
    """

    batch: dict[str, Any]
    samples: int
    unset: Sequence[str]


@contextmanager
def fake_groups(num_ranks: int) -> Iterator[None]:
    """Provide a default process group of some ranks that sends nothing, for `FakeMesh`.

    Raises:
        RuntimeError: this process has a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("a plan needs a process without a process group: make it before launch_from_torch")
    assert fake_pg  # registers the backend
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class FakeMesh:
    """Groups of the axes, which exist in this process alone and send nothing; made in `fake_groups`.

    Args:
        sizes: sizes of the axes; an axis without one has size 1.
    """

    def __init__(self, **sizes: int) -> None:
        self._sizes = sizes
        self._groups = {axis: dist.new_group(range(size)) for axis, size in sizes.items()}

    def size(self, *axes: str) -> int:
        """Return the size of an axis."""
        (axis,) = axes
        return self._sizes.get(axis, 1)

    def rank(self, axis: str) -> int:
        """Return the coordinate on an axis: 0."""
        return 0

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the group of an axis."""
        return self._groups[axis]

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """Return the axis of a group; "world" for another group."""
        names = {known.group_name: axis for axis, known in self._groups.items()}
        return names.get(group.group_name, "world")


class _BalancedExperts(TorchFunctionMode):
    """A context in which every rank sends equally many rows to the experts of every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rows: set[int] = set()  # that a rank sends in one exchange
        self._num_rows = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; answer the exchange of numbers of rows."""
        if func is torch.argsort:
            self._num_rows = args[0].numel()  # the rows that are about to be sent
        if func is not exchange_counts:
            return func(*args, **(kwargs or {}))
        counts_PE, group = args
        self.num_rows.add(self._num_rows)
        count, rest = divmod(self._num_rows, group.size())
        rows = [count + (rank < rest) for rank in range(group.size())]
        return Rows(rows, [rows[0]] * group.size(), counts_PE, rows[0])


class Tracer:
    """Traces of one model under any layout.

    Args:
        model: the full model on the meta device; it is not changed.
        task: see `derive.inputs.Inputs`.
        length: tokens of a text.
    """

    def __init__(self, model: nn.Module, task: str, length: int) -> None:
        self.model, self.plan, self.length, self._task = model, stage_plan(model), length, task
        self._num_experts = _num_common_experts(model)
        names = inspect.signature(model.forward).parameters
        self._reads_integers = "input_ids" in names and not _IMAGES.isdisjoint(names)
        self._inputs: Inputs | None = None  # with the forms of images, which the first trace finds out
        self._image_errors: list[str] = []  # if it finds out none
        self._shortened = meta_copy(model)
        self._traced_of = [] if self.plan is None else shorten(self._shortened, self.plan)
        config: Any = self._shortened.config
        # A script sets them; any number is as good here.
        self._unset = [
            name for name in ("pad_token_id", "decoder_start_token_id") if getattr(config, name, None) is None
        ]
        for name in self._unset:
            setattr(config, name, 0)
        self._traces: dict[Any, Trace | ValueError] = {}
        self._recordings: dict[Any, dict[int, Recording]] = {}  # by layout but for ep_size, and by that
        self._results = ResultCache()
        self._policies: dict[bool, Policy] = {}  # a policy that has sharded tensors keeps their table

    def trace(self, config: HybridConfig, samples: int) -> Trace:
        """Trace a microbatch under the tensor, sequence, weight and expert axes of a config.

        Args:
            config: the options of a plugin; its pipeline and data axes are left out.
            samples: rows of the microbatch.

        Raises:
            ValueError: the model cannot be sharded so, or its forward reads values on the host; all reasons at once.
        """
        axes = (config.tp_size, config.sp, config.sequence, config.wp_size, config.dtype, samples)
        key = (axes, config.ep_size)
        if key not in self._traces:
            try:
                self._fit_images()
                recordings = self._recordings.setdefault(axes, {})
                self._traces[key] = self._recording(config, samples, recordings).trace(self._traced_of)
            except ValueError as error:
                self._traces[key] = error
            except Exception as error:  # of any model's code, which was written for tensors with values
                self._traces[key] = ValueError(f"its forward cannot be traced: {described(error)}")
        if isinstance(result := self._traces[key], ValueError):
            raise ValueError(*result.args)  # a new one: raising one again would make its traceback longer
        return result

    def example(self) -> Example:
        """Return a batch of a few samples, and the tokens that a script must set."""
        batch = self._inputs_of(self._shortened).make(_EXAMPLES)
        batch.pop("attention_mask", None)
        has_decoder = bool(getattr(self.model.config, "is_encoder_decoder", False))
        pads = "input_ids" in batch and (has_decoder or self._task != "CAUSAL_LM")
        needed = {"pad_token_id": pads, "decoder_start_token_id": has_decoder}
        return Example(batch, _EXAMPLES, [name for name in self._unset if needed[name]])

    def _policy(self, config: HybridConfig) -> Policy | None:
        """Return the policy of the model type, which may take seconds to derive."""
        is_split = config.tp_size > 1
        if not is_split and config.sp == 1:
            return None
        if is_split not in self._policies:
            self._policies[is_split] = policy_for(self._shortened)
        return self._policies[is_split]

    def _recording(self, config: HybridConfig, samples: int, recordings: dict[int, Recording]) -> Recording:
        """Return the recording of a layout, from those under other sizes of the expert axis if possible."""
        size = config.ep_size
        is_like_others = size > 1 and self._num_experts > size and self._num_experts % size == 0
        if is_like_others and (recording := recording_of(size, recordings)) is not None:
            return recording
        recording = self._record(config, samples)
        if is_like_others:
            recordings[size] = recording
        return recording

    def _inputs_of(self, model: nn.Module) -> Inputs:
        """Return what makes batches of a sharded model."""
        inputs = Inputs(model, self._task, length=self.length, target_length=self.length)
        if self._inputs is not None:
            inputs.adopt(self._inputs)
        return inputs

    def _fit_images(self) -> None:
        """Find the form of images, and the number of their tokens, by the errors of the model's own forward.

        Raises:
            ValueError: it accepts none.
        """
        if self._inputs is None and self._reads_integers:
            inputs = self._inputs = self._inputs_of(self._shortened)
            inputs.samples, inputs.most_placeholders, inputs.grid_side = 1, self.length - 1, _GRID_SIDE
            while True:
                try:
                    self._record(HybridConfig(precision="fp32"), samples=1)
                    self._image_errors = []
                    break
                except Exception as error:  # of any model's code
                    self._image_errors.append(described(error))
                    if len(self._image_errors) == ANSWERS or not inputs.adapt(error, leaves_out=False):
                        break
                inputs.length = self.length - sum(inputs.num_placeholders.values())
        if self._image_errors:
            raise ValueError(
                f"its forward accepts no sample of {self.length} tokens with an image (more: --seq): "
                + " | ".join(dict.fromkeys(self._image_errors))
            )

    def _record(self, config: HybridConfig, samples: int) -> Recording:
        num_ranks = max(config.tp_size, config.sp * config.wp_size * config.ep_size)
        with fake_groups(num_ranks), warnings.catch_warnings(), patch.object(_LOG_OF_FAKES, "disabled", True):
            # By a cache of weights.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            sharded, mesh = shard(meta_copy(self._shortened), config, self._policy(config))
            inputs = self._inputs_of(sharded)
            made = {name: value for name, value in inputs.make(samples).items() if name != "attention_mask"}
            paths = [] if self.plan is None else self.plan.layer_paths(sharded)
            parameters = local_parameters(sharded, self.plan, self._traced_of)
            experts = _BalancedExperts()
            with FakeTensorMode(allow_non_fake_inputs=True) as mode, as_untraced(), experts:
                mode.cache_enabled = False  # see result_cache.py
                _make_fake(sharded)
                sharded.train()
                fake = partial(_in_fake, mode=mode, dtype=config.dtype, keeps_integers=self._reads_integers)
                batch = tree_map_only(Tensor, fake, made)
                integers = KnownIntegers() if self._reads_integers else nullcontext()
                meter = Meter(Traffic(mesh), self._results)
                measured = _measure(sharded, batch, paths, meter, integers)
        return Recording(**measured, parameters=parameters, num_rows=frozenset(experts.num_rows))


def _num_common_experts(model: nn.Module) -> int:
    """Return the number of experts of every layer of a mixture; 0 if the layers or their interfaces differ."""
    interfaces = {module: interface for module in model.modules() if (interface := interface_of(module))}
    if any(interface is not COMMON for interface in interfaces.values()):
        return 0
    numbers = {int(getattr(module, COMMON.counts[0])) for module in interfaces}
    return numbers.pop() if len(numbers) == 1 else 0


def _make_fake(model: nn.Module) -> None:
    """Replace meta tensors by fake ones on the CPU, for whose operations kernels are chosen as for others."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    made[tensor] = (
                        Parameter(fake, tensor.requires_grad) if isinstance(tensor, Parameter) else fake
                    )
                    vars(made[tensor]).update(vars(tensor))  # placements
                tensors[name] = made[tensor]  # type: ignore[assignment]


def _in_fake(tensor: Tensor, *, mode: FakeTensorMode, dtype: torch.dtype, keeps_integers: bool) -> Tensor:
    """Return a tensor of a batch without values, in the format of the computation; integers may keep their values."""
    if keeps_integers and not tensor.is_floating_point():
        return tensor
    fake: Tensor = mode.from_tensor(tensor)
    return fake.to(dtype) if fake.is_floating_point() else fake


def shard(model: nn.Module, config: HybridConfig, policy: Policy | None) -> tuple[nn.Module, FakeMesh]:
    """Shard a model as boost does, without stages.

    Args:
        model: the full model.
        config: options of the plugin.
        policy: that of the model type, for a tensor or sequence axis.

    Raises:
        ValueError: it cannot be sharded so; all reasons at once.
    """
    axes = {"tp": config.tp_size, "sp": config.sp}
    sub_axes = {axis: size for axis in SUB_AXES if (size := getattr(config, f"{axis}_size")) > 1}
    mesh: Any = FakeMesh(pp=1, data=lcm(config.sp, *sub_axes.values()), **axes, **sub_axes)
    options = TransformOptions(
        shard_config=config.shard_config(mesh, PipelineStageManager(mesh)),
        device=torch.device("cpu"),
        dtype=config.dtype,
        policy=policy,
        shards=policy is not None,
        moves=False,
        groups={axis: mesh.group(axis) for axis in ("data", *sub_axes)},
        weights={"overlap": config.wp_overlap, "gradient_dtype": config.wire_dtype},
    )
    errors = expert_width_errors(model, tp_size=config.tp_size, dtype=config.dtype)
    return ModelPlan(model.to(config.dtype), options, errors).apply(), mesh


def _measure(
    model: nn.Module,
    batch: dict[str, Any],
    paths: Sequence[str],
    meter: Meter,
    integers: AbstractContextManager[Any],
) -> dict[str, list[Any]]:
    """Run forward and backward, and return forwards, backwards and outputs of a `Recording`."""
    cuts = _Cuts(meter)
    for path in dict.fromkeys(paths):
        cuts.add(model.get_submodule(path))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop)
    with meter.traffic.noted(), meter, integers:
        meter.enter_section((FORWARD, 0))
        loss = loss_of(model(**batch, **({"use_cache": False} if takes(model, "use_cache") else {})))
        cuts.begin_backward()
        loss.backward()
        meter.end_section()
    if cuts.num_runs != len(paths):
        raise ValueError(f"{cuts.num_runs} layers run in a forward, and {len(paths)} are known")
    sections = range(2 * cuts.num_runs + 1)
    return dict(
        forwards=[meter.measured[FORWARD, section] for section in sections],
        backwards=[meter.measured.get((BACKWARD, section), Measured()) for section in sections],
        outputs=[cuts.outputs.get(section, 0) for section in sections],
    )


def _drop(parameter: Tensor) -> None:
    parameter.grad = None  # boost adds it to a bucket


class _Cuts:
    """Hooks that cut a model's forward and backward at its layers; see [Note: sections] in cost.py.

    Sections are counted in the order of forward: an even number is between two layers, an odd one a layer.

    Args:
        meter: measures the sections.

    Attributes:
        outputs: by section, the bytes of its output.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter, self._section = meter, 0
        self._last: Tensor | None = None
        self.outputs: dict[int, int] = {}

    @property
    def num_runs(self) -> int:
        """The number of runs of layers."""
        return self._section // 2

    def add(self, layer: nn.Module) -> None:
        """Cut before and after a layer."""
        layer.register_forward_pre_hook(self._before, with_kwargs=True)
        layer.register_forward_hook(self._after)

    def begin_backward(self) -> None:
        """Enter the backward of the last section."""
        self._meter.enter_section((BACKWARD, self._section))

    def _before(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._cut([*args, *kwargs.values()])

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._cut(output)

    def _cut(self, values: Any) -> None:
        """End a section, whose output is the first of these tensors that requires a gradient."""
        tensors = [
            value for value in tree_leaves(values) if isinstance(value, Tensor) and value.requires_grad
        ]
        self.outputs[self._section] = tensors[0].nbytes if tensors else 0
        if tensors and tensors[0] is not self._last:  # else nothing is computed between two layers
            tensors[0].register_hook(partial(self._arrive, self._section))
        self._last = tensors[0] if tensors else None
        self._section += 1
        self._meter.enter_section((FORWARD, self._section))

    def _arrive(self, section: int, gradient: Tensor) -> None:
        self._meter.enter_section((BACKWARD, section))
