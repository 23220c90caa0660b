"""Ranks of several stages, of models whose layers are shared, change the shape or are all read at the end."""

import pytest

from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool

INTERLEAVED = Layout(pp=2, schedule="interleaved", chunks=2)
ZERO_BUBBLE = Layout(pp=2, schedule="zbv")
GROUPS = ModelChoice(model_type="albert", num_layers=6, settings=(("num_hidden_groups", 2),))
ROWS = [
    (GROUPS, INTERLEAVED),
    (GROUPS, ZERO_BUBBLE),
    (GROUPS, Layout(tp=2, pp=2, precision="bf16")),
    (ModelChoice(model_type="swin", head="backbone"), INTERLEAVED),
    (ModelChoice(model_type="swin"), ZERO_BUBBLE),
    (ModelChoice(model_type="swinv2"), ZERO_BUBBLE),
    (ModelChoice(model_type="swinv2"), Layout(tp=2, pp=2, schedule="zbh1")),
    (ModelChoice(model_type="swinv2", head="backbone"), Layout(pp=2, schedule="zbh1")),
    (ModelChoice(model_type="beit", head="segmentation"), INTERLEAVED),
    (ModelChoice(model_type="beit", head="masked_image"), ZERO_BUBBLE),
    (ModelChoice(model_type="vit"), Layout(tp=2, pp=2, precision="bf16")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "layout"),
    [pytest.param(*row, id=f"{row[0].model_type}-{row[0].head_name}-{row[1]}") for row in ROWS],
)
def test_stages_of_one_rank_train_as_one_process_does(
    pool: Pool, choice: ModelChoice, layout: Layout
) -> None:
    reports = pool.run(layout.world_size, parity, choice, layout, timeout=120.0)
    assert reports[0].departure is None
