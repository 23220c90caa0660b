"""The first module with a NaN is named on every rank, with its rank and microbatch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.verify.model_choice import ModelChoice

from ..plugins.training import boosted, hybrid, sgd
from ..pool import Pool

NUMBERS = torch.arange(4 * 6).view(4, 6) % 20
BATCH = {"input_ids": NUMBERS, "labels": NUMBERS}


def spoiled(module: Any, args: Any, output: Tensor) -> Tensor:
    """Forward hook: NaNs in the second microbatch."""
    module.calls += 1
    return torch.full_like(output, float("nan")) if module.calls == 2 else output


class Infinite(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


def named(sizes: dict[str, Any], path: str | None, is_backward: bool) -> str:
    """Return the error of a step in which a module at this path was spoiled; "" without one."""
    booster, plain = hybrid(**sizes), ModelChoice(model_type="llama").build()
    if path is not None:
        module = plain.get_submodule(path)
        module.calls = 0
        if is_backward:
            module.register_forward_pre_hook(lambda _, args: (Infinite.apply(args[0]), *args[1:]))
        else:
            module.register_forward_hook(spoiled)
    model, optimizer = boosted(booster, plain, sgd)
    try:
        with booster.naming_nonfinite(model):
            booster.execute_pipeline(iter([BATCH]), model, optimizer=optimizer)
    except FloatingPointError as error:
        return str(error)
    optimizer.step()
    return ""


STAGES, IS = {"pp_size": 2}, "is the first that is not finite, on rank"


@pytest.mark.parametrize(
    ("sizes", "path", "is_backward", "words"),
    [
        ({}, None, False, ""),
        (
            {},
            "model.layers.1.mlp.act_fn",
            False,
            f"the output of model.layers.1.mlp.act_fn {IS} 0 in microbatch 1: ",
        ),
        (
            STAGES,
            "model.layers.2.mlp.act_fn",
            False,
            f"of model.layers.2.mlp.act_fn {IS} 1 in microbatch 1; ",
        ),
        (
            STAGES,
            "model.layers.0.mlp.act_fn",
            False,
            f"of model.layers.0.mlp.act_fn {IS} 0 in microbatch 1; 1 other ranks have some too: ",
        ),
        (
            STAGES,
            "model.layers.3.mlp.act_fn",
            True,
            f"the gradient of the output of model.layers.3.mlp.gate_proj {IS} 1 in microbatch 0",
        ),
        (  # the first rank has the first stage and the last one
            {"pp_size": 2, "pp_style": "zbv"},
            "model.layers.3.mlp.act_fn",
            True,
            "is the first that is not finite, on rank 0 in microbatch 0",
        ),
    ],
    ids=["finite", "alone", "last stage", "first stage", "backward", "several stages"],
)
def test_the_first_module_that_is_not_finite_is_named_on_every_rank(
    pool: Pool, sizes: dict[str, Any], path: str | None, is_backward: bool, words: str
) -> None:
    errors = pool.run(sizes.get("pp_size", 1), named, sizes, path, is_backward)
    assert len(set(errors)) == 1
    assert words in errors[0] and bool(words) == bool(errors[0])
