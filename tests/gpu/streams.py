"""Training on another stream than the default one, beside a plain loop on the default one.

A parameter's gradient is accumulated, and its hooks run, on the stream that was current when autograd made the node of
it: in forward, or in an earlier one if something kept the node (torch 2.11, AccumulateGrad). That stream waits for the
gradient that comes, and at the end of backward the caller's stream waits for it. So a bucket is filled and launched on
one stream, and a step comes behind it. A missing wait would show as other numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from echelon.verify import parity
from echelon.verify.layout import Layout

from ..contract.row import ParityRow
from .kernels import LLAMA

MISSING = "" if torch.cuda.is_available() else "only CUDA has streams"


def on_another_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on a stream of its own, behind the current one and before what follows there."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, own = torch.cuda.current_stream(), torch.cuda.Stream()
        own.wait_stream(before)
        with torch.cuda.stream(own):
            result = function(*args, **kwargs)
        before.wait_stream(own)
        return result

    return run


def _replaced(*names: str) -> Callable[[], Any]:
    @contextmanager
    def within() -> Iterator[None]:
        others = {name: on_another_stream(getattr(parity, name)) for name in names}
        with patch.multiple(parity, **others):
            yield

    return within


# Where a model is boosted on the default stream, and where on one more.
WAYS = {
    "trained on another stream": _replaced("take_steps"),
    "boosted and trained on other streams": _replaced("boosted_under", "take_steps"),
}


def stream_rows(num_ranks: int = 1) -> dict[str, ParityRow]:
    """ZeRO-1 and ZeRO-2 on so many replicas, in each way, by name."""
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
