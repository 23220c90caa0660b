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
        *(
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
        ),
        *("seconds", "why"),
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
    page.write_text("\n\n".join(_page(kept)) + "\n")
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
    """Return the blocks of the page, between which are blank lines."""
    rows = kept["rows"]
    headings, *families = family_rows(types_of(kept))
    convolutional = [row for row in rows if row.get("convolutional")]
    kinds: dict[str, list[str]] = {}
    for row in rows:
        if not row.get("trains"):
            kinds.setdefault(kind_of_reason(row), []).append(row["type"])
    return [
        "# Model types",
        "Made by `make coverage`, not by hand, from `cli/coverage.json`, which is shipped.",
        about(kept),
        "Is my model supported? `echelon models --all` has a line for each of these types, and `echelon models NAME`\n"
        "the reasons. % of the types that are built here and were tried, with the numbers of one process:",
        _table(headings, families),
        "sg: `split_gather`, a2a: `all_to_all`, ra: `ring_attn` ([sequence.md](sequence.md)). What to do with a type\n"
        "that is refused: [policies.md](policies.md).",
        "## Model types that train at all",
        "Every model type of transformers that has a class for a task: its usual class, built from a small config and\n"
        "given a synthetic batch, without Echelon. It trains if its loss in a plain loop has gradients, and is another"
        "\none after a step of SGD. Config and batch are made by general rules (`derive/`), so a type that is not among"
        "\nthem may train all the same: the reasons say what is missing.",
        _trained_table([row for row in rows if not row.get("convolutional")]),
        "## Convolutional models",
        "More than half of the parameters are weights of convolutions: for data parallelism and ZeRO alone.",
        _trained_table(convolutional),
        f"{', '.join(row['type'] for row in convolutional if row.get('trains'))}.",
        "## Types that do not train",
        _table(
            ["reason", "types", ""],
            [(kind, str(len(kinds[kind])), ", ".join(kinds[kind])) for kind, _ in REASONS if kind in kinds],
        ),
        "The first error of each is in `cli/coverage.json`.",
        *_stage_blocks(rows, kept["stages"]),
        *_split_blocks(rows, kept["splits"]),
        *_parity_blocks(rows, kept["parity"]),
        *_listed_blocks("five", kept["five"]),
        *_listed_blocks("sequences", kept["sequences"]),
        *_head_blocks(kept["heads"]),
    ]


def _trained_table(rows: Sequence[Mapping[str, Any]]) -> str:
    counted = [(row["family"], ["types", *["train"] * bool(row.get("trains"))]) for row in rows]
    return _by_family(counted, ["types", "train"], {"train"})


def _by_family(
    counted: Iterable[tuple[str, Sequence[str]]], columns: Sequence[str], good: Iterable[str]
) -> str:
    """Return a table with a row for each family, the largest first, and one for all.

    Args:
        counted: the family of each type, and the columns that count it.
        columns: those of the table.
        good: the columns whose % is the last cell.
    """
    counts: dict[str, Counter[str]] = {}
    totals = Counter[str]()
    for family, names in counted:
        for name in (family, "all"):
            counts.setdefault(name, Counter()).update(names)
            totals[name] += 1
    families = sorted(counts, key=lambda name: (name == "all", -totals[name]))
    shares = {name: 100 * sum(counts[name][column] for column in good) // totals[name] for name in families}
    cells = [
        (name, *(str(counts[name][column]) for column in columns), str(shares[name])) for name in families
    ]
    return _table(["family", *columns, "%"], cells)


def _stage_blocks(rows: Sequence[Mapping[str, Any]], stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on pipeline stages, by family; only of types that train and are not convolutional."""
    if not stages:
        return []
    support, known = _support(rows, stages, "stages", ("table", "derived"))
    num_encoders, num_carried = (sum(name in row for row in known) for name in ("encoder", "carried"))
    return [
        "## Pipeline stages",
        "Of the types that train: by a table, or derived from a traced forward and proven in one process\n"
        "(`python -m tests.coverage.stages`): a stage for each layer, forward and backward, against the whole copy.",
        *support,
        f"{num_encoders} of the derived have stages of two lists of layers, as of a vision model and a\n"
        f"language model. In {num_carried} more than hidden states is sent, or the model computes\n"
        "between its layers.",
        "Refused, with what departs:",
        _refused(known, "stages"),
    ]


def _split_blocks(rows: Sequence[Mapping[str, Any]], splits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on tensor parallelism, as `_stage_blocks` does."""
    if not splits:
        return []
    support, known = _support(rows, splits, "split", ("table", "transformers' plan", "proposed"))
    return [
        "## Tensor parallelism",
        "Of the types that train: by a table, by transformers' own plan, or proposed from the names and sizes of the\n"
        "layers (`python -m tests.coverage.splits`). What no table says is tried in one process: a small copy over two"
        "\nthreads, forward and backward in float64, against the whole copy.",
        *support,
        "Refused:",
        _refused(known, "split"),
    ]


def _support(
    rows: Sequence[Mapping[str, Any]], tried: Sequence[Mapping[str, Any]], field: str, kinds: Sequence[str]
) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return how the types of each family are supported, and the rows of the types that train.

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
    counted = [(families[row["type"]], [row[field]]) for row in known]
    blocks = [f"{len(known)} of these {len(families)} types have been tried."]
    return [*blocks, _by_family(counted, [*kinds, "refused"], kinds)], known


def _refused(known: Sequence[Mapping[str, Any]], field: str) -> str:
    """Return a line for each refused type, with the reason."""
    refused = (row for row in known if row[field] == "refused")
    return "\n".join(f"- {row['type']}: {_text(row.get('why', ''))}" for row in refused)


def _text(why: str) -> str:
    return why.replace("|", "/").replace("<", "(").replace(">", ")")


def _parity_blocks(rows: Sequence[Mapping[str, Any]], parity: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on parity on real ranks: counts by family, and all that is not an agreement."""
    if not parity:
        return []
    families = {row["type"]: row["family"] for row in rows}
    by_layout: dict[str, Counter[str]] = {}
    for layout in (layout for row in parity for layout in row.get("layouts", ())):
        by_layout.setdefault(layout["layout"], Counter())[layout["outcome"]] += 1
    most_tried = sorted(by_layout.items(), key=lambda item: -item[1].total())
    trained = sum(bool(row.get("trains")) and not row.get("convolutional") for row in rows)
    refused = [
        f"- {row['type']}, {layout}: {_text(why)}"
        for row in parity
        for layout, why in row.get("refused", {}).items()
    ]
    return [
        "## Parity on processes",
        "Three steps of SGD at a rate of 0.1 on real processes, beside one process\n"
        "(`python -m tests.coverage.parity`): losses, gradients before they are clipped, their norm, and weights,\n"
        "within the tolerances of `echelon verify`. Every type under tp2·pp2, and under pp3, whose stages have unequal"
        "\nnumbers of layers (or pp2); data parallelism with ZeRO-1 is in place of what is refused.",
        f"{len(parity)} of these {trained} types have been tried, in a random order.",
        _by_family([(families[row["type"]], [row["parity"]]) for row in parity], _OUTCOMES, {"agrees"}),
        _outcome_table(dict(most_tried)),
        *_outcome_blocks(parity),
        f"Layouts that are refused before they start: {len(refused)}",
        "\n".join(refused),
    ]


_LISTED_TEXTS = {
    "five": (
        "## Five layouts",
        "As above, under each of five layouts (`python -m tests.coverage.parity --layouts five`):\n"
        "the types that ColossalAI has policies for, with DeepSeek-V2 in place of DeepSeek-MoE, which is no type of\n"
        "transformers, and 40 others of those that train, drawn by the date. Those of ColossalAI:\n"
        f"{', '.join(SEEDS)}.",
    ),
    "sequences": (
        "## Sequences and ZeRO",
        "As above, under each mode of sequence parallelism ([sequence.md](sequence.md)) and ZeRO-2, on two ranks\n"
        "(`python -m tests.coverage.parity --layouts sequences`): the same types, then all others that train, and the\n"
        "convolutional ones. The % above are of the types that were tried.",
    ),
}


def _listed_blocks(record: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on listed layouts: counts by release and layout, and all that is not an agreement."""
    if not rows:
        return []
    blocks = [*_LISTED_TEXTS[record]]
    releases = sorted({(row["transformers"], row["torch"]) for row in rows}, reverse=True)
    for transformers, torch in releases:
        tried = [row for row in rows if (row["transformers"], row["torch"]) == (transformers, torch)]
        absent = [row["type"] for row in tried if _ABSENT in row.get("why", "")]
        present = [row for row in tried if row["type"] not in absent]
        missing = f" Not in this release: {', '.join(absent)}." if absent else ""
        blocks += [
            f"### transformers {transformers}",
            f"torch {torch}, {len(present)} types.{missing}",
            *_tried_blocks(present, listed_layouts(record)),
        ]
    return blocks


def _head_blocks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on classes for other tasks."""
    if not rows:
        return []
    return [
        "## Other heads",
        "Types with each class for another task under tp2·pp2, or what of it is not refused\n"
        "(`python -m tests.coverage.parity --layouts heads`), but for types whose heads the tests compare\n"
        f"([models.md](models.md)): the types of the five layouts first, then others. {len(rows)} classes.",
        *_tried_blocks(rows, ()),
    ]


def _tried_blocks(rows: Sequence[Mapping[str, Any]], layouts: Iterable[str]) -> list[str]:
    """Return the outcomes of layouts, of those that no row has, too, and all that is not an agreement."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in layouts}
    for row in rows:
        for layout in row.get("layouts", ()):
            counts.setdefault(layout["layout"], Counter())[layout["outcome"]] += 1
        for layout in row.get("refused", ()):
            counts.setdefault(layout, Counter())["refused"] += 1
    causes = "\n".join(_cause_lines(rows))
    return [_outcome_table(counts), *_outcome_blocks(rows), "Refused before the ranks start:", causes]


def _outcome_table(counts: Mapping[str, Counter[str]]) -> str:
    cells = [(name, *(str(outcomes[outcome]) for outcome in _OUTCOMES)) for name, outcomes in counts.items()]
    return _table(["layout", *_OUTCOMES], cells)


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


def _outcome_blocks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return all departures, failures and refusals of ranks, with their numbers."""
    blocks = []
    for outcome, heading in (
        ("departs", "Departures"),
        ("fails", "Failures"),
        ("refused", "Refused when the small copy is built or the ranks start"),
    ):
        reasons = [
            f"- {row['type']}{under}: {_text(why)}" for row in rows for under, why in _reasons(row, outcome)
        ]
        blocks += [f"{heading}: {len(reasons)}", *["\n".join(reasons)] * bool(reasons)]
    return blocks


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


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows))
