"""Faults in layers that are compiled one by one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.cluster.collectives import InFlight
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import parity

from ...compiled import traced_layers
from ...plugins.test_compiled_layers import (
    test_layers_share_a_graph_unless_their_modules_have_hooks_in_other_places,
)
from ..mutations import around, fault, returning

LLAMA = ModelChoice(model_type="llama", num_layers=2)
COMPILED = ("compile_layers",)


def departs(layout: Layout) -> str | None:
    """Return the difference under a layout, with the traced graphs."""
    with traced_layers():
        return parity(LLAMA, layout, num_steps=1).departure


def unsummed_in_graphs(begin: Callable[..., Any], x: Tensor, group: Any) -> Any:
    """Skip the sums over ranks in compiled graphs only."""
    return InFlight(None, x.clone()) if torch.compiler.is_compiling() else begin(x, group)


@contextmanager
def left_aside(layer: nn.Module) -> Iterator[None]:
    """Lose the gradients that are set aside for the compiler."""
    for parameter in layer.parameters():
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad = None
    yield


# fmt: off
FAULTS = {
    "sums over the ranks are missing in a graph": fault("cluster.collectives:begin_all_reduce",
        around(unsummed_in_graphs), partial(departs, Layout(tp=2, options=COMPILED)), notice="^step 1: "),
    "gradients that were set aside are lost": fault("shardformer.compiled_layers:_detach_mixed_gradients", left_aside,
        partial(departs, Layout(precision="bf16", options=COMPILED)), num_ranks=1, notice="^step 1: gradient of "),
    "layers share a graph though their modules have hooks in other places": fault(
        "shardformer.compiled_layers:_hook_positions", returning(()),
        test_layers_share_a_graph_unless_their_modules_have_hooks_in_other_places, num_ranks=1,
        notice="^AssertionError: Tensor-likes are not close"),
}
# fmt: on
