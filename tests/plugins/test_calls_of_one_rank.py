"""Calls of only some ranks end with an error that names the call of each rank; a late rank is waited for."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from echelon.cluster import watch
from echelon.cluster.errors import RankFailure
from echelon.verify.batch import loss_of, make_batch

from ..pool import Pool, on_ranks
from ..slow import slow_row
from .training import LLAMA, boosted, booster_of, forward_and_backward, share

KINDS = {
    "tp": ("hybrid", {"tp_size": 2}),
    "dp": ("hybrid", {"zero_stage": 1}),
    "pp": ("hybrid", {"pp_size": 2}),
}


class Run:
    """A boosted model and its optimizer on this rank, after one step, with short timeouts of failure detection."""

    def __init__(self, kind: str, folder: Path) -> None:
        watch.INTERVAL_SECONDS, watch.LOOK_SECONDS, watch.BRIEF_SECONDS = 0.1, 0.2, 0.4
        watch.WAITING_SECONDS, watch.STUCK_SECONDS = 1.0, 4.0
        self.kind, self.folder = kind, folder
        plugin, sizes = KINDS.get(kind, (kind, {}))
        self.booster = booster_of(plugin, **sizes)
        self.model, self.optimizer = boosted(self.booster, LLAMA)
        self.train()

    def train(self) -> None:
        self.backward()
        self.step()

    def backward(self) -> None:
        if self.kind in ("ddp", "fsdp"):
            forward_and_backward(self.booster, self.model, self.optimizer, LLAMA, 0)
        else:
            self.booster.execute_pipeline(share(self.booster, LLAMA, 0), self.model, loss_of, self.optimizer)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> None:
        self.booster.save_model(self.model, self.folder / "model", shard=True)

    def save_checkpoint(self) -> None:
        self.booster.save_checkpoint(self.folder, 1, model=self.model, optimizer=self.optimizer)

    def load(self) -> None:
        self.booster.load_checkpoint(self.folder, model=self.model, optimizer=self.optimizer)


def on_one_rank(kind: str, folder: Path, call: str) -> None:
    """Make a call on the first rank alone, and then train on both."""
    run = Run(kind, folder)
    if dist.get_rank() == 0:
        getattr(run, call)()
    for _ in range(2):
        run.train()


@pytest.mark.parametrize(
    ("kind", "call", "names"),
    [
        ("tp", "step", ("optimizer.step", "execute_pipeline")),
        ("pp", "load", ("load_checkpoint", "execute_pipeline")),
        slow_row("dp", "save_checkpoint", ("save_checkpoint", "execute_pipeline")),
        ("dp", "backward", ("execute_pipeline", "optimizer.step")),
        ("ddp", "save", ("save_model", "model(**batch)")),
    ],
)
def test_a_call_of_one_rank_is_refused(
    pool: Pool, tmp_path: Path, kind: str, call: str, names: tuple[str, str]
) -> None:
    errors = pool.run_failing(2, on_one_rank, kind, tmp_path, call, timeout=60.0)
    reported = [str(error) for error in errors]
    # The timeout was not what ended it.
    assert not any("timed out in" in message for message in reported), reported
    assert any(
        isinstance(error, RankFailure) and all(name in str(error) for name in names) for error in errors
    ), reported


def save_alone_and_go_on(kind: str, folder: Path) -> int:
    """Handle the error of a save on the first rank, and then train and save on both."""
    run = Run(kind, folder)
    if dist.get_rank() == 0:
        with pytest.raises(RankFailure, match="is in save_model"):
            run.save()
    for _ in range(2):
        run.train()
    run.save()
    return len(list(folder.glob("model/*")))


def test_training_continues_after_a_script_handled_the_save_of_one_rank(pool: Pool, tmp_path: Path) -> None:
    assert min(pool.run(2, save_alone_and_go_on, "tp", tmp_path)) > 0


@pytest.mark.parametrize("kind", ["tp", slow_row("ddp")])
def test_a_rank_that_is_late_is_named_and_waited_for(pool: Pool, tmp_path: Path, kind: str) -> None:
    first, second = pool.run(2, come_late, kind, tmp_path)
    assert second == []
    assert len(first) == 2  # one line for each call
    assert all(
        "for ranks that have not joined; likely cause: rank 1 has not made this call" in line
        for line in first
    )
    assert "in save_model (call " in first[1]


def come_late(kind: str, folder: Path) -> list[str]:
    """Call a step and a save late on the second rank; return the lines logged meanwhile."""
    run, said = Run(kind, folder), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_say", said.append)
        for call in (run.train, run.save):
            if dist.get_rank() == 1:
                time.sleep(2.5)
            call()
    return said


@pytest.mark.parametrize("kind", [slow_row("dp"), "ddp"])
@on_ranks(2)
def test_a_rank_that_is_late_after_an_error_that_all_ranks_handled_is_waited_for(
    kind: str, tmp_path: Path
) -> None:
    run = Run(kind, tmp_path)
    with pytest.raises(ValueError, match="batch_size"):
        run.model(**{**make_batch(LLAMA, num_samples=2, seed=0), "labels": torch.zeros(3)})
    watch.STUCK_SECONDS = 1.0
    if dist.get_rank() == 1:
        time.sleep(4)
    run.train()


@pytest.mark.parametrize(("kind", "how"), [("ddp", "raises"), ("fsdp", "exits"), slow_row("ddp", "exits")])
def test_torch_plugins_name_a_rank_that_fails(pool: Pool, tmp_path: Path, kind: str, how: str) -> None:
    errors = pool.run_failing(2, fail_between_forward_and_backward, kind, tmp_path, how)
    reported = {"raises": "rank 1 left: ", "exits": "rank 1 died: its process is gone; "}
    assert isinstance(errors[0], RankFailure), errors
    assert str(errors[0]).startswith(reported[how])


def fail_between_forward_and_backward(kind: str, folder: Path, how: str) -> None:
    run = Run(kind, folder)
    if dist.get_rank() == 1:
        if how == "exits":
            os._exit(3)
        raise LookupError("no such file")
    run.train()


@pytest.mark.slow
@on_ranks(2, timeout=200.0)
def test_a_rank_that_sleeps_for_a_minute_is_not_ended(tmp_path: Path) -> None:
    run = Run("tp", tmp_path)
    watch.INTERVAL_SECONDS, watch.LOOK_SECONDS, watch.BRIEF_SECONDS = 0.5, 1.0, 2.0
    watch.WAITING_SECONDS, watch.STUCK_SECONDS = 30.0, 20.0
    for call in (run.train, run.save):
        if dist.get_rank() == 1:
            time.sleep(60)
        call()
