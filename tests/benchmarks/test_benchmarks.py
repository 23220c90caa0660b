"""The benchmarks: every script runs and reports its measurements, and its checks and ratios can fail."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ..pool import Pool
from ..test_project import imports
from .conftest import BENCHMARKS

# From the imports of torch.distributed.optim and of the peers of torch.distributed.tensor.parallel.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

NUMBER = r"\d+\.\d{3}"
OURS = {f"echelon stage {stage}" for stage in range(3)}
DATA_PARALLEL = OURS | {
    "torch DDP",
    "torch DDP + ZeroRedundancyOptimizer",
    "torch FSDP2",
    "torch FSDP2, no resharding",
}
PIPELINES = {f"echelon {style}" for style in ("gpipe", "1f1b", "interleaved", "zbh1", "zbv")}
PIPELINES |= {f"torch {style}" for style in ("gpipe", "1f1b", "interleaved", "zbv")}
TENSOR = {"echelon", "transformers DistributedConfig"}
TENSOR |= {f"torch DTensor, {kind}" for kind in ("plain", "loss-parallel", "sequence-parallel")}
EXPERTS = {"echelon experts, stage 0", "echelon experts, stage 1", "transformers experts, FSDP2"}
EXPERTS |= {"echelon stage 1", "torch DDP", "torch FSDP2"}
SEQUENCE = {"echelon ring_attn", "torch context parallel"}
MEMORY = {"echelon stage 2", "torch DDP"}


def check_contenders(results: dict[str, Any], names: set[str], others: Set[str] = frozenset()) -> None:
    """Check that all contenders computed the same, and that each has a time for every round."""
    assert results["agreement"].keys() == names
    assert all(max(errors.values()) <= 1e-4 for errors in results["agreement"].values())
    assert results["seconds"].keys() == names | others
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in results["seconds"].values())


def check_pipelines(results: dict[str, Any]) -> None:
    """Check that all schedules compute the same, and that the three fastest of each side are timed on."""
    warmup = results["warmup_seconds"]
    assert warmup.keys() == PIPELINES and all(len(seconds) == 1 for seconds in warmup.values())
    chosen = {
        name
        for side in ("echelon", "torch")
        for name in sorted(
            (contender for contender in warmup if contender.startswith(side)), key=warmup.__getitem__
        )[:3]
    }
    assert results["seconds"].keys() == chosen | {"one process", "one process on each rank"}
    assert results["agreement"].keys() == PIPELINES
    assert all(max(errors.values()) <= 1e-4 for errors in results["agreement"].values())
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in results["seconds"].values())


def check_data_parallel(results: dict[str, Any]) -> None:
    """Check memory on two ranks: 4 bytes for each parameter and gradient, 8 of states, sharded as labelled."""
    check_contenders(results, DATA_PARALLEL)
    local, ledger = results["held"], results["ledger"]
    unsharded = ledger["echelon stage 0"]["parameters"]
    assert [ledger[name]["gradients"] for name in sorted(OURS)] == [unsharded, unsharded, unsharded / 2]
    assert [ledger[name]["states"] for name in sorted(OURS)] == [2 * unsharded, unsharded, unsharded]
    for name in ("echelon stage 0", "echelon stage 1", "torch DDP"):
        assert local[name]["parameters"] == local[name]["gradients"] == unsharded
    for name in DATA_PARALLEL:
        if "FSDP2" in name:
            assert local[name]["parameters"] == local[name]["gradients"] == unsharded / 2


def check_experts(results: dict[str, Any]) -> None:
    """Check that ranks share the experts: those of transformers as many bytes as Echelon's, and DDP nearly twice."""
    check_contenders(results, EXPERTS)
    held = {name: sum(sizes.values()) for name, sizes in results["held"].items()}
    assert held["echelon experts, stage 1"] == pytest.approx(held["transformers experts, FSDP2"], rel=0.1)
    assert held["torch DDP"] > 1.8 * held["echelon experts, stage 1"]


def check_optimizers(results: dict[str, Any]) -> None:
    """Check that all step alike, and that two ranks share states: two of a parameter's size for AdamW, one for Muon."""
    names = {"echelon stage 1", "echelon stage 2", "torch DDP", "torch FSDP2"}
    refusing = {"adafactor": {"torch FSDP2"}}
    held = {}
    for kind, of_kind in results["optimizers"].items():
        peers = names - refusing.get(kind, set())
        alone = {"one process"}
        check_contenders(of_kind, peers, alone)
        assert of_kind["loss_afterwards"].keys() == peers | alone
        held[kind] = {name: sum(sizes.values()) for name, sizes in of_kind["held"].items()}
        assert held[kind]["torch DDP"] == held[kind]["one process"] > 0
    assert held.keys() == {"adamw", "muon", "adafactor"}
    adamw, muon = held["adamw"], held["muon"]
    assert (
        adamw["echelon stage 1"] == adamw["echelon stage 2"] == adamw["torch FSDP2"] == adamw["torch DDP"] / 2
    )
    assert 2 * muon["torch FSDP2"] == muon["torch DDP"] < adamw["torch DDP"]
    # A state and a float32 master for each matrix of Muon; a master and small states for those of Adafactor.
    masters = {kind: results["optimizers"][kind]["held"]["echelon stage 1"]["masters"] for kind in held}
    assert masters["adamw"] == 0 < masters["muon"] < masters["adafactor"]
    assert muon["echelon stage 1"] == pytest.approx(adamw["echelon stage 1"], rel=0.1)


def check_memory(results: dict[str, Any]) -> None:
    ours, ddp = (results["memory"][name] for name in sorted(MEMORY))
    assert ours["held"]["parameters"] == ddp["held"]["parameters"] == 2 * ours["held"]["gradients"]
    for contender in (ours, ddp):
        assert len(contender["peaks"]) == 2 and min(contender["peaks"]) > sum(contender["held"].values())


def check_sequence(results: dict[str, Any]) -> None:
    rows = results["runs"]["2"]["lengths"]
    assert [row["length"] for row in rows] == [4, 8, 16]  # 2 is not a multiple of 2·ranks
    for row in rows:
        assert row["seconds"].keys() == row["bytes"].keys() == row["agreement"].keys() == SEQUENCE
        assert all(0 < sizes["kept"] <= sizes["peak"] for sizes in row["bytes"].values())
    assert results["longest"]["measured"]["2"] > results["longest"]["measured"]["1"] == 16


def check_host_time(results: dict[str, Any]) -> None:
    """Check that every contender has its times in each round, and that tensor parallelism costs time."""
    contenders = {
        **{
            module: {"transformers", "echelon", "torch DTensor, plain"}
            for module in ("layer", "attention", "mlp")
        },
        **{style: {"echelon", "torch"} for style in ("gpipe", "1f1b")},
    }
    for module, rows in (results["layers"] | results["engines"]).items():
        assert rows.keys() == contenders[module]
    assert results["steps"].keys() == {"one process"} | DATA_PARALLEL - {
        "torch DDP + ZeroRedundancyOptimizer"
    }
    rows = [*results["layers"].values(), *results["engines"].values(), results["steps"]]
    for seconds in (times for row in rows for times in row.values()):
        assert len(seconds) == 3 and min(map(min, seconds)) > 0
    last = results["summary"]["last"]
    assert 0 < last["ratio_to_dtensor"] < 1 and last["layer_forward_ms"] > 0


def check_checkpoint(results: dict[str, Any]) -> None:
    """Check the bytes of weights and two states in float32; indices and archives add little."""
    expected = 3 * 4 * (2 * 2048 * 128 + 4 * (4 * 128 * 128 + 3 * 128 * 352 + 2 * 128) + 128)
    for measured in results["layouts"].values():
        assert min(measured["plain"] + measured["saved"] + measured["stall"]) > 0
        assert all(expected <= size <= 1.1 * expected for size in measured["bytes"].values())


def check_curves(results: dict[str, Any]) -> None:
    """Check three steps: only float32 rounding."""
    curve, reference = results["curves"]["dp2·zero2"], results["reference"]
    assert curve["losses"] == pytest.approx(reference["losses"], rel=1e-6) and len(curve["losses"]) == 3
    assert curve["norms"] == pytest.approx(reference["norms"], rel=1e-5)


# The script, its options, its last line, and the check of its results.
SCRIPTS: list[tuple[str, tuple[str, ...], str, Callable[[dict[str, Any]], None]]] = [
    (
        "pipeline.py",
        (),
        f"ratio_to_best_peer={NUMBER} ratio_to_ideal={NUMBER}",
        check_pipelines,
    ),
    ("tensor.py", (), f"ratio_to_best_peer={NUMBER}", lambda results: check_contenders(results, TENSOR)),
    ("experts.py", (), f"ratio_to_best_peer={NUMBER}", check_experts),
    ("zero.py", (), f"ratio_to_best_peer={NUMBER}", check_data_parallel),
    (
        "optimizers.py",
        (),
        " ".join(f"{kind}_to_best_peer={NUMBER}" for kind in ("adamw", "muon", "adafactor")),
        check_optimizers,
    ),
    (
        "zero_memory.py",
        ("--contenders", *sorted(MEMORY), "--steps", "2"),
        f"echelon_stage_2={NUMBER}",
        check_memory,
    ),
    (
        "sequence.py",
        ("--ranks", "1", "2", "4", "--contenders", *sorted(SEQUENCE)),
        f"ratio_to_best_peer={NUMBER} bytes_to_best_peer={NUMBER}",
        check_sequence,
    ),
    (
        "host_time.py",
        (),
        f"layer_forward_ms={NUMBER} layer_backward_ms=-?{NUMBER} ratio_to_dtensor={NUMBER} step_ms={NUMBER}",
        check_host_time,
    ),
    (
        "checkpoint.py",
        ("--hidden", "128", "--vocabulary", "2048", "--layers", "4"),
        f"saved_to_plain={NUMBER} stall_to_plain={NUMBER} slower_steps_to_plain={NUMBER}",
        check_checkpoint,
    ),
    ("curves.py", ("--layouts", "dp2·zero2"), r"largest_difference=\S+", check_curves),
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "options", "last", "check"), SCRIPTS, ids=[row[0] for row in SCRIPTS])
def test_a_script_runs_and_all_of_it_is_reported(  # type: ignore[no-untyped-def]
    run_quickly, tmp_path: Path, script: str, options: tuple[str, ...], last: str, check: Callable
) -> None:
    times, picture = tmp_path / "times.json", tmp_path / "times.png"
    drawn = () if script in ("zero_memory.py", "host_time.py", "checkpoint.py") else ("--plot", str(picture))
    printed = run_quickly(script, *options, "--json", str(times), *drawn)
    assert re.fullmatch(last, printed.splitlines()[-1])
    check(json.loads(times.read_text()))
    assert not drawn or picture.read_bytes().startswith(b"\x89PNG")


# Checks that can fail.


@contextmanager
def scripts() -> Iterator[None]:
    """Make bare names of the benchmarks importable in this worker."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield
    finally:
        sys.path.remove(str(BENCHMARKS))


class Fake:
    """A contender with given gradients and a loss of 2."""

    name = "a fake"

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        self._gradients = gradients

    def compute(self) -> None: ...

    def update(self) -> None: ...

    def forget(self) -> None: ...

    def loss(self) -> Tensor:
        return torch.tensor(2.0)

    def gradients(self) -> Mapping[str, Tensor]:
        return self._gradients


def agree(error: float, missing: bool) -> dict[str, dict[str, float]]:
    """Run the check on two fakes with the given difference of gradients, on one rank."""
    with scripts():
        check = import_module("contender")
    reference = Fake({"a": torch.ones(3), "b": torch.ones(3)})
    other = {"a": torch.ones(3)} | ({} if missing else {"b": torch.ones(3) * (1 + error)})
    return check.agreement([Fake(other)], reference)


@pytest.mark.slow
def test_a_contender_with_other_gradients_or_without_some_is_refused(pool: Pool) -> None:
    assert pool.run(1, agree, 0.0, False) == [{"a fake": {"loss": 0.0, "gradients": 0.0}}]
    for error, missing in ((1e-3, False), (float("nan"), False), (0.0, True)):
        with pytest.raises(ValueError, match="a fake does not compute what one process does"):
            pool.run(1, agree, error, missing)


TINY = {"hidden": 32, "layers": 1, "vocabulary": 64, "sequence": 8, "batch": 4, "microbatches": 1}


def train_apart(steps: int) -> list[str]:
    """Run the check on three replicas of one rank, one of which takes another number of steps."""
    with scripts():
        check = import_module("contender").require_equal_training
        stepped = import_module("stepped")
        workload = import_module("workload").Workload(**TINY)
    contenders = [stepped.OneProcess(workload, torch.device("cpu"), works=True) for _ in range(3)]
    for index, contender in enumerate(contenders):
        contender.name = f"number {index}"
        for _ in range(steps if index == 1 else 4):
            contender.compute()
            contender.update()
    return list(check(contenders))


@pytest.mark.slow
def test_a_contender_that_leaves_out_steps_is_refused(pool: Pool) -> None:
    assert pool.run(1, train_apart, 4) == [["number 0", "number 1", "number 2"]]
    with pytest.raises(ValueError, match="the losses differ: number 0"):
        pool.run(1, train_apart, 0)


def test_ratios_are_medians_of_rounds_and_to_the_best_peer(load: Callable[[str], ModuleType]) -> None:
    report, ideal = load("report"), load("pipeline").ideal
    assert report.ratio([1.0, 20.0, 3.0], [2.0, 10.0, 3.0]) == 1.0
    assert report.ratio([1.0, 20.0, 9.0], [2.0, 10.0, 3.0]) == 2.0
    seconds = {"late": [6.0], "torch a": [1.0, 2.0]}
    assert report.compared(seconds, "torch a")["late"]["ratio_to_best_peer"] == 3.0  # to the same round's
    bubbles = {"1f1b": 1 / 8, "interleaved": 1 / 16, "zbh1": 1 / 24}
    assert all(ideal(style, 2, 8) == pytest.approx((1 + bubble) / 2) for style, bubble in bubbles.items())
    seconds = {"echelon stage 0": [1.0], "echelon stage 1": [3.0], "torch DDP": [4.0], "torch FSDP2": [6.0]}
    assert load("comparison").summary(seconds, "echelon stage 1")["ratio_to_best_peer"] == 0.75
    peaks = {"echelon stage 1": 3.0, "torch DDP": 4.0, "torch FSDP2": 2.0}
    assert load("zero_memory").to_best_peer(peaks) == {"echelon stage 1": 1.5}
    row = {
        "seconds": {"echelon a": [3.0], "echelon b": [1.0], "torch a": [2.0], "torch b": [4.0]},
        "bytes": {name: {"kept": kept} for name, kept in zip(
            ("echelon a", "echelon b", "torch a", "torch b"), (1, 9, 8, 4), strict=True
        )},
    }  # fmt: skip
    assert load("sequence").last_line(row) == {"ratio_to_best_peer": 0.5, "bytes_to_best_peer": 0.25}


def test_other_bytes_than_the_formulas_are_reported(load: Callable[[str], ModuleType]) -> None:
    memory = load("memory")
    expected = memory.held_at_stage(1, elements=100, num_ranks=2)
    memory.require_held("a stage", expected | {"buffers": 7}, expected, padding=0)
    memory.require_held("a stage", expected | {"states": 408}, expected, padding=1)
    for wrong in ({"gradients": 200}, {"states": 408}, {"masters": 400}):
        with pytest.raises(ValueError, match=f"a stage holds .* bytes of {next(iter(wrong))} instead of"):
            memory.require_held("a stage", expected | wrong, expected, padding=0)
    flat = torch.zeros(100)
    assert memory.held_bytes([flat[:10], flat[50:], torch.zeros(5)]) == 4 * 105


def test_live_bytes_are_those_of_tensors_that_still_exist(load: Callable[[str], ModuleType]) -> None:
    live_bytes = load("live_bytes")
    before = torch.ones(1000)
    with live_bytes.KeptBytes() as live:
        view = before.view(10, 100)
        assert live.now == 0
        made = view * 2
        turned = made.t()
        del made
        assert live.now == 4000  # the view keeps it
        del turned
        assert (live.now, live.peak, live.kept) == (0, 4000, None)
    x = torch.ones(1000, requires_grad=True)
    kept, peak = live_bytes.training_bytes(lambda: x.mul(2).exp().sin().sum().backward())
    # exp keeps its result, which sin keeps as its input; the sum and backward's initial 1 take 4 bytes each.
    assert kept == 4000 + 8 and kept + 4000 <= peak <= kept + 12000


def test_the_longest_sequence_satisfies_all_needs(load: Callable[[str], ModuleType]) -> None:
    longest = load("sequence_longest")
    need = longest.Need(constant=5e6, whole=300.0, shared=9000.0)
    peaks = {(ranks, length): need(ranks, length) for ranks in (1, 2, 4) for length in (512, 1024, 4096)}
    assert longest.error([longest.fit(peaks)], peaks) < 1e-9
    needs = {
        "most": longest.Need(constant=1000, whole=0, shared=10),
        "first": longest.Need(constant=0, whole=2, shared=1),
    }
    simulated = longest.simulated(needs, 11_000, (1, 2, 8))
    assert simulated["longest"] == {"1": 1000, "2": 2000, "8": int(11_000 / 2.125)}
    for start in (64, 320, 4000):
        assert longest.search(lambda length: 200 + 15 * length, start=start, unit=32, memory=5000) == 320


@pytest.mark.parametrize(
    ("losses", "norms", "error"),
    [
        ((2.0, 1.00003), (1.0, 1.0), "the loss of odd departs from the reference's by 3.0e-05 of it"),
        ((2.0, float("nan")), (1.0, 1.0), "the loss of odd departs from the reference's by inf of it"),
        ((2.0, 1.0), (1.0, 0.998), "the norm of odd departs from the reference's by 2.0e-03 of it"),
    ],
)
def test_a_curve_that_differs_is_an_error(  # type: ignore[no-untyped-def]
    load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], losses, norms, error: str
) -> None:
    curves, curve_of = load("curves"), load("plain_training").Curve
    reference = curve_of(losses=(2.0, 1.0), norms=(1.0, 1.0))
    away = curves.departure(curve_of(losses=losses, norms=norms), reference)
    near = curves.departure(curve_of(losses=(2.0, 1.000005), norms=(1.0005, 1.0)), reference)
    monkeypatch.setattr(sys, "argv", ["curves.py"])
    monkeypatch.setattr(curves, "show_results", lambda *_: None)
    for departures, status in (({"even": near}, 0), ({"even": near, "odd": away}, 1)):
        monkeypatch.setattr(curves, "measure", lambda *_, measured=departures: {"departures": measured})
        assert curves.main() == status
    assert error in capsys.readouterr().err


def test_the_plain_loop_imports_nothing_of_echelon() -> None:
    for path in [BENCHMARKS / f"{name}.py" for name in ("plain_training", "report")]:
        targets = [target.split(".")[0] for _, _, target in imports(path.read_text(), path.stem)]
        assert targets and "echelon" not in targets
