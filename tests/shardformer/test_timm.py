"""Models without a config, by a table for their class: timm's vision transformers."""

import pytest
from torch import nn

from echelon.shardformer import policy_for
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.tables.table import table_for_class
from echelon.shardformer.tables.vision import TIMM_VIT
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import Report, parity

from ..models.small_timm import VisionTransformer, build_timm, register_timm
from ..pool import Pool
from ..slow import slow


class Distilled(VisionTransformer):
    """Subclass of the registered class, like timm's DeiT."""


def errors(model: nn.Module, *, tp_size: int = 1, num_stages: int = 1) -> list[str]:
    return split_errors(model, policy_for(model), tp_size=tp_size, num_stages=num_stages)


def test_a_class_made_from_a_registered_one_has_its_table_and_another_has_none() -> None:
    assert table_for_class(Distilled) is TIMM_VIT
    assert table_for_class(nn.Linear) is None


def test_heads_that_do_not_divide_are_padded() -> None:
    model = build_timm()  # of 4 heads
    assert errors(model, tp_size=8) == errors(model, tp_size=2, num_stages=3) == []


def test_an_attribute_that_a_layer_lacks_is_reported() -> None:
    model = build_timm()
    del model.blocks[1].attn.attn_dim
    (error,) = errors(model, tp_size=2)
    assert "blocks.1: the table names 'attn.attn_dim' in a layer, which has no attribute" in error


def registered_parity(choice: ModelChoice, layout: Layout) -> Report:
    register_timm()
    return parity(choice, layout)


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, pp=2), *slow(Layout(tp=2), Layout(pp=2), Layout(tp=2, dp=2, zero=1))],
    ids=str,
)
@pytest.mark.parametrize(
    "choice", [ModelChoice(model_type="timm", head="image_classification")], ids=["timm"]
)
def test_timm_trains_as_one_process_does(pool: Pool, choice: ModelChoice, layout: Layout) -> None:
    assert pool.run(layout.world_size, registered_parity, choice, layout)[0].departure is None
