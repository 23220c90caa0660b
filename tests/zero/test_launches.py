"""Operators of a step, by number: a GPU launches a few kernels for each."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.zero.partition import default_bucket_size

from ..pool import Pool
from .helpers import shard

PAGE = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text()


class Operators(TorchDispatchMode):
    """Counts operators by name, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace in ("aten", "c10d"):
            self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def count(stage: int, num_parameters: int, num_buckets: int) -> tuple[int, Counter[str]]:
    """Of a step that clips, from the gradients to the parameters. On one rank of the pool."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(64)) for _ in range(num_parameters)])
    size = 64 * (num_parameters // num_buckets)
    arguments: dict[str, Any] = {"bucket_size": size, "max_norm": 1e-3, "overlap_communication": False}
    optimizer = shard(model, torch.optim.AdamW, stage=stage, precision="bf16", **arguments)
    for _ in range(4):  # in the first three, ranks compare their calls
        optimizer.backward(torch.stack([each.float().square().sum() for each in model]).sum())
        with Operators() as operators:
            optimizer.step()
        optimizer.zero_grad()
    return len(optimizer.buckets), operators.names


def table() -> dict[str, str]:
    """Formulas by operator."""
    (section,) = re.findall(r"^## What a step launches$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    return {names.strip().strip("`"): number.strip().strip("`") for names, number, *_ in rows}


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_launches_what_the_page_says(pool: Pool, stage: int) -> None:
    formulas = table()
    for num_parameters, num_buckets in ((4, 1), (12, 3), (120, 3)):
        found, names = pool.run(2, count, stage, num_parameters, num_buckets)[0]
        assert found == num_buckets
        terms = {"B": num_buckets, "G": 1, "stage": stage}
        expected = {name: eval(formula.replace("·", "*"), {}, terms) for name, formula in formulas.items()}
        collectives = sum(number for name, number in names.items() if name.startswith("c10d::"))
        others = expected.pop("others")
        assert collectives == expected.pop("collectives"), names
        assert {name: names[name] for name in expected} == expected, names
        rest = {name: n for name, n in names.items() if name not in expected and not name.startswith("c10d")}
        assert sum(rest.values()) <= others, rest


def test_buckets_are_larger_on_cuda_and_with_many_ranks() -> None:
    assert default_bucket_size(torch.device("cpu"), 64) == 12 * 2**20
    assert [default_bucket_size(torch.device("cuda"), ranks) // 2**20 for ranks in (2, 64)] == [40, 64]
