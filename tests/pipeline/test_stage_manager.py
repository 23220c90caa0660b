"""Distribution of layers to stages, compared with all other distributions, and for the sizes of real models."""

import itertools
import random
from typing import Any

import pytest
import torch
import transformers as T

from echelon.pipeline.stage_manager import (
    PipelineStageManager,
    StageSize,
    assign_layers,
    layer_bounds,
    layer_errors,
)

from ..shardformer.test_stages import RankAlone
from .stages import plan_of


def by_weights(weights: list[int]) -> StageSize:
    return lambda start, stop: sum(weights[start:stop])


def all_ways(num_layers: int, num_stages: int) -> list[list[int]]:
    cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [[stop - start for start, stop in itertools.pairwise((0, *inner, num_layers))] for inner in cuts]


def largest(counts: list[int], size: StageSize) -> int:
    return max(itertools.starmap(size, itertools.pairwise(layer_bounds(counts))))


@pytest.mark.parametrize("seed", range(20))
def test_layers_are_distributed_with_the_smallest_largest_stage_and_then_most_evenly(seed: int) -> None:
    draw = random.Random(seed)
    num_layers, num_stages = draw.randint(3, 9), draw.randint(2, 5)
    num_layers += num_layers % num_stages == 0
    num_stages = min(num_stages, num_layers)
    weights = [draw.choice([1, 2, 3, 20]) for _ in range(num_layers)]
    size = by_weights(weights)
    ways = all_ways(num_layers, num_stages)
    best = min(largest(counts, size) for counts in ways)
    assigned = assign_layers(num_layers, num_stages, size)
    assert largest(assigned, size) == best
    rivals = [counts for counts in ways if largest(counts, size) == best]
    order = [(sum(count**2 for count in counts), counts[0] + counts[-1], counts) for counts in rivals]
    assert assigned == min(order)[-1]


def test_divisible_layers_are_distributed_evenly_and_extra_ones_go_to_the_middle() -> None:
    assert assign_layers(8, 4, by_weights([100, *[1] * 7])) == [2, 2, 2, 2]
    assert assign_layers(9, 4) == [2, 2, 3, 2]
    assert assign_layers(10, 4) == [2, 3, 3, 2]
    assert assign_layers(7, 1) == [7]
    assert layer_bounds([2, 3, 2]) == [0, 2, 5, 7]


def test_layers_of_different_sizes_are_not_distributed_evenly() -> None:
    sizes = [1, 1, 1, 1, 10, 10, 10, 10]  # of a vision and a language model
    assert assign_layers(8, 2, lambda start, stop: sum(sizes[start:stop]), are_alike=False) == [6, 2]


def test_layers_of_a_long_model_with_a_large_embedding_are_distributed() -> None:
    weights = [50, *[1] * 125, 50]
    counts = assign_layers(127, 32, by_weights(weights))
    assert (counts[0], counts[-1], sum(counts)) == (1, 1, 127)
    assert set(counts[1:-1]) == {4, 5}


def on_meta(tied: bool, vocab_size: int) -> torch.nn.Module:
    config = T.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=7,
        num_attention_heads=4,
        intermediate_size=64,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        return T.LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_a_stages_size_is_that_of_its_parameters_and_a_tied_head_counts_on_the_last(tied: bool) -> None:
    model = on_meta(tied, vocab_size=1000)
    size = plan_of(model).stage_size(model)
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert size(1, 3) == 2 * layer
    assert size(0, 2) == 2 * layer + 32000
    assert size(5, 7) == 2 * layer + 32000 + 32
    assert size(0, 7) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("vocab_size", "expected"), [(100, [2, 3, 2]), (700, [2, 4, 1]), (1000, [1, 5, 1])])
def test_a_large_embedding_and_head_leave_fewer_layers_at_the_ends(
    vocab_size: int, expected: list[int]
) -> None:
    model = on_meta(True, vocab_size)
    plan = plan_of(model)
    mesh: Any = RankAlone(0, 3)
    manager = PipelineStageManager(mesh)
    counts = manager.distribute_layers(plan.num_layers(model), plan.stage_size(model))
    assert counts == expected
    manual = PipelineStageManager(mesh, num_layers_per_stage=[1, 1, 5])
    assert manual.bounds(7, plan.stage_size(model)) == [0, 1, 2, 7]


def test_a_layer_count_that_does_not_fit_says_what_would() -> None:
    assert "at most 3 stages" in layer_errors(3, 4, None)[0]
    assert "use [1, 2, 1], for example" in layer_errors(4, 3, [2, 2, 1])[0]
    assert "use [1, 1, 2], for example" in layer_errors(4, 3, [2, 2, 1], by_weights([9, 9, 1, 1]))[0]
    assert layer_errors(4, 3, [2, 1, 1]) == []
