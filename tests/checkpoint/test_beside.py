"""A save beside training holds what there was when it was asked for, whatever training does meanwhile."""

import threading
from pathlib import Path

import torch
import torch.distributed as dist

from ..pool import Pool
from .failures import at_every_write
from .runs import SHARD, Run, small_run


def save_two_beside_training(directory: Path) -> None:
    """Nothing is written before training went on; the second save has to wait for the first one's copies."""
    run = small_run()
    for group in run.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])  # which its scheduler changes in place
    may_write = threading.Event()
    saved, rates, saves = [], [], []
    with at_every_write(directory, lambda number, what: may_write.wait(30) and None):
        for step in (1, 2):
            run.step(step)
            saved.append(run.whole())
            rates.append(rates_of(run))
            saves.append(
                run.booster.save_checkpoint(
                    directory, step, **run.everything, size_per_shard=SHARD, use_async=True
                )
            )
            run.step(10 + step)
            if step == 1:
                assert not saves[0].done
                threading.Timer(0.2, may_write.set).start()
        for save in saves:
            save.wait()
    for step, whole in enumerate(saved, start=1):
        dist.barrier()
        run.booster.load_checkpoint(directory, **run.everything, resume=step)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in run.whole().items()), step
        assert rates_of(run) == rates[step - 1]
    assert rates[0] != rates[1]
    assert not torch.equal(saved[0]["model.norm.weight"], saved[1]["model.norm.weight"])


def rates_of(run: Run) -> list[float]:
    return [float(group["lr"]) for group in run.optimizer.param_groups]


def test_a_save_beside_training_holds_the_moment_it_was_asked_for(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_two_beside_training, tmp_path)
