"""Comparing takes the memory of a tensor, however large the checkpoint is."""

import subprocess
import sys
from pathlib import Path

import pytest

from .handmade import Handmade, small_config

MIB = 2**20
ALLOWED = 64 * MIB  # a chunk of 1 Mi entries, some of it in float64

# Anonymous memory: pages of mapped files are the kernel's to drop.
MEASURE = """
import re, sys, threading, time
from pathlib import Path

import torch
from echelon.checkpoint.inspect import examine
from echelon.checkpoint.difference import Comparison
from echelon.checkpoint.inspect import open_folder

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

opened = open_folder(Path(sys.argv[1]))
examine(opened.path, progress=lambda _: None)  # imports, allocators
before, peak, done = anonymous(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
assert list(Comparison(a=opened, b=opened).differences(lambda _: None)) == []
done = True
watcher.join()
print(peak - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 26 tensors of 1 Mi entries: 52 MiB of weights and 104 MiB of each state; the embedding and head are small."""
    config = small_config(
        hidden_size=1024, intermediate_size=1024, num_hidden_layers=4, num_key_value_heads=2
    )
    made = Handmade.of(config)
    made.model = {name: each / 100 for name, each in made.model.items()}
    return made.write(tmp_path_factory.mktemp("large"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")
def test_memory_is_bounded_by_a_tensor(large: Path) -> None:
    total = sum(path.stat().st_size for path in large.rglob("*") if path.is_file())
    assert total > 250 * MIB
    command = [sys.executable, "-c", MEASURE, str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= ALLOWED, f"{int(done.stdout) / MIB:.1f} MiB"
