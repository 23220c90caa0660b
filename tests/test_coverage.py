"""The page of model types that train at all, and the record that it is made from."""

import json
import os
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from echelon.verify.model_choice import heads_of

from .coverage import parity
from .coverage.page import DATA, PAGE, make_page
from .coverage.ranks import run_forked
from .coverage.records import Records, run_each, trained_types

ABOUT = {"commit": "abc1234", "torch": "2.13.0", "transformers": "5.24.0"}
LIMITS = {"jobs": 1, "cpu_seconds": 20, "wall_seconds": 20, "memory": 1 << 40}


def row(name: str, **settings: Any) -> dict[str, Any]:
    return {
        "type": name,
        "class": name.title(),
        "task": "CAUSAL_LM",
        "family": "causal LM",
        **ABOUT,
        **settings,
    }


def test_the_page_counts_by_family_and_gives_reasons(tmp_path: Path) -> None:
    rows = {
        "good": row("good", trains=True),
        "bad": row("bad", trains=False, reason="ImportError: Bad requires the timm library | and more"),
        "net": row("net", trains=True, convolutional=True, family="image classification"),
    }
    data, page = tmp_path / "coverage.json", tmp_path / "coverage.md"
    assert make_page(rows=rows, data=data, page=page) == "coverage.md: 2 of 3 train"
    text = page.read_text()
    assert "| causal LM | 2 | 1 | 50 |" in text
    assert "| a package is missing | 1 | bad |" in text
    assert "| image classification | 1 | 1 | 100 |" in text
    assert [row["type"] for row in json.loads(data.read_text())["rows"]] == ["bad", "good", "net"]
    stages = {"good": {"type": "good", "stages": "derived", **ABOUT}}
    make_page(stages=stages, data=data, page=page)
    assert "| all | 0 | 1 | 0 | 100 |" in page.read_text()
    assert "| causal LM | 2 | 1 | 50 |" in page.read_text()
    layouts = [
        {"layout": "tp2·pp2", "outcome": "agrees", "gradient": 1e-9},
        {"layout": "pp3", "outcome": "departs", "why": "<loss>"},
    ]
    parity = {
        "good": {"type": "good", "parity": "departs", "layouts": layouts, "refused": {}, **ABOUT},
        "bad": {"type": "bad", "parity": "fails", "why": "passed a limit", **ABOUT},
    }
    make_page(parity=parity, data=data, page=page)
    text = page.read_text()
    assert "| all | 0 | 1 | 1 | 0 | 0 |" in text and "| pp3 | 0 | 1 | 0 | 0 |" in text
    assert "- good, pp3: (loss)" in text and "- bad: passed a limit" in text


def test_the_page_counts_five_layouts_by_release(tmp_path: Path) -> None:
    data, page = tmp_path / "coverage.json", tmp_path / "coverage.md"
    why = "no pipeline stages of a GoodModel are known: no list of layers. Use pp_size=1, or write a table"
    layouts = [
        {"layout": "tp2", "outcome": "agrees"},
        {"layout": "tp2·dp2·zero1", "outcome": "departs", "why": "w"},
    ]
    refused = dict.fromkeys(("pp2", "pp3", "tp2·pp2"), why)
    good = {"type": "good", "parity": "departs", "layouts": layouts, "refused": refused, **ABOUT}
    none = {"type": "none", "parity": "refused", "layouts": [], "refused": {"tp2": "why"}, **ABOUT}
    new = {
        "type": "new",
        "parity": "refused",
        "why": "model 'new' is not a model type of transformers 5",
        **ABOUT,
    }
    for release in ("5.24.0", "5.0.0"):
        rows = {row["type"]: row | {"transformers": release} for row in (good, none, new)}
        make_page(five=rows, data=data, page=page)
    newest, oldest = page.read_text().partition("## Five layouts")[2].split("### transformers ")[1:]
    assert newest.startswith("5.24.0") and oldest.startswith("5.0.0")
    for text in (newest, oldest):
        assert "| tp2 | 1 | 0 | 0 | 1 |" in text and "| tp2·dp2·zero1 | 0 | 1 | 0 | 0 |" in text
        assert "torch 2.13.0, 2 types. Not in this release: new.\n" in text
        assert "- good, tp2·dp2·zero1: w" in text and "the ranks start: 0" in text
        assert "- good, pp2, pp3, tp2·pp2: no list of layers\n- none, tp2: why\n" in text


def test_types_for_five_layouts_are_the_seeds_and_others_drawn_by_the_date() -> None:
    types = parity.drawn_types("2026-11-28")
    assert types == parity.drawn_types("2026-11-28") != parity.drawn_types("2026-11-29")
    assert len(types) == len(set(types)) == len(parity.SEEDS) + 40
    everything = parity.ordered_types()
    assert everything[: len(types)] == types == parity.drawn_types()
    convolutional = trained_types(convolutional=True)
    assert everything[-len(convolutional) :] == convolutional
    assert set(everything) == {*trained_types(), *convolutional, *parity.SEEDS}


@pytest.mark.slow
def test_heads_are_the_classes_beside_the_usual_one() -> None:
    by_type: dict[str, list[str]] = {}
    for name in parity.other_heads():
        model_type, _, head = name.partition("/")
        by_type.setdefault(model_type, []).append(head)
    assert "llama" not in by_type  # tests compare all of its heads
    assert "audio_classification" in by_type["wavlm"] and "ctc" not in by_type["wavlm"]
    assert len({heads_of("wavlm")[head] for head in by_type["wavlm"]}) == len(by_type["wavlm"])


def test_the_page_has_the_modes_of_sequence_parallelism_and_further_heads(tmp_path: Path) -> None:
    data, page = tmp_path / "coverage.json", tmp_path / "coverage.md"
    causes = {
        f"sp2·{mode}": f"sequence_parallelism_mode={mode!r}: Good uses shape: use another sequence_parallelism_mode"
        for mode in ("all_to_all", "ring_attn")
    }
    layouts = [
        {"layout": "dp2·zero2", "outcome": "agrees"},
        {"layout": "tp2·ring", "outcome": "fails", "why": "w"},
    ]
    good = {"type": "good", "parity": "fails", "layouts": layouts, "refused": causes, **ABOUT}
    token = {
        "type": "good/token",
        "parity": "agrees",
        "layouts": [{"layout": "tp2·pp2", "outcome": "agrees"}],
    }
    failing = {
        "type": "owlv2/object_detection",
        "parity": "fails",
        "layouts": [{"layout": "dp2·zero1", "outcome": "fails", "why": "w"}],
    }
    heads = {row["type"]: row | ABOUT for row in (token, failing)}
    rows = {"good": row("good", trains=True)}
    make_page(rows=rows, sequences={"good": good}, heads=heads, data=data, page=page)
    text = page.read_text()
    assert "| causal LM | 1 | 1 |  |  |  | 0% | 0% | 0% | 100% |" in text
    assert "| dp2·zero2 | 1 | 0 | 0 | 0 |" in text and "| sp2·ring_attn | 0 | 0 | 0 | 1 |" in text
    assert (
        "- good, tp2·ring: w" in text and "- good, sp2·all_to_all, sp2·ring_attn: Good uses shape\n" in text
    )
    assert "| tp2·pp2 | 1 | 0 | 0 | 0 |" in text.partition("## Other heads")[2]
    assert "- owlv2/object_detection, dp2·zero1: w: rounding in float32" in text


def test_the_page_is_made_from_the_data() -> None:
    kept = json.loads(DATA.read_text())
    assert kept["rows"]
    text = PAGE.read_text()
    trained = sum(bool(row.get("trains")) for row in kept["rows"] if not row.get("convolutional"))
    assert f"| all | {sum(not row.get('convolutional') for row in kept['rows'])} | {trained} |" in text


def test_a_record_goes_on_and_forgets_other_releases(tmp_path: Path) -> None:
    records = Records("plain", ABOUT, tmp_path)
    records.add({"type": "llama", "trains": False})
    records.add({"type": "llama", "trains": True})
    assert Records("plain", ABOUT, tmp_path).rows == {"llama": {"type": "llama", "trains": True} | ABOUT}
    assert Records("plain", ABOUT | {"transformers": "6.0.0"}, tmp_path).rows == {}


def _fails(argument: str) -> dict[str, Any]:
    if argument == "hangs":  # with a child that would hold the pipe open
        os.fork()
        time.sleep(60)
    if argument == "loops":
        while True:
            pass
    raise ValueError(f"no {argument}")


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("raises", "ValueError: no raises"),
        ("loops", "passed a limit of time or memory"),
        ("hangs", "passed a limit of time or memory"),
    ],
)
def test_a_row_that_fails_is_a_reason(argument: str, reason: str) -> None:
    limits = LIMITS | ({"loops": {"cpu_seconds": 1}, "hangs": {"wall_seconds": 1}}.get(argument, {}))
    ((name, answer),) = run_each(_fails, [argument], **limits)
    assert name == argument
    assert answer["reason"].startswith(reason)


def _rank(what: str) -> int:
    rank = dist.get_rank()
    if what == "refuses" or (what == "fails" and rank == 1):
        raise ValueError(f"no {what}")
    if what == "hangs" and rank == 0:
        time.sleep(60)
    return rank


def _on_ranks(what: str) -> dict[str, Any]:
    answers = run_forked(2, _rank, what, seconds=20 if what != "hangs" else 4)
    return {"answers": answers if isinstance(answers, list) else [answers.why, answers.is_refusal]}


@pytest.mark.parametrize(
    ("what", "answers"),
    [
        ("returns", [0, 1]),
        ("refuses", ["no refuses", True]),
        ("fails", ["no fails", False]),
        ("hangs", ["ranks [0] did not end within 4 s", False]),
    ],
)
def test_forked_ranks_answer_or_say_why_not(what: str, answers: list[Any]) -> None:
    ((_, answer),) = run_each(_on_ranks, [what], **LIMITS)
    assert answer == {"answers": answers}


# Known departures, with the types, are in docs/coverage.md.
@pytest.mark.slow
@pytest.mark.parametrize(("layouts", "count"), [("two", 12), ("sequences", 6)])
def test_drawn_types_agree_with_one_process_or_refuse(layouts: str, count: int) -> None:
    types = trained_types(datetime.now(UTC).strftime("%Y-%m-%d"))[:count]
    record = json.loads(DATA.read_text())[parity.RECORDS[layouts]]
    known = {row["type"] for row in record if row["parity"] == "departs"}
    limits = {"cpu_seconds": parity.CPU_SECONDS, "wall_seconds": parity.WALL_SECONDS, "memory": parity.MEMORY}
    rows = dict(run_each(partial(parity.compared, layouts=layouts), types, jobs=1, **limits))
    assert not {name: row for name, row in rows.items() if row.get("parity") == "departs"}.keys() - known
    assert sum(row.get("parity") == "agrees" for row in rows.values()) >= count // 2
