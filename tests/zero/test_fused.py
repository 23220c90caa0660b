"""Torch's fused kernels step, if they exist and the user chose no other option."""

from typing import Any

import pytest
import torch

from echelon.zero.inner_optimizer import choose_fused_kernels

from ..pool import Pool
from .helpers import shard, small_model

FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)


class Own(torch.optim.AdamW):
    """A subclass, which may change the step."""


def test_the_fused_kernel_steps_unless_the_user_chose(pool: Pool) -> None:
    pool.run(1, check_fused)


def check_fused() -> None:
    def fused(build: Any, **arguments: Any) -> bool | None:
        options = {"cpu_offload": arguments.pop("cpu_offload", False), "stage": arguments.pop("stage", 1)}
        optimizer = shard(
            small_model(), lambda parameters: build(parameters, lr=1e-2, **arguments), **options
        )
        chosen: bool | None = optimizer.param_groups[0].get("fused")
        return chosen

    for build in FUSED:
        assert all(fused(build, stage=stage) for stage in (0, 1, 2))
        assert fused(build, cpu_offload=True) is True
        assert fused(build, fused=False) is False
        assert fused(build, foreach=True) is fused(build, foreach=False) is None
        assert fused(build, differentiable=True) is None
    assert fused(torch.optim.AdamW, capturable=True) is None
    assert fused(torch.optim.SGD, momentum=0.9) is None
    assert fused(torch.optim.RMSprop) is None
    assert fused(Own) is None
    by_loop = shard(small_model(), lambda parameters: torch.optim.AdamW(parameters, foreach=False))
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
