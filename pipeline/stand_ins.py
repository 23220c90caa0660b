"""Stand-ins for modules of other stages; see [Note: whole forward] in stage.py.

[Note: sent outputs] A model may read the output of a module before the first layer again: encoder states, features of
an image. Where it runs a hook records it, Leaving sends its tensors along, and on later stages a Sent returns them.
Other modules have an Outline on later stages; where the model returns one as an output, it is None: no nan for a user.

[Note: carried outputs] A stage sends the input of the next layer, and the next stage returns it as the output of the
layer before. A model that computes between its layers (Qwen3-VL adds image features there) would do so twice, and what
a layer passes on besides them would be lost. With `StagePlan.carried` a stage sends all that its last layer returned.

[Note: collecting] The outputs of every earlier layer are sent along with those of the stage's own layers: an earlier
layer is a Recalled, which returns its received output. So everything that a model or transformers collects from
layers, by return values or by hooks, is complete on the last stage. transformers registers hooks by the class of
a module. These stand-ins therefore report the class of the replaced module, and share its hooks: a rank of several
stages has them all, independent of the stage that runs first.
"""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from .stage_plan import OutputStructure


class StageExit(Exception):
    """Exit from a model's forward at the end of a stage. Not an error: `Stage.forward` catches it."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__("the stage's last layer is done")
        self.tensors = tensors


class Inbox:
    """Tensors of the current microbatch that stand-ins return or send; one inbox per cut model.

    Attributes:
        received: the tensors from the previous stage.
        runs: by stand-in of a layer that runs several times, the number of its runs so far.
        returned: by index (0 for the entry), outputs of layers to send on; see [Note: collecting].
        sent: by path in `StagePlan.sent`, the tensors of the module's output, computed here or received.
        carried: the tensors of the last layer's output, if the plan has `carried`.
        ends_after: the path of the encoder, for a stage that ends with it.
        outlines: all tensors that stand-ins returned without values.
    """

    def __init__(self) -> None:
        self.received: tuple[Tensor, ...] = ()
        self.runs: Counter[nn.Module] = Counter()
        self.returned: dict[int, Tensor] = {}
        self.sent: dict[str, tuple[Tensor, ...]] = {}
        self.carried: tuple[Tensor, ...] = ()
        self.ends_after = ""
        self.outlines: list[Tensor] = []

    def begin(self, received: tuple[Tensor, ...], ends_after: str = "") -> None:
        """Start a microbatch, with its received tensors; see the attributes."""
        self.received, self.ends_after = received, ends_after
        self.runs.clear()
        self.returned = dict(enumerate(received))
        self.sent.clear()
        self.carried = ()
        self.outlines.clear()

    def take(self) -> tuple[Tensor, ...]:
        """Return the received tensors; raise AssertionError without any."""
        if not self.received:
            raise AssertionError("a stage after the first was called without a received tensor")
        return self.received

    def record(self, path: str, tensors: tuple[Tensor, ...]) -> None:
        """Keep the tensors of a module's output in `sent`.

        Raises:
            ValueError: the module ran before in this microbatch, and there is room for one output.
        """
        if path in self.sent:
            raise ValueError(
                f"{path} runs twice in a microbatch, for images and for videos for example, and a pipeline sends one "
                "output of it to the next stage: give microbatches of one kind, or use pp_size=1"
            )
        self.sent[path] = tensors

    def outline(self, scalar: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a tensor of this shape, without memory, and keep it in `outlines`."""
        self.outlines.append(scalar.expand(shape))
        return self.outlines[-1]

    def without_outlines(self, outputs: Any) -> Any:
        """Return a model's outputs with None in place of outlines and their views, as of the features of an image."""
        storages = {tensor.untyped_storage()._cdata for tensor in self.outlines}
        return _without(outputs, storages) if storages else outputs


class Role(NamedTuple):
    """The task of a stand-in at one place, for one stage.

    Args:
        kind: its class.
        arity: for a layer: the length of the tuple that it returns, 0 for a tensor (see `StagePlan.arity`).
        stage_runs: for a layer that runs several times: the first run of the stage, and the end of its runs.
        received_index: for a recalled layer or a sent output: the index of its first tensor among the received ones.
        output: for a sent output: its structure; for an earlier layer, `StagePlan.carried`.
        sent: for a later layer: the paths of modules whose outputs are sent with its input, and their numbers of
            tensors. For a sent output: its path alone.
    """

    kind: "type[StandIn]"
    arity: int = 0
    stage_runs: tuple[int, int] = (0, 0)
    received_index: int = 0
    output: OutputStructure | None = None
    sent: tuple[tuple[str, int], ...] = ()


Roles = dict[str, Role]  # by path; modules without a role are the stage's own


class StandIn(nn.Module):
    """Replacement for a module of another stage: without parameters, with readable attributes.

    The native module is kept outside of the module tree, only for attribute look-ups. If another rank has it, its
    parameters have no memory here.
    """

    def __init__(self, native: nn.Module, inbox: Inbox, device: torch.device, role: Role) -> None:
        super().__init__()
        self.__dict__.update(native=native, inbox=inbox, device=device, role=role)
        self.train(native.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["native"], name)

    def hidden_states(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Return the first argument of a layer's call, given by position or by name."""
        if args:
            return args[0]
        first = next(iter(inspect.signature(self.native.forward).parameters))
        return kwargs[first]

    def adopt(self, path: str) -> None:
        """Make a submodule of the native module a submodule of this stand-in too, under the same path.

        Another layer borrows it: see [Note: repeated modules] in stage.py.
        """
        name, _, below = path.partition(".")
        module = self.__dict__["native"].get_submodule(name)
        if below:
            inner = self._modules.get(name) or Absent(module, self.inbox, self.device, Role(Absent))
            assert isinstance(inner, StandIn)
            inner.adopt(below)
            module = inner
        self._modules[name] = module

    def extra_repr(self) -> str:
        return f"for {type(self.__dict__['native']).__name__}, of another stage"


class Placeholder(StandIn):
    """Stand-in for an entry module: returns a tensor in the shape of its output, without memory.

    The shape is that of the ids for an embedding, otherwise that of the received tensor. The values are nan, so that
    a use of them is noticed.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return nan in the shape of an embedding of ids, or of the received hidden states."""
        received = self.inbox.take()[0]
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        takes_ids = bool(tensors) and not tensors[0].is_floating_point()
        shape = tensors[0].shape if takes_ids else received.shape[:-1]
        width = getattr(self.native, "embedding_dim", received.shape[-1])
        return self.inbox.outline(received.detach().new_full((), nan), (*shape, width))


class Outline(StandIn):
    """Stand-in for a module of another stage that changes shapes: runs it on the meta device for its output shapes.

    Returns tensors of these shapes without memory: nan, so that a use of their values is noticed, or zeros in formats
    without nan. Outputs that are not tensors are returned unchanged.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the meta device; return tensors without memory in the shapes of its outputs."""
        state = dict(chain(self.native.named_parameters(), self.native.named_buffers()))
        inputs = tree_map_only(Tensor, _on_meta, (state, args, kwargs))
        with torch.no_grad():
            outputs = functional_call(self.native, *inputs)
        return tree_map_only(Tensor, self._without_values, outputs)

    def _without_values(self, outline: Tensor) -> Tensor:
        """Return a tensor in the shape of a meta tensor, whose values nothing should read."""
        if not outline.is_floating_point():
            scalar = torch.zeros((), dtype=outline.dtype, device=self.device)
        elif self.inbox.received:
            scalar = self.inbox.received[0].detach().new_full((), nan)
        else:  # of a module that the first stage of an encoder lacks
            dtypes = (tensor.dtype for tensor in self.native.parameters() if tensor.is_floating_point())
            scalar = torch.full((), nan, dtype=next(dtypes, torch.get_default_dtype()), device=self.device)
        return self.inbox.outline(scalar, outline.shape)


class Passing(StandIn):
    """Stand-in for a layer of an earlier stage: returns its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple:
        return self._as_layer(self.hidden_states(args, kwargs))

    def _as_layer(self, hidden: Tensor) -> Tensor | tuple:
        if (carried := self.role.output) is not None:
            return carried.filled([hidden] * carried.num_tensors)
        return (hidden, *(None,) * (self.role.arity - 1)) if self.role.arity else hidden


class Arriving(Passing):
    """Stand-in for the layer before the stage's first: returns the received tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple:
        return self._as_layer(self.inbox.take()[0])


class Runs(Passing):
    """Stand-in for a layer that runs several times, if the stage has only some of its runs.

    It shares the dictionaries of the native layer's modules, parameters and buffers, so that it follows replacements.
    """

    def __init__(self, native: nn.Module, *args: Any) -> None:
        super().__init__(native, *args)
        for kind in ("_modules", "_parameters", "_buffers"):
            self.__dict__[kind] = native.__dict__[kind]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer in the stage's runs; before them return the received tensor, behind them leave the forward."""
        first, end = self.role.stage_runs
        run = self.inbox.runs[self]
        self.inbox.runs[self] += 1
        if run < first:
            return self._as_layer(self.inbox.take()[0])
        if run >= end:
            raise StageExit((self.hidden_states(args, kwargs),))
        return self.native(*args, **kwargs)


class Leaving(StandIn):
    """Stand-in for the layer after the stage's last: leaves the forward with its input and the sent outputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [*(self.inbox.carried or (self.hidden_states(args, kwargs),))]
        for path, num_tensors in self.role.sent:  # nothing, of a module that did not run: there is no image
            tensors += self.inbox.sent.get(path, [tensors[0].new_empty(0)] * num_tensors)
        raise StageExit(tuple(tensors))


class LeavingEmpty(StandIn):
    """Stand-in for the decoder's list of layers, on a stage of the encoder, which did not run: leaves with nothing."""

    def _leave(self, *_: Any, **__: Any) -> Any:
        raise StageExit(())

    forward = _leave
    __iter__ = __getitem__ = _leave


class Sent(StandIn):
    """Stand-in for a module before the stage's first layer: returns its received output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, output = self.role.received_index, self.role.output
        assert output is not None
        # Copies: the model may change them in place.
        tensors = tuple(tensor.clone() for tensor in self.inbox.take()[first : first + output.num_tensors])
        for path, _ in self.role.sent:
            self.inbox.record(path, output.without_graphs(tensors))
        for number in output.detached:
            if tensors[number].requires_grad:
                tensors[number].register_hook(self._refuse_gradient)
        return output.filled(tensors)

    def _refuse_gradient(self, gradient: Tensor | None) -> None:
        """Raise ValueError for a gradient of a tensor that was sent without its graph: it would be lost."""
        if gradient is not None:
            raise ValueError(
                f"the loss depends on an output of {type(self.native).__name__}, which travels between pipeline stages "
                "without gradient because the model's own loss does not depend on it: use pp_size=1"
            )


class Absent(StandIn):
    """Stand-in for a module that only another stage runs: raises if a forward reaches it."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"a microbatch reached {type(self.native).__name__}, which is on another stage: the model uses it between "
            "its layers, or the batch has no images for the layers that the pipeline cuts. Give batches that run "
            "these layers, or use pp_size=1"
        )

    forward = _refuse
    __iter__ = __getitem__ = _refuse  # of a list of layers


class Borrowed:
    """Reference to a module elsewhere in the model. The borrowing module can call it, but does not list its parameters.

    Args:
        owner: the module that has it as a submodule.
        path: of this submodule; looked up in each call, so that replacements are followed.
    """

    def __init__(self, owner: nn.Module, path: str) -> None:
        self._owner = owner
        self._path = path

    @property
    def module(self) -> nn.Module:
        """The module now at that path."""
        return self._owner.get_submodule(self._path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also during copying, before it has an owner
            raise AttributeError(name)
        return getattr(self.module, name)


def _on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of this shape on the meta device, in float32 for all floating-point formats."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class _SharesHooks(StandIn):
    """Stand-in that shares the hooks of the replaced module."""

    def __init__(self, native: nn.Module, *args: Any) -> None:
        super().__init__(native, *args)
        for name in _HOOKS:
            self.__dict__[name] = native.__dict__[name]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["native"])


class RecalledEntry(Outline):
    """Stand-in for an entry that returns more than a tensor: returns its output, the first received tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        first = self.inbox.take()[0]
        self.inbox.returned[0] = first  # a hook on an entry of this rank recorded its outline
        return (first, *outputs[1:]) if isinstance(outputs, tuple) else first


class Recalled(_SharesHooks, Passing):
    """Stand-in for the entry or a layer of an earlier stage: returns its received output."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple:
        return self._as_layer(self.inbox.take()[self.role.received_index])


class LeavingWithAll(_SharesHooks):
    """Stand-in for the layer after the stage's last: sends the outputs of all layers, its input as the last one's."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        outputs = [self.inbox.returned[index] for index in sorted(self.inbox.returned)]
        raise StageExit((*outputs[:-1], self.hidden_states(args, kwargs)))


def record_returns(model: nn.Module, inbox: Inbox, entry: str, layers: Sequence[str]) -> None:
    """Register hooks that record outputs in `inbox.returned`: of the entry (0) and the layers (from 1) of this rank.

    Args:
        model: the cut model.
        inbox: receives the outputs.
        entry, layers: their paths.
    """
    for index, path in enumerate((entry, *layers)):
        module = model.get_submodule(path)
        if not isinstance(module, StandIn):
            module.register_forward_hook(_return_recorder(inbox, index))


def record_sent(model: nn.Module, inbox: Inbox, outputs: Mapping[str, OutputStructure]) -> None:
    """Register hooks that record outputs of modules in `inbox.sent`, on the rank that has these modules.

    A stage that ends with one of them leaves the forward there.

    Args:
        model: the cut model.
        inbox: receives the outputs.
        outputs: by path of a module, the structure of its output: `StagePlan.sent` and `StagePlan.returned`.
    """

    def record(module: nn.Module, args: tuple, output: Any, *, path: str) -> None:
        inbox.record(path, outputs[path].tensors(output, path))
        if path == inbox.ends_after:
            raise StageExit(inbox.sent[path])

    for path in outputs:
        module = model.get_submodule(path)
        if not isinstance(module, StandIn):
            module.register_forward_hook(partial(record, path=path))


def record_carried(model: nn.Module, inbox: Inbox, paths: Sequence[str], carried: OutputStructure) -> None:
    """Register hooks that record the outputs of layers in `inbox.carried`.

    Args:
        model: the cut model.
        inbox: receives the outputs.
        paths: of the last layer of each stage of this rank.
        carried: `StagePlan.carried`.
    """

    def record(module: nn.Module, args: tuple, output: Any, *, path: str) -> None:
        if torch._C._current_graph_task_id() == -1:  # not in a recomputation
            inbox.carried = carried.tensors(output, path)

    for path in paths:
        model.get_submodule(path).register_forward_hook(partial(record, path=path))


def _without(tree: Any, storages: Collection[int]) -> Any:
    """Return a tree with None in place of tensors in these storages, and of structures that have nothing else."""
    if isinstance(tree, Tensor):
        return None if tree.untyped_storage()._cdata in storages else tree
    values: dict[Any, Any]
    if dataclasses.is_dataclass(tree):
        values = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    elif isinstance(tree, (Mapping, tuple, list)):
        values = dict(tree if isinstance(tree, Mapping) else enumerate(tree))
    else:
        return tree
    kept = {name: _without(value, storages) for name, value in values.items()}
    if all(kept[name] is value for name, value in values.items()):
        return tree
    if all(value is None for value in kept.values()):
        return None
    original: Any = tree
    if dataclasses.is_dataclass(tree):
        return dataclasses.replace(original, **kept)
    if isinstance(tree, Mapping):
        return kept
    is_named = hasattr(tree, "_fields")
    return type(original)(*kept.values()) if is_named else type(original)(kept.values())


def _return_recorder(inbox: Inbox, index: int) -> Any:
    """Return a forward hook that records the hidden states of a layer's output in `Inbox.returned`."""

    def record(module: nn.Module, args: tuple, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not in a recomputation
            inbox.returned[index] = output[0] if isinstance(output, tuple) else output

    return record
