"""The first layers of a model, to which all others are alike, and the parameters of all."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..cluster.layout import SUB_AXES
from ..cluster.placement import placements_of
from ..pipeline.stage_plan import StagePlan, is_within
from ..shardformer.policy_choice import policy_for
from ..shardformer.sharder import stand_in_config
from .sections import LocalParameters


def stage_plan(model: nn.Module) -> StagePlan | None:
    """Return the stage plan of a model; None if it can have no pipeline."""
    try:
        policy = policy_for(model)
        policy.set_model(model)
        policy.set_shard_config(stand_in_config(num_stages=2))
        plan = policy.stage_plan()
        return plan if plan is not None and plan.num_layers(model) else None
    except ValueError:
        return None


def shorten(model: nn.Module, plan: StagePlan) -> list[int]:
    """Remove layers from the end of every stack, as long as one of every kind is left. In place.

    At least two stay before the last remaining one. This stands for the last layer, behind which others compute, and is
    of its kind. Lists of lists, layers that run several times and those with modules in between stay complete.

    Returns:
        By layer of the full model, the index of a remaining layer like it.
    """
    traced_of: list[int] = []
    num_kept = 0
    for stack in plan.stacks(model):
        kinds = [_kind(model.get_submodule(path)) for path in stack.paths]
        like = [*range(len(kinds))]
        is_one_list = "*" not in stack.plan.layers and not stack.plan.applied and not stack.plan.between
        num_before_last = max(2, 1 + max(map(kinds.index, kinds)))
        if is_one_list and num_before_last + 1 < len(kinds):
            last = kinds.index(kinds[-1], num_before_last)
            owner, _, name = stack.plan.layers.rpartition(".")
            layers: Any = model.get_submodule(stack.plan.layers)
            setattr(model.get_submodule(owner), name, layers[: last + 1])
            # The latest of a kind: the first layer may save what others share with it.
            latest = {kind: index for index, kind in enumerate(kinds[:last])}
            like = [*range(last), *(latest[kind] for kind in kinds[last:-1]), last]
        traced_of += [num_kept + index for index in like]
        num_kept += max(like) + 1
    return traced_of


def _kind(layer: nn.Module) -> Any:
    """Return a value that is equal for layers that compute alike: classes, shapes and switches."""
    modules = [
        (
            name,
            type(module),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if type(value) in (bool, int, str) and "idx" not in key
            ),
        )
        for name, module in layer.named_modules()
    ]
    parameters = [(name, parameter.shape) for name, parameter in layer.named_parameters()]
    return str((modules, parameters))


def local_parameters(
    model: nn.Module, plan: StagePlan | None, traced_of: Sequence[int]
) -> list[LocalParameters]:
    """Return the parameters of every layer of the full model, of which `model` has the first ones."""
    full_of: dict[int, list[int]] = {}
    for layer, traced in enumerate(traced_of):
        full_of.setdefault(traced, []).append(layer)
    paths = plan.layer_paths(model) if plan is not None else []
    users: dict[Tensor, set[int]] = {}
    within: set[Tensor] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, set()).update([0] if plan is None else plan.layers_of(model, name))
        if any(is_within(name, path) for path in paths):
            within.add(parameter)
    ends = _ends(model, plan, traced_of)
    sums: dict[tuple[str | None, frozenset[int]], tuple[int, int]] = {}
    for tensor, layers in users.items():
        placed = placements_of(tensor)
        axis = next((axis for axis in SUB_AXES if axis in placed and placed[axis].size > 1), None)
        if tensor in within and len(layers) == 1:
            (layer,) = layers
            places = [frozenset({full}) for full in full_of[layer]]
        elif len(layers) > 1 and len(layers) == len(paths):
            places = [frozenset(range(len(traced_of)))]
        else:
            places = [frozenset(ends.get(layer, layer) for layer in layers)]
        for place in places:
            numel, nbytes = sums.get((axis, place), (0, 0))
            sums[axis, place] = (numel + tensor.numel(), nbytes + tensor.nbytes)
    return [
        LocalParameters(numel=numel, nbytes=nbytes, axis=axis, layers=place)
        for (axis, place), (numel, nbytes) in sums.items()
    ]


def _ends(model: nn.Module, plan: StagePlan | None, traced_of: Sequence[int]) -> dict[int, int]:
    """Return for the first and last remaining layer of each stack its index in the full model."""
    if plan is None:
        return {}
    stacks = plan.stacks(model)
    stops = [*(traced_of.index(stack.first) for stack in stacks[1:]), len(traced_of)]
    ends = {}
    for stack, stop in zip(stacks, stops, strict=True):
        ends[stack.first] = traced_of.index(stack.first)
        if stack.stop - 1 > stack.first:
            ends[stack.stop - 1] = stop - 1
    return ends
