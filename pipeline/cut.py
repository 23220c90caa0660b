"""Cutting a whole model down to one stage without touching its forward. Running stages is runner.py.

[Note: whole forward] Every stage calls the whole model with the same microbatch, so the model computes
masks, positions and per-layer choices as ever. What the stage does not hold is replaced by stand-ins:

    entry modules  -> Placeholder   a zero-stride tensor of the right shape, which nobody reads
    earlier layers -> Passing       hand on what they get
    the last one   -> Arriving      returns the tensor received from the stage before
    own layers                      as they are
    the next layer -> Leaving       leaves the forward by an exception that carries its input
    all the rest   -> Absent        holds no parameters and is never called

What arrives takes a layer's place and not the embedding's: between the two some models scale, add or
project once more, and would do it twice.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .plan import StagePlan

# A stage sees its own layers alone, so what collects over all layers would silently be partial.
PARTIAL_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


class StageExit(Exception):
    """Leaves a model's forward at a stage's end. Not an error: `Stage.forward` catches it."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__("the stage's last layer is done")
        self.tensor = tensor


class Inbox:
    """What the stage before sent for the microbatch that is being computed; one per cut model."""

    def __init__(self) -> None:
        self.received: Tensor | None = None

    def take(self) -> Tensor:
        """The tensor that arrived."""
        if self.received is None:
            raise AssertionError("a stage after the first was called without a received tensor")
        return self.received


class StandIn(nn.Module):
    """In the place of a module that another stage holds: no parameters, its attributes readable.

    The native module is kept on the meta device, out of the module tree, for attribute look-ups alone.
    """

    def __init__(self, native: nn.Module, inbox: Inbox, device: torch.device) -> None:
        super().__init__()
        self.__dict__["native"] = native.to("meta")
        self.__dict__["inbox"] = inbox
        self.__dict__["device"] = device
        self.train(native.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["native"], name)

    def extra_repr(self) -> str:
        return f"for {type(self.__dict__['native']).__name__}, held by another stage"


class Placeholder(StandIn):
    """For an entry module: zeros in the shape of what it would have returned, without memory."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        arrived = self.inbox.take()
        width = getattr(self.native, "embedding_dim", arrived.shape[-1])
        return arrived.detach().new_zeros(()).expand(*arrived.shape[:-1], width)


class Passing(StandIn):
    """For a layer of an earlier stage."""

    def __init__(self, native: nn.Module, inbox: Inbox, device: torch.device, arity: int) -> None:
        super().__init__(native, inbox, device)
        self.__dict__["arity"] = arity

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple:
        return self._as_layer(hidden)

    def _as_layer(self, hidden: Tensor) -> Tensor | tuple:
        return (hidden, *(None,) * (self.arity - 1)) if self.arity else hidden


class Arriving(Passing):
    """For the layer right before the stage's first: what the stage before sent."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple:
        return self._as_layer(self.inbox.take())


class Leaving(StandIn):
    """For the layer right after the stage's last."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise StageExit(hidden)


class Absent(StandIn):
    """For what runs on another stage alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{type(self.native).__name__} was called on a stage that does not hold it")


def cut_stage(model: nn.Module, plan: StagePlan, *, stage: int, bounds: Sequence[int]) -> Inbox:
    """Replace in place all of the model that this stage does not hold; parameter names stay what they were.

    Args:
        model: the whole model, in any state of initialization.
        plan: where its layers are.
        stage: the stage to keep.
        bounds: where each stage's layers begin, and where the last one's stop.

    Returns:
        The inbox from which the cut model takes what the stage before sent.
    """
    inbox = Inbox()
    device = next(model.parameters()).device
    layers: Any = model.get_submodule(plan.layers)
    start, stop, last = bounds[stage], bounds[stage + 1], len(bounds) - 2
    for index, layer in enumerate(list(layers.children())):
        if index < start - 1:
            layers[index] = Passing(layer, inbox, device, plan.arity)
        elif index == start - 1:
            layers[index] = Arriving(layer, inbox, device, plan.arity)
        elif index >= stop:
            layers[index] = Leaving(layer, inbox, device)
    if stage > 0:
        for name in plan.entry:
            model.set_submodule(name, Placeholder(model.get_submodule(name), inbox, device))
    if stage < last:
        for name in tail_names(model, plan):
            model.set_submodule(name, Absent(model.get_submodule(name), inbox, device))
    return inbox


def tail_names(model: nn.Module, plan: StagePlan) -> list[str]:
    """The outermost modules that hold parameters and are neither entries nor layers, nor around them."""
    kept = (plan.layers, *plan.entry)
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if child_path in kept or not any(True for _ in child.parameters()):
                continue
            if any(keep.startswith(f"{child_path}.") for keep in kept):
                visit(child, child_path)
            else:
                found.append(child_path)

    visit(model, "")
    return found


class Stage:
    """One stage as the runner sees it: the whole model's forward, from what arrives to what leaves.

    Args:
        model: the model, cut by `cut_stage` where there are several stages.
        inbox: what `cut_stage` returned; None for a pipeline of one stage.
        index, num_stages: which stage of how many.
    """

    def __init__(self, model: nn.Module, inbox: Inbox | None, *, index: int, num_stages: int) -> None:
        self.model = model
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self._inbox = inbox or Inbox()
        self._forced = {"use_cache": False} if num_stages > 1 and _takes(model, "use_cache") else {}

    def forward(self, microbatch: Any, received: tuple[Tensor, ...]) -> Any:
        """The tensors for the next stage, or on the last stage the model's outputs.

        Args:
            microbatch: a dict (passed by name), a tuple or list (by place) or a single tensor.
            received: what the stage before sent; empty on the first.
        """
        args, kwargs = as_arguments(microbatch)
        self._inbox.received = received[0] if received else None
        try:
            outputs = self.model(*args, **{**kwargs, **self._forced})
        except StageExit as stage_exit:
            return (stage_exit.tensor,)
        finally:
            self._inbox.received = None
        if not self.is_last:
            raise AssertionError(f"stage {self.index} ran to the end of the model: no later layer was called")
        return outputs


def as_arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """A batch as the positional and named arguments of a model's call."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def partial_output_faults(settings: Mapping[str, Any], source: str) -> list[str]:
    """Why these settings (a batch, a config) would give partial results under a pipeline; empty when none do."""
    return [
        f"{name}={settings[name]!r} in {source} collects over all layers, and a pipeline stage sees its own alone: "
        f"leave it out or use pp_size=1"
        for name in PARTIAL_OUTPUTS
        if settings.get(name)
    ]


def _takes(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward takes this argument, itself or by handing its keywords to its base model."""
    named = inspect.signature(model.forward).parameters
    if argument in named:
        return True
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in named.values())
    base = getattr(model, "base_model", model)
    return takes_any and base is not model and argument in inspect.signature(base.forward).parameters
