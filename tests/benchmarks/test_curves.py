"""The loss curves: that layouts train as the plain loop does, and that another curve is told."""

import json
import sys
from pathlib import Path

import pytest

from ..test_project import imports
from .conftest import BENCHMARKS


@pytest.mark.slow
def test_a_layout_lies_on_the_plain_loop_and_all_of_it_is_reported(run_quickly, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    log, picture = tmp_path / "curves.json", tmp_path / "curves.svg"
    printed = run_quickly("curves.py", "--layouts", "dp2·zero2", "--json", str(log), "--plot", str(picture))

    found = json.loads(log.read_text())
    assert found["curves"].keys() == found["departures"].keys() == {"dp2·zero2"}
    losses, reference = found["curves"]["dp2·zero2"]["losses"], found["reference"]["losses"]
    assert len(losses) == len(reference) == 3
    assert losses == pytest.approx(reference, rel=1e-6)  # three steps: the rounding of float32 alone
    assert found["curves"]["dp2·zero2"]["norms"] == pytest.approx(found["reference"]["norms"], rel=1e-5)
    assert printed.splitlines()[-1] == f"largest_difference={found['departures']['dp2·zero2']['loss']:.2e}"
    assert "plain torch, one process" in picture.read_text()


@pytest.mark.parametrize(
    ("losses", "norms", "told"),
    [
        ((2.0, 1.00003), (1.0, 1.0), "the loss of odd departs from the reference's by 3.0e-05 of it"),
        ((2.0, float("nan")), (1.0, 1.0), "the loss of odd departs from the reference's by inf of it"),
        ((2.0, 1.0), (1.0, 0.998), "the norm of odd departs from the reference's by 2.0e-03 of it"),
    ],
)
def test_a_curve_that_departs_is_an_error(  # type: ignore[no-untyped-def]
    load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], losses, norms, told: str
) -> None:
    curves, curve_of = load("curves"), load("plain_training").Curve
    reference = curve_of(losses=(2.0, 1.0), norms=(1.0, 1.0))
    away = curves.departure(curve_of(losses=losses, norms=norms), reference)
    near = curves.departure(curve_of(losses=(2.0, 1.000005), norms=(1.0005, 1.0)), reference)
    monkeypatch.setattr(sys, "argv", ["curves.py"])
    monkeypatch.setattr(curves, "tell", lambda *_: None)
    for departures, status in (({"even": near}, 0), ({"even": near, "odd": away}, 1)):
        monkeypatch.setattr(curves, "measure", lambda *_, found=departures: {"departures": found})
        assert curves.main() == status
    assert told in capsys.readouterr().err


def test_the_plain_loop_imports_nothing_of_echelon() -> None:
    example = BENCHMARKS.parent / "examples" / "language" / "llama"
    sources = {
        name: BENCHMARKS / f"{name}.py" for name in ("plain_training", "curves", "curve_picture", "report")
    }
    for name, path in {**sources, "data": example / "data.py"}.items():
        targets = [target.split(".")[0] for _, _, target in imports(path.read_text(), name)]
        assert targets and "echelon" not in targets
