"""Attention of sequences that are spread over ranks, under names of transformers' interface.

How it is computed is all_to_all.py and ring.py; for which models it can be, attention_faults.py.
"""

# B batch, S sequence with padding, N query heads, M key-value heads, D width of a head, P ranks

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ..attention import BESIDES, FLASH_ATTENTION_2, SDPA
from ..layers.sequence_axis import SequenceAxis, axis_of
from .all_to_all import attend_by_heads
from .block_mask import BlockMask, Mask, Seen, block_mask
from .native import EAGER, KERNELS, kernel_of, mask_of
from .ring import ring_attention

ALL_TO_ALL, RING = "all_to_all", "ring_attn"

_UNSPREAD = (
    "under 'ring_attn' only layers whose sequences are spread may: use sequence_parallelism_mode='all_to_all'"
)

# What attention is told, and what models hand to it besides: what the mask says too, and what is not about attention.
_TOLD = frozenset(("scaling", "dropout", "is_causal", "softcap"))
_BY_HEADS = _TOLD | frozenset(
    (
        "sliding_window",
        "position_bias",
        "s_aux",
        "deterministic",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    )
)
_BESIDES = BESIDES | {"deterministic"}
# By mode, the arguments that do not change what is computed, or that attention knows what to do with.
KNOWN = {ALL_TO_ALL: _BY_HEADS | _BESIDES, RING: _TOLD | _BESIDES}


def set_sequence_attention(model: nn.Module, mode: str) -> None:
    """Let the layers of a model that hold parts of sequences attend over all of them.

    Args:
        model: `SequenceAxis.note` was told of its layers; `sequence_attention_faults` found nothing against it.
        mode: a key of KNOWN.
    """
    _register()
    for part in models_around(model, _is_spread):
        # `set_attn_implementation` takes a name with "flash" in it for that of a package, and would look for it.
        part.config._attn_implementation = {"": _attention_name(mode, part.config._attn_implementation)}


def attention_kernels(model: nn.Module) -> set[str]:
    """With which kernels the layers that hold parts of sequences compute attention."""
    return {part.config._attn_implementation for part in models_around(model, _is_spread)}


def all_to_all_attention(
    kernel: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention as transformers calls it, by `attend_by_heads`; as ever where the module's sequences are whole.

    Args:
        kernel: with which it is computed.
        module: the attention.
        query: (B, N, S/P, D).
        key, value: (B, M, S/P, D).
        attention_mask: the kernel's, for whole sequences.
        **kwargs: the kernel's.

    Returns:
        (B, S/P, N, D), and None for the weights where they are split.

    Raises:
        ValueError: something is given that would not mean the same.
    """
    attend, axis = kernel_of(module, kernel), axis_of(module)
    if axis is None or axis.group.size() == 1:
        return attend(module, query, key, value, attention_mask, **kwargs)
    _check_known(module, kwargs, ALL_TO_ALL)
    known = {name: value for name, value in kwargs.items() if name in _BY_HEADS}
    if kernel == FLASH_ATTENTION_2 and (positions := kwargs.get("position_ids")) is not None:
        known["position_ids"] = _whole_positions(positions, axis)  # they say where packed sequences begin
    return attend_by_heads(attend, module, query, key, value, attention_mask, axis, **known), None


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
    """Attention as transformers calls it, by `ring_attention`; by torch's own where the module's sequences are whole.

    Args:
        module: the attention; its `is_causal` holds where the argument is None.
        query: (B, N, S/P, D).
        key, value: (B, M, S/P, D), where M divides N.
        attention_mask: for whole sequences, as `block_mask` makes it. Without one all are seen, or with `is_causal`
            those before.
        dropout: probability, 0 outside of training.
        scaling: of the scores; None is D to the power of -1/2.
        softcap: of the scores; for sequences that are spread.
        is_eager: whether the model computed it by its own code, which adds any mask to the scores.
        **kwargs: what need not be known.

    Returns:
        (B, S/P, N, D), and None for the weights.

    Raises:
        ValueError: something is given that would not mean the same.
    """
    _check_known(module, kwargs, RING)
    if is_eager and isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool:
        raise ValueError(
            f"a boolean attention mask of {tuple(attention_mask.shape)}, which eager attention adds to the scores as 0 "
            "and 1: give one of (batch, sequence), numbers that are added, or attn_implementation='sdpa'"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    axis = axis_of(module)
    if axis is None:
        if softcap is not None:
            raise ValueError(f"{type(module).__name__} caps its scores (softcap={softcap}): {_UNSPREAD}")
        kernel, mask, causal = _whole_mask(attention_mask, query, is_causal=causal)
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


def models_around(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> list[PreTrainedModel]:
    """The innermost models that the wanted modules are in, one for each config, which names the attention."""
    found: dict[int, PreTrainedModel] = {}
    inside: list[tuple[nn.Module, PreTrainedModel | None]] = [(model, None)]
    while inside:
        module, part = inside.pop()
        part = module if isinstance(module, PreTrainedModel) else part
        if part is not None and is_wanted(module):
            found.setdefault(id(part.config), part)
        inside.extend((child, part) for child in module.children())
    return list(found.values())


def _is_spread(module: nn.Module) -> bool:
    return axis_of(module) is not None


def _attention_name(mode: str, kernel: str) -> str:
    """What attention of a mode is called, for models that computed it with a kernel."""
    if mode == RING and kernel != EAGER:
        return f"echelon_{mode}"  # its masks are those of all kernels but eager attention
    return f"echelon_{mode}_{kernel}"


def _register() -> None:
    """Make the attentions known to transformers. Doing it again changes nothing."""
    for kernel in KERNELS:
        name = _attention_name(ALL_TO_ALL, kernel)
        AttentionInterface.register(name, partial(all_to_all_attention, kernel))
        AttentionMaskInterface.register(name, mask_of(kernel))
    for kernel in (SDPA, EAGER):
        ring = partial(ring_attention_of, is_eager=kernel == EAGER)
        AttentionInterface.register(_attention_name(RING, kernel), ring)
        blocks = partial(_blocks, levels=kernel == EAGER)
        AttentionMaskInterface.register(_attention_name(RING, kernel), blocks)


def _blocks(*, cache_position: Tensor | None = None, **given: Any) -> BlockMask:
    """`block_mask`, also as releases of transformers call it that tell the queries by their positions."""
    if cache_position is not None:
        given.update(
            q_length=len(cache_position), q_offset=int(cache_position[0]), device=cache_position.device
        )
    return block_mask(**given)


def _check_known(module: nn.Module, given: dict[str, Any], mode: str) -> None:
    unknown = sorted(
        name
        for name, value in given.items()
        if name not in KNOWN[mode] and value is not None and value is not False
    )
    if unknown:
        raise ValueError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, of which that of "
            f"sequence_parallelism_mode={mode!r} knows nothing and which would silently be lost: use 'split_gather' or "
            "'ring'"
        )


def _whole_mask(
    mask: Mask | Tensor | None, query: Tensor, *, is_causal: bool
) -> tuple[str, Tensor | None, bool]:
    """A kernel for a whole sequence, the mask as it takes it, and whether that is causal besides."""
    if not isinstance(mask, Mask):
        return SDPA, mask, is_causal
    queries, keys = (range(length) for length in mask.lengths)
    seen, levelled = mask.block(queries, keys), mask.levelled(queries)
    if seen is Seen.NOTHING:
        seen = torch.zeros(1, 1, *mask.lengths, dtype=torch.bool, device=query.device)
    if not isinstance(seen, Tensor):
        return SDPA, None, seen is Seen.TRIANGLE
    if levelled is None:
        return SDPA, seen, False
    return EAGER, query.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(query.dtype).min), False


def _whole_positions(positions: Tensor, axis: SequenceAxis) -> Tensor:
    """Position ids of the whole sequence from this rank's; a collective of the axis."""
    if positions.shape[-1] == axis.length:
        return positions
    return axis.gathered(positions, -1, axis.length)
