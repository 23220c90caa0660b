"""How many layers each stage gets. Where layers are, and what else a stage holds, is plan.py."""

from collections.abc import Callable, Sequence

# The number of parameters of a stage that holds the layers from the first index up to before the second. More
# layers never make it smaller.
StageSize = Callable[[int, int], int]


def deal_layers(num_layers: int, num_stages: int, stage_size: StageSize | None = None) -> list[int]:
    """How many layers each stage gets: equal where they divide, else so that the largest stage is smallest.

    Among such the most even counts, then fewer layers at both ends, then fewer early: an early stage keeps the
    activations of more microbatches.

    Args:
        num_layers: layers in all, at least one for each stage.
        num_stages: stages in all.
        stage_size: what counts as large; None takes the number of layers.
    """
    if num_layers % num_stages == 0:
        return [num_layers // num_stages] * num_stages
    size = stage_size or (lambda start, stop: stop - start)
    limit = _smallest_limit(num_layers, num_stages, size)
    # For each number of layers, the best way to deal them to the stages so far: what is compared, counts last.
    ways: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(num_stages):
        is_end = stage in (0, num_stages - 1)
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (unevenness, at_ends, counts) in ways.items():
            for stop in range(start + 1, num_layers - (num_stages - stage - 1) + 1):
                if size(start, stop) > limit:
                    break
                count = stop - start
                way = (unevenness + count**2, at_ends + count * is_end, (*counts, count))
                longer[stop] = min(longer.get(stop, way), way)
        ways = longer
    return list(ways[num_layers][-1])


def _smallest_limit(num_layers: int, num_stages: int, size: StageSize) -> int:
    """The size of the largest stage when it is as small as can be."""
    low, high = max(size(layer, layer + 1) for layer in range(num_layers)), size(0, num_layers)
    while low < high:
        middle = (low + high) // 2
        if _stages_within(num_layers, size, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_within(num_layers: int, size: StageSize, limit: int) -> int:
    """The fewest stages that hold all layers with none above the limit."""
    start = stages = 0
    while start < num_layers:
        stop = start + 1
        while stop < num_layers and size(start, stop + 1) <= limit:
            stop += 1
        start, stages = stop, stages + 1
    return stages


def layer_bounds(counts: Sequence[int]) -> list[int]:
    """Where each stage's layers begin, and at the end where the last one's stop: [2, 3] gives [0, 2, 5]."""
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return bounds


def layer_faults(
    num_layers: int,
    num_stages: int,
    num_layers_per_stage: Sequence[int] | None,
    stage_size: StageSize | None = None,
) -> list[str]:
    """All that is wrong with dealing out the layers; empty when it works."""
    if num_layers < num_stages:
        return [
            f"the model has {num_layers} layers and the pipeline {num_stages} stages, and each stage needs a layer: "
            f"use at most {num_layers} stages (pp_size times the stages of a rank)"
        ]
    if num_layers_per_stage is None:
        return []
    given = list(num_layers_per_stage)
    if len(given) == num_stages and sum(given) == num_layers and min(given) >= 1:
        return []
    return [
        f"num_layers_per_stage={given} must give each of {num_stages} stages at least one layer and "
        f"{num_layers} in all: {deal_layers(num_layers, num_stages, stage_size)} would"
    ]
