"""Print lines of code and files of each package, compared with an earlier commit.

python benchmarks/sizes.py --since dd525cd

A line of code contains more than comments and docstrings. Tests count with all their lines.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
ELSEWHERE = ("examples", "benchmarks", "docs")
_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def lines_of_code(source: str) -> int:
    """Count the lines of a source that contain more than comments, docstrings and blanks."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstring_lines(ast.parse(source))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def sources(commit: str | None) -> dict[str, str]:
    """Return the Python sources by path: of a commit, or the present ones that git tracks."""
    if commit is None:
        paths = subprocess.run(
            ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).exists()}
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        return {
            member.name: content.read().decode()
            for member in files
            if member.name.endswith(".py") and (content := files.extractfile(member)) is not None
        }


def counted(sources: Mapping[str, str]) -> dict[str, tuple[int, int, int]]:
    """Return files, lines of code and all lines, by top-level folder."""
    counts: dict[str, tuple[int, int, int]] = {}
    for path, source in sources.items():
        folder = path.split("/")[0] if "/" in path else "(root)"
        files, code, lines = counts.get(folder, (0, 0, 0))
        counts[folder] = files + 1, code + lines_of_code(source), lines + source.count("\n")
    return counts


def table(now: Mapping[str, tuple[int, int, int]], before: Mapping[str, tuple[int, int, int]]) -> list[str]:
    """Return Markdown lines: packages, their sum, then tests and the rest."""
    others = {"tests", "(root)", *ELSEWHERE}
    packages = sorted({*now, *before} - others)
    lines = ["| | files | lines of code | all lines |", "|---|---|---|---|"]

    def row(name: str, folders: list[str]) -> str:
        cells = []
        for place in range(3):
            new, old = (sum(counts[f][place] for f in folders if f in counts) for counts in (now, before))
            cells.append(f"{old:,} → {new:,}" if before else f"{new:,}")
        return f"| {name} | {' | '.join(cells)} |"

    lines += [row(name, [name]) for name in packages]
    lines.append(row("**product**", packages))
    return lines + [row(name, [name]) for name in ("tests", *ELSEWHERE)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--since", metavar="COMMIT", help="compare with this commit")
    arguments = parser.parse_args()
    before = {} if arguments.since is None else counted(sources(arguments.since))
    sys.stdout.write("\n".join(table(counted(sources(None)), before)) + "\n")


if __name__ == "__main__":
    main()
