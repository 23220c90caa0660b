"""Stages of a model: cut from the full model without changing its forward.

[Note: whole forward] Every stage calls the full model with the same microbatch, so the model computes
masks, positions and per-layer choices as usual. Modules of other stages are replaced by stand-ins:

    entry modules  -> Placeholder   a zero-stride tensor of the right shape, whose values are never read
    after them     -> Outline       another one, see [Note: shapes]
    earlier layers -> Passing       return their input
    the last one   -> Arriving      returns the tensor received from the previous stage
    own layers                      unchanged
    the next layer -> Leaving       leaves the forward by an exception that carries its input
    all the rest   -> Absent        holds no parameters and is never called

Every stage has the parameters of modules that contain the layers, and the modules that the plan lists as
`everywhere`. Where their result is not used they get no gradient, and the sum over the stages is the full gradient.

The received tensor replaces a layer's output and not the embedding's: some models scale, add or project between the
two, and would do it twice.

[Note: encoder and decoder] The encoder's layers come first, then the decoder's. A stage may end in either, or between
them, and may have the end of the encoder and the start of the decoder. A stage that ends with the encoder leaves the
forward behind the encoder's module, with its output, which a Sent returns on the next one. Modules of the encoder
besides its layers and entries (its last norm) are on the stage of its last layer. For a microbatch without images, for
which the encoder does not run, its stages send nothing: LeavingEmpty.

[Note: repeated modules] T5 computes its position bias in the first layer of each stack and passes it on. The first
layer of every later stage must therefore compute it again, with the same parameters. Parameters have one name: that of
the first layer, whose stand-in adopts the module if the layer itself is on another rank. Other layers borrow it.

[Note: shapes] Some layers return another shape than they take (Swin), and some models compute with the entries'
outputs before the first layer (timm). Then the received tensor has not the shape that the forward expects before the
stage's first layer. An Outline runs the replaced module on the meta device, and returns a tensor of the right shape.

[Note: runs] ALBERT runs one layer many times. Every stage with a run of it has the layer, and its parameters count as
tied between those stages. If a stage has only some of the runs, a Runs replaces the layer: it counts the runs, and
calls the layer in those of the stage only. Between forwards the layer itself is in its place, see [Note: seats].

[Note: seats] A rank may have several stages of one model. Between forwards its module tree has the modules of all of
them, so parameters, hooks and modes are those of one model. While a stage runs, its stand-ins replace the modules of
the rank's other stages, and are removed afterwards. With one stage per rank nothing is exchanged.

[Note: packed texts] transformers separates packed texts, whose `position_ids` restart within a row, but only in a call
without `attention_mask` and without cache. `use_cache` decides if there is a cache, in the call or else in the config,
where it is True by default; some models have none in training. Such a call is made as the user wrote it, in training
with an EmptyCache, so that its masks are those of `model(**batch)` without Echelon. The cache is not returned.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import Cache, PreTrainedModel

from ..cluster.transformers_api import CACHE_NAMES, EmptyCache, attention_name
from .host_masks import compiles_masks, is_compiled, mask_of_all
from .roles import stage_roles
from .stage_plan import StagePlan, is_within
from .stand_ins import (
    Borrowed,
    Inbox,
    Role,
    Roles,
    Runs,
    StageExit,
    StandIn,
    record_carried,
    record_returns,
    record_sent,
)

_STAGES = "_pipeline_stages"  # the attribute of a cut model with its stages
# Arguments that decide which tokens see each other.
_VISIBILITY_ARGUMENTS = ("attention_mask", "position_ids")


class Seat(NamedTuple):
    """A place in the module tree that a stand-in takes while its stage runs: `modules[name]`."""

    modules: dict[str, nn.Module | None]
    name: str
    stand_in: StandIn


class Carried(Protocol):
    """Further tensors that travel with the activations, behind those of the layers: statistics of experts' routers."""

    def begin(
        self, args: tuple, kwargs: dict[str, Any], received: tuple[Tensor, ...], *, is_last: bool
    ) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Start a forward; return the keywords of the model's call, and the received tensors of the layers."""
        ...

    def sent(self) -> tuple[Tensor, ...]:
        """Return the tensors to send after those of the layers."""
        ...

    def finish(self) -> None:
        """End a forward, also one that raises."""
        ...


class Stage:
    """One stage as the runner uses it: the full model's forward, from the received tensors to the sent ones.

    Args:
        model: the model; several stages may share one.
        index, num_stages: the index of the stage, and the number of stages.
        bounds: the first layer of each stage, and the end of the last one's; empty without a plan.
        layer_paths: the paths of the stage's own layers; empty without a plan.
        inbox: the received tensors, for the model's stand-ins.
        seats: see [Note: seats].
        borrowed: see [Note: repeated modules].
        ends_after: the path of the encoder, if the stage ends with it.

    Attributes:
        carried: tensors besides those of the layers; None without.
    """

    carried: Carried | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        index: int = 0,
        num_stages: int = 1,
        bounds: Sequence[int] = (),
        layer_paths: Sequence[str] = (),
        inbox: Inbox | None = None,
        seats: Sequence[Seat] = (),
        borrowed: Sequence[Borrowed] = (),
        ends_after: str = "",
    ) -> None:
        self.model = model
        self.index = index
        self.num_stages = num_stages
        self.bounds = list(bounds)
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self._layer_paths = list(layer_paths)
        self._inbox = inbox or Inbox()
        self._seats = list(seats)
        self._borrowed = list(borrowed)
        self._ends_after = ends_after
        self.is_computing = False
        self._takes_cache = takes(model, "use_cache")
        self._makes_positions = makes_positions(model)

    @property
    def layers(self) -> list[nn.Module]:
        """The stage's own layers, in order."""
        return [self.model.get_submodule(path) for path in self._layer_paths]

    def parameters(self) -> list[Parameter]:
        """Return the parameters of the stage's forward, each once. A parameter tied between stages belongs to both."""
        with self.seated():
            parameters = list(self.model.parameters())
        for borrowed in self._borrowed:
            parameters += borrowed.module.parameters()
        return list(dict.fromkeys(parameters))

    def forward(self, microbatch: Any, received: tuple[Tensor, ...]) -> Any:
        """Return the tensors for the next stage, or on the last stage the model's outputs.

        Args:
            microbatch: a dict (passed by name), a tuple or list (by position) or a single tensor.
            received: the tensors from the previous stage; empty on the first.
        """
        args, kwargs = as_arguments(microbatch)
        kwargs = with_known_cache_name(self.model, kwargs)
        # No cache: it would save the keys and values of all layers, and a stage has only its own.
        if self._takes_cache:
            kwargs = without_cache(self.model, args, kwargs)
        if self._makes_positions:
            kwargs = with_mask(self.model, args, kwargs)
        carried, layer_inputs = self.carried, received
        if carried is not None:
            kwargs, layer_inputs = carried.begin(args, kwargs, received, is_last=self.is_last)
        self._inbox.begin(layer_inputs, self._ends_after)
        self.is_computing = True
        try:
            with self.seated():
                outputs = self._inbox.without_outlines(self.model(*args, **kwargs))
        except StageExit as stage_exit:
            sent = stage_exit.tensors if carried is None else (*stage_exit.tensors, *carried.sent())
            # A received tensor that is sent on unchanged gets a graph here, like all outputs that are not frozen.
            received_ids = set(map(id, received))
            return tuple(tensor.view_as(tensor) if id(tensor) in received_ids else tensor for tensor in sent)
        finally:
            self.is_computing = False
            self._inbox.begin(())
            if carried is not None:
                carried.finish()
        if not self.is_last:
            raise AssertionError(f"stage {self.index} ran to the end of the model: no later layer was called")
        return drop_cache(outputs)

    @contextmanager
    def seated(self) -> Iterator[None]:
        """Put this stage's stand-ins into the model in this context, and the model's own modules back at its end."""
        native = [modules[name] for modules, name, _ in self._seats]
        try:
            for seat, module in zip(self._seats, native, strict=True):
                assert module is not None
                seat.stand_in.training = module.training
                seat.modules[seat.name] = seat.stand_in
            yield
        finally:
            for seat, module in zip(self._seats, native, strict=True):
                seat.modules[seat.name] = module


def cut_stages(
    model: nn.Module,
    plan: StagePlan,
    *,
    stages: Sequence[int],
    bounds: Sequence[int],
    device: torch.device | None = None,
) -> dict[int, Stage]:
    """Cut a model into stages: replace the modules that this rank does not have by stand-ins, and free their memory.

    In place; parameter names are unchanged. No communication.

    Args:
        model: the full model, in any state of initialization.
        plan: the paths of its layers.
        stages: the stages to keep.
        bounds: the first layer of each stage, and the end of the last one's.
        device: the device of the computation; None is the model's present one.

    Returns:
        The stages by index. `local_stages` returns them again.
    """
    paths = plan.layer_paths(model)
    roles = {stage: stage_roles(model, plan, bounds[stage], bounds[stage + 1]) for stage in stages}
    stand_ins = _StandIns(model, device or next(model.parameters()).device)
    for path, role in _absent_on_all_stages(list(roles.values())).items():
        model.set_submodule(path, stand_ins.get(path, role))
    borrowed = {stage: _lend_repeated_modules(model, plan, bounds[stage]) for stage in stages}
    _free_modules([*stand_ins.native.values()], kept=set(model.modules()))
    if plan.collects(model):
        record_returns(model, stand_ins.inbox, plan.entry[0], paths)
    record_sent(model, stand_ins.inbox, plan.recorded)
    ends = {stack.stop: stack.plan.module for stack in plan.stacks(model)[:-1]}
    for stack in plan.stacks(model):
        if (carried := stack.plan.carried) is not None:
            last = {bounds[stage + 1] - 1 for stage in stages}
            layers = [path for layer, path in enumerate(stack.paths, stack.first) if layer in last]
            record_carried(model, stand_ins.inbox, layers, carried)
    local = {
        stage: Stage(
            model,
            index=stage,
            num_stages=len(bounds) - 1,
            bounds=bounds,
            layer_paths=paths[bounds[stage] : bounds[stage + 1]],
            inbox=stand_ins.inbox,
            seats=stand_ins.seats(roles[stage]),
            borrowed=borrowed[stage],
            ends_after=ends.get(bounds[stage + 1], ""),
        )
        for stage in sorted(stages)
    }
    remember_stages(model, local)
    return local


def local_stages(model: nn.Module) -> dict[int, Stage]:
    """Return the stages of a cut model by index; a model that was not cut is one stage."""
    return vars(model).get(_STAGES) or {0: Stage(model)}


def remember_stages(model: nn.Module, stages: dict[int, Stage]) -> None:
    """Attach the stages to the model that they call, for `local_stages`."""
    for stage in stages.values():
        stage.model = model
    vars(model)[_STAGES] = stages


def refuse_direct_calls(model: nn.Module) -> None:
    """Make calls of a cut model outside of a schedule raise RuntimeError, on every rank of the pipeline."""
    model.register_forward_pre_hook(_refuse_direct_call)


def _refuse_direct_call(model: nn.Module, args: tuple) -> None:
    """Forward pre-hook of a cut model: raise RuntimeError unless one of its stages calls it."""
    stages = local_stages(model)
    if not any(stage.is_computing for stage in stages.values()):
        local, num_stages = list(stages), next(iter(stages.values())).num_stages
        raise RuntimeError(
            f"this {type(model).__name__} has only stages {local} of {num_stages}, but was called directly or by "
            "generate(): call booster.execute_pipeline, under torch.no_grad() to evaluate; to generate, save it by "
            "booster.save_model and load it at pp_size=1"
        )


def _lend_repeated_modules(model: nn.Module, plan: StagePlan, start: int) -> list[Borrowed]:
    """Lend modules of a stack's first layer to the first layer of a stage that starts within the stack.

    Changes this layer of the model: see [Note: repeated modules]. Returns the references to the lent modules.
    """
    borrowed = []
    for stack in plan.stacks(model):
        if not stack.first < start < stack.stop:
            continue
        owner = model.get_submodule(stack.paths[0])
        borrower = model.get_submodule(stack.paths[start - stack.first])
        for path, switch in stack.plan.repeated.items():
            if isinstance(owner, StandIn):
                owner.adopt(path)
            reference = Borrowed(owner, path)
            borrowed.append(reference)
            # A plain attribute, not a child module: the owner alone lists the parameters.
            parent, _, name = path.rpartition(".")
            vars(borrower.get_submodule(parent))[name] = reference
            # The boolean by which the layer's forward asks if it has the module.
            holder, _, attribute = switch.rpartition(".")
            setattr(borrower.get_submodule(holder), attribute, True)
    return borrowed


def _absent_on_all_stages(all_roles: Sequence[Roles]) -> Roles:
    """Return the modules that no stage of this rank has, each by its path with one of its roles.

    These are replaced by a stand-in, or inside one, on every stage. A layer that `Runs` replaces is on the stage.

    Args:
        all_roles: the roles of each stage of this rank.
    """
    absent: Roles = {}
    all_roles = [{path: role for path, role in roles.items() if role.kind is not Runs} for roles in all_roles]
    candidates = [item for roles in all_roles for item in roles.items()]
    for path, role in sorted(candidates, key=lambda item: item[0]):  # outer ones first
        is_inside = any(is_within(path, outer) for outer in absent)
        if not is_inside and all(any(is_within(path, outer) for outer in roles) for roles in all_roles):
            absent[path] = role
    return absent


def _free_modules(natives: Sequence[nn.Module], kept: set[nn.Module]) -> None:
    """Free the memory of replaced modules, but not of those in `kept`: they are in the model under another name too."""
    for native in natives:
        for module in native.modules():
            if module not in kept:
                module._apply(lambda tensor: tensor.to("meta"), recurse=False)


class _StandIns:
    """Makes the stand-ins of one model: one for each path and role, shared by this rank's stages."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.inbox = Inbox()
        self.native: dict[str, nn.Module] = {}  # by path, the modules that stand-ins replace
        self._model = model
        self._device = device
        self._stand_ins: dict[tuple[str, Role], StandIn] = {}

    def get(self, path: str, role: Role) -> StandIn:
        """Return the stand-in with this role for the native module at a path."""
        native = self.native.setdefault(path, self._model.get_submodule(path))
        key = (path, role)
        if key not in self._stand_ins:
            self._stand_ins[key] = role.kind(native, self.inbox, self._device, role)
        return self._stand_ins[key]

    def seats(self, roles: Roles) -> list[Seat]:
        """Return the places where a stage's stand-ins replace other modules while it runs."""
        seats = []
        for path, role in roles.items():
            stand_in = self.get(path, role)
            parent, _, name = path.rpartition(".")
            modules = self._model.get_submodule(parent)._modules
            if modules[name] is not stand_in:
                seats.append(Seat(modules, name, stand_in))
        return seats


def as_arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """Return a batch as the positional and named arguments of a model's call."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def takes(model: nn.Module, argument: str) -> bool:
    """Return True if a model's forward takes this argument: by name, or among keywords that its base model gets."""
    parameters, base = inspect.signature(model.forward).parameters, getattr(model, "base_model", model)
    if argument in parameters:
        return True
    takes_keywords = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    # T5Gemma's classifiers pass it themselves. The keywords of a call are a tuple among the constants.
    calls = [names for names in getattr(code, "co_consts", ()) if isinstance(names, tuple)]
    is_passed = base is not model and argument in inspect.signature(base.forward).parameters
    return takes_keywords and is_passed and not any(argument in names for names in calls)


def argument(model: nn.Module, args: tuple, kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an argument of a model's call, given by name or by position; None if it is not given."""
    if name in kwargs or not args:
        return kwargs.get(name)
    return dict(zip(inspect.signature(model.forward).parameters, args, strict=False)).get(name)


def depends_on_cache(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Return True if the masks of a call may depend on the presence of a cache: see [Note: packed texts]."""
    has_positions = argument(model, args, kwargs, "position_ids") is not None
    return has_positions and argument(model, args, kwargs, "attention_mask") is None


def cache_name(model: nn.Module) -> str | None:
    """Return the name of the argument by which a model's forward takes a cache; None if it takes none."""
    return next((name for name in CACHE_NAMES if takes(model, name)), None)


def cache_of(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return the cache of a model's call, by any of its names; None if it is not given."""
    caches = (argument(model, args, kwargs, name) for name in CACHE_NAMES)
    return next((cache for cache in caches if cache is not None), None)


def with_known_cache_name(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call, with the cache under the name that this release of transformers has for it.

    Raises:
        ValueError: a cache is given under two names.
    """
    renamed = [name for name in CACHE_NAMES if name in kwargs and not takes(model, name)]
    if not renamed or (accepted := cache_name(model)) is None:
        return dict(kwargs)
    if accepted in kwargs or len(renamed) > 1:
        names = [name for name in CACHE_NAMES if name in kwargs]
        raise ValueError(
            f"{' and '.join(names)} are two names of one argument, the cache: give {accepted} alone"
        )
    return {accepted if name == renamed[0] else name: value for name, value in kwargs.items()}


def without_cache(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call, changed so that it makes no cache, or in training an empty one.

    It gets `use_cache=False`, or an EmptyCache if its masks depend on a cache; see [Note: packed texts].

    Args:
        model: a model that takes `use_cache`.
        args, kwargs: the arguments of its call.
    """
    if not depends_on_cache(model, args, kwargs):
        return {**kwargs, "use_cache": False}
    use_cache = argument(model, args, kwargs, "use_cache")
    if use_cache is None:
        use_cache = getattr(getattr(model, "config", None), "use_cache", False)
    name = cache_name(model)
    if not (use_cache and model.training) or name is None or cache_of(model, args, kwargs) is not None:
        return dict(kwargs)
    return {**kwargs, name: EmptyCache()}


def makes_positions(model: nn.Module) -> bool:
    """Return True for a transformers model that makes positions, and masks from them, if neither is given."""
    parameters = inspect.signature(model.forward).parameters
    return isinstance(model, PreTrainedModel) and {"input_ids", *_VISIBILITY_ARGUMENTS} <= parameters.keys()


def with_mask(model: PreTrainedModel, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call, with a mask of all tokens if no argument decides which tokens are seen.

    See [Note: questions about masks] in host_masks.py.

    Args:
        model: a model with `makes_positions`.
        args, kwargs: the arguments of its call, on its device.
    """
    ids = argument(model, args, kwargs, "input_ids")
    deciding = (*_VISIBILITY_ARGUMENTS, *CACHE_NAMES, "inputs_embeds")
    is_undecided = all(argument(model, args, kwargs, name) is None for name in deciding)
    has_ids = isinstance(ids, Tensor) and ids.dim() == 2
    if not (has_ids and is_undecided) or is_compiled(model) or compiles_masks(attention_name(model.config)):
        return dict(kwargs)
    return {**kwargs, "attention_mask": mask_of_all(ids)}


def drop_cache(outputs: Any) -> Any:
    """Return a model's outputs without its cache, of which each rank would have only its layers'."""
    if isinstance(outputs, tuple):
        return tuple(output for output in outputs if not isinstance(output, Cache))
    if not dataclasses.is_dataclass(outputs) or isinstance(outputs, type):
        return outputs
    names = [field.name for field in dataclasses.fields(outputs)]
    caches = [name for name in names if isinstance(getattr(outputs, name), Cache)]
    return dataclasses.replace(outputs, **dict.fromkeys(caches)) if caches else outputs
