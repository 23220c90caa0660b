"""Changed lines of moved scripts, as the table of docs/index.md lists them; the moved scripts train."""

import difflib
import re
from pathlib import Path

import pytest

from ..pool import Pool
from .scripts import DOCS, code_blocks, losses, printed

MOVED = Path(__file__).parent / "moved"
PAGES = {"Accelerate": "coming-from-accelerate", "ColossalAI": "coming-from-colossalai"}
FILES = {"torch": "torch", "Trainer": "trainer", "DeepSpeed": "deepspeed"}


def scripts_of(name: str) -> tuple[str, str]:
    """Return a script before and after it is moved."""
    if name in PAGES:
        page = DOCS / f"{PAGES[name]}.md"
        return code_blocks(page, "py")[0], code_blocks(page, "python")[0]
    before, after = ((MOVED / f"{FILES[name]}_{time}.py").read_text() for time in ("before", "after"))
    return before, after


def changed_lines(before: str, after: str) -> tuple[int, int]:
    """Return how many lines with text come and go."""
    lines = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[2:].strip()]
    return tuple(sum(line[0] == sign for line in lines) for sign in "+-")  # type: ignore[return-value]  # two signs


@pytest.mark.parametrize("name", [*FILES, *PAGES])
def test_the_index_lists_how_many_lines_a_moved_script_changes(name: str) -> None:
    row = re.search(rf"^\| [^|]*{name}[^|]* \| \+(\d+) −(\d+) \|", (DOCS / "index.md").read_text(), re.M)
    assert row is not None
    assert (int(row[1]), int(row[2])) == changed_lines(*scripts_of(name))


def run(script: str, folder: Path) -> list[float]:
    return losses(printed(script, folder))


def test_the_loop_of_torch_prints_the_same_losses_after_it_is_moved(pool: Pool, tmp_path: Path) -> None:
    before, after = scripts_of("torch")
    one = run(before, tmp_path / "one")
    (other, *_) = pool.run(2, run, after, tmp_path / "two")
    assert len(one) == 3 and other == pytest.approx(one, abs=2e-5)


def test_the_loop_of_deepspeed_trains_after_it_is_moved(pool: Pool, tmp_path: Path) -> None:
    (printed_losses, *_) = pool.run(2, run, scripts_of("DeepSpeed")[1], tmp_path / "two")
    assert len(printed_losses) == 3 and printed_losses[-1] < printed_losses[0]
