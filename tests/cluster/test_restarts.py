"""torchrun ends a run whose rank was killed and starts it again: it connects, and goes on from its checkpoint."""

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from .processes import run_together

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "2"]
# Rank 1 is late in the second attempt, so that rank 0 finds its addresses of the first one, if any.
SHORT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from echelon.cluster.failures import naming_failures, start_watch
from echelon.cluster.launch import launch_from_torch

is_again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if is_again and os.environ["RANK"] == "1":
    time.sleep(1)
STARTED
with naming_failures("all_reduce"):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1 and not is_again:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)
time.sleep(1.2)  # two heartbeats: events of the first attempt would be read
with naming_failures("all_reduce"):
    dist.all_reduce(total)
print(f"total {total.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
OURS = "launch_from_torch(timeout_seconds=20)"
PLAIN = """from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
launch_from_torch()
"""
TRAINING = """
import os, signal, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from echelon import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

folder, killed_in, use_async = sys.argv[1], sys.argv[2].split(","), sys.argv[3] == "async"
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
launch_from_torch(seed=0, timeout_seconds=60)
world = DistCoordinator()
plugin = HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1, precision="fp32", num_microbatches=2)
booster = Booster(plugin=plugin)
sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
texts = (torch.arange(64).unsqueeze(1) + torch.arange(16)) % 50
data = plugin.prepare_dataloader([dict(input_ids=t, labels=t) for t in texts], 4, shuffle=True)
model, optimizer, _, data, _ = booster.boost(model, optimizer, dataloader=data)
parts = dict(model=model, optimizer=optimizer, dataloader=data)
resumed = booster.load_checkpoint(folder, **parts, resume="auto")
step = 0 if resumed is None else resumed.step
world.print_on_master(f"begins at step {step}")
while step < 16:
    for batch in data:
        if str(step) in killed_in[attempt : attempt + 1] and world.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
        optimizer.step()
        optimizer.zero_grad()
        world.print_on_master(f"step {step}: loss {loss.item()!r}")
        step += 1
        if step % 5 == 0:
            save = booster.save_checkpoint(folder, step, **parts, use_async=use_async)
        if step == 16:
            break
save.wait()
world.destroy()
"""


def outputs(folder: Path, script: str, *agents: list[str], words: tuple[str, ...] = ()) -> tuple[str, str]:
    """Run a script under agents that start together; return what all of them printed."""
    (folder / "train.py").write_text(script)
    environments = [{**os.environ, "OMP_NUM_THREADS": "1"}] * len(agents)
    commands = [[*TORCHRUN, *agent, "train.py", *words] for agent in agents]
    ended = run_together(commands, environments, cwd=folder, seconds=240)
    out, err = "".join(process.out for process in ended), "".join(process.err for process in ended)
    assert [process.status for process in ended] == [0] * len(agents), err
    return out, err


def alone(count: int) -> list[str]:
    return ["--standalone", "--nproc_per_node", str(count)]


@pytest.mark.slow  # test_attempt.py tries the stores in one process
def test_a_run_is_restarted_on_the_store_of_its_agent(tmp_path: Path) -> None:
    out, err = outputs(tmp_path, SHORT.replace("STARTED", OURS), alone(2))
    assert out == "total 4.0\n" * 2
    assert "started its process group" not in err
    assert len(re.findall("RankFailure: rank 1 died: its process is gone", err)) == 1


@pytest.mark.slow
def test_a_group_that_the_script_starts_is_restarted_without_the_shared_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = SHORT.replace("STARTED", PLAIN)
    try:
        _, printed = outputs(tmp_path, script, alone(2))
    except AssertionError as error:  # torchrun fails: as a rule no restart connects
        printed = str(error)
    lines = printed.count("started its process group on a store that torchrun keeps")
    assert lines in (1, 2)  # one line for each restart, of which a slow machine may not begin the second
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    out, err = outputs(tmp_path, script, alone(2))
    assert out == "total 4.0\n" * 2
    assert "started its process group" not in err


def two_agents(kind: str) -> list[list[str]]:
    """Arguments of two agents of two processes, which meet at an address of this machine."""
    common = ["--nnodes", "2", "--nproc_per_node", "2"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    if kind == "static":
        common += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    else:
        common += ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        common += ["--local-addr", "127.0.0.1"]
    return [[*common, "--node-rank", str(rank)] for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "c10d", "static"])
def test_a_restarted_run_resumes_with_the_losses_of_an_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    expected, _ = outputs(tmp_path, TRAINING, alone(4), words=("whole", "none", "sync"))
    agents = [alone(4)] if kind == "one" else two_agents(kind)
    out, _ = outputs(tmp_path, TRAINING, *agents, words=("restarted", "10", "sync"))
    begun, *steps = expected.splitlines()
    assert out.splitlines() == [begun, *steps[:10], "begins at step 10", *steps[10:]]
    assert len(steps) == 16


@pytest.mark.slow
def test_a_rank_that_is_killed_twice_beside_its_asynchronous_save_costs_no_loss(tmp_path: Path) -> None:
    expected, _ = outputs(tmp_path, TRAINING, alone(4), words=("whole", "none", "sync"))
    out, err = outputs(tmp_path, TRAINING, alone(4), words=("restarted", "5,10", "async"))
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", out)]
    # The save of the step at which a rank is killed may just have become complete.
    assert len(begun) == 3 and begun[0] == 0 and begun[1] in (0, 5) and begun[2] in (begun[1], 5, 10), begun
    assert len(set(re.findall("rank 3 died: its process is gone", err))) == 1
    losses = dict(line.split(": ") for line in out.splitlines() if line.startswith("step"))
    assert losses == dict(line.split(": ") for line in expected.splitlines() if line.startswith("step"))
