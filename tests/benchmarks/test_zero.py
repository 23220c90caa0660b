"""The data-parallel benchmark: that it runs, what it writes, and that its checks and counts can fail."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .conftest import BENCHMARKS

OURS = ("echelon stage 0", "echelon stage 1", "echelon stage 2")
TORCH = (
    "torch DDP",
    "torch DDP + ZeroRedundancyOptimizer",
    "torch FSDP2",
    "torch FSDP2, no resharding",
)
KINDS = ["parameters", "gradients", "states"]
TINY = {"hidden": 32, "layers": 1, "vocabulary": 64, "sequence": 8, "batch": 4, "microbatches": 1}


@pytest.mark.slow
def test_every_contender_computes_the_same_and_all_of_it_is_reported(
    run_quickly, load, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    times, picture = tmp_path / "times.json", tmp_path / "times.png"
    printed = run_quickly("zero.py", "--json", str(times), "--plot", str(picture))

    assert re.fullmatch(r"ratio_to_best_peer=\d+\.\d{3}", printed.splitlines()[-1])
    assert all(printed.count(name) >= 2 for name in (*OURS, *TORCH)), "a name is in both tables"
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(times.read_text())
    for part in ("agreement", "held", "seconds", "loss_afterwards"):
        assert found[part].keys() == {*OURS, *TORCH}
    assert all(max(errors.values()) <= 1e-4 for errors in found["agreement"].values())
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in found["seconds"].values())
    workload = load("workload").Workload(**quick_sizes(found))
    require_true_bytes(found["held"], workload)
    require_true_slices(found["ledger"], workload)


def quick_sizes(found: dict[str, Any]) -> dict[str, int]:
    """The workload that a run says to have measured."""
    settings = found["settings"]
    return {name: settings[name] for name in ("hidden", "layers", "vocabulary", "sequence", "batch")}


def require_true_bytes(held: dict[str, dict[str, int]], workload: Any) -> None:
    """On two ranks: four bytes for each parameter and gradient, eight of states, shared out where it says so."""
    assert all(list(row) == KINDS for row in held.values())
    sizes = [parameter.numel() for parameter in workload.model().parameters()]
    whole, counters = 4 * sum(sizes), 4 * len(sizes)  # AdamW counts the steps of each parameter, in float32
    for name in ("echelon stage 0", "echelon stage 1", "torch DDP", "torch DDP + ZeroRedundancyOptimizer"):
        assert held[name]["parameters"] == held[name]["gradients"] == whole
    for name in ("echelon stage 0", "torch DDP"):
        assert held[name]["states"] == 2 * whole + counters
    assert whole < held["echelon stage 1"]["states"] <= whole + counters
    for name in TORCH[2:]:
        assert held[name]["parameters"] == held[name]["gradients"] == whole / 2
        assert held[name]["states"] == whole + counters


def require_true_slices(ledger: dict[str, dict[str, int]], workload: Any) -> None:
    """The same of what the ledger counts, which knows of gradients in slices at stage 2."""
    assert ledger.keys() == set(OURS)
    whole = 4 * sum(parameter.numel() for parameter in workload.model().parameters())
    assert [ledger[name]["gradients"] for name in OURS] == [whole, whole, whole / 2]
    assert [ledger[name]["states"] for name in OURS] == [2 * whole, whole, whole]
    assert all(ledger[name]["parameters"] == whole and ledger[name]["masters"] == 0 for name in OURS)


# Of the import of torch.distributed.optim, whose functional optimizers are scripted.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_ratio_is_that_of_stage_1_to_the_fastest_of_torch(load) -> None:  # type: ignore[no-untyped-def]
    seconds = {"echelon stage 0": [1.0], "echelon stage 1": [3.0], "torch DDP": [4.0], "torch FSDP2": [6.0]}
    found = load("comparison").summary(seconds, "echelon stage 1")
    assert found["best_peer"] == "torch DDP"
    assert found["ratio_to_best_peer"] == 0.75


@contextmanager
def scripts() -> Iterator[None]:
    """Bare names of the benchmarks can be imported in this worker."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield
    finally:
        sys.path.remove(str(BENCHMARKS))


def check_replicas(averages: bool) -> list[str]:
    """The check on two plain replicas, whose gradients are averaged as told; the contenders that passed."""
    with scripts():
        modules = {name: importlib.import_module(name) for name in ("contender", "data_parallel", "stepped")}
        workload = importlib.import_module("workload").Workload(**TINY)
    cpu = torch.device("cpu")
    model = workload.model()
    batch = modules["data_parallel"].own_samples(workload, cpu)

    class Replica(modules["data_parallel"].DataParallel):  # type: ignore[name-defined, misc]
        name = "a replica"

        def gradients(self) -> dict[str, Tensor]:
            found = modules["stepped"].gradients_of(self._model)
            if averages:
                for gradient in found.values():
                    torch.distributed.all_reduce(gradient, op=torch.distributed.ReduceOp.AVG)
            return found

    replica = Replica(model, torch.optim.SGD(model.parameters()), batch=batch)
    reference = modules["stepped"].OneProcess(workload, cpu, works=True)
    return list(modules["contender"].agreement([replica], reference))


def test_replicas_that_are_not_averaged_are_refused(pool) -> None:  # type: ignore[no-untyped-def]
    assert pool.run(2, check_replicas, True) == [["a replica"]] * 2
    with pytest.raises(ValueError, match="a replica does not compute what one process does"):
        pool.run(2, check_replicas, False)


def train_apart(steps: int) -> list[str]:
    """The check on three replicas of one rank, of which one takes another number of steps."""
    with scripts():
        check = importlib.import_module("contender").require_equal_training
        stepped = importlib.import_module("stepped")
        workload = importlib.import_module("workload").Workload(**TINY)
    contenders = [stepped.OneProcess(workload, torch.device("cpu"), works=True) for _ in range(3)]
    for index, contender in enumerate(contenders):
        contender.name = f"number {index}"
        for _ in range(steps if index == 1 else 4):
            contender.compute()
            contender.update()
    return list(check(contenders))


def test_a_contender_that_leaves_out_steps_is_refused(pool) -> None:  # type: ignore[no-untyped-def]
    assert pool.run(1, train_apart, 4) == [["number 0", "number 1", "number 2"]]
    with pytest.raises(ValueError, match="the losses differ: number 0"):
        pool.run(1, train_apart, 0)


def cut_unevenly() -> None:
    with scripts():
        data_parallel = importlib.import_module("data_parallel")
        workload = importlib.import_module("workload").Workload(**TINY | {"batch": 5})
    data_parallel.own_samples(workload, torch.device("cpu"))


def test_a_batch_that_the_ranks_do_not_divide_is_refused(pool) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="--batch 5 must be a multiple of --dp 2"):
        pool.run(2, cut_unevenly)


def test_shared_memory_is_counted_once(load) -> None:  # type: ignore[no-untyped-def]
    held_bytes = load("memory").held_bytes
    flat = torch.zeros(100)
    assert held_bytes([flat[:10], flat[50:], torch.zeros(5)]) == 4 * 105
