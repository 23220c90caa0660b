"""A Trainer that is killed in mid-epoch, and started again by torchrun, ends with the numbers of one process."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ..pool import Pool
from .runs import Run, differences, trained
from .test_trainer import COMMON, TOLERANCE

ROOT = Path(__file__).parents[2]
SAVING = COMMON | dict(save_strategy="steps", save_steps=1)
WORKERS = dict(dataloader_num_workers=2, dataloader_persistent_workers=True)
SCRIPT = """
import os, pickle, signal, sys
import torch.distributed as dist
from transformers import TrainerCallback
from echelon import launch_from_torch
from tests.trainer.runs import KINDS, Kind, Run, trained
from tests.trainer.test_restart import SAVING, WORKERS

folder, is_again = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
launch_from_torch(seed=None, timeout_seconds=60)

class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5 and dist.get_rank() == 1 and not is_again:
            os.kill(os.getpid(), signal.SIGKILL)

KINDS["killed"] = Kind(trainer_arguments={"callbacks": [Killed()]})
run = Run(folder, kind="killed", arguments=SAVING | WORKERS, resume=True if is_again else None)
numbers = trained(run, dict(pp_size=2, num_microbatches=2))
if numbers is not None:
    with open(folder + "/numbers", "wb") as file:
        pickle.dump(numbers, file)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_complete_checkpoint(pool: Pool, tmp_path: Path) -> None:
    one = pool.run(1, trained, Run(str(tmp_path / "one"), arguments=SAVING), None)[0]
    folder, script = tmp_path / "killed", tmp_path / "train.py"
    script.write_text(SCRIPT)
    (folder / "checkpoint-9").mkdir(parents=True)  # of a run that was killed while it wrote
    (folder / "checkpoint-9" / "config.json").write_text("{}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1", "--standalone"]
    command = [*torchrun, "--nproc_per_node", "2", str(script), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    other = pickle.loads((folder / "numbers").read_bytes())
    assert other["steps"] == [*one["steps"], "checkpoint-9"]
    for run in (one, other):
        del run["history"][-1]["train_loss"], run["steps"]  # of the steps of one call of train() alone
    assert differences(one, other, tolerance=TOLERANCE) == []
