"""The page docs/coverage.md and its data, cli/coverage.json, from the rows of a run."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.cli.model_types import REASONS, about, family_rows, kind_of_reason, types_of

from ..commit import ROOT
from .parity import CAUSES, LISTED, SEEDS, listed_layouts

DATA = ROOT / "cli" / "coverage.json"  # shipped, for `echelon models --all`
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
    **dict.fromkeys(
        ("parity", "five", "sequences", "heads"), ("type", "parity", "layouts", "refused", "why")
    ),
}
_ABSENT = "is not a model type of transformers"  # in the refusal of verify
_BEGINNING = re.compile(
    r"^(no (pipeline stages|split) of an? \w+ (are known|gives the numbers of one process)|"
    r"sequence_parallelism_mode='\w+'): "
)
_CLASS = re.compile(r"\ban? [A-Z]\w+(For|With|LMHead)[A-Z]\w+")
_END = re.compile(r", and (model_type='.*' has no table|an? \w+ has none)$")
_OUTCOMES = ("agrees", "departs", "fails", "refused")
Rows = Mapping[str, Mapping[str, Any]]


def make_page(*, data: Path = DATA, page: Path = PAGE, **records: Rows) -> str:
    """Replace the rows of these types in the data, and write the page; return a summary.

    Args:
        data, page: the files.
        records: rows by type of each record, a key of `_KEPT`.
    """
    kept: dict[str, list[dict[str, Any]]] = json.loads(data.read_text()) if data.exists() else {}
    kept = {name: kept.get(name, []) for name in _KEPT}
    for name, rows in records.items():
        known = {_key(name, row): row for row in kept[name]}
        known |= {_key(name, row): _short(row, _KEPT[name]) for row in rows.values()}
        kept[name] = [known[key] for key in sorted(known)]
    sections = (
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for name, rows in kept.items()
    )
    data.write_text("{\n" + ",\n".join(sections) + "\n}\n")
    page.write_text("\n".join(_page(kept)) + "\n")
    return f"{page.name}: {sum(bool(row.get('trains')) for row in kept['rows'])} of {len(kept['rows'])} train"


def _key(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key of a row in its record: of listed layouts, there are rows of several releases."""
    return (row["type"], row["transformers"]) if name in LISTED else (row["type"],)


def _short(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return these fields of a row if they say anything, texts without their further alternatives."""
    fields = {
        name: row[name]
        for name in (*names, "commit", "torch", "transformers")
        if not (row.get(name) is None or row[name] is False or row[name] in ("", {}))
    }
    texts = {
        name: value.partition(" | ")[0][:240] for name, value in fields.items() if isinstance(value, str)
    }
    return fields | texts


def _page(kept: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    rows = kept["rows"]
    headings, *families = family_rows(types_of(kept))
    others = [row for row in rows if not row.get("convolutional")]
    convolutional = [row for row in rows if row.get("convolutional")]
    missing = [row for row in rows if not row.get("trains")]
    lines = [
        "# Model types",
        "",
        "Made by `make coverage`, not by hand, from `cli/coverage.json`, which is shipped.",
        "",
        about(kept),
        "",
        "Is my model supported? `echelon models --all` has a line for each of these types, and `echelon models NAME`",
        "the reasons. % of the types that are built here and were tried, with the numbers of one process:",
        "",
        *_table(headings, families),
        "",
        "sg: `split_gather`, a2a: `all_to_all`, ra: `ring_attn` ([sequence.md](sequence.md)). What to do with a type",
        "that is refused: [policies.md](policies.md).",
        "",
        "## Model types that train at all",
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
        "## Types that do not train",
        "",
    ]
    kinds: dict[str, list[str]] = {}
    for row in missing:
        kinds.setdefault(kind_of_reason(row), []).append(row["type"])
    lines += _table(
        ["reason", "types", ""],
        [(kind, str(len(kinds[kind])), ", ".join(kinds[kind])) for kind, _ in REASONS if kind in kinds],
    )
    lines += ["", "The first error of each is in `cli/coverage.json`."]
    return [
        *lines,
        *_stage_lines(rows, kept["stages"]),
        *_split_lines(rows, kept["splits"]),
        *_parity_lines(rows, kept["parity"]),
        *_listed_lines("five", kept["five"]),
        *_listed_lines("sequences", kept["sequences"]),
        *_head_lines(kept["heads"]),
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
            *(str(of_family[kind]) for kind in (*kinds, "refused")),
            str(100 * sum(of_family[kind] for kind in kinds) // sum(of_family.values())),
        )
        for name, of_family in sorted(
            counts.items(), key=lambda item: (item[0] == "all", -sum(item[1].values()))
        )
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
            *(str(of_family[outcome]) for outcome in _OUTCOMES),
            str(100 * of_family["agrees"] // sum(of_family.values())),
        )
        for name, of_family in sorted(
            counts.items(), key=lambda item: (item[0] == "all", -sum(item[1].values()))
        )
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


_LISTED_TEXTS = {
    "five": (
        "",
        "## Five layouts",
        "",
        "As above, under each of five layouts (`python -m tests.coverage.parity --layouts five`):",
        "the types that ColossalAI has policies for, with DeepSeek-V2 in place of DeepSeek-MoE, which is no type of",
        "transformers, and 40 others of those that train, drawn by the date. Those of ColossalAI:",
        f"{', '.join(SEEDS)}.",
    ),
    "sequences": (
        "",
        "## Sequences and ZeRO",
        "",
        "As above, under each mode of sequence parallelism ([sequence.md](sequence.md)) and ZeRO-2, on two ranks",
        "(`python -m tests.coverage.parity --layouts sequences`): the same types, then all others that train, and the",
        "convolutional ones. The % above are of the types that were tried.",
    ),
}


def _listed_lines(record: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on listed layouts: counts by release and layout, and all that is not an agreement."""
    if not rows:
        return []
    lines = [*_LISTED_TEXTS[record]]
    releases = sorted({(row["transformers"], row["torch"]) for row in rows}, reverse=True)
    for transformers, torch in releases:
        tried = [row for row in rows if (row["transformers"], row["torch"]) == (transformers, torch)]
        absent = [row["type"] for row in tried if _ABSENT in row.get("why", "")]
        present = [row for row in tried if row["type"] not in absent]
        lines += [
            "",
            f"### transformers {transformers}",
            "",
            f"torch {torch}, {len(present)} types."
            + (f" Not in this release: {', '.join(absent)}." if absent else ""),
            "",
            *_outcome_table(present, listed_layouts(record)),
            *_outcome_lines(present),
            "",
            "Refused before the ranks start:",
            "",
            *_cause_lines(present),
        ]
    return lines


def _outcome_table(rows: Sequence[Mapping[str, Any]], layouts: Iterable[str]) -> list[str]:
    """Return a table of the outcomes of layouts; of those that no row has, too."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in layouts}
    for row in rows:
        for layout in row.get("layouts", ()):
            counts.setdefault(layout["layout"], Counter())[layout["outcome"]] += 1
        for layout in row.get("refused", ()):
            counts.setdefault(layout, Counter())["refused"] += 1
    cells = [(name, *(str(outcomes[outcome]) for outcome in _OUTCOMES)) for name, outcomes in counts.items()]
    return _table(["layout", *_OUTCOMES], cells)


def _head_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on classes for other tasks."""
    if not rows:
        return []
    return [
        "",
        "## Other heads",
        "",
        "Types with each class for another task under tp2·pp2, or what of it is not refused",
        "(`python -m tests.coverage.parity --layouts heads`), but for types whose heads the tests compare",
        f"([models.md](models.md)): the types of the five layouts first, then others. {len(rows)} classes.",
        "",
        *_outcome_table(rows, ()),
        *_outcome_lines(rows),
        "",
        "Refused before the ranks start:",
        "",
        *_cause_lines(rows),
    ]


def _cause_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each cause for which types refuse the same layouts."""
    types: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        layouts: dict[str, list[str]] = {}
        for layout, why in row.get("refused", {}).items():
            layouts.setdefault(_cause(why), []).append(layout)
        for cause, names in layouts.items():
            types.setdefault((cause, *names), []).append(row["type"])
    return [
        f"- {', '.join([*names, *layouts])}: {_text(cause)}" for (cause, *layouts), names in types.items()
    ]


def _cause(why: str) -> str:
    """Return the cause in a refusal, without its beginning and end, equal for all types, and without the advice."""
    cause = re.split(r"\. Use pp_size=|: leave |: use another", _BEGINNING.sub("", why))[0]
    return _CLASS.sub("a model", _END.sub("", cause))


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
    model_type = row["type"].partition("/")[0]  # without the head
    cause = f": {CAUSES[model_type]}" if outcome != "refused" and model_type in CAUSES else ""
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
