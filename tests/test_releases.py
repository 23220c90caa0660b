"""The table of tried releases, and the files that name releases, agree."""

import json
import re
from pathlib import Path
from typing import Any

from echelon.cluster.releases import NEWEST_TRIED, _numbers

from .releases import DATA, PAGE, ROOT, make_page, merged, page

ROW: dict[str, Any] = {
    "python": "3.11",
    "torch": "2.13.0+cpu",
    "transformers": "5.9.0",
    "peft": "0.21.2",
    "tests": "quick tests",
    "passed": 3,
    "failed": 0,
    "skipped": 1,
    "date": "2026-11-25",
    "commit": "abc",
}


def test_a_row_replaces_the_one_of_the_same_releases_and_newer_releases_come_first() -> None:
    again, newer = ROW | {"passed": 4}, ROW | {"transformers": "5.24.0"}
    assert merged([ROW], [again, newer]) == [newer, again]


def test_the_rows_of_runs_become_the_page_and_are_removed(tmp_path: Path) -> None:
    rows, data, document = tmp_path / "rows", tmp_path / "releases.json", tmp_path / "releases.md"
    rows.mkdir()
    (rows / "a.json").write_text(json.dumps(ROW))
    for new in (1, 0):
        assert make_page(rows, data, document) == f"releases.md has 1 rows, {new} of them new"
        row = "| 5.9.0 | 2.13.0+cpu | 0.21.2 | 3.11 | quick tests | 3 | 0 | 1 | 2026-11-25 | abc |"
        assert row in document.read_text()


def test_the_page_is_that_of_the_data() -> None:
    assert PAGE.read_text() == page(json.loads(DATA.read_text()))


def test_the_newest_releases_that_are_called_tried_have_a_row() -> None:
    rows = json.loads(DATA.read_text())
    for package, release in NEWEST_TRIED.items():
        assert _numbers(release) in [_numbers(row[package]) for row in rows], package


def test_the_constraints_hold_releases_that_were_tried() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    assert {name: pinned[name] for name in ("transformers", "peft")} == {
        name: NEWEST_TRIED[name] for name in ("transformers", "peft")
    }
    assert pinned["torch"] and not {"echelon"} & pinned.keys()


def test_no_package_has_an_upper_bound_except_where_its_internals_are_used() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    bounded = re.findall(r'"([\w-]+)[^"#]*<', text)
    assert bounded == ["liger-kernel"]
