"""Training on a stream other than the default one, compared with a plain loop on the default stream.

A parameter's gradient is accumulated, and its hooks run, on the stream that was current when autograd created the
accumulation node: in forward, or earlier if the node was kept (torch 2.11, AccumulateGrad). That stream waits for the
incoming gradient, and at the end of backward the caller's stream waits for it. So a bucket is filled and launched on
one stream, and the step follows it. A missing wait would give other numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from echelon.verify import parity
from echelon.verify.layout_choice import Layout

from ..contract.row import ParityRow
from .kernels import LLAMA

MISSING = "" if torch.cuda.is_available() else "only CUDA has streams"


def on_another_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to run on a separate stream, after the current one and before later work there."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, side_stream = torch.cuda.current_stream(), torch.cuda.Stream()
        side_stream.wait_stream(before)
        with torch.cuda.stream(side_stream):
            result = function(*args, **kwargs)
        before.wait_stream(side_stream)
        return result

    return run


def _replaced(*names: str) -> Callable[[], Any]:
    @contextmanager
    def within() -> Iterator[None]:
        others = {name: on_another_stream(getattr(parity, name)) for name in names}
        with patch.multiple(parity, **others):
            yield

    return within


# Ways to boost a model: on the default stream or on another one.
WAYS = {
    "trained on another stream": _replaced("take_steps"),
    "boosted and trained on other streams": _replaced("boosted_under", "take_steps"),
}


def stream_rows(num_ranks: int = 1) -> dict[str, ParityRow]:
    """Return ZeRO-1 and ZeRO-2 on this number of replicas, in each way, by name."""
    return {
        f"{name}, ZeRO-{stage}": ParityRow(
            name=name,
            choice=LLAMA,
            layout=Layout(dp=num_ranks, zero=stage, max_norm=0.1),
            within=within,
            quick=True,
            missing=MISSING,
        )
        for (name, within), stage in product(WAYS.items(), (1, 2))
    }
