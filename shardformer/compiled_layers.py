"""Layers compiled by torch.compile, one graph per layer (compile_layers).

[Note: compiled layers] The forward of a layer is one graph, collectives included (cluster/collectives.py), and its
backward another. Parameters are inputs of the graphs, so layers with equal code share them. Code around a layer is not
compiled: hooks of the layer itself, recomputation, the pipeline. The gradients of a layer arrive together at the end of
its backward, and are reduced during the backward of the previous layer. Random numbers are drawn as without compiling.

[Note: hooks of modules in a layer] torch.compile reads hooks when it traces, and does not check later whether a module
still has none. So layers whose modules have hooks in different places never share a graph.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from .fused_code import inductor
from .layers.class_change import change_class
from .layers.gathered_linear import ShardedLinear
from .layers.parallel_module import AROUND_FORWARD
from .layers.sequence_axis import axis_of
from .policy import Policy
from .tables.table import Table
from .weight_sharding import model_layers

# Dropout drops the same entries as without compiling. Collectives begin as early and are waited for as late as
# possible. The passes that move them use the graph alone, so the order is the same on all ranks.
_OPTIONS: dict[str, Any] = {
    "fallback_random": True,
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}


def layers_to_compile(
    model: nn.Module, errors: list[str], *, policy: Policy | Table | None = None
) -> list[nn.Module]:
    """Return the layers of an uncut model that are compiled; of nested layers the inner ones.

    Args:
        model: the model.
        errors: an error is appended if the layers of the model are not known.
        policy: names the layers if transformers does not mark them; None takes the policy of the model type.
    """
    layers = model_layers(model, policy)
    if not layers:
        errors.append(
            f"compile_layers=True, but the layers of a {type(model).__name__} are unknown: it has no "
            "GradientCheckpointingLayer of transformers and no table. Give a policy with a stage_plan "
            "(custom_policy=...), or leave compile_layers out"
        )
    unique_layers = dict.fromkeys(layers or ())
    return [layer for layer in unique_layers if unique_layers.keys().isdisjoint(list(layer.modules())[1:])]


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile the forwards of layers, in place; see [Note: compiled layers]. No communication.

    Names, parameters and hooks stay. The compiler runs at the first call of a layer, and once more at the first call
    with other shapes; that graph then serves all lengths.

    Args:
        layers: layers of the full model, already sharded; layers of other stages are skipped.
    """
    compiled: dict[tuple[Any, ...], type[nn.Module]] = {}  # by class of the layer and positions of hooks
    for layer in layers:
        if any(parameter.is_meta for parameter in layer.parameters()):  # of another stage: released
            continue
        for module in layer.modules():
            if isinstance(module, ShardedLinear):  # prefetches in a recorded order, so it is not traced
                vars(module)["forward"] = torch.compiler.disable(module.forward)
        class_and_hooks = (type(layer), *_hook_positions(layer))
        if class_and_hooks not in compiled:
            compiled[class_and_hooks] = _compiled_class(type(layer))
        change_class(layer, compiled[class_and_hooks])


def _hook_positions(layer: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the path and kind of every hook inside a layer; see [Note: hooks of modules in a layer]."""
    return tuple(
        (path, kind)
        for path, module in layer.named_modules()
        for kind in AROUND_FORWARD
        if module is not layer and getattr(module, kind)
    )


def _compiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass with a compiled forward; it shares no graphs with other classes made here."""

    def compute(self: nn.Module, length: int, *args: Any, **kwargs: Any) -> Any:
        # The length is an argument because it changes between calls; attributes of modules are constants of a graph.
        if (axis := axis_of(self)) is not None:
            axis.length = length
        return kind.forward(self, *args, **kwargs)

    compute.__code__ = compute.__code__.replace()  # graphs are kept by code and backend
    compiled = torch.compile(compute, backend=partial(inductor, options=_OPTIONS))

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        axis = axis_of(self)
        with _detach_mixed_gradients(self):
            return compiled(self, 0 if axis is None else axis.length, *args, **kwargs)

    return type(f"Compiled{kind.__name__}", (kind,), {"forward": forward})


@contextmanager
def _detach_mixed_gradients(layer: nn.Module) -> Iterator[None]:
    """Inside the block, set gradients whose dtype differs from their parameters' to None, and put them back after it.

    torch.compile refuses to trace parameters with such gradients.
    """
    present = [(parameter, parameter.grad) for parameter in layer.parameters() if parameter.grad is not None]
    detached = [(parameter, gradient) for parameter, gradient in present if gradient.dtype != parameter.dtype]
    for parameter, _ in detached:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in detached:
            parameter.grad = gradient
