"""If processes are killed at any call that writes, the last complete checkpoint can be loaded, bitwise equal."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from .failures import KILLED, at_every_write, in_warm_process, kill_rank_at, run_ranks
from .runs import SHARD, Run, small_run

Kind = Literal["new", "replacing", "asynchronous", "model", "optimizer", "file"]
Saves = tuple[Mapping[str, Tensor], ...]
PLACES = {"model": "m", "optimizer": "o", "file": "m.safetensors"}
COMMITTED = {
    **dict.fromkeys(("new", "asynchronous"), "step-00000003"),
    **dict.fromkeys(("model", "optimizer"), ".complete"),
    "replacing": "step-00000002",
    "file": "m.safetensors",
}


class Death(NamedTuple):
    """The place where processes are killed: a rank, and the number of its call."""

    rank: int
    number: int


def explore(folder: Path, kind: Kind, chosen: Literal["all", "quick"]) -> None:
    """Kill a save at each of its calls that write, and check the remaining files.

    Must run in a process that may be forked. `folder/found.json` then lists the calls.

    Raises:
        AssertionError: loading found something else than the last complete save.
    """
    assert run_ranks(2, prepare, folder, kind) == [0, 0]
    calls = [json.loads((folder / f"calls-{rank}.json").read_text()) for rank in range(2)]
    committed = 1 + max(index for index, call in enumerate(calls[0]) if is_commit(call, kind))
    for calls_of_rank in (calls[0][:committed], calls[1]):
        require_on_disk(calls_of_rank)
    deaths = [Death(rank, 1 + index) for rank in range(2) for index in range(len(calls[rank]))]
    if chosen == "quick":
        near = [Death(0, committed + by) for by in (-1, 0, 1)]
        deaths = [Death(1, len(calls[1]) // 2), *(death for death in near if death in deaths)]
    for death in deaths:
        shutil.copytree(folder / "base", place_of(folder, death))
        ends = run_ranks(2, doomed, place_of(folder, death), kind, death)
        # The other rank may have ended before, while this one cleans up.
        assert ends[death.rank] == KILLED and set(ends) <= {KILLED, 0}, f"{kind}, {death}: {ends}"
    survived = {death: death.rank == 0 and death.number > committed for death in deaths}
    assert run_ranks(1, look, folder, kind, survived, seconds=280) == [0]
    (folder / "found.json").write_text(json.dumps([calls[death.rank][death.number - 1] for death in deaths]))


def prepare(folder: Path, kind: Kind) -> None:
    """Make the older save, keep the unsharded tensors of both, and list the calls of an uninterrupted save."""
    run = small_run()
    run.step(0)
    base = folder / "base"
    for step in (1, 2):
        run.booster.save_checkpoint(base, step, **run.everything, size_per_shard=SHARD)
    for saved_kind in ("model", "optimizer", "file"):
        save(run, base, saved_kind)
    keep(run, folder / "old.pt")
    run.step(1)
    keep(run, folder / "new.pt")
    completed = folder / "whole"
    if dist.get_rank() == 0:
        shutil.copytree(base, completed)
    dist.barrier()
    with at_every_write(completed, lambda number, what: None) as calls:
        save(run, completed, kind)
    (folder / f"calls-{dist.get_rank()}.json").write_text(json.dumps(calls))


def doomed(place: Path, kind: Kind, death: Death) -> None:
    """Make the same save, and be killed in it."""
    run = small_run()
    run.step(0)
    run.step(1)

    with at_every_write(place, kill_rank_at(*death, with_others=True)):
        save(run, place, kind)


def look(folder: Path, kind: Kind, survived: Mapping[Death, bool]) -> None:
    """Load the files after each death, in one process; then save again, which must remove unfinished files."""
    disable_progress_bar()
    run = small_run(seed=7)
    old, new = torch.load(folder / "old.pt"), torch.load(folder / "new.pt")
    assert not torch.equal(old["model.norm.weight"], new["model.norm.weight"])
    for death, is_new in survived.items():
        place = place_of(folder, death)
        expected = new if is_new else old
        where = f"{kind}, {death}, {'new' if is_new else 'old'}"
        tensors = loaded(run, place, kind, (old, new), step_of(kind) if is_new else 2, where)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items()), where
        save(run, place, kind)
        inside = place / PLACES[kind] if kind in ("model", "optimizer") else place
        assert [name for name in os.listdir(inside) if name.startswith(".")] == [], where
        again = loaded(run, place, kind, (expected,), step_of(kind), where)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items()), where


def save(run: Run, place: Path, kind: Kind) -> None:
    """Make a save of a kind and wait for its end."""
    path = place / PLACES.get(kind, "")
    if kind == "model":
        run.booster.save_model(run.model, path, shard=True, size_per_shard=SHARD)
    elif kind == "file":
        run.booster.save_model(run.model, path)
    elif kind == "optimizer":
        run.booster.save_optimizer(run.optimizer, path)
    else:
        options = {"keep_last": 1 if kind == "replacing" else 2, "use_async": kind == "asynchronous"}
        parts = run.everything | {"size_per_shard": SHARD}
        run.booster.save_checkpoint(place, step_of(kind), **parts, **options).wait()


def step_of(kind: Kind) -> int:
    """Return the number of the step that is saved."""
    return 2 if kind == "replacing" else 3


def loaded(run: Run, place: Path, kind: Kind, saves: Saves, step: int, where: str) -> dict[str, Tensor]:
    """Load, and return the tensors that this kind of save contains; `step` is the expected one."""
    path = place / PLACES.get(kind, "")
    if kind == "model":
        _require_no_mixture(path, saves, where)
    if kind in ("model", "file"):
        run.booster.load_model(run.model, path)
        return {name: tensor for name, tensor in run.unsharded().items() if "/" not in name}
    if kind == "optimizer":
        run.booster.load_optimizer(run.optimizer, path)
        return {name: tensor for name, tensor in run.unsharded().items() if name.startswith("exp")}
    resumed = run.booster.load_checkpoint(place, **run.everything)
    assert resumed is not None and resumed.step == step, f"{where}: {resumed}"
    return run.unsharded()


def _require_no_mixture(path: Path, saves: Saves, where: str) -> None:
    """Require that transformers loads one of the two saves, or refuses."""
    try:
        model = LlamaForCausalLM.from_pretrained(path)
    except OSError:
        return
    weights = dict(model.named_parameters())
    assert any(
        all(torch.equal(weight, saved[name]) for name, weight in weights.items()) for saved in saves
    ), where


def keep(run: Run, path: Path) -> None:
    """Save all unsharded tensors in a file."""
    tensors = run.unsharded()
    if dist.get_rank() == 0:
        torch.save(tensors, path)


def place_of(folder: Path, death: Death) -> Path:
    """Return the folder of the save that ends in this death."""
    return folder / f"rank-{death.rank}-call-{death.number}"


def is_commit(call: str, kind: Kind) -> bool:
    """Return True if the save counts as complete from this call on."""
    words = call.split()
    return words[0] in ("rename", "replace") and Path(words[-1]).name == COMMITTED[kind]


def require_on_disk(calls: list[str]) -> None:
    """Require that every written file was flushed to disk after its last write, to survive a power failure.

    Files in the temporary folder of configs are exempt: their content is written again.
    """
    last = {}
    for call in calls:
        what, path = call.split()[:2]
        if not Path(path).parent.name.startswith("tmp") and what in ("open", "write", "fsync"):
            last[path] = what
    late = [path for path, what in last.items() if what != "fsync"]
    assert late == [], f"written and not on the disk when the save holds: {late}"


def test_a_save_that_is_killed_leaves_what_was_complete(tmp_path: Path) -> None:
    in_warm_process(explore, tmp_path, "replacing", "quick", seconds=60)
    assert len(json.loads((tmp_path / "found.json").read_text())) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_save_that_is_killed_anywhere_leaves_what_was_complete(tmp_path: Path, kind: Kind) -> None:
    in_warm_process(explore, tmp_path, kind, "all", seconds=270)
    calls = json.loads((tmp_path / "found.json").read_text())
    print(f"{kind}: killed at {len(calls)} calls")
    assert len(calls) >= (50 if kind in ("new", "replacing", "asynchronous") else 10)
    kinds = {call.split()[0] for call in calls}
    assert {"open", "write", "fsync", "mkdir"} <= kinds and kinds & {"rename", "replace"}
