"""Models without a config, by a table for their class: timm's vision transformers."""

import pytest
import torch
from torch import Tensor, nn

from echelon import Booster, HybridParallelPlugin
from echelon.shardformer import policy_for
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.tables.table import table_for_class
from echelon.shardformer.tables.vision import TIMM_VIT
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import Report, parity

from ..models.small_timm import VisionTransformer, build_timm, register_timm, timm_pixels
from ..pool import Pool
from .compare import require_same_training


class Distilled(VisionTransformer):
    """Made from the one that is registered, as timm's DeiT is."""


def faults(model: nn.Module, *, tp_size: int = 1, num_stages: int = 1) -> list[str]:
    return split_errors(model, policy_for(model), tp_size=tp_size, num_stages=num_stages)


def test_a_class_made_from_a_registered_one_has_its_table_and_another_has_none() -> None:
    assert table_for_class(Distilled) is TIMM_VIT
    assert table_for_class(nn.Linear) is None
    with pytest.raises(ValueError, match="no table says how to split a Linear"):
        policy_for(nn.Linear(2, 2))


def test_heads_that_do_not_divide_are_padded() -> None:
    model = build_timm(num_heads=4)
    assert faults(model, tp_size=8) == faults(model, tp_size=2, num_stages=3) == []


def test_an_attribute_that_a_layer_lacks_is_told() -> None:
    model = build_timm()
    del model.blocks[1].attn.attn_dim
    (told,) = faults(model, tp_size=2)
    assert "blocks.1: the table names 'attn.attn_dim' in a layer, which has no attribute" in told


def train_split(num_heads: int) -> None:
    model = build_timm(num_heads=num_heads, width=8 * num_heads)
    require_same_training(model, {"pixels": timm_pixels(3)}, loss=squares)


def squares(outputs: Tensor, inputs: object = None) -> Tensor:
    return outputs.square().mean()


@pytest.mark.parametrize(("num_ranks", "num_heads"), [(2, 4), (4, 4), (2, 3)])
def test_the_split_model_computes_as_the_whole_one(pool: Pool, num_ranks: int, num_heads: int) -> None:
    pool.run(num_ranks, train_split, num_heads)


def train_steps() -> list[float]:
    """The losses of three steps on two stages of two ranks each."""
    plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=2, precision="fp32")
    booster = Booster(plugin=plugin)
    model = build_timm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, boosted_optimizer, criterion, _, _ = booster.boost(model, optimizer, squares)
    losses = []
    for step in range(3):
        output = booster.execute_pipeline(
            iter([timm_pixels(4, seed=step)]), boosted, criterion, boosted_optimizer, return_loss=True
        )
        losses.append(output["loss"].item())
        boosted_optimizer.step()
        boosted_optimizer.zero_grad()
    return losses


def test_stages_of_split_layers_train_as_one_process(pool: Pool) -> None:
    model = build_timm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for step in range(3):
        loss = squares(model(timm_pixels(4, seed=step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert expected[0] != pytest.approx(expected[2], rel=1e-2), "the steps change nothing"
    for losses in pool.run(4, train_steps):
        assert losses == pytest.approx(expected, rel=1e-5)


def registered_parity(choice: ModelChoice, layout: Layout) -> Report:
    register_timm()
    return parity(choice, layout)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(tp=2, dp=2, zero=1)], ids=str
)
@pytest.mark.parametrize(
    "choice", [ModelChoice(model_type="timm", head="image_classification")], ids=["timm"]
)
def test_timm_trains_as_one_process_does(pool: Pool, choice: ModelChoice, layout: Layout) -> None:
    assert pool.run(layout.world_size, registered_parity, choice, layout)[0].departure is None
