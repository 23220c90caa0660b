"""Numbers of operators in a step: a GPU launches a few kernels for each."""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from echelon import Booster, HybridParallelPlugin
from echelon.verify.layout_choice import Layout
from echelon.zero.partition import default_bucket_size

from ..cuda_page import table, value
from ..pool import Pool
from .helpers import shard


class Operators(TorchDispatchMode):
    """Counter of operators by name, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace in ("aten", "c10d"):
            self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def count(stage: int, num_parameters: int, num_buckets: int) -> tuple[int, Counter[str]]:
    """Count the operators of a clipped step, from the gradients to the parameters. On one rank of the pool."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(64)) for _ in range(num_parameters)])
    size = 64 * (num_parameters // num_buckets)
    arguments: dict[str, Any] = {"bucket_size": size, "max_norm": 1e-3, "overlap_communication": False}
    optimizer = shard(model, torch.optim.AdamW, stage=stage, precision="bf16", **arguments)
    for _ in range(4):  # in the first three, ranks compare their calls
        optimizer.backward(torch.stack([parameter.float().square().sum() for parameter in model]).sum())
        with Operators() as operators:
            optimizer.step()
        optimizer.zero_grad()
    return len(optimizer.buckets), operators.names


LAYOUTS = {
    "dp 2": Layout(dp=2),
    "tp 2": Layout(tp=2),
    "tp 2, split_gather": Layout(tp=2, sequence="split_gather"),
    "sp 2, all_to_all": Layout(sp=2, sequence="all_to_all"),
    "sp 2, ring_attn": Layout(sp=2, sequence="ring_attn"),
}


def count_layer(layout: Layout | None) -> list[int]:
    """Count a Llama layer's operators forward and backward, and its collectives forward and backward.

    Args:
        layout: None is transformers only.
    """
    few, many = (count_microbatch(layout, num_layers) for num_layers in (2, 4))
    return [(b - a) // 2 for a, b in zip(few, many, strict=True)]


def count_microbatch(layout: Layout | None, num_layers: int) -> list[int]:
    """Count like `count_layer`, for a bf16 microbatch that is neither the first nor the last before a step."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, use_cache=False, **sizes))
    if layout is None:
        model, backward, accumulating = model.bfloat16(), torch.Tensor.backward, nullcontext()
    else:
        booster = Booster(plugin=HybridParallelPlugin(**{**layout.arguments, "precision": "bf16"}))
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        backward = partial(booster.backward, optimizer=optimizer)
        accumulating = booster.no_sync(model, optimizer)
    tokens = torch.arange(32).view(2, 16)
    with accumulating:
        for _ in range(2):
            with Operators() as forward:
                loss = model(input_ids=tokens, labels=tokens).loss
            with Operators() as back:
                backward(loss)
    both = forward.names, back.names
    return [names.total() for names in both] + [collectives_of(names) for names in both]


def collectives_of(names: Counter[str]) -> int:
    """Return the number of operators that communicate."""
    return sum(number for name, number in names.items() if name.startswith("c10d::"))


def test_a_layer_launches_as_many_operators_as_the_page_says(pool: Pool) -> None:
    plain, *_ = pool.run(1, count_layer, None)
    rows = {name: cells[:4] for name, *cells in table("What a layer launches")}
    assert rows.keys() == LAYOUTS.keys()
    for name, layout in LAYOUTS.items():
        sharded = pool.run(2, count_layer, layout)[0]
        assert [b - a for a, b in zip(plain, sharded, strict=True)] == [int(cell) for cell in rows[name]]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_launches_as_many_operators_as_the_page_says(pool: Pool, stage: int) -> None:
    formulas = {name: formula for name, formula, _ in table("What a step launches")}
    for num_parameters, num_buckets in ((4, 1), (12, 3), (120, 3)):
        bucket_count, names = pool.run(2, count, stage, num_parameters, num_buckets)[0]
        assert bucket_count == num_buckets
        terms = {"B": num_buckets, "G": 1, "stage": stage}
        expected = {name: value(formula, terms) for name, formula in formulas.items()}
        others = expected.pop("others")
        assert collectives_of(names) == expected.pop("collectives"), names
        assert {name: names[name] for name in expected} == expected, names
        rest = {name: n for name, n in names.items() if name not in expected and not name.startswith("c10d")}
        assert sum(rest.values()) <= others, rest


def test_buckets_are_larger_on_cuda_and_with_many_ranks() -> None:
    assert default_bucket_size(torch.device("cpu"), 64) == 12 * 2**20
    assert [default_bucket_size(torch.device("cuda"), ranks) // 2**20 for ranks in (2, 64)] == [40, 64]
