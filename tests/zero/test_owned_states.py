"""Full masters and states: in 16 bits, on the CPU, after writes to parameters, and saved for any other layout."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.checkpoint.checkpoints import Checkpoints

from ..pool import Pool, on_ranks
from .helpers import assert_same_bits
from .owners import OPTIMIZERS, Run, reference


def resume(
    folder: Path, name: str, saved: tuple[dict[str, int], int], loaded: tuple[dict[str, int], int]
) -> None:
    """Save after two steps, load under another layout, and compare a third step and all states with one process."""
    run = Run(*saved, OPTIMIZERS[name])
    data = run.mesh.size("data")
    for step in (1, 2):
        run.step(step)
    Checkpoints(run.mesh).save_step(folder, 2, **run.parts()).wait()
    other = Run(*loaded, OPTIMIZERS[name])
    other.step(7)  # weights, masters and states are overwritten
    assert Checkpoints(other.mesh).load_step(folder, **other.parts(), resume="must") is not None
    other.require(reference(OPTIMIZERS[name], data, (1, 2)))
    if other.mesh.size("data") == data:
        other.step(3)
        other.require(reference(OPTIMIZERS[name], data, (1, 2, 3)))


@pytest.mark.parametrize("name", ["adafactor", "muon of stacks"])
def test_states_of_any_shape_resume_under_another_layout(pool: Pool, tmp_path: Path, name: str) -> None:
    pool.run(4, resume, tmp_path, name, ({"tp": 2}, 1), ({"tp": 2, "ep": 2}, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loaded", [({"tp": 2, "zero": 1}, 2), ({"dp": 2, "tp": 2}, 0)], ids=str)
@pytest.mark.parametrize("saved", [({"ep": 2, "tp": 2}, 2), ({"dp": 2, "tp": 2}, 0)], ids=str)
def test_states_resume_between_many_layouts(
    pool: Pool, tmp_path: Path, name: str, saved: Any, loaded: Any
) -> None:
    pool.run(4, resume, tmp_path, name, saved, loaded)


@on_ranks(2)
def test_masters_are_unrounded_in_16_bits() -> None:
    """Masters stay unrounded, with and without offload; ranks of other layouts have equal ones."""
    kept: dict[str, Tensor] = {}
    for sizes, stage, options in (
        ({"zero": 1}, 1, {}),
        ({}, 1, {}),
        ({}, 2, {"cpu_offload": True}),
        ({"tp": 2}, 0, {"cpu_offload": True}),
    ):
        run = Run(sizes, stage, OPTIMIZERS["adafactor"], precision="bf16", **options)
        tp = run.mesh.size("tp")
        for step in (1, 2):
            run.step(step)
        masters = run.optimizer.masters()
        for name, master in masters.items():
            assert torch.equal(master.to(torch.bfloat16), run.named[name]), name
            assert not torch.equal(master, run.named[name].float()), name
            if tp == 1:
                assert torch.equal(kept.setdefault(name, master), master), (name, sizes, stage)


@on_ranks(2)
def test_masters_follow_parameters_that_were_written_to() -> None:
    """Written parameters replace their masters, the others keep their low bits; one rank may write alone."""
    run = Run({}, 1, OPTIMIZERS["lamb"], precision="bf16")
    run.step(1)
    before = run.optimizer.masters()
    with torch.no_grad():
        run.named["m_out"].fill_(2.0)
    run.optimizer.refresh_masters()
    masters = run.optimizer.masters()
    assert bool((masters["m_out"] == 2).all())
    assert torch.equal(masters["m_qkv"], before["m_qkv"])
    with torch.no_grad():
        if dist.get_rank() == 0:
            run.named["m_plain"].copy_(run.named["m_plain"])  # counted as a write on this rank alone
    run.step(2)
    assert torch.equal(run.optimizer.masters()["m_plain"].to(torch.bfloat16), run.named["m_plain"])


@on_ranks(2)
def test_local_state_restores_full_masters() -> None:
    """The local state of this layout restores masters and states."""
    run, other = (Run({}, 1, OPTIMIZERS["adafactor"], precision="bf16") for _ in range(2))
    run.step(1)
    other.optimizer.load_state_dict(deepcopy(run.optimizer.local_state()))
    for trained in (run, other):
        trained.step(2)
    assert_same_bits(run.optimizer.masters(), other.optimizer.masters())
    third = Run({"zero": 1}, 1, OPTIMIZERS["adafactor"], precision="bf16")
    with pytest.raises(ValueError, match="saved under another layout"):
        third.optimizer.load_state_dict(run.optimizer.local_state())


@on_ranks(2)
def test_members_of_a_boosted_optimizer_are_not_stepped_alone() -> None:
    run = Run({}, 1, OPTIMIZERS["muon of stacks"])
    for member in run.optimizer.inner.optimizers:  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="step the one that boost returned"):
            member.step()
    with pytest.raises(RuntimeError, match=r"booster\.save_optimizer"):
        run.optimizer.state_dict()
