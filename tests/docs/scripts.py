"""Helpers to find scripts in the pages of docs/, and to run them on the worker pool or as commands."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TIMEOUT_SECONDS = 300.0
ENDING = "\nfrom echelon import DistCoordinator\n\nDistCoordinator().destroy()\n"


def code_blocks(path: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), flags=re.M | re.S)


def losses(printed: str) -> list[float]:
    """Return the losses in a script's output. Lines of processes that print at the same time may be joined."""
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+|nan|inf)", printed)]


def printed(script: str, folder: Path, *words: str) -> str:
    """Run a script with these arguments in a folder, on a rank of the pool; return its output."""
    folder.mkdir(exist_ok=True)
    argv = mock.patch.object(sys, "argv", ["train.py", *words])
    with contextlib.redirect_stdout(io.StringIO()) as out, argv, contextlib.chdir(folder):
        exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def users_environment() -> dict[str, str]:
    """The environment without the tests' own log level of torch, which hides its warnings."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    return {**kept, "OMP_NUM_THREADS": "1"}


def without_name_service(err: str) -> str:
    """Leave out the lines by which torch's store reports that this machine has no name for its own address."""
    return re.sub(r"^.*The hostname of the client socket cannot be retrieved.*\n", "", err, flags=re.M)


def run_script(script: str, folder: Path, *, num_processes: int | None, warning: str = "") -> str:
    """Run a script in a folder by python, or by torchrun if a number of processes is given; return its output.

    Standard error must be empty, or have the one warning that is expected.
    """
    (folder / "train.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    process = subprocess.Popen(
        [sys.executable, *(torchrun if num_processes else []), "train.py"],
        cwd=folder,
        env=users_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun forwards it to its workers
        out, err = process.communicate()
        pytest.fail(f"the script did not end in {TIMEOUT_SECONDS} s; it printed\n{out}\n{err}")
    assert process.returncode == 0, err
    err = without_name_service(err)
    assert warning in err
    assert len(err.splitlines()) == (2 if warning else 0), err  # a warning, and the line that caused it
    return out
