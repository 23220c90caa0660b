"""Warnings of other packages are collected, and Echelon's own stay errors."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from . import foreign_warnings

CODE = "import warnings\ndef f(text):\n    warnings.warn(text, FutureWarning, stacklevel=2)\n"


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(warnings, "warn", getattr(warnings.warn, "native", warnings.warn))
    monkeypatch.setenv(foreign_warnings.FOLDER, str(tmp_path))
    foreign_warnings.install()


def module_named(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType(name)
    exec(CODE, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.usefixtures("collecting")
def test_a_warning_of_another_package_is_kept_once_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = module_named("torch.pretended", monkeypatch)
    for _ in range(2):
        other.f("goes away")
    other.f("another")
    assert sorted(foreign_warnings.kept()) == [
        "FutureWarning of torch.pretended: another",
        "FutureWarning of torch.pretended: goes away",
    ]
    with pytest.warns(FutureWarning, match="expected"):
        other.f("expected")
    assert len(foreign_warnings.kept()) == 2


@pytest.mark.usefixtures("collecting")
def test_a_warning_of_echelon_stays_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FutureWarning, match="own"):
        module_named("echelon.pretended", monkeypatch).f("own")
    assert foreign_warnings.kept() == []


def test_one_test_fails_with_every_message(tmp_path: Path) -> None:
    environment = {**os.environ, foreign_warnings.FOLDER: str(tmp_path)}
    environment.pop("RELEASES", None)  # it is no run of its own
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    command += ["tests/foreign_warnings.py"]
    for messages in ((), ("one", "another")):
        for message in messages:
            row = {"category": "UserWarning", "message": message, "module": "torch.nn"}
            (tmp_path / f"{message}.json").write_text(json.dumps(row))
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True
        )
        assert done.returncode == bool(messages), done.stdout + done.stderr
        assert all(f"UserWarning of torch.nn: {message}" in done.stdout for message in messages)


def test_without_the_variable_every_warning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(foreign_warnings.FOLDER, raising=False)
    monkeypatch.setattr(warnings, "warn", getattr(warnings.warn, "native", warnings.warn))
    foreign_warnings.install()
    with pytest.raises(FutureWarning):
        module_named("torch.pretended", monkeypatch).f("goes away")
