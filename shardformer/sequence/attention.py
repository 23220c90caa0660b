"""Attention of sequences that are spread over ranks, under names of transformers' interface.

How it is computed is all_to_all.py and ring.py; for which models it can be, attention_faults.py.
"""

# B batch, S sequence with padding, N query heads, M key-value heads, D width of a head, P ranks

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ...cluster.collectives import all_gather
from ..attention import FLASH_ATTENTION_2
from .all_to_all import attend_by_heads
from .axis import SequenceAxis, axis_of
from .kernel import KERNELS, kernel_of, mask_of

ALL_TO_ALL = "all_to_all"
MODES = (ALL_TO_ALL,)

# What attention is told, and what models hand to it besides: what the mask says too, and what is not about attention.
_ABOUT_ATTENTION = frozenset(
    (
        "scaling",
        "dropout",
        "is_causal",
        "softcap",
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
_BESIDES = frozenset(
    (
        "position_ids",
        "cache_position",
        "use_cache",
        "output_router_logits",
        "output_hidden_states",
    )
)


def attention_name(mode: str, kernel: str) -> str:
    """What attention of a mode is called, for models that computed it with a kernel."""
    return f"echelon_{mode}_{kernel}"


def set_sequence_attention(model: nn.Module, mode: str) -> None:
    """Let the layers of a model that hold parts of sequences attend over all of them.

    Args:
        model: `SequenceAxis.note` was told of its layers; `sequence_attention_faults` found nothing against it.
        mode: one of MODES.
    """
    _register()
    for part in _split_parts(model):
        name = attention_name(mode, part.config._attn_implementation)
        part.set_attn_implementation({"": name})
        if part.config._attn_implementation != name:
            raise AssertionError(f"transformers did not take {name!r} for {type(part).__name__}")


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
    _check_known(module, kwargs, _ABOUT_ATTENTION | _BESIDES)
    known = {name: value for name, value in kwargs.items() if name in _ABOUT_ATTENTION}
    if kernel == FLASH_ATTENTION_2 and (positions := kwargs.get("position_ids")) is not None:
        known["position_ids"] = _whole_positions(positions, axis)  # they say where packed sequences begin
    return attend_by_heads(attend, module, query, key, value, attention_mask, axis, **known), None


def _register() -> None:
    """Make the attentions known to transformers. Doing it again changes nothing."""
    for kernel in KERNELS:
        name = attention_name(ALL_TO_ALL, kernel)
        AttentionInterface.register(name, partial(all_to_all_attention, kernel))
        AttentionMaskInterface.register(name, mask_of(kernel))


def _split_parts(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The models with a config of their own, which names the attention, that layers with an axis are in."""
    seen: set[int] = set()
    inside: list[tuple[nn.Module, PreTrainedModel | None]] = [(model, None)]
    while inside:
        module, part = inside.pop()
        part = module if isinstance(module, PreTrainedModel) else part
        if axis_of(module) is not None and part is not None and id(part.config) not in seen:
            seen.add(id(part.config))
            yield part
        inside.extend((child, part) for child in module.children())


def _check_known(module: nn.Module, given: dict[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(
        name
        for name, value in given.items()
        if name not in known and value is not None and value is not False
    )
    if unknown:
        raise ValueError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, of which attention of split "
            "sequences knows nothing and which would silently be lost: use a sequence_parallelism_mode of the tensor "
            "axis, 'split_gather' or 'ring'"
        )


def _whole_positions(positions: Tensor, axis: SequenceAxis) -> Tensor:
    """Position ids of the whole sequence from this rank's; a collective of the axis."""
    if positions.shape[-1] == axis.length:
        return positions
    gathered = all_gather(positions, axis.group, positions.ndim - 1)
    return axis.order.whole(gathered.chunk(axis.order.size, -1), -1, axis.length)
