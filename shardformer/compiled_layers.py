"""Layers compiled by torch.compile, each as a graph of its own (compile_layers).

[Note: compiled layers] The forward of a layer is one graph, collectives included (cluster/collectives.py), and its
backward another. Parameters are inputs of the graphs, so layers that are alike share them. What surrounds a layer stays
as it is: hooks of the layer itself, recomputation, the pipeline. Its gradients arrive together at the end of its
backward, and are reduced while the layer before computes its own. Random numbers are drawn as without compiling.

[Note: hooks of modules in a layer] torch.compile sees hooks when it traces, and does not ask again whether a module
still has none. So layers whose modules have hooks in other places never share a graph.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from .fused_code import inductor
from .layers.gathered_linear import ShardedLinear
from .layers.parallel_module import AROUND_FORWARD
from .layers.sequence_axis import axis_of
from .policy import Policy
from .tables.table import Table
from .weight_sharding import model_layers

# The same entries are dropped as without compiling. Collectives begin as early and are waited for as late as may be, by
# passes that look at the graph alone: the order is the same on all ranks.
_OPTIONS: dict[str, Any] = {
    "fallback_random": True,
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}


def layers_to_compile(
    model: nn.Module, errors: list[str], *, policy: Policy | Table | None = None
) -> list[nn.Module]:
    """The layers of a whole model that are compiled: of layers within layers the inner ones.

    Args:
        model: the model.
        errors: found so far; where nothing says which its layers are, that is added.
        policy: knows them where transformers does not; None is that of the model's type.
    """
    layers = model_layers(model, policy)
    if not layers:
        errors.append(
            f"compile_layers=True, and nothing says which the layers of {type(model).__name__} are: it has no "
            "GradientCheckpointingLayer of transformers, and there is no table for it. Give a policy with a stage_plan "
            "(custom_policy=...), or leave compile_layers out"
        )
    among = dict.fromkeys(layers or ())
    return [layer for layer in among if among.keys().isdisjoint(list(layer.modules())[1:])]


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile the forwards of layers, in place; see [Note: compiled layers]. Communicates nothing.

    Names, parameters and hooks stay. The compiler itself runs when a layer runs first, and once more where it is given
    tensors of other shapes; from then on for all lengths.

    Args:
        layers: of the whole model, already split; those that this rank does not hold are left alone.
    """
    compiled: dict[tuple[Any, ...], type[nn.Module]] = {}
    for layer in layers:
        if any(parameter.is_meta for parameter in layer.parameters()):  # of another stage, and released
            continue
        for module in layer.modules():
            if isinstance(module, ShardedLinear):  # prefetches by what was used before: the compiler calls it
                vars(module)["forward"] = torch.compiler.disable(module.forward)
        alike = (type(layer), *_places_of_hooks(layer))
        if alike not in compiled:
            compiled[alike] = _compiled_class(type(layer))
        layer.__class__ = compiled[alike]


def _places_of_hooks(layer: nn.Module) -> tuple[tuple[str, str], ...]:
    """See [Note: hooks of modules in a layer]."""
    return tuple(
        (path, kind)
        for path, module in layer.named_modules()
        for kind in AROUND_FORWARD
        if module is not layer and getattr(module, kind)
    )


def _compiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class whose forward is the compiled one of another; it shares no graphs with other classes made here."""

    def compute(self: nn.Module, length: int, *args: Any, **kwargs: Any) -> Any:
        # As an argument it may change from call to call; numbers that modules hold are constants of a graph.
        if (axis := axis_of(self)) is not None:
            axis.length = length
        return kind.forward(self, *args, **kwargs)

    compute.__code__ = compute.__code__.replace()  # graphs are kept by code and backend
    compiled = torch.compile(compute, backend=partial(inductor, options=_OPTIONS))

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        axis = axis_of(self)
        with _gradients_aside(self):
            return compiled(self, 0 if axis is None else axis.length, *args, **kwargs)

    return type(f"Compiled{kind.__name__}", (kind,), {"forward": forward})


@contextmanager
def _gradients_aside(layer: nn.Module) -> Iterator[None]:
    """Take away gradients of another format than their parameters, which torch.compile refuses to trace."""
    held = [(each, each.grad) for each in layer.parameters() if each.grad is not None]
    held = [(each, gradient) for each, gradient in held if gradient.dtype != each.dtype]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
