"""No tensor of a boosted model, or of a step, is made on the CPU where the model is on a device."""

import subprocess
import sys
from pathlib import Path

import pytest

MISTAKES = ["a mistake", "a blocking copy"]  # of tests/pretended_device.py
ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # a process of its own, and four models by torch's Python kernels
def test_models_train_on_a_device_that_is_not_the_cpu_and_mistakes_raise() -> None:
    families = ["bert", "llama", "t5", "vit"]
    command = [sys.executable, "-W", "ignore", "-m", "tests.pretended_device", *families, *MISTAKES]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    *trained, elsewhere, blocking = run.stdout.splitlines()[-2 - len(families) :]
    assert trained == [f"{family} trains on pretended:0" for family in families], run.stderr
    assert "Expected all tensors to be on the same device" in elsewhere, run.stdout
    assert "copies to the device and blocks the host" in blocking, run.stdout
