"""Draws docs/images/imports.svg: the imports between packages, read from the sources. Every arrow points downward.

python docs/draw_imports.py docs/images/imports.svg
"""

import ast
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Text in the picture: dependencies that a package excludes beyond the order of imports, or its role.
IGNORANCE = {
    "migration": "names alone",
    "cluster": "no model",
    "data": "no model",
    "lazy": "no layout",
    "pipeline": "no optimizer, no ZeRO",
    "zero": "no model, no microbatch",
    "derive": "no sharding",
    "shardformer": "no optimizer",
    "checkpoint": "no schedule",
    "plugins": "the composition of all below",
    "booster": "the user's face",
    "trainer": "transformers' Trainer on top",
    "verify": "a reference that imports nothing of Echelon",
    "planning": "no weights, no process",
    "cli": "its help imports no torch",
}
WIDTH, HEIGHT, GAP_X, GAP_Y = 210, 44, 40, 34


def packages() -> list[str]:
    """Return the packages at the top level."""
    return sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def imported(package: str) -> set[str]:
    """Return the other packages that the files of a package import relatively."""
    imports = set()
    for path in (ROOT / package).rglob("*.py"):
        depth = len(path.relative_to(ROOT).parts) - 1
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level > depth:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                imports |= {name.split(".")[0] for name in names}
    return imports & {*packages()} - {package}


def heights(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the number of imports on the longest path from each package down."""
    height_of: dict[str, int] = {}

    def height(package: str, above: tuple[str, ...] = ()) -> int:
        if package in above:
            raise ValueError(f"an import circle: {' → '.join([*above, package])}")
        if package not in height_of:
            height_of[package] = max(
                (1 + height(below, (*above, package)) for below in graph[package]), default=0
            )
        return height_of[package]

    for package in graph:
        height(package)
    return height_of


def direct(graph: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Return the imports that no path over another package implies."""

    def below(package: str) -> set[str]:
        return graph[package].union(*(below(other) for other in graph[package]))

    return {
        (package, other)
        for package, others in graph.items()
        for other in others
        if not any(other in below(between) for between in others)
    }


def picture(graph: Mapping[str, set[str]]) -> str:
    """Return the graph as SVG, with a row for each height, the highest first."""
    rows: dict[int, list[str]] = {}
    for package, height in heights(graph).items():
        rows.setdefault(height, []).append(package)
    columns = max(map(len, rows.values()))
    total = columns * WIDTH + (columns + 1) * GAP_X
    places = {
        package: (
            (total - len(row) * (WIDTH + GAP_X) + GAP_X) // 2 + number * (WIDTH + GAP_X),
            GAP_Y + (max(rows) - height) * (HEIGHT + GAP_Y),
        )
        for height, row in rows.items()
        for number, package in enumerate(sorted(row))
    }
    size = f'width="{total}" height="{(max(rows) + 1) * (HEIGHT + GAP_Y) + GAP_Y}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" text-anchor="middle">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for package, other in sorted(direct(graph)):
        (x1, y1), (x2, y2) = places[package], places[other]
        ends = f'x1="{x1 + WIDTH // 2}" y1="{y1 + HEIGHT}" x2="{x2 + WIDTH // 2}" y2="{y2}"'
        lines.append(f'<line {ends} stroke="#555" marker-end="url(#tip)"/>')
    for package, (x, y) in sorted(places.items()):
        lines += [
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#eef2fb" stroke="#1f4db8"/>',
            f'<text x="{x + WIDTH // 2}" y="{y + 18}" font-size="14" font-weight="bold">{package}</text>',
            f'<text x="{x + WIDTH // 2}" y="{y + 34}" font-size="10">{escape(IGNORANCE[package])}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture({package: imported(package) for package in packages()}))
