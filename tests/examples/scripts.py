"""Running the examples as a user does, and loading one of their modules."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

TIMEOUT_SECONDS = 280


def load(path: Path) -> ModuleType:
    """A module of an example that imports nothing of it, under a name of its own: examples share names."""
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look up the module of their class
    spec.loader.exec_module(module)
    return module


def start(script: Path, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """The script, ended, under python or torchrun."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run(
        [*launcher, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def run(script: Path, *arguments: str, processes: int = 1, status: int = 0) -> str:
    """What the script prints; its progress bar is beside that, on the error stream."""
    done = start(script, *arguments, processes=processes)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def refusal(script: Path, *arguments: str) -> str:
    """What the script says on the error stream when it ends with status 2."""
    done = start(script, *arguments)
    assert done.returncode == 2, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    return done.stderr
