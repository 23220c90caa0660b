"""The commit of this checkout, and the files that are generated from results. Imports nothing else."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "results"
MATRIX = ROOT / "cli" / "matrix.json"
PAGE = ROOT / "docs" / "models.md"
# Generated from results: a commit that changes only these files does not count as another commit.
MADE = (RESULTS, MATRIX, PAGE, ROOT / "cli" / "coverage.json", ROOT / "docs" / "coverage.md")


def current_commit() -> str:
    """Return the last commit that changed more than results, followed by "+" if files differ from it."""
    paths = [".", *(f":!{path.relative_to(ROOT)}" for path in MADE)]
    commit = _git("log", "-1", "--format=%h", "--", *paths)
    return commit + "+" * bool(_git("status", "--porcelain", "--", *paths))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
