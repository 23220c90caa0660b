"""A world of two ranks with a single process, over torch's "fake" process group."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg

from echelon.cluster import gathering, watch
from echelon.zero import reduced_gradients

RANKS = 2


@contextmanager
def fake_world() -> Iterator[None]:
    """Run as the first of `RANKS` ranks; collectives behave as if the others had the same data."""
    assert fake_pg  # registers the backend
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)
    measure = reduced_gradients.norm_over_all_ranks

    def agreed(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Report agreement: the sums of checksums contain one rank only, so ranks would seem to differ."""
        norm, is_agreed = measure(*arguments, **named)
        return norm, torch.ones_like(is_agreed)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (reduced_gradients, "norm_over_all_ranks", agreed),
            (dist, "recv", lambda x, *_, **__: x.fill_(1)),  # votes of torch's pipeline
            (watch.Watch, "wait_for_all", lambda _: None),
            (watch.Watch, "wait_for_batch", lambda *_: None),
            (gathering, "_Watched", lambda work, _: work),  # the fake group's work never reports completion
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield
    dist.destroy_process_group()
