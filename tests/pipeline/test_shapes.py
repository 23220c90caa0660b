"""Cuts where layers change the shape, run several times, or a model computes before its first layer."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn

from echelon.pipeline.plan import StagePlan
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.models import ModelChoice

from ..models.small_timm import build_timm, timm_pixels
from .stages import Ranks, cut, plan_of, require_same

IMAGES = [
    ModelChoice(model_type=model_type, head=head)
    for model_type, heads in (
        ("swin", ("image_classification", "masked_image", "base", "backbone")),
        ("swinv2", ("image_classification", "masked_image", "base", "backbone")),
        ("beit", ("masked_image", "base", "backbone", "segmentation")),
    )
    for head in heads
]
# Those that read the outputs of all layers.
WHOLE_HEADS = ("backbone", "segmentation")
SHARED = [
    ModelChoice(model_type="albert", head="masked"),
    ModelChoice(model_type="albert", settings=(("num_hidden_groups", 2),)),
    ModelChoice(model_type="albert", num_layers=5, settings=(("num_hidden_groups", 3),)),
    ModelChoice(model_type="albert", num_layers=3, settings=(("inner_group_num", 2),)),
]


def cuts(count: int) -> list[list[int]]:
    """Two stages with every cut there is, and as many stages as layers."""
    return [*([0, middle, count] for middle in range(1, count)), [*range(count + 1)]]


def require_same_under_every_cut(model: nn.Module, batch: Any, *, is_bitwise: bool) -> None:
    """Loss and gradients of the whole model, with every stage on a rank of its own, on one for all, and on two in turn.

    Gradients of what several stages use are summed in another order: 1e-6 of the largest.
    """
    plan = plan_of(model)
    for bounds in cuts(plan.num_layers(model)):
        stages = range(len(bounds) - 1)
        for placement in ([*stages], [0 for _ in stages], [stage % 2 for stage in stages]):
            ranks = cut(model, plan, placement, bounds)
            require_same(model, ranks, batch, tolerance=0.0 if is_bitwise else 1e-6, criterion=criterion)


def criterion(outputs: Any) -> Tensor:
    return outputs.square().mean() if isinstance(outputs, Tensor) else loss_of(outputs, None)


@pytest.mark.parametrize("choice", IMAGES, ids=lambda choice: f"{choice.model_type}-{choice.head}")
def test_layers_that_change_the_shape_compute_the_same_under_every_cut(choice: ModelChoice) -> None:
    # Layers share their biases, or their outputs are used in several places.
    adds_up = (choice.model_type, choice.head) == ("beit", "masked_image") or choice.head in WHOLE_HEADS
    require_same_under_every_cut(
        choice.build(), make_batch(choice, num_samples=2, seed=0), is_bitwise=not adds_up
    )


def test_parameters_of_the_model_itself_are_used_by_every_stage() -> None:
    require_same_under_every_cut(build_timm(), timm_pixels(2), is_bitwise=True)


@pytest.mark.parametrize("choice", SHARED, ids=lambda choice: f"{choice.num_layers}-{choice.settings}")
def test_layers_that_run_several_times_compute_the_same_under_every_cut(choice: ModelChoice) -> None:
    require_same_under_every_cut(choice.build(), make_batch(choice, num_samples=2, seed=0), is_bitwise=False)


def held_by(ranks: Ranks, path: str) -> list[bool]:
    return [any(name.startswith(path) for name, _ in part.named_parameters()) for part in ranks.parts]


def test_a_group_is_held_where_it_runs_and_nowhere_else() -> None:
    choice = ModelChoice(model_type="albert", num_layers=6, settings=(("num_hidden_groups", 2),))
    model = choice.build()
    plan = plan_of(model)
    ranks = cut(model, plan, [0, 1, 2], [0, 2, 4, 6])
    groups = "albert.encoder.albert_layer_groups"
    assert held_by(ranks, f"{groups}.0") == [True, True, False]
    assert held_by(ranks, f"{groups}.1") == [False, True, True]
    assert plan.stages_of(model, f"{groups}.0", [0, 2, 4, 6]) == [0, 1]


@pytest.mark.parametrize("is_encoder", [True, False])
def test_layers_of_an_encoder_and_a_decoder_that_run_several_times_are_refused(is_encoder: bool) -> None:
    plans: Sequence[str] = ("count", "") if is_encoder else ("", "count")
    with pytest.raises(ValueError, match="run once each: leave applied out"):
        StagePlan(
            layers="decoder.layers",
            entry=(),
            module="decoder",
            applied=plans[1],
            encoder=StagePlan(layers="encoder.layers", entry=(), module="encoder", applied=plans[0]),
        )


def test_collecting_from_what_runs_several_times_is_refused() -> None:
    with pytest.raises(ValueError, match="one stack of layers that run once, behind one entry"):
        StagePlan(layers="layers", entry=("embeddings",), applied="count", collecting=("fpn",))


def test_a_list_of_lists_that_lacks_one_is_told() -> None:
    choice = ModelChoice(model_type="swin")
    plan = StagePlan(layers="swin.encoder.layers.*.rows", entry=("swin.embeddings",))
    (told,) = plan.path_errors(choice.build_on_meta())
    assert "there is no 'swin.encoder.layers.0.rows'" in told
