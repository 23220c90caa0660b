"""Which layers of a model compute on parts of sequences. What happens at the ends of a stack is boundary.py."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...pipeline.plan import COLLECTING, Stack, StagePlan, settings_of
from ...pipeline.stage import argument, depends_on_cache, drop_cache, local_stages, takes, without_cache
from ...pipeline.stand_ins import StandIn
from ..attention import FLASH_ATTENTION_2
from ..layers.sequence_axis import SequenceAxis, SequenceOrder
from .all_to_all import heads_faults
from .attention import ALL_TO_ALL, RING, attention_kernels, set_sequence_attention
from .attention_faults import sequence_attention_faults
from .boundary import Boundary
from .config import SequenceParallelism, SequenceSplit
from .recompute import remember_lengths


def spread_sequences(model: nn.Module, plan: StagePlan, split: SequenceSplit) -> None:
    """Let the layers of each stack compute on parts of sequences, by hooks. After the cut, before layers are split.

    Args:
        model: a cut model; `spread_faults` found nothing against it.
        plan: where its layers are.
        split: how.
    """
    is_data, held = split.settings.is_on_sequence_axis, list[nn.Module]()
    for stack in plan.stacks(model):
        layers = [model.get_submodule(path) for path in stack.paths]
        is_zigzag = split.settings.mode == RING and any(map(_is_causal, layers))
        order = SequenceOrder(size=split.group.size(), is_zigzag=is_zigzag)
        boundary = Boundary(SequenceAxis(split.group, order, split.rings), is_data=is_data)
        for first in _in_first_place(model, stack):
            boundary.enter(first, is_held=not isinstance(first, StandIn))
        for layer in layers:
            if not isinstance(layer, StandIn):
                boundary.note(layer)
                held.append(layer)
        if not isinstance(layers[-1], StandIn):
            boundary.leave(layers[-1])
    if is_data:
        assert split.settings.mode is not None
        is_flash_ring = split.settings.mode == RING and FLASH_ATTENTION_2 in attention_kernels(model)
        set_sequence_attention(model, split.settings.mode)
        if takes(model, "use_cache"):
            forgo = partial(_without_cache, is_flash_ring=is_flash_ring)
            model.register_forward_pre_hook(forgo, with_kwargs=True)
            model.register_forward_hook(lambda module, args, outputs: drop_cache(outputs))
    model.register_forward_pre_hook(_refuse_collecting, with_kwargs=True)
    model.register_forward_pre_hook(lambda module, args: remember_lengths(held))


def reckoning(plan: StagePlan) -> StagePlan:
    """The plan by which later stages know how long sequences are: what arrives is a part of one."""
    encoder = None if plan.encoder is None else reckoning(plan.encoder)
    return replace(plan, are_entries_reckoned=True, encoder=encoder)


def spread_faults(
    model: nn.Module, plan: StagePlan | None, settings: SequenceParallelism, *, tp_size: int, sp_size: int
) -> list[str]:
    """Why the layers of a whole model cannot compute on parts of sequences; empty when they can."""
    kind, option = type(model).__name__, f"sequence_parallelism_mode={settings.mode!r}"
    if plan is None:
        return [
            f"{option}: the policy of this {kind} has no stage_plan, which says where its layers are: add one"
        ]
    found = []
    if plan.between:
        found.append(
            f"{option}: the layers of {kind} work on windows of an image, and no sequence goes through all of them: "
            "leave enable_sequence_parallelism out"
        )
    if plan.applied:
        found.append(
            f"{option}: the layers of {kind} run several times each, and nothing tells the first run from the others: "
            "leave enable_sequence_parallelism out"
        )
    if plan.collects(model):
        found.append(
            f"{option}: {kind} reads the outputs of all layers, which are parts: leave enable_sequence_parallelism out"
        )
    config = getattr(model, "config", None)
    found += [
        f"{option}: {name}=True in {source} collects what layers compute, which are parts: set it to False, or leave "
        "enable_sequence_parallelism out"
        for source, settings in settings_of(model).items()
        for name in COLLECTING
        if settings.get(name)
    ]
    if found or not settings.is_on_sequence_axis:
        return found
    assert settings.mode is not None
    layers = [model.get_submodule(path) for path in plan.layer_paths(model)]
    found = sequence_attention_faults(model, settings.mode, option, layers)
    heads = -(-getattr(config, "num_attention_heads", 0) // tp_size)
    return found + (heads_faults(heads, sp_size, option) if settings.mode == ALL_TO_ALL else [])


def _in_first_place(model: nn.Module, stack: Stack) -> list[nn.Module]:
    """What stands at the first layer's place, on each of this rank's stages."""
    found: list[nn.Module] = []
    for stage in local_stages(model).values():
        with stage.seated():
            found.append(model.get_submodule(stack.paths[0]))
    return list(dict.fromkeys(found))


def _without_cache(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], *, is_flash_ring: bool
) -> tuple[tuple, dict[str, Any]]:
    """Forgo the keys and values of former calls, of which each rank would keep those of a part."""
    if (
        argument(model, args, kwargs, "use_cache")
        or argument(model, args, kwargs, "past_key_values") is not None
    ):
        raise ValueError(
            "use_cache=True, as in generate(), under a sequence_parallelism_mode of the sequence axis, where each rank "
            "would keep the keys and values of a part: save the model, and generate with it in one process or under tp"
        )
    if is_flash_ring and depends_on_cache(model, args, kwargs):
        # Flash attention keeps packed texts apart in batches of one row, with or without a cache.
        positions = argument(model, args, kwargs, "position_ids")
        if len(positions) > 1:
            kwargs = {**kwargs, "attention_mask": torch.ones_like(positions)}
        return args, {**kwargs, "use_cache": False}
    return args, without_cache(model, args, kwargs)


def _is_causal(layer: nn.Module) -> bool:
    return any(getattr(module, "is_causal", False) is True for module in layer.modules())


def _refuse_collecting(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for name in COLLECTING:
        asked = kwargs.get(name)
        if getattr(getattr(model, "config", None), name, False) if asked is None else asked:
            raise ValueError(
                f"{name}=True in this call returns what the layers compute, which under sequence parallelism is a part "
                "of the sequence on each rank: leave it out"
            )
