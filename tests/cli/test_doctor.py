"""`echelon doctor` reports packages, devices, limits and environment, and exits with 1 if something does not work."""

from pathlib import Path
from typing import Any

import pytest
import torch

import echelon.cli.doctor as command
from echelon.cli.doctor import BAD, GOOD, HINT, Finding

from .calls import call


@pytest.mark.slow
def test_a_machine_that_can_train_has_nothing_wrong() -> None:
    status, output = call("doctor", terminal_width=160)
    assert status == 0, output
    assert "communicate over gloo" in output and output.endswith("nothing is wrong\n")


def test_the_report_names_releases_devices_and_limits() -> None:
    status, output = call("doctor --processes 0", terminal_width=160)
    assert status == 0, output
    for words in (torch.__version__, "backend gloo", "fp32 unless", "open files", "cores", "echelon.Trainer"):
        assert words in output


def states(findings: Any, subject: str) -> list[str]:
    return [finding.state for finding in findings if finding.subject == subject]


def test_a_missing_package_is_wrong_or_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "installed_release", lambda name: None)
    findings = command.package_findings()
    assert states(findings, "torch") == [BAD]
    advice = 'not installed, for LoRA: booster.enable_lora: pip install "echelon[lora]"'
    assert Finding("peft", HINT, advice) in findings and len(states(findings, "peft")) == 1
    status, output = call("doctor", terminal_width=160)  # without torch nothing else can be tried
    assert status == 1 and 'pip install "echelon[lora]"' in output and output.endswith("4 wrong\n")


def test_a_driver_without_a_gpu_in_torch_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.cluster.device.local_devices", list)
    monkeypatch.setattr(command.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert states(command.device_findings(), "device") == [GOOD, BAD]


def test_limits_that_training_meets_are_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**26}))
    findings = command.limit_findings()
    assert states(findings, "open files") == [HINT]
    assert states(findings, "shared memory") == [HINT] * Path("/dev/shm").is_dir()


def test_variables_of_the_environment_are_shown_with_advice() -> None:
    environment = {"NCCL_DEBUG": "INFO", "RANK": "3", "HOME": "/root", "CUDA_LAUNCH_BLOCKING": "1"}
    findings = command.environment_findings(environment)
    assert Finding("NCCL_DEBUG", GOOD, "INFO") in findings and states(findings, "HOME") == []
    assert states(findings, "CUDA_LAUNCH_BLOCKING") == [GOOD, HINT]
    assert states(findings, "OMP_NUM_THREADS") == [HINT]
    assert command.environment_findings({"OMP_NUM_THREADS": "1"}) == [Finding("OMP_NUM_THREADS", GOOD, "1")]


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        ([1.0, 1.0], GOOD, "communicate over gloo"),
        ([1.0, 0.0], BAD, "add up to [1.0, 0.0], and should to 1.0"),
        ("rank 1 failed:\n\nConnection refused", BAD, "Connection refused; see the firewall"),
    ],
)
def test_a_collective_is_tried(monkeypatch: pytest.MonkeyPatch, answer: Any, state: str, words: str) -> None:
    monkeypatch.setattr("echelon.cli.local_processes.run_on_processes", lambda *_, **__: answer)
    (finding,) = command.collective_findings(2)
    assert finding.state == state and words in finding.text


def test_something_wrong_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "limit_findings", lambda: [Finding("open files", BAD, "none")])
    status, output = call("doctor --processes 0", terminal_width=160)
    assert status == 1 and "1 wrong" in output
