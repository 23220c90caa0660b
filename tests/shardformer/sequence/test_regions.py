"""Sequences that are spread between regions: layers against the native ones."""

from typing import Any

import pytest

from ...pool import Pool
from ..compare import named
from .layers import FURTHER, LAYERS, require_same, world_sequence


def layers(style: Any, overlap: bool, lengths: tuple[int, ...]) -> None:
    for name in LAYERS:
        for length in lengths:
            with named(f"{name} of length {length}"):
                require_same(name, world_sequence(style, overlap=overlap), length)


def further_layers(style: Any, overlap: bool) -> None:
    for name in FURTHER:
        with named(name):
            require_same(name, world_sequence(style, overlap=overlap), 13)


STYLES = [("gather", False), ("gather", True), ("regather", False), ("regather", True), ("ring", False)]


@pytest.mark.parametrize(("style", "overlap"), STYLES)
@pytest.mark.parametrize(
    ("ranks", "lengths"),
    [(2, (13,)), (3, (3, 13)), pytest.param(4, (3, 12, 13), marks=pytest.mark.slow)],
)
def test_a_layer_on_parts_of_a_sequence_computes_what_the_whole_one_does(
    pool: Pool, ranks: int, lengths: tuple[int, ...], style: Any, overlap: bool
) -> None:
    pool.run(ranks, layers, style, overlap, lengths)


@pytest.mark.parametrize(("style", "overlap"), STYLES)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_that_flatten_or_hold_what_is_not_spread(
    pool: Pool, ranks: int, style: Any, overlap: bool
) -> None:
    pool.run(ranks, further_layers, style, overlap)
