"""Profiles have names of actions, calls, layers and collectives; those of all ranks are merged on one clock."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from echelon.booster import traces
from echelon.cluster import profiling
from echelon.verify.batch import loss_of, make_batch

from ..plugins.training import LLAMA, boosted, hybrid
from ..pool import Pool


def train_profiled(sizes: dict[str, Any], path: Path) -> None:
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, LLAMA)
    batch = make_batch(LLAMA, num_samples=4, seed=0)
    booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)
        optimizer.step()
    booster.save_trace(profiler, path)


@pytest.fixture(scope="module")
def events(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the events of four ranks in one trace."""
    path = tmp_path_factory.mktemp("traces") / "of this run" / "trace.json"
    pool.run(4, train_profiled, {"tp_size": 2, "pp_size": 2}, path)
    trace: dict[str, Any] = json.loads(path.read_text())
    return trace["traceEvents"]  # type: ignore[no-any-return]


def of_rank(events: list[dict[str, Any]], rank: int, prefix: str) -> list[dict[str, Any]]:
    timed = [event for event in events if "dur" in event and event["name"].startswith(prefix)]
    return [event for event in timed if str(event["pid"]).startswith(f"rank {rank}:")]


def test_actions_calls_layers_waits_and_collectives_have_names(events: list[dict[str, Any]]) -> None:
    actions = {event["name"] for event in of_rank(events, 3, "F ") + of_rank(events, 3, "B ")}
    assert actions == {f"{op} stage 1 microbatch {microbatch}" for op in "FB" for microbatch in (0, 1)}
    names = Counter(event["name"] for event in of_rank(events, 3, ""))
    assert names["execute_pipeline"] == names["optimizer.step"] == 1
    assert names["model.layers.1.mlp"] == names["model.layers.1"] == 2
    assert "model.layers.0" not in names  # of the other stage
    assert any(name.startswith("all_reduce over tp, ranks 2, 3") for name in names)
    wait = "wait for receiving the activations of microbatch 1 at stage 1 (rank 1"
    assert any(name.startswith(wait) for name in names)


def test_ranks_are_rows_with_their_places(events: list[dict[str, Any]]) -> None:
    labels = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert any(label.startswith("rank 2 (pp 1, tp 0), ") for label in labels), labels
    assert not any(label.endswith(", ") for label in labels), labels


def test_ranks_share_a_clock(events: list[dict[str, Any]]) -> None:
    """A stage does not end a receive before the other one began the forward that is sent."""
    for microbatch in (0, 1):
        (sent,) = of_rank(events, 0, f"F stage 0 microbatch {microbatch}")
        (received,) = of_rank(events, 2, f"F stage 1 microbatch {microbatch}")
        assert received["ts"] + received["dur"] > sent["ts"] + sent["dur"]
    calls = [event for rank in range(4) for event in of_rank(events, rank, "optimizer.step")]
    assert max(call["ts"] for call in calls) < min(call["ts"] + call["dur"] for call in calls)  # they overlap


def test_a_clock_that_is_ahead_is_set_back() -> None:
    event = {"ph": "X", "name": "F", "pid": 7, "tid": 1, "ts": 1000.0, "dur": 5.0}
    of_ranks = [("", {"baseTimeNanoseconds": 10_000, "traceEvents": [dict(event)]}) for _ in range(2)]
    of_ranks[1][1]["baseTimeNanoseconds"] = 5_000_000 + 10_000 + 2_000  # 5 ms ahead, and 2 µs later
    events = traces.merged(of_ranks, [0, 5_000_000])["traceEvents"]
    assert [event["ts"] for event in events if event["ph"] == "X"] == [1000.0, 1002.0]


def offset_of_a_shifted_clock(shift: int) -> list[int]:
    rank, now = torch.distributed.get_rank(), time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces.time, "time_ns", lambda: now() + rank * shift)
        return traces.clock_offsets()


def test_the_offset_of_a_clock_is_measured_within_a_millisecond(pool: Pool) -> None:
    offsets = pool.run(2, offset_of_a_shifted_clock, 3_000_000_000)[0]
    assert offsets[0] == 0
    assert abs(offsets[1] - 3_000_000_000) < 1_000_000, offsets


def test_another_suffix_is_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    for error in pool.run_failing(2, train_profiled, {"tp_size": 2}, tmp_path / "trace.html"):
        assert isinstance(error, ValueError) and "must end in .json" in str(error)


def save_a_trace_of_nothing(path: Path) -> None:
    hybrid(tp_size=2).save_trace(profile(activities=[ProfilerActivity.CPU]), path)


def test_a_profiler_that_did_not_record_is_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    for error in pool.run_failing(2, save_a_trace_of_nothing, tmp_path / "trace.json"):
        assert isinstance(error, ValueError) and "the profiler has recorded nothing: give" in str(error)


def test_without_a_profiler_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "record_function", lambda name: pytest.fail(f"{name} was recorded"))
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with profiling.named("a"), profiling.named_modules(layer, list(layer)):
        layer(torch.ones(1, 2))
    assert not layer[0]._forward_hooks and not layer[0]._forward_pre_hooks


def test_modules_are_named_while_a_profiler_records() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with profile(activities=[ProfilerActivity.CPU]) as profiler, profiling.named_modules(model, list(model)):
        model(torch.ones(1, 2))
    assert "0" in {event.name for event in profiler.events() or ()}
    assert not model[0]._forward_hooks
