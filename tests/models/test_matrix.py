"""Every model type that has a table, with every head that transformers has for it, beside one process.

A row per table is quick, and one of a head that reads what all layers return; the others are `slow`.
"""

import pytest
from transformers import CONFIG_MAPPING

from echelon.shardformer import model_types, table_for
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice, heads_of
from echelon.verify.parity import parity

from ..pool import Pool

LAYOUTS = (Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(tp=2, dp=2, zero=1))
QUICK_LAYOUT = Layout(tp=2, pp=2)
COLLECTING = ("beit", "backbone")
# Heads whose weight may be the embedding's.
TIED_HEADS = ("causal", "double", "seq2seq", "masked", "speech", "image_text")
# Model types of six kinds that also run on four ranks of one axis.
WIDE = ("llama", "gpt2", "bert", "t5", "swin", "vit")


def choices(model_type: str) -> list[ModelChoice]:
    """The small models of a type, the one of its usual head first."""
    by_class = {kind: head for head, kind in reversed(heads_of(model_type).items())}
    heads = sorted(by_class.values(), key=lambda head: head != ModelChoice(model_type=model_type).head_name)
    return [
        ModelChoice(model_type=model_type, head=head, tied=is_tied)
        for head in heads
        for is_tied in ((False, True) if head in TIED_HEADS else (False,))
    ]


def rows() -> list[object]:
    """Model and layout of every row."""
    found, tables = [], []
    for model_type in filter(CONFIG_MAPPING.__contains__, model_types()):  # chatglm is in test_chatglm.py
        is_first = table_for(model_type) not in tables
        tables.append(table_for(model_type))
        for number, choice in enumerate(choices(model_type)):
            for layout in (*LAYOUTS, *((Layout(tp=4), Layout(pp=4)) if model_type in WIDE else ())):
                is_usual = is_first and number == 0
                is_quick = layout == QUICK_LAYOUT and (is_usual or (model_type, choice.head) == COLLECTING)
                name = f"{model_type}-{choice.head_name}{'-tied' * choice.tied}-{layout}"
                marks = () if is_quick else pytest.mark.slow
                found.append(pytest.param(choice, layout, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("choice", "layout"), rows())
def test_a_model_trains_as_one_process_does(pool: Pool, choice: ModelChoice, layout: Layout) -> None:
    reports = pool.run(layout.world_size, parity, choice, layout, timeout=120.0)
    assert len({report.departure for report in reports}) == 1, "ranks disagree on the verdict"
    assert reports[0].departure is None
