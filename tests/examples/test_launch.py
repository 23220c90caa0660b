"""Launch files: their form, and their command with the variables that a cluster sets, on local processes."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from ..docs.scripts import users_environment
from .scripts import EXAMPLES, FP32, numbers_of, records_of

SLURM, KUBERNETES = EXAMPLES / "launch" / "slurm.sh", EXAMPLES / "launch" / "kubernetes.yaml"
SCRIPT = EXAMPLES / "language" / "llama" / "pretrain.py"
TINY = f"--steps 3 --sequence_length 32 --batch_size 8 --data {SCRIPT} {FP32}".split()
# Of the custom resource trainer.kubeflow.org/v1alpha1, those that the file may use.
TRAINER_FIELDS = {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}


def free_port(*wanted: int) -> int:
    """Return the first of these ports that is free, of all without any."""
    for port in wanted or (0,):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return server.getsockname()[1]
    raise OSError(f"no port of {wanted} is free")


def run_agents(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> None:
    """Run commands at the same time, each with further variables, and require that all succeed."""
    processes = [
        subprocess.Popen(
            command,
            env={**users_environment(), **variables},
            cwd=EXAMPLES.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, variables in zip(commands, environments, strict=True)
    ]
    try:
        printed = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The numbers of one process."""
    log = tmp_path_factory.mktemp("alone") / "log.jsonl"
    run_agents([[sys.executable, str(SCRIPT), *TINY, "--metrics", str(log)]], [{}])
    return numbers_of(log)


def test_the_script_of_slurm_is_one_of_bash_and_names_a_task_per_node() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    text = SLURM.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, flags=re.M))
    assert options.keys() >= {"nodes", "ntasks-per-node", "gpus-per-node", "time", "signal"}
    assert options["ntasks-per-node"] == "1" and text.startswith("#!/bin/bash\n")
    # SLURM reads options up to the first command.
    assert text.index("set -euo") > text.rindex("#SBATCH")
    assert "Not run on a cluster" in text


def test_the_train_job_has_the_fields_of_kubeflow_s_resource() -> None:
    (job,) = yaml.safe_load_all(KUBERNETES.read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert job["spec"].keys() == {"runtimeRef", "trainer"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert trainer.keys() <= TRAINER_FIELDS
    assert type(trainer["numNodes"]) is int and type(trainer["numProcPerNode"]) is int
    limits = trainer["resourcesPerNode"]["limits"]
    assert limits["nvidia.com/gpu"] == trainer["numProcPerNode"]
    for variable in trainer["env"]:
        assert variable.keys() == {"name", "value"} and isinstance(variable["value"], str)
        assert not variable["name"].startswith("PET_")  # reserved
    assert trainer["command"][0] == "torchrun" and (EXAMPLES.parent / trainer["command"][1]).exists()
    assert all(isinstance(word, str) for word in (*trainer["command"], *trainer["args"]))
    assert "Not run on a cluster" in KUBERNETES.read_text()


@pytest.mark.slow
def test_the_command_of_slurm_trains_on_two_nodes(tmp_path: Path, alone: list[float]) -> None:
    """`srun` is pretended: it starts its command once for each node, all of them on this machine.

    The list of nodes is longer than a pipe's buffer: `| head -n 1` would end the script by SIGPIPE.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text("#!/bin/bash\nfor node in {1..2000}; do echo localhost; done\n")
    (folder / "srun").write_text(
        "#!/bin/bash\nshift\npids=()\n"
        'for node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done\n'
        'for pid in "${pids[@]}"; do wait "$pid" || exit 1; done\n'
    )
    for name in ("scontrol", "srun"):
        (folder / name).chmod(0o755)
    (folder / "torchrun").symlink_to(Path(sys.executable).parent / "torchrun")
    log = tmp_path / "log.jsonl"
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(free_port(*range(20100, 20900))),  # the script takes the port of this number
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_PER_TASK": "2",
    }
    words = [str(SCRIPT), *TINY, "--tp_size", "2", "--zero_stage", "1", "--metrics", str(log)]
    run_agents([["bash", str(SLURM), *words]], [variables])
    assert numbers_of(log) == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_the_command_of_kubernetes_trains_on_two_nodes(tmp_path: Path, alone: list[float]) -> None:
    trainer = yaml.safe_load(KUBERNETES.read_text())["spec"]["trainer"]
    log, folder = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    words = [word.replace("=8", "=2").replace("/shared/llama", str(folder)) for word in trainer["args"]]
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    command = [torchrun, *trainer["command"][1:], *words, *TINY, "--metrics", str(log)]
    port = str(free_port())
    nodes = [
        {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "2",
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": "localhost",
            "PET_MASTER_PORT": port,
        }
        for node in range(2)
    ]
    run_agents([command] * 2, nodes)
    assert numbers_of(log) == pytest.approx(alone, rel=1e-4)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]


@pytest.mark.slow
def test_a_run_under_torchrun_that_gets_sigterm_is_saved_and_goes_on(tmp_path: Path) -> None:
    log, folder = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    words = [*TINY, "--steps", "60", "--log_every", "1", "--metrics", str(log), "--checkpoints", str(folder)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    first = subprocess.Popen(
        [*command, str(SCRIPT), *words, "--tp_size", "2"],
        env=users_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("step 5/"):
                first.send_signal(signal.SIGTERM)
    (saved,) = folder.iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert 5 <= step < 60
    run_agents([[*command, str(SCRIPT), *words, "--pp_size", "2", "--num_microbatches", "2"]], [{}])
    steps = [record["step"] for record in records_of(log) if "loss" in record]
    assert steps == list(range(1, 61))


@pytest.mark.slow
def test_two_agents_on_one_machine_meet_by_c10d(tmp_path: Path, alone: list[float]) -> None:
    log, endpoint = tmp_path / "log.jsonl", f"localhost:{free_port()}"
    words = [str(SCRIPT), *TINY, "--pp_size", "2", "--num_microbatches", "2", "--metrics", str(log)]
    commands = [
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(node)),
            *("--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, *words),
        ]
        for node in range(2)
    ]
    run_agents(commands, [{}, {}])
    assert numbers_of(log) == pytest.approx(alone, rel=1e-4)
