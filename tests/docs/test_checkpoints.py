"""The guide to checkpoints: its script goes on under another layout, and what it points to exists."""

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from ..pool import Pool

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "checkpoints.md").read_text()
SCRIPT = re.findall(r"^```py\n(.*?)^```", TEXT, flags=re.M | re.S)[0]


def printed(folder: Path, *words: str) -> str:
    """What the script prints, run with these words in a folder."""
    folder.mkdir(exist_ok=True)
    before = Path.cwd()
    with (
        contextlib.redirect_stdout(io.StringIO()) as told,
        mock.patch.object(sys, "argv", ["train.py", *words]),
    ):
        os.chdir(folder)
        try:
            exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})
        finally:
            os.chdir(before)
    return told.getvalue()


def losses(told: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", told)}


@pytest.mark.slow
def test_the_script_goes_on_under_another_layout(pool: Pool, tmp_path: Path) -> None:
    commands = re.findall(r"--nproc_per_node (\d) train.py (.*)", TEXT)
    assert len(commands) == 2
    found = [losses(pool.run(int(size), printed, tmp_path, *words.split())[0]) for size, words in commands]
    assert [list(each) for each in found] == [list(range(1, 7)), list(range(7, 13))]
    alone = losses(pool.run(1, printed, tmp_path / "alone", "1", "1", "12")[0])
    assert {**found[0], **found[1]} == pytest.approx(alone, abs=2e-6)  # six digits are printed
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000009",
        "step-00000012",
    ]


def test_what_the_guide_points_to_exists() -> None:
    headings = {
        re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)", TEXT, re.M)
    }
    assert [anchor for anchor in re.findall(r"\]\(#([^)]*)\)", TEXT) if anchor not in headings] == []
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT)
    assert [target for target in targets if not (DOCS / target).exists()] == []
