"""Attention over sharded sequences, registered in transformers' attention interface.

ulysses.py and ring_attention.py compute it. Models whose attention would give other results are refused.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ...cluster.forward_random import not_compiled
from ...cluster.transformers_api import (
    ATTENTION,
    ATTENTION_BY_HEADS,
    ATTENTION_SETTINGS,
    ATTENTION_TABLE,
    BESIDES_ATTENTION,
    EAGER_FUNCTION,
    attention_name,
    can_set_attention,
    register_attention,
    set_attention_name,
)
from ..layers.attention_kernels import (
    EAGER,
    FLASH_PACKAGES,
    KERNELS,
    SDPA,
    is_causal_call,
    register_kernels,
)
from ..layers.region import AttributeView
from ..layers.sequence_axis import INSTEAD, SequenceAxis, axis_of
from .block_mask import BlockKind, Mask, block_mask
from .ring_attention import ring_attention
from .ulysses import attend_by_heads

# B batch, S sequence with padding, N query heads, M key-value heads, D width of a head, P ranks

ALL_TO_ALL, RING = "all_to_all", "ring_attn"

_UNSHARDED = (
    "under 'ring_attn' this is supported only in layers whose sequences are sharded: use "
    "sequence_parallelism_mode='all_to_all'"
)

_BY_HEADS = ATTENTION_SETTINGS | ATTENTION_BY_HEADS
_WITHOUT_EFFECT = BESIDES_ATTENTION | {"deterministic"}
# The arguments that each mode supports, or that do not change its results.
SUPPORTED_ARGUMENTS = {ALL_TO_ALL: _BY_HEADS | _WITHOUT_EFFECT, RING: ATTENTION_SETTINGS | _WITHOUT_EFFECT}
_CROSS = re.compile("cross_?att|encoder_attn|EncDecAttention", re.IGNORECASE)


def set_sequence_attention(model: nn.Module, mode: str) -> None:
    """Set the attention of layers with sharded sequences to a mode that attends over full sequences.

    Args:
        model: its layers are marked by `SequenceAxis.mark`, and have no `sequence_attention_errors`.
        mode: a key of SUPPORTED_ARGUMENTS.
    """
    _register()
    for submodel in models_around(model, _has_sharded_sequences):
        set_attention_name(submodel.config, _sequence_attention_name(mode, attention_name(submodel.config)))


def attention_kernels(model: nn.Module) -> set[str]:
    """Return the attention kernels of layers with sharded sequences."""
    return {attention_name(submodel.config) for submodel in models_around(model, _has_sharded_sequences)}


def all_to_all_attention(
    kernel: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Compute attention by `attend_by_heads`, with the signature of transformers' attention functions.

    Modules with unsharded sequences call the kernel directly.

    Args:
        kernel: name of the attention kernel.
        module: the attention module.
        query: (B, N, S/P, D).
        key, value: (B, M, S/P, D).
        attention_mask: the kernel's mask, for full sequences.
        **kwargs: further arguments of the kernel.

    Returns:
        (B, S/P, N, D), and None for the attention weights if sequences are sharded.

    Raises:
        ValueError: an argument is not supported for sharded sequences.
    """
    attend, axis = kernel_of(module, kernel), axis_of(module)
    if axis is None or axis.group.size() == 1:
        return attend(module, query, key, value, attention_mask, **kwargs)
    _refuse_unknown_arguments(module, kwargs, ALL_TO_ALL)
    known = {name: value for name, value in kwargs.items() if name in _BY_HEADS}
    if kernel in FLASH_PACKAGES and (positions := kwargs.get("position_ids")) is not None:
        known["position_ids"] = _full_positions(positions, axis)  # they mark the starts of packed sequences
    return attend_by_heads(attend, module, query, key, value, attention_mask, axis, **known), None


@not_compiled
def ring_attention_of(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    *,
    is_eager: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Compute attention by `ring_attention`, with the signature of transformers' attention functions.

    Modules with unsharded sequences use torch's attention.

    Args:
        module: the attention module; its `is_causal` is the default of the argument.
        query: (B, N, S/P, D).
        key, value: (B, M, S/P, D), where M divides N.
        attention_mask: for full sequences, as `block_mask` makes it. Without one all keys are visible, or with
            `is_causal` the keys up to the query.
        dropout: probability, 0 outside of training.
        scaling: factor of the scores; None is D to the power of -1/2.
        softcap: bound of the scores; only for sharded sequences.
        is_eager: True if the model used eager attention, which adds any mask to the scores.
        **kwargs: arguments without effect on the result.

    Returns:
        (B, S/P, N, D), and None for the attention weights.

    Raises:
        ValueError: an argument is not supported for sharded sequences.
    """
    _refuse_unknown_arguments(module, kwargs, RING)
    if is_eager and isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool:
        raise ValueError(
            f"a boolean attention mask of {tuple(attention_mask.shape)}, but eager attention would add it to "
            "the scores as 0 and 1: give a mask of (batch, sequence), an additive one of floating-point "
            "numbers, or attn_implementation='sdpa'"
        )
    causal = is_causal_call(module, is_causal)
    axis = axis_of(module)
    if axis is None:
        if softcap is not None:
            raise ValueError(f"{type(module).__name__} caps its scores (softcap={softcap}): {_UNSHARDED}")
        kernel, mask, causal = _unsharded_mask(attention_mask, query, is_causal=causal)
        attend = kernel_of(module, kernel)
        return attend(module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal)
    out = ring_attention(
        query,
        key,
        value,
        axis,
        mask=attention_mask,
        is_causal=causal,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        dropout=dropout,
    )
    return out, None


def models_around(model: nn.Module, predicate: Callable[[nn.Module], bool]) -> list[PreTrainedModel]:
    """Return the innermost transformers models around certain modules, one model for each config.

    The config of such a model names the attention of the modules.

    Args:
        model: the full model.
        predicate: returns True for the modules.
    """
    by_config: dict[int, PreTrainedModel] = {}
    pending: list[tuple[nn.Module, PreTrainedModel | None]] = [(model, None)]
    while pending:
        module, submodel = pending.pop()
        submodel = module if isinstance(module, PreTrainedModel) else submodel
        if submodel is not None and predicate(module):
            by_config.setdefault(id(submodel.config), submodel)
        pending.extend((child, submodel) for child in module.children())
    return list(by_config.values())


def _has_sharded_sequences(module: nn.Module) -> bool:
    """Return True for a layer that computes on sequence shards, or a module in it."""
    return axis_of(module) is not None


def _sequence_attention_name(mode: str, kernel: str) -> str:
    """Return the registered name of a mode's attention, for models that used this kernel."""
    if mode == RING and kernel != EAGER:
        return f"echelon_{mode}"  # one name: all kernels except eager attention have the same masks
    return f"echelon_{mode}_{kernel}"


def _register() -> None:
    """Register the attention functions and masks in transformers. May be called repeatedly."""
    register_kernels()
    for kernel in KERNELS:
        name = _sequence_attention_name(ALL_TO_ALL, kernel)
        register_attention(name, partial(all_to_all_attention, kernel), kernel)
    for kernel in (SDPA, EAGER):
        ring = partial(ring_attention_of, is_eager=kernel == EAGER)
        blocks = partial(block_mask, is_eager=kernel == EAGER)
        register_attention(_sequence_attention_name(RING, kernel), ring, blocks)


def _refuse_unknown_arguments(module: nn.Module, arguments: dict[str, Any], mode: str) -> None:
    """Raise ValueError for arguments of an attention call that have a value and that a mode does not support."""
    used = [name for name, value in arguments.items() if value is not None and value is not False]
    unknown = sorted(set(used) - set(SUPPORTED_ARGUMENTS[mode]))
    if unknown:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which "
            f"sequence_parallelism_mode={mode!r} does not support: {INSTEAD}"
        )


def _unsharded_mask(
    mask: Mask | Tensor | None, query: Tensor, *, is_causal: bool
) -> tuple[str, Tensor | None, bool]:
    """Choose a kernel for an unsharded sequence, and convert a mask of ring attention for it.

    Returns:
        The name of the kernel, its mask, and its argument `is_causal`.
    """
    if not isinstance(mask, Mask):
        return SDPA, mask, is_causal
    queries, keys = (range(length) for length in mask.lengths)
    seen, uniform_queries = mask.block(queries, keys), mask.uniform_queries(queries)
    if seen is BlockKind.NOTHING:
        seen = torch.zeros(1, 1, *mask.lengths, dtype=torch.bool, device=query.device)
    if not isinstance(seen, Tensor):
        return SDPA, None, seen is BlockKind.TRIANGLE
    if uniform_queries is None:
        return SDPA, seen, False
    # Only eager attention gives queries that see no key the mean of all values.
    return EAGER, query.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(query.dtype).min), False


def _full_positions(positions: Tensor, axis: SequenceAxis) -> Tensor:
    """Return the position ids of the full sequence from this rank's; an all-gather over the axis if sharded."""
    if positions.shape[-1] == axis.length:
        return positions
    return axis.gather(positions, -1, axis.length)


def kernel_of(module: nn.Module, name: str) -> Callable[..., tuple[Tensor, Any]]:
    """Return the attention function that transformers would call for a module.

    Args:
        module: an attention module of a model.
        name: one of KERNELS.
    """
    function = _function_of(module, name)

    def attend(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Call the attention function, with a config that names its kernel."""
        # Flash attention reads its version from the config.
        if (config := getattr(module, "config", None)) is not None:
            module = AttributeView(module, config=AttributeView(config, **{ATTENTION: name}))
        result: tuple[Tensor, Any] = function(module, *args, **kwargs)
        return result

    return attend


def _function_of(module: nn.Module, name: str) -> Callable[..., tuple[Tensor, Any]]:
    """Return the function by which a module computes attention with a kernel."""
    function: Callable[..., tuple[Tensor, Any]] | None
    if name == EAGER:
        function = _find_in_file(module, EAGER_FUNCTION)
    else:
        functions = _find_in_file(module, ATTENTION_TABLE)  # a model's file may define its own
        function = (functions if isinstance(functions, AttentionInterface) else AttentionInterface())[name]
    if function is None:
        raise AssertionError(f"{type(module).__module__} has no attention by {name!r}")
    return function


def _find_in_file(module: nn.Module, name: str) -> Any:
    """Return the global of this name in the file of the module's class, or else of a base class; None without one."""
    files = (sys.modules[base.__module__] for base in type(module).__mro__)
    return next((value for file in files if (value := getattr(file, name, None)) is not None), None)


def sequence_attention_errors(model: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    """List reasons why the attention of layers cannot be chosen; empty if it can. A trial tells whether it is right.

    Args:
        model: the full model.
        layers: the layers that would compute on shards.
    """
    layer_ids = {id(layer) for layer in layers}
    submodels = models_around(model, lambda module: id(module) in layer_ids)
    if not submodels:
        return [
            (
                f"{type(model).__name__} is not a transformers model, and its attention cannot be chosen: "
                f"{INSTEAD}"
            )
        ]
    errors = [error for submodel in submodels for error in _model_errors(submodel)]
    return [f"{error}: {INSTEAD}" for error in errors or _cross_attentions(layers)]


def _model_errors(submodel: PreTrainedModel) -> Iterator[str]:
    """Yield the reasons why a model, or a model in it, cannot compute attention on sequence shards."""
    name, config = type(submodel).__name__, submodel.config
    kernel = attention_name(config)
    if kernel not in KERNELS:
        yield f"{name} computes attention by {kernel!r}, but it must be one of {', '.join(KERNELS)}"
    if not can_set_attention(submodel):
        yield f"{name} has the attention that was chosen when it was built, which cannot be changed"
    if config.is_encoder_decoder:
        yield f"{name} has a decoder with cross-attention"
    if kernel == EAGER and getattr(config, "reorder_and_upcast_attn", False):
        yield f"{name} computes attention by its own code (config.reorder_and_upcast_attn)"


def _cross_attentions(layers: Sequence[nn.Module]) -> list[str]:
    """List layers with cross-attention, by the names of their modules: each rank would repeat the encoder's keys."""
    return [
        f"{type(layer).__name__} has cross-attention ({path})"
        for layer in layers
        for path, module in layer.named_modules()
        if _CROSS.search(path.rpartition(".")[2]) and list(module.children())
    ]
