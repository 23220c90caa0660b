"""The ends of a stack of layers whose sequences are sharded, and the layers of a model that compute on parts.

All that a model computes around its layers it computes on whole sequences: embeddings, masks, positions, pooling,
losses, except for the modules of before_layers.py. How layers compute with a part of a sequence is
layers/split_gather.py on the tensor axis, attention.py on the sequence axis.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...pipeline.plan import COLLECTING, Stack, StagePlan, settings_of
from ...pipeline.stage import argument, depends_on_cache, drop_cache, local_stages, takes, without_cache
from ...pipeline.stand_ins import StandIn
from ..layers.attention import FLASH_ATTENTION_2
from ..layers.sequence_axis import (
    CommonRandom,
    PartRandom,
    SequenceAxis,
    SequenceOrder,
    axis_of,
    draws,
    gather_sequence,
    samplewise,
    shard_sequence,
)
from .attention import ALL_TO_ALL, RING, attention_kernels, sequence_attention_errors, set_sequence_attention
from .before_layers import PartTensor
from .config import SequenceParallelism, SequenceSplit
from .ulysses import heads_errors


def shard_sequences(model: nn.Module, plan: StagePlan, split: SequenceSplit) -> None:
    """Let the layers of each stack compute on parts of sequences, by hooks. After the cut, before layers are split.

    Args:
        model: a cut model; `sequence_errors` found nothing against it.
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
            boundary.enter(first, is_local=not isinstance(first, StandIn))
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


def sequence_errors(
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
    found = sequence_attention_errors(model, settings.mode, option, layers)
    heads = -(-getattr(config, "num_attention_heads", 0) // tp_size)
    return found + (heads_errors(heads, sp_size, option) if settings.mode == ALL_TO_ALL else [])


def _in_first_place(model: nn.Module, stack: Stack) -> list[nn.Module]:
    """The modules at the first layer's place, on each of this rank's stages."""
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


_DIM = 1  # of the sequence in hidden states (B, S, H)
# Arguments of layers with an entry for each position, besides hidden states, and the dimension of positions.
_BY_POSITION = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1}
# Whole for all layers: attention sees the whole sequence, and the loss takes its own part.
_WHOLE = ("attention_mask", "past_key_values", "past_key_value", "shift_labels")


class Boundary:
    """The two ends of one stack of layers.

    Args:
        axis: over which its sequences are sharded. On the tensor axis only the stretches between regions are.
        is_data: whether it is the sequence axis, see [Note: gradients over the sequence axis].
    """

    def __init__(self, axis: SequenceAxis, *, is_data: bool) -> None:
        self.axis, self._is_data = axis, is_data

    def enter(self, first: nn.Module, *, is_local: bool) -> None:
        """Shard sequences in front of the first layer, or in front of what stands for it on a later stage."""

        def begin(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            hidden, put = _hidden(args, kwargs)
            if hidden.ndim != _DIM + 2:
                raise ValueError(
                    "sequence parallelism takes hidden states of (batch, sequence, width), and a "
                    f"{type(module).__name__} is given {tuple(hidden.shape)}: leave "
                    "enable_sequence_parallelism out for this model"
                )
            self.axis.length = hidden.shape[_DIM]
            if isinstance(hidden, PartTensor):
                if is_local and hidden.part is not None:
                    return put(hidden.part)
                hidden = hidden.whole()
            return put(shard_sequence(hidden, self.axis, is_data=self._is_data) if is_local else hidden)

        first.register_forward_pre_hook(begin, with_kwargs=True)

    def leave(self, last: nn.Module) -> None:
        """Gather them behind the last layer, unless they stay sharded up to the loss."""

        def end(module: nn.Module, args: tuple, output: Any) -> Any:
            if not self.axis.ends_whole:
                return output
            hidden = output[0] if isinstance(output, tuple) else output
            whole = gather_sequence(hidden, self.axis, self.axis.length, is_data=self._is_data)
            return (whole, *output[1:]) if isinstance(output, tuple) else whole

        last.register_forward_hook(end)

    def note(self, layer: nn.Module) -> None:
        """Let a layer compute on parts: mark it with the axis, and cut its arguments by position."""
        self.axis.note(layer)
        if not self._is_data:
            return
        names = list(inspect.signature(layer.forward).parameters)

        def cut(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            named = dict(zip(names, args, strict=False))
            first = next(iter(named), names[0])  # the hidden states
            own = {
                name: value if name == first else self._own(module, name, value)
                for name, value in (*named.items(), *kwargs.items())
            }
            return (
                tuple(own[name] for name in names[: len(args)]),
                {name: own[name] for name in kwargs},
            )

        layer.register_forward_pre_hook(cut, with_kwargs=True)
        if draws(layer):
            for name in samplewise(layer):
                CommonRandom.from_native_module(layer.get_submodule(name), self.axis.group, layer=layer)
            PartRandom.from_native_module(layer, self.axis.group)

    def _own(self, layer: nn.Module, name: str, value: Any) -> Any:
        if name in _BY_POSITION:
            return tree_map_only(Tensor, lambda x: self._part(x, _BY_POSITION[name]), value)
        if name not in _WHOLE and isinstance(value, Tensor) and self.axis.length in value.shape:
            raise ValueError(
                f"{type(layer).__name__} is given {name} of {tuple(value.shape)}, and nothing says how a sequence of "
                f"{self.axis.length} is cut in it: use sequence_parallelism_mode='split_gather' for this model"
            )
        return value

    def _part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's, which may be there without the whole."""
        part = x.part if isinstance(x, PartTensor) else None
        return self.axis.own(x, dim) if part is None else part


def _hidden(
    args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Tensor, Callable[[Tensor], tuple[tuple, dict[str, Any]]]]:
    """The hidden states among a layer's arguments, and the arguments with others in their place."""
    if args:
        return args[0], lambda hidden: ((hidden, *args[1:]), dict(kwargs))
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return kwargs[name], lambda hidden: ((), {**kwargs, name: hidden})


class RememberingLength:
    """A function that checkpoints, in front of which the length of the sequence is kept for the second time.

    Args:
        checkpoint: calls what it is given once in forward and again in backward, as transformers' layers have it.
        axis: of the layer.
    """

    def __init__(self, checkpoint: Callable[..., Any], axis: SequenceAxis) -> None:
        self.checkpoint, self._axis = checkpoint, axis

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `checkpoint` on a function that knows the length in backward too."""
        lengths: list[int] = []

        def compute(*args: Any) -> Any:
            if lengths:
                with self._axis.computing(lengths[0]):
                    return function(*args)
            outputs = function(*args)
            lengths.append(self._axis.length)  # the first layer sets it itself
            return outputs

        return self.checkpoint(compute, *args)


def remember_lengths(layers: Sequence[nn.Module]) -> None:
    """Let these layers keep the length where they are checkpointed, whoever asked for that, and when."""
    for layer in layers:
        checkpoint, axis = getattr(layer, "_gradient_checkpointing_func", None), axis_of(layer)
        if checkpoint is not None and axis is not None and not isinstance(checkpoint, RememberingLength):
            layer._gradient_checkpointing_func = RememberingLength(checkpoint, axis)  # type: ignore[assignment]
