"""The page docs/coverage.md, from the rows of a run."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..matrix import ROOT
from .parity import CAUSES, SEEDS, five_layouts

DATA = ROOT / "docs" / "coverage.json"
PAGE = ROOT / "docs" / "coverage.md"
_KEPT = {
    "rows": ("type", "class", "task", "family", "trains", "convolutional", "parameters", "unused", "reason"),
    "stages": (
        "type",
        "stages",
        "layers",
        "encoder",
        "carried",
        "entry",
        "leading",
        "everywhere",
        "sent",
        "arity",
        "seconds",
        "why",
    ),
    "splits": ("type", "split", "seconds", "why"),
    "parity": ("type", "parity", "layouts", "refused", "why"),
    "five": ("type", "parity", "layouts", "refused", "why"),
}
_ABSENT = "is not a model type of transformers"  # in the refusal of verify
_OUTCOMES = ("agrees", "departs", "fails", "refused")
Rows = Mapping[str, Mapping[str, Any]]
# Kinds of reasons, the first that matches; the last are limits of the small configs and batches, not of the types.
_KINDS = (
    ("a package is missing", r"requires the (\w+) library"),
    ("it refuses to train", r"[Tt]raining .*(not supported|not implemented)|does not support training"),
    ("a limit of time or memory", r"passed a limit"),
    ("it has no forward", r"required \"forward\""),
    ("a step does not change the loss", r"after a step"),
    ("no small config was found", r"^(StrictDataclass|Ambiguous)"),
    ("no batch was found", r""),
)


def make_page(
    *,
    plain: Rows | None = None,
    stages: Rows | None = None,
    splits: Rows | None = None,
    parity: Rows | None = None,
    five: Rows | None = None,
    data: Path = DATA,
    page: Path = PAGE,
) -> str:
    """Replace the rows of these types in the data, and write the page; return a summary."""
    kept: dict[str, list[dict[str, Any]]] = json.loads(data.read_text()) if data.exists() else {}
    kept = {name: rows for name, rows in kept.items() if name in _KEPT}
    made = {"rows": plain, "stages": stages, "splits": splits, "parity": parity, "five": five}
    for name, rows in made.items():
        if rows is not None:
            known = {_key(name, row): row for row in kept.get(name, ())}
            known |= {_key(name, row): _short(row, _KEPT[name]) for row in rows.values()}
            kept[name] = [known[key] for key in sorted(known)]
        kept.setdefault(name, [])
    sections = (
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for name, rows in kept.items()
    )
    data.write_text("{\n" + ",\n".join(sections) + "\n}\n")
    page.write_text("\n".join(_page(**kept)) + "\n")
    return f"{page.name}: {sum(bool(row.get('trains')) for row in kept['rows'])} of {len(kept['rows'])} train"


def _key(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key of a row in its record: of five layouts, there are rows of several releases."""
    return (row["type"], row["transformers"]) if name == "five" else (row["type"],)


def _short(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return these fields of a row if they say anything, texts without their further alternatives."""
    found = {
        name: row[name]
        for name in (*names, "commit", "torch", "transformers")
        if not (row.get(name) is None or row[name] is False or row[name] in ("", {}))
    }
    texts = {name: each.partition(" | ")[0][:240] for name, each in found.items() if isinstance(each, str)}
    return found | texts


def _page(
    rows: Sequence[Mapping[str, Any]],
    stages: Sequence[Mapping[str, Any]],
    splits: Sequence[Mapping[str, Any]],
    parity: Sequence[Mapping[str, Any]],
    five: Sequence[Mapping[str, Any]],
) -> list[str]:
    about = sorted({(row["commit"], row["torch"], row["transformers"]) for row in rows})
    others = [row for row in rows if not row.get("convolutional")]
    convolutional = [row for row in rows if row.get("convolutional")]
    missing = [row for row in rows if not row.get("trains")]
    lines = [
        "# Model types that train at all",
        "",
        "Made by `make coverage` (`python -m tests.coverage.plain`), not by hand.",
        "",
        *(
            f"torch {torch}, transformers {transformers}, commit {commit}."
            for commit, torch, transformers in about
        ),
        "",
        "Every model type of transformers that has a class for a task: its usual class, built from a small config and",
        "given a synthetic batch, without Echelon. It trains if its loss in a plain loop has gradients, and is another",
        "one after a step of SGD. Config and batch are made by general rules (`derive/`), so a type that is not among",
        "them may train all the same: the reasons say what is missing.",
        "",
        *_table(["family", "types", "train", "%"], _counts(others)),
        "",
        "## Convolutional models",
        "",
        "More than half of the parameters are weights of convolutions: for data parallelism and ZeRO alone.",
        "",
        *_table(["family", "types", "train", "%"], _counts(convolutional)),
        "",
        f"{', '.join(row['type'] for row in convolutional if row.get('trains'))}.",
        "",
        "## The others",
        "",
    ]
    kinds: dict[str, list[str]] = {}
    for row in missing:
        kind = next(kind for kind, pattern in _KINDS if re.search(pattern, row.get("reason", "")))
        kinds.setdefault(kind, []).append(row["type"])
    lines += _table(
        ["reason", "types", ""],
        [(kind, str(len(kinds[kind])), ", ".join(kinds[kind])) for kind, _ in _KINDS if kind in kinds],
    )
    lines += ["", "The first error of each is in [coverage.json](coverage.json)."]
    return [
        *lines,
        *_stage_lines(rows, stages),
        *_split_lines(rows, splits),
        *_parity_lines(rows, parity),
        *_five_lines(five),
    ]


def _stage_lines(rows: Sequence[Mapping[str, Any]], stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on pipeline stages, by family; only of types that train and are not convolutional."""
    if not stages:
        return []
    lines, known = _support(rows, stages, "stages", ("table", "derived"))
    return [
        "",
        "## Pipeline stages",
        "",
        "Of the types that train: by a table, or derived from a traced forward and proven in one process",
        "(`python -m tests.coverage.stages`): a stage for each layer, forward and backward, against the whole copy.",
        "",
        *lines,
        "",
        f"{_count(known, 'encoder')} of the derived have stages of two lists of layers, as of a vision model and a",
        f"language model. In {_count(known, 'carried')} more than hidden states is sent, or the model computes",
        "between its layers.",
        "",
        "Refused, with what departs:",
        "",
        *_refused(known, "stages"),
    ]


def _split_lines(rows: Sequence[Mapping[str, Any]], splits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on tensor parallelism, as `_stage_lines` does."""
    if not splits:
        return []
    lines, known = _support(rows, splits, "split", ("table", "transformers' plan", "proposed"))
    return [
        "",
        "## Tensor parallelism",
        "",
        "Of the types that train: by a table, by transformers' own plan, or proposed from the names and sizes of the",
        "layers (`python -m tests.coverage.splits`). What no table says is tried in one process: a small copy over two",
        "threads, forward and backward in float64, against the whole copy.",
        "",
        *lines,
        "",
        "Refused:",
        "",
        *_refused(known, "split"),
    ]


def _support(
    rows: Sequence[Mapping[str, Any]], tried: Sequence[Mapping[str, Any]], field: str, kinds: Sequence[str]
) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return a table of how the types of each family are supported, and the rows of the types that train.

    Args:
        rows: all types.
        tried: the rows of a record.
        field: its field with one of `kinds`, or "refused".
        kinds: how a type can be supported.
    """
    families = {
        row["type"]: row["family"] for row in rows if row.get("trains") and not row.get("convolutional")
    }
    known = [row for row in tried if row["type"] in families]
    counts: dict[str, Counter[str]] = {}
    for row in known:
        for name in (families[row["type"]], "all"):
            counts.setdefault(name, Counter())[row[field]] += 1
    cells = [
        (
            name,
            *(str(each[kind]) for kind in (*kinds, "refused")),
            str(100 * sum(each[kind] for kind in kinds) // sum(each.values())),
        )
        for name, each in sorted(counts.items(), key=lambda item: (item[0] == "all", -sum(item[1].values())))
    ]
    lines = [f"{len(known)} of these {len(families)} types have been tried.", ""]
    return [*lines, *_table(["family", *kinds, "refused", "%"], cells)], known


def _refused(known: Sequence[Mapping[str, Any]], field: str) -> list[str]:
    """Return a line for each refused type, with the reason."""
    return [f"- {row['type']}: {_reason(row)}" for row in known if row[field] == "refused"]


def _count(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    """Return the number of rows that have a value of this name."""
    return sum(name in row for row in rows)


def _reason(row: Mapping[str, Any]) -> str:
    return _text(row.get("why", ""))


def _text(why: str) -> str:
    return why.replace("|", "/").replace("<", "(").replace(">", ")")


def _parity_lines(rows: Sequence[Mapping[str, Any]], parity: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on parity on real ranks: counts by family, and all that is not an agreement."""
    if not parity:
        return []
    families = {row["type"]: row["family"] for row in rows}
    tried = [(row["type"], layout) for row in parity for layout in row.get("layouts", ())]
    counts: dict[str, Counter[str]] = {}
    for row in parity:
        for name in (families[row["type"]], "all"):
            counts.setdefault(name, Counter())[row["parity"]] += 1
    cells = [
        (
            name,
            *(str(each[outcome]) for outcome in _OUTCOMES),
            str(100 * each["agrees"] // sum(each.values())),
        )
        for name, each in sorted(counts.items(), key=lambda item: (item[0] == "all", -sum(item[1].values())))
    ]
    by_layout = Counter((layout["layout"], layout["outcome"]) for _, layout in tried)
    layouts = Counter(layout["layout"] for _, layout in tried)
    trained = sum(bool(row.get("trains")) and not row.get("convolutional") for row in rows)
    lines = [
        "",
        "## Parity on processes",
        "",
        "Three steps of SGD at a rate of 0.1 on real processes, beside one process",
        "(`python -m tests.coverage.parity`): losses, gradients before they are clipped, their norm, and weights,",
        "within the tolerances of `echelon verify`. Every type under tp2·pp2, and under pp3, whose stages have unequal",
        "numbers of layers (or pp2); data parallelism with ZeRO-1 is in place of what is refused.",
        "",
        f"{len(parity)} of these {trained} types have been tried, in a random order.",
        "",
        *_table(["family", *_OUTCOMES, "%"], cells),
        "",
        *_table(
            ["layout", *_OUTCOMES],
            [
                (layout, *(str(by_layout[layout, outcome]) for outcome in _OUTCOMES))
                for layout, _ in layouts.most_common()
            ],
        ),
    ]
    lines += _outcome_lines(parity)
    refused = [
        f"- {row['type']}, {layout}: {_text(why)}"
        for row in parity
        for layout, why in row.get("refused", {}).items()
    ]
    return [*lines, "", f"Layouts that are refused before they start: {len(refused)}", "", *refused]


def _five_lines(five: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on five layouts: counts by release and layout, and all that is not an agreement."""
    if not five:
        return []
    lines = [
        "",
        "## Five layouts",
        "",
        "As above, under each of five layouts (`python -m tests.coverage.parity --layouts five --date 2026-11-28`):",
        "the types that ColossalAI has policies for, with DeepSeek-V2 in place of DeepSeek-MoE, which is no type of",
        "transformers, and 40 others of those that train, drawn by the date. Those of ColossalAI:",
        f"{', '.join(SEEDS)}.",
    ]
    releases = sorted({(row["transformers"], row["torch"]) for row in five}, reverse=True)
    for transformers, torch in releases:
        tried = [row for row in five if (row["transformers"], row["torch"]) == (transformers, torch)]
        absent = [row["type"] for row in tried if _ABSENT in row.get("why", "")]
        rows = [row for row in tried if row["type"] not in absent]
        counts: dict[str, Counter[str]] = {name: Counter() for name in five_layouts()}
        for row in rows:
            for layout in row.get("layouts", ()):
                counts[layout["layout"]][layout["outcome"]] += 1
            for layout in row.get("refused", ()):
                counts[layout]["refused"] += 1
        lines += [
            "",
            f"### transformers {transformers}",
            "",
            f"torch {torch}, {len(rows)} types."
            + (f" Not in this release: {', '.join(absent)}." if absent else ""),
            "",
            *_table(
                ["layout", *_OUTCOMES],
                [
                    (layout, *(str(outcomes[outcome]) for outcome in _OUTCOMES))
                    for layout, outcomes in counts.items()
                ],
            ),
            *_outcome_lines(rows),
            "",
            "Refused before the ranks start:",
            "",
            *(line for row in rows for line in _causes(row)),
        ]
    return lines


def _causes(row: Mapping[str, Any]) -> list[str]:
    """Return a line for each cause for which a type refuses layouts."""
    layouts: dict[str, list[str]] = {}
    for layout, why in row.get("refused", {}).items():
        layouts.setdefault(_cause(why), []).append(layout)
    return [f"- {row['type']}, {', '.join(names)}: {_text(cause)}" for cause, names in layouts.items()]


def _cause(why: str) -> str:
    """Return the cause in a refusal, without its beginning, equal for all types, and without the advice."""
    cause = re.sub(
        r"^no (pipeline stages|split) of an? \w+ (are known|gives the numbers of one process): ", "", why
    )
    return re.split(r"\. Use pp_size=|: leave tp_size", cause)[0]


def _outcome_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return all departures, failures and refusals of ranks, with their numbers."""
    lines = []
    for outcome, heading in (
        ("departs", "Departures"),
        ("fails", "Failures"),
        ("refused", "Refused when the small copy is built or the ranks start"),
    ):
        reasons = [
            f"- {row['type']}{under}: {_text(why)}" for row in rows for under, why in _reasons(row, outcome)
        ]
        lines += ["", f"{heading}: {len(reasons)}", *([""] if reasons else []), *reasons]
    return lines


def _reasons(row: Mapping[str, Any], outcome: str) -> list[tuple[str, str]]:
    """Return where a type has this outcome, and why: under layouts, or as a whole."""
    if not row.get("layouts") and row.get("refused"):
        return []  # before the ranks start
    cause = f": {CAUSES[row['type']]}" if outcome == "fails" and row["type"] in CAUSES else ""
    layouts = row.get("layouts") or [{"outcome": row["parity"], "why": row.get("why", "")}]
    return [
        (f", {layout['layout']}" if "layout" in layout else "", layout["why"] + cause)
        for layout in layouts
        if layout["outcome"] == outcome
    ]


def _counts(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    total, trained = Counter[str](), Counter[str]()
    for row in rows:
        for name in (row["family"], "all"):
            total[name] += 1
            trained[name] += bool(row.get("trains"))
    names = sorted(total, key=lambda name: (name == "all", -total[name]))
    return [
        (name, str(total[name]), str(trained[name]), str(100 * trained[name] // total[name]))
        for name in names
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]
