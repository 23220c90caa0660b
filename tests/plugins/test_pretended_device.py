"""Families and layouts train on a device that is not the CPU, with all tensors on the right one and no host waits."""

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.shardformer import table_for

from ..contract.matrix_rows import DERIVED, missing, types_with_tables

ROOT = Path(__file__).parents[2]
# Model types that fake tensors cannot train, with the error and the reason.
NOT_FAKED = {
    # Indexing by a list makes torch create a tensor outside of its Python kernels.
    "falcon": "Could not run 'aten::empty_strided' with arguments from the 'pretended' backend",
    # It counts the image tokens in the text.
    "gemma3": "Image features and image tokens do not match",
}


def outcomes(*names: str) -> dict[str, str]:
    """Return the outcome of each name, see `tests/pretended_device.py`, from a separate process."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.pretended_device", *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    lines = (line.partition(": ") for line in run.stdout.splitlines())
    outcome_of = {name: outcome for name, _, outcome in lines if name in names}
    assert outcome_of.keys() == set(names), run.stderr[-2000:]
    return outcome_of


@pytest.mark.slow  # starts a process, and runs models by torch's Python kernels
def test_models_train_on_a_device_that_is_not_the_cpu_and_mistakes_raise() -> None:
    families = ["bert", "llama", "mixtral", "t5", "vit", "whisper"]
    outcome_of = outcomes(*families, "a mistake", "a blocking copy", "a read")
    assert "Expected all tensors to be on the same device" in outcome_of.pop("a mistake")
    assert "copies to the device and blocks the host" in outcome_of.pop("a blocking copy")
    assert "reads a number from the device and blocks the host" in outcome_of.pop("a read")
    assert outcome_of == dict.fromkeys(families, "trains")


@pytest.mark.slow
def test_every_family_of_the_matrix_trains_there() -> None:
    derived = [
        model_type for model_type in DERIVED if table_for(model_type) is None and not missing(model_type)
    ]
    outcome_of = outcomes(*types_with_tables(), *derived, "chatglm")
    for name, error in NOT_FAKED.items():
        assert error in outcome_of.pop(name)
    assert {name: outcome for name, outcome in outcome_of.items() if outcome != "trains"} == {}


@pytest.mark.slow
def test_a_rank_of_every_layout_trains_there() -> None:
    from ..pretended_device import layouts

    outcome_of = outcomes(*layouts())
    assert {name: outcome for name, outcome in outcome_of.items() if outcome != "trains"} == {}
