"""The tables of docs/cuda.md, made of the results of `make gpu`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .results import FAILED, PASSED, ROOT, every

PAGE = ROOT / "docs" / "cuda.md"
BEGIN, END = "<!-- results of make gpu -->", "<!-- end of results -->"


def write_tables(folder: Path) -> int:
    """Write the tables into the folder of the results, and those of a GPU into docs/cuda.md.

    Returns:
        1 if a row failed, else 0.
    """
    parts = list(every(folder))
    text = tables(parts)
    (folder / "table.md").write_text(text)
    if any(part["on"]["device"] != "CPU" for part in parts):
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}")
    print(f"\n{text}")
    failed = [name for part in parts for name, row in part["rows"].items() if row["state"] == FAILED]
    print(f"failed: {len(failed)}", *failed, sep="\n  ")
    return 1 if failed else 0


def tables(parts: Iterable[Mapping[str, Any]]) -> str:
    """All tables as Markdown."""
    parts = list(parts)
    lines = [
        "",
        *machine(parts),
        "",
        "| part | passed | failed | skipped | seconds |",
        "|---|---|---|---|---|",
    ]
    for part in parts:
        states = [row["state"] for row in part["rows"].values()]
        passed, failed = states.count(PASSED), states.count(FAILED)
        seconds = sum(row.get("seconds", 0) for row in part["rows"].values())
        rest = len(states) - passed - failed
        lines.append(f"| {part['part']} | {passed} | {failed} | {rest} | {seconds:.0f} |")
    for part in parts:
        for name, row in part["rows"].items():
            if row["state"] == FAILED:
                why = row.get("departure") or row.get("error", "")
                lines += ["", f"- {part['part']}, {name}: {why[:300]}"]
    for part in parts:
        lines += measured(part)
    return "\n".join([*lines, ""]) + "\n"


def machine(parts: list[Mapping[str, Any]]) -> list[str]:
    """On what the parts ran, in a line for each machine."""
    found = {}
    for part in parts:
        on = part["on"]
        key = (
            f"{on['num_devices']} × {on['device']}, torch {on['torch']}, transformers {on['transformers']}, "
            f"commit {part['commit'] or 'sources ' + on['sources']}"
        )
        found.setdefault(key, []).append(part["part"])
    return [f"{key}: {', '.join(names)}." for key, names in found.items()]


def measured(part: Mapping[str, Any]) -> list[str]:
    """A table of a part whose rows are figures under equal names; else nothing."""
    rows = {name: row["figures"] for name, row in part["rows"].items() if "figures" in row}
    if not rows:
        return []
    columns = list(dict.fromkeys(name for figures in rows.values() for name in figures))
    lines = ["", f"| {part['part']} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return lines + [
        f"| {name} | {' | '.join(str(figures.get(each, '')) for each in columns)} |"
        for name, figures in rows.items()
    ]
