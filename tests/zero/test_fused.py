"""Torch's fused kernels step, if they exist and the user chose no other option."""

from functools import partial
from typing import Any

import pytest
import torch

from echelon.nn.optimizer import HybridAdam
from echelon.zero.inner_optimizer import choose_fused_kernels

from ..pool import on_ranks
from .helpers import shard, small_model

FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)


class Own(torch.optim.AdamW):
    """A subclass that changes the step."""

    def step(self, closure: Any = None) -> Any:
        """Step once more for a reason of its own."""
        return super().step(closure)


@on_ranks(1)
def test_the_fused_kernel_steps_unless_the_user_chose() -> None:
    def fused(build: Any, *, stage: int = 1, cpu_offload: bool = False, **arguments: Any) -> bool | None:
        inner = partial(build, lr=1e-2, **arguments)
        optimizer = shard(small_model(), inner, stage=stage, cpu_offload=cpu_offload)
        return optimizer.param_groups[0].get("fused")

    for build in FUSED:
        assert all(fused(build, stage=stage) for stage in (0, 1, 2))
        assert fused(build, cpu_offload=True) is True
        assert fused(build, fused=False) is False
        assert fused(build, foreach=True) is fused(build, foreach=False) is None
        assert fused(build, differentiable=True) is None
    assert fused(torch.optim.AdamW, capturable=True) is None
    assert fused(torch.optim.SGD, momentum=0.9) is None
    assert fused(torch.optim.RMSprop) is None
    assert fused(Own) is None and fused(HybridAdam) is True
    by_loop = shard(small_model(), partial(torch.optim.AdamW, foreach=False))
    by_loop.param_groups[0]["foreach"] = None  # as loaded from a release that did not set it
    optimizer = shard(small_model(), torch.optim.AdamW)
    optimizer.load_state_dict(by_loop.local_state())
    assert optimizer.param_groups[0]["fused"] is True, "another run's kernel came with its state"


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(), reason="torch for CUDA, without a GPU"
)
def test_counts_of_steps_are_where_the_kernel_reads_them() -> None:
    parameters = list(small_model().parameters())
    optimizer = torch.optim.Adagrad(parameters)
    choose_fused_kernels(optimizer, torch.device("cuda"))  # this build of torch has no kernels for it
    assert optimizer.param_groups[0]["fused"] is None or torch.version.cuda
    optimizer.param_groups[0]["fused"] = True  # as a user may have given it
    choose_fused_kernels(optimizer, torch.device("meta"))
    assert {optimizer.state[parameter]["step"].device.type for parameter in parameters} == {"meta"}
