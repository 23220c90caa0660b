"""Sequence sharding at the first layer of a stack, gathering after the last, and setup of the layers between.

Outside of its layers a model computes on full sequences: embeddings, masks, positions, pooling, losses. Exceptions are
the modules of before_layers.py and the losses of loss.py. Inside, layers/split_gather.py communicates on the tensor
axis, attention.py on the sequence axis.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...cluster.collectives import all_reduce, paired
from ...cluster.errors import raise_errors
from ...cluster.transformers_api import (
    CACHE_NAMES,
    LAYER_POSITIONS,
    EmptyCache,
    checkpoint_function,
    set_checkpoint_function,
)
from ...pipeline.stage import (
    argument,
    cache_of,
    depends_on_cache,
    drop_cache,
    local_stages,
    takes,
    with_known_cache_name,
    without_cache,
)
from ...pipeline.stage_plan import Stack, StagePlan, refused_settings, settings_of
from ...pipeline.stand_ins import StandIn
from ..layers.attention_kernels import FLASH_PACKAGES
from ..layers.parallel_module import change_inputs, name_of_first_tensor
from ..layers.sequence_axis import (
    CommonRandom,
    SequenceAxis,
    SequenceOrder,
    ShardRandom,
    axis_of,
    draws_random_numbers,
    gather_sequence,
    sample_droppers,
    shard_sequence,
)
from .attention import ALL_TO_ALL, RING, attention_kernels, sequence_attention_errors, set_sequence_attention
from .before_layers import ShardTensor
from .config import SEQUENCE_MODES, SequenceSplit


def shard_sequences(model: nn.Module, plan: StagePlan, split: SequenceSplit) -> None:
    """Add hooks by which the layers of each stack compute on sequence shards.

    Further hooks, of the model and the modules around its layers, refuse calls that would compute on wrong shards,
    average the gradients of the model's inputs, and prepare recomputation. Called after the model is cut into stages,
    and before its layers are sharded over the tensor axis.

    Args:
        model: a cut model, or an uncut one in a dry run.
        plan: the paths of its layers.
        split: the mode and the ranks.

    Raises:
        ValueError: the layers cannot compute on shards; all reasons at once, before anything is changed.
    """
    raise_errors(_errors(model, plan, split))
    stacks = plan.stacks(model)
    layers = [layer for stack in stacks for layer in _shard_stack(model, stack, split)]
    around_layers = _modules_around(model, [path for stack in stacks for path in stack.paths])
    running = _track_running(around_layers)
    for layer in layers:
        layer.register_forward_pre_hook(partial(_refuse_call_outside_model, running=running))
    if split.settings.is_on_sequence_axis:
        _average_input_gradients(around_layers, running, split.group)
        _shard_attention(model, split)
    refuse = partial(_refuse_layer_outputs, names=refused_settings(model))
    model.register_forward_pre_hook(refuse, with_kwargs=True)
    model.register_forward_pre_hook(lambda module, args: remember_lengths(layers))


def _shard_stack(model: nn.Module, stack: Stack, split: SequenceSplit) -> list[nn.Module]:
    """Add the hooks of one stack of layers; return the local layers."""
    layers = [model.get_submodule(path) for path in stack.paths]
    is_zigzag = split.settings.mode == RING and any(map(_is_causal, layers))
    order = SequenceOrder(size=split.group.size(), is_zigzag=is_zigzag)
    boundary = Boundary(
        SequenceAxis(split.group, order, split.rings), is_on_sequence_axis=split.settings.is_on_sequence_axis
    )
    for first in _first_layer_of_stages(model, stack):
        boundary.enter(first, is_local=not isinstance(first, StandIn))
    local = [layer for layer in layers if not isinstance(layer, StandIn)]
    for layer in local:
        boundary.prepare(layer)
    if not isinstance(layers[-1], StandIn):
        boundary.leave(layers[-1])
    return local


def _shard_attention(model: nn.Module, split: SequenceSplit) -> None:
    """Set the attention of layers to the mode, which attends over full sequences, and turn key-value caches off."""
    mode = split.settings.mode
    assert mode is not None
    is_flash_ring = mode == RING and not attention_kernels(model).isdisjoint(FLASH_PACKAGES)
    set_sequence_attention(model, mode)
    if takes(model, "use_cache"):
        turn_off_cache = partial(_without_cache, is_flash_ring=is_flash_ring)
        model.register_forward_pre_hook(turn_off_cache, with_kwargs=True)
        model.register_forward_hook(lambda module, args, outputs: drop_cache(outputs))


def with_derived_entries(plan: StagePlan, *, in_encoder: bool) -> StagePlan:
    """Return a plan by which later stages, which receive only a shard, infer the length from the model's inputs.

    Args:
        plan: the plan of all layers.
        in_encoder: the layers of its encoder compute on shards, too.
    """
    encoder = (
        replace(plan.encoder, derives_entry_shapes=True) if plan.encoder and in_encoder else plan.encoder
    )
    return replace(plan, derives_entry_shapes=True, encoder=encoder)


def _errors(model: nn.Module, plan: StagePlan, split: SequenceSplit) -> list[str]:
    """List reasons why the layers of a model cannot compute on sequence shards; empty if they can."""
    kind, option = type(model).__name__, f"sequence_parallelism_mode={split.settings.mode!r}"
    conditions = {
        f"the layers of {kind} compute on windows of an image, not on one sequence": plan.between,
        f"the layers of {kind} run several times each": plan.applied,
        f"{kind} reads the outputs of all layers, which would be sharded": plan.collects(model),
    }
    errors = [
        f"{option}: {message}: leave enable_sequence_parallelism out"
        for message, holds in conditions.items()
        if holds
    ]
    errors += [
        f"{option}: {name}=True in {source} collects the outputs of layers, which would be sharded: set it "
        "to False, or leave enable_sequence_parallelism out"
        for source, settings in settings_of(model).items()
        for name in refused_settings(model)
        if settings.get(name)
    ]
    layers = [model.get_submodule(path) for path in plan.layer_paths(model)]
    chunks = {type(layer).__name__: getattr(layer, "chunk_size_feed_forward", 0) for layer in layers}
    errors += [
        f"{name} has chunk_size_feed_forward={chunk}, which chunks the sharded sequences again: set it to 0"
        for name, chunk in chunks.items()
        if chunk
    ]
    mode, size = split.settings.mode, split.group.size()
    if errors or mode not in SEQUENCE_MODES:
        return errors
    local = [layer for layer in layers if not isinstance(layer, StandIn)]
    errors = sequence_attention_errors(model, local) if local else []
    heads = -(-getattr(getattr(model, "config", None), "num_attention_heads", 0) // split.tp_size)
    if mode == ALL_TO_ALL and 1 <= heads < size:
        errors.append(
            f"sp_size={size} is more than the {heads} attention heads of a rank, over which all_to_all "
            f"shards: use sp_size={heads} or less, a smaller tp_size, or "
            "sequence_parallelism_mode='ring_attn'"
        )
    return [f"{option}: {error}" for error in dict.fromkeys(errors)]


def _first_layer_of_stages(model: nn.Module, stack: Stack) -> list[nn.Module]:
    """Return the module at the first layer's path for each of this rank's stages: the layer or its stand-in."""
    modules: list[nn.Module] = []
    for stage in local_stages(model).values():
        with stage.seated():
            modules.append(model.get_submodule(stack.paths[0]))
    return list(dict.fromkeys(modules))


def _modules_around(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """Return all modules around the modules at these paths, the model first."""
    paths_around = {
        ".".join(names[:count])
        for names in (path.split(".") for path in paths)
        for count in range(len(names))
    }
    return [model.get_submodule(path) for path in sorted(paths_around)]


def _track_running(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return a list of those of these modules whose forward runs now, the outermost first; hooks keep it up to date."""
    running: list[nn.Module] = []

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        if running and running[-1] is module:  # not if another hook has raised before
            running.pop()

    for module in modules:
        module.register_forward_pre_hook(lambda module, args: running.append(module))
        module.register_forward_hook(leave, always_call=True)
    return running


def _average_input_gradients(
    modules: Sequence[nn.Module], running: Sequence[nn.Module], group: dist.ProcessGroup
) -> None:
    """Add hooks that average the gradients of the tensors given to a model, as the optimizer does for parameters.

    A script may call the model, or a module in it that runs the layers: only the outermost running module averages.
    One all-reduce in backward for each tensor that requires a gradient. See [Note: gradients over the sequence axis].

    Args:
        modules: the modules around the layers.
        running: the ones whose forward runs now, the outermost first.
        group: the sequence axis.
    """

    def average_gradient(x: Tensor) -> Tensor:
        """Return the same tensor, whose gradient is averaged over the ranks in backward."""
        # A `ShardTensor` comes from the model's own embedding, whose parameters the optimizer averages.
        if not x.requires_grad or isinstance(x, ShardTensor) or not torch.is_grad_enabled():
            return x
        return paired(x, lambda x: x.view_as(x), lambda gradient: all_reduce(gradient, group) / group.size())

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook: average the gradients of the arguments, if this module is the outermost that runs."""
        if len(running) > 1:
            return args, kwargs
        averaged: tuple[tuple, dict[str, Any]] = tree_map_only(Tensor, average_gradient, (args, kwargs))
        return averaged

    for module in modules:
        module.register_forward_pre_hook(enter, with_kwargs=True)


def _refuse_call_outside_model(layer: nn.Module, args: Any, *, running: Sequence[nn.Module]) -> None:
    """Forward pre-hook: raise ValueError if the script calls a layer itself, whose hooks rely on the model's hooks.

    Args:
        layer, args: of the hook.
        running: the modules around the layers whose forward runs now; empty in a call outside of the model.
    """
    if (
        not running and torch._C._current_graph_task_id() == -1
    ):  # in a backward, which recomputes layers by themselves
        raise ValueError(
            f"a {type(layer).__name__} was called outside of its model, but computes on a shard of the "
            "sequences: call the model, or leave enable_sequence_parallelism out"
        )


def _without_cache(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], *, is_flash_ring: bool
) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook: turn the key-value cache off, or raise ValueError if the call requests one.

    Each rank would cache only a shard. `is_flash_ring` is True for ring attention in place of flash attention.
    """
    kwargs = with_known_cache_name(model, kwargs)
    cache = cache_of(model, args, kwargs)
    if argument(model, args, kwargs, "use_cache") or not isinstance(cache, (EmptyCache, NoneType)):
        raise ValueError(
            "use_cache=True, as in generate(), is not supported by 'all_to_all' and 'ring_attn', where each "
            "rank has the keys and values of its shard: save the model, and generate with it in one process "
            "or under tp"
        )
    if is_flash_ring and depends_on_cache(model, args, kwargs):
        # Flash attention separates packed texts in batches of one row, with or without a cache.
        positions = argument(model, args, kwargs, "position_ids")
        positions_BS = positions.select(0, 0) if positions.ndim == 3 else positions  # (axes, B, S), or (B, S)
        if len(positions_BS) > 1:
            kwargs = {**kwargs, "attention_mask": torch.ones_like(positions_BS)}
        remaining = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        return args, {**remaining, "use_cache": False}
    return args, without_cache(model, args, kwargs)


def _is_causal(layer: nn.Module) -> bool:
    """Return True if a layer has an attention that is causal by default."""
    return any(getattr(module, "is_causal", False) is True for module in layer.modules())


def _refuse_layer_outputs(
    model: Any, args: Sequence[Any], kwargs: dict[str, Any], *, names: Sequence[str]
) -> None:
    """Forward pre-hook: raise ValueError if the call, or else the config, asks for outputs of layers."""
    for name in names:
        requested, source = kwargs.get(name), "this call"
        if requested is None:
            requested, source = getattr(getattr(model, "config", None), name, False), "the model's config"
        if requested:
            raise ValueError(
                f"{name}=True in {source} returns the outputs of layers, which sequence parallelism shards "
                f"over the ranks: set it to False"
            )


_DIM = 1  # the sequence dimension of hidden states (B, S, H)
# Not sharded for any layer: attention covers the full sequence, and the loss takes its shard itself.
_UNSHARDED_ARGUMENTS = ("attention_mask", "shift_labels")


class Boundary:
    """Hooks at both ends of one stack of layers.

    Args:
        axis: axis of the sharded sequences. On the tensor axis sequences are sharded only between regions.
        is_on_sequence_axis: False on the tensor axis, see [Note: gradients over the sequence axis].
    """

    def __init__(self, axis: SequenceAxis, *, is_on_sequence_axis: bool) -> None:
        self.axis, self._is_on_sequence_axis = axis, is_on_sequence_axis

    def enter(self, first: nn.Module, *, is_local: bool) -> None:
        """Shard sequences before the first layer; before its stand-in on a later stage, only set the length."""

        def begin(module: nn.Module, inputs: dict[str, Any]) -> None:
            """Set the length of the axis, and replace the hidden states by this rank's shard if the layer is local."""
            name = name_of_first_tensor(inputs)
            hidden = inputs[name]
            if hidden.ndim != _DIM + 2:
                raise ValueError(
                    f"a {type(module).__name__} received hidden states of shape {tuple(hidden.shape)}, but "
                    "sequence parallelism needs (batch, sequence, width): leave enable_sequence_parallelism "
                    "out for this model"
                )
            self.axis.length = hidden.shape[_DIM]
            if is_local and isinstance(hidden, ShardTensor) and hidden.shard is not None:
                inputs[name] = hidden.shard  # the modules before the layers sharded it
                return
            full = hidden.full() if isinstance(hidden, ShardTensor) else hidden
            inputs[name] = (
                shard_sequence(full, self.axis, is_on_sequence_axis=self._is_on_sequence_axis)
                if is_local
                else full
            )

        change_inputs(first, begin)

    def leave(self, last: nn.Module) -> None:
        """Gather sequences after the last layer, unless they stay sharded up to the loss."""

        def end(module: nn.Module, args: tuple, output: Any) -> Any:
            """Forward hook: gather the hidden states, the output or the first entry of a tuple."""
            if not self.axis.gathers_after_last_layer:
                return output
            hidden = output[0] if isinstance(output, tuple) else output
            gathered = gather_sequence(
                hidden, self.axis, self.axis.length, is_on_sequence_axis=self._is_on_sequence_axis
            )
            return (gathered, *output[1:]) if isinstance(output, tuple) else gathered

        last.register_forward_hook(end)

    def prepare(self, layer: nn.Module) -> None:
        """Prepare a layer for sequence shards: mark it with the axis, and add hooks to it.

        On the sequence axis the hooks shard its arguments by position, and give its dropout random numbers that differ
        between ranks. On the tensor axis the sharding of the layer itself does both.
        """
        self.axis.mark(layer)
        if not self._is_on_sequence_axis:
            return

        def cut(module: nn.Module, inputs: dict[str, Any]) -> None:
            """Replace all inputs by position, except for the hidden states, by this rank's shard."""
            for name in list(inputs)[1:]:  # without the hidden states
                inputs[name] = self._shard_argument(module, name, inputs[name])

        change_inputs(layer, cut)
        if draws_random_numbers(layer):
            for name in sample_droppers(layer):
                CommonRandom.from_native_module(layer.get_submodule(name), self.axis.group, layer=layer)
            ShardRandom.from_native_module(layer, self.axis.group)

    def _shard_argument(self, layer: nn.Module, name: str, value: Any) -> Any:
        """Return this rank's shard of an argument with entries by position, or another argument as it is.

        Raises:
            ValueError: the argument is unknown, and one of its dimensions has the length of the sequence.
        """
        if name in LAYER_POSITIONS:
            return tree_map_only(Tensor, lambda x: self._shard_tensor(x, LAYER_POSITIONS[name]), value)
        if name not in _UNSHARDED_ARGUMENTS and isinstance(value, Tensor) and self.axis.length in value.shape:
            raise ValueError(
                f"{type(layer).__name__} received {name} of shape {tuple(value.shape)}, whose dimension of "
                f"the sequence (length {self.axis.length}) is unknown: use "
                "sequence_parallelism_mode='split_gather' for this model"
            )
        return value

    def _shard_tensor(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a full sequence along `dim`; a `ShardTensor` already contains it."""
        shard = x.shard if isinstance(x, ShardTensor) else None
        return self.axis.shard(x, dim) if shard is None else shard


class CheckpointWithLength:
    """A checkpoint function that saves the sequence length in forward, for recomputation in backward.

    Args:
        checkpoint: calls a function in forward and again in backward, as used by transformers' layers.
        axis: the axis of the layer.
    """

    def __init__(self, checkpoint: Callable[..., Any], axis: SequenceAxis) -> None:
        self.checkpoint, self._axis = checkpoint, axis

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `checkpoint` on a function that restores the length in backward."""
        lengths: list[int] = []  # of this call; empty until its forward has run

        def compute(*args: Any) -> Any:
            """Call the function; in backward with the length of its forward."""
            if lengths:
                with self._axis.computing(lengths[0]):
                    return function(*args)
            outputs = function(*args)
            lengths.append(self._axis.length)  # after the call: the first layer sets it
            return outputs

        return self.checkpoint(compute, *args)


def remember_lengths(layers: Sequence[nn.Module]) -> None:
    """Wrap the checkpoint functions of these layers in `CheckpointWithLength`; called before every forward."""
    for layer in layers:
        checkpoint, axis = checkpoint_function(layer), axis_of(layer)
        if checkpoint is not None and axis is not None and not isinstance(checkpoint, CheckpointWithLength):
            set_checkpoint_function(layer, CheckpointWithLength(checkpoint, axis))
