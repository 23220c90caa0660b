"""torch.compile in tests: graphs of layers that run as they are, once traced forward and backward, and are counted."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

# torch's own, where it compiles: of what it does itself, and of what it hides from users.
HIDDEN = (
    "`torch.jit.script",
    "The .grad attribute of a Tensor",
    "<class 'torch.autograd.function.Function'> should not",
)


@contextmanager
def traced_layers(
    *, most_graphs: int | None = None, may_break: bool = False
) -> Iterator[list[torch.fx.GraphModule]]:
    """Within, compiled layers run the operations that were traced, instead of what inductor makes of them.

    Yields:
        The graphs of forwards, as they are traced.

    Raises:
        AssertionError: at the end, there are more than `most_graphs`, or a layer was left within its forward.
    """
    import torch._dynamo
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()  # what earlier tests compiled decides which sizes are taken for constants
    counters.clear()
    with patch("echelon.shardformer.compiled_layers.inductor", backend), warnings.catch_warnings():
        for message in HIDDEN:
            warnings.filterwarnings("ignore", message)
        yield graphs
    assert may_break or not counters["graph_break"], dict(counters["graph_break"])
    assert most_graphs is None or len(graphs) <= most_graphs, f"{len(graphs)} graphs and not {most_graphs}"
    assert graphs, "nothing was compiled"
