"""The tables of docs/cuda.md, generated from the results of `make gpu`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .results import FAILED, PASSED, ROOT, UNAVAILABLE, every

PAGE = ROOT / "docs" / "cuda.md"
BEGIN, END = "<!-- results of make gpu -->", "<!-- end of results -->"


def write_tables(folder: Path) -> int:
    """Write the tables into the folder of the results, and those of a GPU also into docs/cuda.md.

    Returns:
        1 if a row failed, else 0.
    """
    parts = list(every(folder))
    text = tables(parts)
    print(f"\n{text}")
    (folder / "table.md").write_text(text)
    if any(part["on"]["device"] != "CPU" for part in parts):
        try:
            before, _, rest = PAGE.read_text().partition(BEGIN)
            PAGE.write_text(f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}")
        except OSError as error:
            print(f"{PAGE} stays as it is, {error}: the tables are in {folder / 'table.md'}")
    failed = [name for part in parts for name, row in part["rows"].items() if row["state"] == FAILED]
    print(f"failed: {len(failed)}", *failed, sep="\n  ")
    return 1 if failed else 0


def tables(parts: Iterable[Mapping[str, Any]]) -> str:
    """Return all tables as Markdown."""
    parts = list(parts)
    heading = "| part | passed | failed | unavailable | seconds |"
    lines = ["", *machine(parts), "", heading, "|---|---|---|---|---|"]
    for part in parts:
        states = [row["state"] for row in part["rows"].values()]
        passed, failed = states.count(PASSED), states.count(FAILED)
        seconds = sum(row.get("seconds", 0) for row in part["rows"].values())
        rest = states.count(UNAVAILABLE)
        lines.append(f"| {part['part']} | {passed} | {failed} | {rest} | {seconds:.0f} |")
    for part in parts:
        for name, row in part["rows"].items():
            if row["state"] == FAILED:
                why = row.get("departure") or row.get("error", "")
                lines += ["", f"- {part['part']}, {name}: {why[:300]}"]
    for part in parts:
        lines += [*unavailable(part), *measured(part)]
    return "\n".join([*lines, ""]) + "\n"


def machine(parts: list[Mapping[str, Any]]) -> list[str]:
    """Return a line for each machine that ran parts."""
    parts_of = {}
    for part in parts:
        on = part["on"]
        key = (
            f"{on['num_devices']} × {on['device']}, torch {on['torch']}, transformers {on['transformers']}, "
            f"commit {part['commit'] or 'sources ' + on['sources']}"
        )
        parts_of.setdefault(key, []).append(part["part"])
    return [f"{key}: {', '.join(names)}." for key, names in parts_of.items()]


def unavailable(part: Mapping[str, Any]) -> list[str]:
    """Return a line for each reason why rows of a part could not run, with their names."""
    rows_of: dict[str, list[str]] = {}
    for name, row in part["rows"].items():
        if row["state"] == UNAVAILABLE:
            rows_of.setdefault(row["reason"], []).append(name)
    lines = []
    for reason, names in rows_of.items():
        lines += ["", f"- {part['part']}, unavailable: {reason} ({'; '.join(names)})"]
    return lines


def measured(part: Mapping[str, Any]) -> list[str]:
    """Return tables of a part: rows that share names of figures form one table; rows without figures are left out."""
    tables: list[tuple[dict[str, None], dict[str, Any]]] = []  # names of the figures, and rows
    for name, row in part["rows"].items():
        figures = row.get("figures", {})
        known = next((table for table in tables if figures.keys() & table[0]), None)
        if known is None and figures:
            tables.append(known := ({}, {}))
        if known is not None:
            known[0].update(dict.fromkeys(figures))
            known[1][name] = figures
    lines = []
    for columns, rows in tables:
        lines += ["", f"| {part['part']} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for name, figures in rows.items():
            lines.append(f"| {name} | {' | '.join(str(figures.get(column, '')) for column in columns)} |")
    return lines
