"""A model of real widths against one process: tiny ones have no product whose order of summing matters."""

import pytest

from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import Report, parity

from ..pool import Pool

# 110 million parameters.
LARGE = ModelChoice(
    model_type="llama",
    num_layers=12,
    settings=(
        ("vocab_size", 32000),
        ("hidden_size", 768),
        ("intermediate_size", 2048),
        ("num_attention_heads", 12),
        ("num_key_value_heads", 4),
    ),
)


def compare(layout: Layout) -> Report:
    return parity(LARGE, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", (Layout(tp=2, dp=2, zero=1), Layout(pp=2, dp=2, zero=2)), ids=str)
def test_a_hundred_million_parameters_agree(pool: Pool, layout: Layout) -> None:
    report = pool.run(4, compare, layout, timeout=900)[0]
    assert report.departure is None
