"""Rows of the matrix fail when a mechanism that they rest on is broken on purpose."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from echelon.pipeline.plan import StagePlan
from echelon.pipeline.stand_ins import Recalled
from echelon.shardformer import table as table_module
from echelon.shardformer.layer import region
from echelon.shardformer.tables.vision import SWINV2
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool

ALBERT = ModelChoice(model_type="albert")
SEGMENTATION = ModelChoice(model_type="beit", head="segmentation")
SHARED_BIASES = ModelChoice(model_type="beit", head="masked_image")


def same(x: Any, *_: object) -> Any:
    return x


def no_reduction_where_layers_begin_a_region() -> AbstractContextManager:
    return patch.object(region, "enter", same)


@contextmanager
def only_one_stage_is_told_of_what_several_hold() -> Iterator[None]:
    layers_of = StagePlan.layers_of

    def first(self: StagePlan, model: nn.Module, name: str) -> list[int]:
        return layers_of(self, model, name)[:1]

    with patch.object(StagePlan, "layers_of", first):
        yield


def recalled_layers_return_what_arrived_last() -> AbstractContextManager:
    return patch.object(Recalled, "forward", lambda self, *args, **kwargs: self.inbox.take()[-1])


@contextmanager
def parts_of_gradients_are_left_as_they_are() -> Iterator[None]:
    broken = replace(SWINV2, partial=(), whole=SWINV2.partial)
    with patch.dict(table_module._TABLES, {"swinv2": broken}):
        yield


def departure_with(
    broken: Callable[[], AbstractContextManager[Any]], choice: ModelChoice, layout: Layout
) -> str:
    with broken():
        return parity(choice, layout, num_steps=1).departure or ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "choice", "layout"),
    [
        (no_reduction_where_layers_begin_a_region, ALBERT, Layout(tp=2)),
        (only_one_stage_is_told_of_what_several_hold, ALBERT, Layout(pp=2)),
        (only_one_stage_is_told_of_what_several_hold, SHARED_BIASES, Layout(pp=2)),
        (recalled_layers_return_what_arrived_last, SEGMENTATION, Layout(pp=2)),
        (parts_of_gradients_are_left_as_they_are, ModelChoice(model_type="swinv2"), Layout(tp=2)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "model_type", None) or str(value),
)
def test_a_broken_mechanism_is_found(
    pool: Pool, broken: Callable[[], AbstractContextManager], choice: ModelChoice, layout: Layout
) -> None:
    departures = pool.run(layout.world_size, departure_with, broken, choice, layout, timeout=120.0)
    assert all(departures), "the row does not see it"
