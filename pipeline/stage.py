"""Stages of a model: cut out of the whole one without touching its forward.

[Note: whole forward] Every stage calls the whole model with the same microbatch, so the model computes
masks, positions and per-layer choices as ever. What the stage does not hold is replaced by stand-ins:

    entry modules  -> Placeholder   a zero-stride tensor of the right shape, which nobody reads
    after them     -> Outline       another one, see [Note: shapes]
    earlier layers -> Passing       return their input
    the last one   -> Arriving      returns the tensor received from the stage before
    own layers                      as they are
    the next layer -> Leaving       leaves the forward by an exception that carries its input
    all the rest   -> Absent        holds no parameters and is never called

What stands on a module around the layers (a parameter of its own), and what the plan calls `everywhere`, is on every
stage; where its result is not read it gets no gradient, and the sum over the stages is the whole one.

What arrives takes a layer's place and not the embedding's: between the two some models scale, add or
project once more, and would do it twice.

[Note: encoder and decoder] The encoder's layers come first, then the decoder's; a stage may end in the one or
the other, or between them, and may hold the end of the one and the start of the other. Stages of the decoder
receive and send two tensors, (hidden states, encoder's output); the stage that ends between them sends one. In
place of the encoder an Encoded then returns what arrived, in place of the decoder a LeavingEncoder ends the stage
that ends between them, and a LeavingDecoder is what Leaving is to a decoder's layer. What stands in the encoder
beside its layers and entries (its last norm) is held with its last layer.

[Note: repeated modules] T5 computes its position bias in the first layer of each stack and hands it on, so the first
layer of every later stage must compute it again, by the same parameters. Parameters stand under one name: that of
the first layer, whose stand-in adopts the module where the layer itself is not here. The others borrow it.

[Note: shapes] Where layers return another shape than they take (Swin), or a model computes with the entries' outputs
before the first layer (timm), what arrives has not the shape that the forward reckons with on the way to the stage's
first layer. An Outline then runs what it stands for on the meta device, and returns a tensor of the right shape.

[Note: runs] ALBERT runs one layer many times. Every stage that has a run of it holds it, and its parameters count as
tied between those stages. Where not all its runs are one stage's, Runs stands for it: it counts them, and only the
stage's own reach the layer. The layer itself has the place between forwards, see [Note: seats].

[Note: seats] A rank may hold several stages of one model. At rest its module tree holds what any of them
holds, so parameters, hooks and modes are those of one model. While a stage runs, its stand-ins take the
places of what the rank's other stages hold, and afterwards give them back. Where a rank holds one stage there
is nothing to exchange.

[Note: packed texts] transformers keeps texts apart whose `position_ids` begin anew within a row, but only in a call
that has neither an `attention_mask` nor a cache. Whether there is a cache `use_cache` says, in the call or else in the
config, where it is True by default; some models have none in training. Such a call is made as the user wrote it, in
training with an EmptyCache, so that its masks are those of `model(**batch)` without Echelon. It is not returned.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import Cache, DynamicCache, PreTrainedModel

from .known_masks import compiles_masks, is_compiled, mask_of_all
from .plan import StagePlan, is_within
from .stand_ins import Borrowed, Inbox, Role, Roles, Runs, StageExit, StandIn, note_returns, stage_roles

_STAGES = "_pipeline_stages"  # where a cut model keeps its stages
_SAYING_WHICH = ("attention_mask", "position_ids")  # tokens see each other


class Seat(NamedTuple):
    """A place in the module tree that a stand-in takes while its stage runs: `modules[name]`."""

    modules: dict[str, nn.Module | None]
    name: str
    stand_in: StandIn


class Stage:
    """One stage as the runner sees it: the whole model's forward, from what arrives to what leaves.

    Args:
        model: the model; several stages may have one.
        index, num_stages: which stage of how many.
        bounds: where each stage's layers begin and the last one's stop; empty where no plan is known.
        layer_paths: where the stage's own layers are; empty where no plan is known.
        inbox: from which the model's stand-ins take what arrived.
        seats: see [Note: seats].
        borrowed: see [Note: repeated modules].
    """

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
        self.is_computing = False
        self._takes_cache = takes(model, "use_cache")
        self._makes_positions = makes_positions(model)

    @property
    def layers(self) -> list[nn.Module]:
        """The stage's own layers, in order."""
        return [self.model.get_submodule(path) for path in self._layer_paths]

    def parameters(self) -> list[Parameter]:
        """Parameters that the stage's forward uses, each once; one that is tied to another stage's belongs to both."""
        with self.seated():
            own = list(self.model.parameters())
        borrowed = [parameter for each in self._borrowed for parameter in each.module.parameters()]
        return list(dict.fromkeys([*own, *borrowed]))

    def forward(self, microbatch: Any, received: tuple[Tensor, ...]) -> Any:
        """The tensors for the next stage, or on the last stage the model's outputs.

        Args:
            microbatch: a dict (passed by name), a tuple or list (by place) or a single tensor.
            received: what the stage before sent; empty on the first.
        """
        args, kwargs = as_arguments(microbatch)
        # A cache would keep every layer's keys and values, and a stage's would have its own layers' alone.
        if self._takes_cache:
            kwargs = without_cache(self.model, args, kwargs)
        if self._makes_positions:
            kwargs = with_mask(self.model, args, kwargs)
        self._inbox.begin(received)
        self.is_computing = True
        try:
            with self.seated():
                outputs = self.model(*args, **kwargs)
        except StageExit as stage_exit:
            # What only passes through gets a graph of its own, so that every output but a frozen one has one.
            return tuple(
                tensor.view_as(tensor) if any(tensor is each for each in received) else tensor
                for tensor in stage_exit.tensors
            )
        finally:
            self.is_computing = False
            self._inbox.begin(())
        if not self.is_last:
            raise AssertionError(f"stage {self.index} ran to the end of the model: no later layer was called")
        return drop_cache(outputs)

    @contextmanager
    def seated(self) -> Iterator[None]:
        """The model as this stage sees it."""
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
    """Replace in place all of the model that none of these stages holds; parameter names stay what they were.

    Args:
        model: the whole model, in any state of initialization.
        plan: where its layers are.
        stages: the stages to keep.
        bounds: where each stage's layers begin, and where the last one's stop.
        device: where it will compute; None is where it is.

    Returns:
        The stages by index. `local_stages` finds them again.
    """
    paths = plan.layer_paths(model)
    roles = {stage: stage_roles(model, plan, bounds[stage], bounds[stage + 1]) for stage in stages}
    casting = _Casting(model, device or next(model.parameters()).device)
    for path, role in _on_no_stage(list(roles.values())).items():
        model.set_submodule(path, casting.stand_in(path, role))
    borrowed = {stage: _borrow(model, plan, bounds[stage], bounds[stage + 1]) for stage in stages}
    _release([*casting.native.values()], kept=set(model.modules()))
    if plan.collects(model):
        note_returns(model, casting.inbox, plan.entry[0], paths)
    local = {
        stage: Stage(
            model,
            index=stage,
            num_stages=len(bounds) - 1,
            bounds=bounds,
            layer_paths=paths[bounds[stage] : bounds[stage + 1]],
            inbox=casting.inbox,
            seats=casting.seats(roles[stage]),
            borrowed=borrowed[stage],
        )
        for stage in sorted(stages)
    }
    remember_stages(model, local)
    return local


def local_stages(model: nn.Module) -> dict[int, Stage]:
    """The stages of a cut model by index; a model that was not cut is one stage."""
    return vars(model).get(_STAGES) or {0: Stage(model)}


def remember_stages(model: nn.Module, stages: dict[int, Stage]) -> None:
    """Make `model` the one that these stages call, and that `local_stages` finds them by."""
    for stage in stages.values():
        stage.model = model
    vars(model)[_STAGES] = stages


def refuse_direct_calls(model: nn.Module) -> None:
    """Let calls of a cut model that no schedule makes raise RuntimeError, on every rank of the pipeline alike."""
    model.register_forward_pre_hook(_refuse_direct_call)


def _refuse_direct_call(model: nn.Module, args: tuple) -> None:
    stages = local_stages(model)
    if not any(stage.is_computing for stage in stages.values()):
        local, in_all = list(stages), next(iter(stages.values())).num_stages
        raise RuntimeError(
            f"this {type(model).__name__} holds stages {local} of {in_all} and was called by itself, or by generate(): "
            "call booster.execute_pipeline, under torch.no_grad() to evaluate; to generate, save it by "
            "booster.save_model and load it at pp_size=1"
        )


def _borrow(model: nn.Module, plan: StagePlan, start: int, stop: int) -> list[Borrowed]:
    """Give the first layer of a stage that starts within a stack its repeated modules."""
    borrowed = []
    for stack in plan.stacks(model):
        if not stack.first < start < stack.stop:
            continue
        owner = model.get_submodule(stack.paths[0])
        borrower = model.get_submodule(stack.paths[start - stack.first])
        for path, switch in stack.plan.repeated.items():
            if isinstance(owner, StandIn):
                owner.adopt(path)
            borrowed.append(Borrowed(owner, path))
            parent, _, name = path.rpartition(".")
            vars(borrower.get_submodule(parent))[name] = borrowed[-1]
            holder, _, attribute = switch.rpartition(".")
            setattr(borrower.get_submodule(holder), attribute, True)
    return borrowed


def _on_no_stage(all_roles: Sequence[Roles]) -> Roles:
    """Places where every stage has a stand-in, or one around them; with the role of one. Runs hold the layer."""
    found: Roles = {}
    all_roles = [{path: role for path, role in roles.items() if role.kind is not Runs} for roles in all_roles]
    places = [place for roles in all_roles for place in roles.items()]
    for path, role in sorted(places, key=lambda place: place[0]):  # outer ones first
        is_inside = any(is_within(path, outer) for outer in found)
        if not is_inside and all(any(is_within(path, outer) for outer in roles) for roles in all_roles):
            found[path] = role
    return found


def _release(natives: Sequence[nn.Module], kept: set[nn.Module]) -> None:
    """Give back the memory of what has left the module tree. A module may also stand where it is kept."""
    for native in natives:
        for module in native.modules():
            if module not in kept:
                module._apply(lambda tensor: tensor.to("meta"), recurse=False)


class _Casting:
    """The stand-ins of one model: one for each place and role, whichever stage it serves."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.inbox = Inbox()
        self.native: dict[str, nn.Module] = {}
        self._model = model
        self._device = device
        self._stand_ins: dict[tuple[str, Role], StandIn] = {}

    def stand_in(self, path: str, role: Role) -> StandIn:
        """The stand-in with this role for the native module at a path."""
        native = self.native.setdefault(path, self._model.get_submodule(path))
        key = (path, role)
        if key not in self._stand_ins:
            self._stand_ins[key] = role.kind(native, self.inbox, self._device, role)
        return self._stand_ins[key]

    def seats(self, roles: Roles) -> list[Seat]:
        """Places of a stage's stand-ins that others have at rest."""
        seats = []
        for path, role in roles.items():
            stand_in = self.stand_in(path, role)
            parent, _, name = path.rpartition(".")
            modules = self._model.get_submodule(parent)._modules
            if modules[name] is not stand_in:
                seats.append(Seat(modules, name, stand_in))
        return seats


def as_arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """A batch as the positional and named arguments of a model's call."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def takes(model: nn.Module, argument: str) -> bool:
    """Return True if the model's forward takes this argument, itself or by handing its keywords to its base model."""
    named = inspect.signature(model.forward).parameters
    if argument in named:
        return True
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in named.values())
    base = getattr(model, "base_model", model)
    return takes_any and base is not model and argument in inspect.signature(base.forward).parameters


def argument(model: nn.Module, args: tuple, kwargs: Mapping[str, Any], name: str) -> Any:
    """An argument of a model's call, given by name or by place; None where it is not given."""
    if name in kwargs or not args:
        return kwargs.get(name)
    return dict(zip(inspect.signature(model.forward).parameters, args, strict=False)).get(name)


def depends_on_cache(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call may have other masks with a cache than without: see [Note: packed texts]."""
    is_given = argument(model, args, kwargs, "position_ids") is not None
    return is_given and argument(model, args, kwargs, "attention_mask") is None


class EmptyCache(DynamicCache):
    """A cache that keeps nothing: a layer that is recomputed would append its keys and values once more."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of this call alone."""
        return key_states, value_states


def without_cache(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call that makes no cache; in training an empty one, where the call's masks depend on it.

    Args:
        model: takes `use_cache`.
        args, kwargs: of its call.
    """
    if not depends_on_cache(model, args, kwargs):
        return {**kwargs, "use_cache": False}
    use_cache = argument(model, args, kwargs, "use_cache")
    is_asked = getattr(getattr(model, "config", None), "use_cache", False) if use_cache is None else use_cache
    if not (is_asked and model.training and takes(model, "past_key_values")):
        return dict(kwargs)
    given = argument(model, args, kwargs, "past_key_values")
    return {**kwargs, "past_key_values": EmptyCache() if given is None else given}


def makes_positions(model: nn.Module) -> bool:
    """Return True for a model of transformers that makes positions, and masks by them, where it is given neither."""
    named = inspect.signature(model.forward).parameters
    return isinstance(model, PreTrainedModel) and {"input_ids", *_SAYING_WHICH} <= named.keys()


def with_mask(model: PreTrainedModel, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call, with a mask of all tokens where nothing says which are seen.

    See [Note: questions about masks] in known_masks.py.

    Args:
        model: `makes_positions`.
        args, kwargs: of its call, on its device.
    """
    ids = argument(model, args, kwargs, "input_ids")
    given = (
        argument(model, args, kwargs, name) for name in (*_SAYING_WHICH, "past_key_values", "inputs_embeds")
    )
    is_plain = isinstance(ids, Tensor) and ids.dim() == 2 and not any(each is not None for each in given)
    if not is_plain or is_compiled(model) or compiles_masks(model.config._attn_implementation):
        return dict(kwargs)
    return {**kwargs, "attention_mask": mask_of_all(ids)}


def drop_cache(outputs: Any) -> Any:
    """A model's outputs without the cache that it made, of which each rank would have a part."""
    if isinstance(outputs, tuple):
        return tuple(each for each in outputs if not isinstance(each, Cache))
    if isinstance(getattr(outputs, "past_key_values", None), Cache):
        return dataclasses.replace(outputs, past_key_values=None)
    return outputs
