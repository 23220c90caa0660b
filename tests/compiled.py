"""torch.compile in tests: compiled layers run their traced operations without inductor; their graphs are counted."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

# Warnings of torch's own code while it compiles.
HIDDEN = (
    "`torch.jit.script",
    "The .grad attribute of a Tensor",
    "<class 'torch.autograd.function.Function'> should not",
)


@contextmanager
def traced_layers(
    *, most_graphs: int | None = None, may_break: bool = False
) -> Iterator[list[torch.fx.GraphModule]]:
    """Within the block, compiled layers run their traced operations without inductor's code generation.

    Yields:
        The list of forward graphs, extended as they are traced.

    Raises:
        AssertionError: on exit, if there are more than `most_graphs` graphs, or a graph break within a layer's forward.
    """
    import torch._dynamo
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()  # layers compiled by earlier tests influence which sizes become constants
    counters.clear()
    with patch("echelon.shardformer.compiled_layers.inductor", backend), warnings.catch_warnings():
        for message in HIDDEN:
            warnings.filterwarnings("ignore", message)
        yield graphs
    assert may_break or not counters["graph_break"], dict(counters["graph_break"])
    assert most_graphs is None or len(graphs) <= most_graphs, f"{len(graphs)} graphs and not {most_graphs}"
    assert graphs, "nothing was compiled"
