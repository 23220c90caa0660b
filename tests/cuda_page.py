"""Tables of docs/cuda.md that tests check."""

import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[1] / "docs" / "cuda.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Return the rows of a section's first table."""
    (section,) = re.findall(rf"^#+ {heading}$(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def value(formula: str, terms: dict[str, Any]) -> Any:
    """Evaluate a formula of the page."""
    return eval(formula.replace("·", "*").replace("−", "-"), {}, terms)
