"""The kernel with which a model computes attention: transformers' own, or xFormers'."""

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ...cluster.device import is_cuda

# What the mask says too, and what is not about attention.
BESIDES = frozenset(
    (
        *("sliding_window", "position_ids", "cache_position", "use_cache"),
        *("output_router_logits", "output_hidden_states", "return_dict"),
        *("num_items_in_batch", "shift_labels"),  # of the loss
    )
)


# B batch, N query heads, M key-value heads, Q queries, K keys, D width of a head


XFORMERS = "xformers"
XFORMERS_DEVICES = ("cuda",)  # for which xFormers has kernels

_ALIGNMENT = 8  # rows of a bias begin at multiples of so many entries


def register_xformers() -> None:
    """Make "xformers" an attention that models of transformers can be set to. Doing it again changes nothing."""
    AttentionInterface.register(XFORMERS, xformers_attention)
    AttentionMaskInterface.register(XFORMERS, AttentionMaskInterface()["sdpa"])


def xformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, by `xformers.ops.memory_efficient_attention`.

    Args:
        module: the attention; its `is_causal` holds where the argument is None.
        query: (B, N, Q, D).
        key, value: (B, M, K, D), where M divides N.
        attention_mask: (B or 1, N or 1, Q, K): True, or 0, where a query sees a key. Without one all are seen, or with
            `is_causal` those before.
        dropout: probability, 0 outside of training.
        scaling: of the scores; None is D to the power of -1/2.
        position_bias: (B or 1, N or 1, Q, K), added to the scores; it may have a gradient.

    Returns:
        (B, Q, N, D), and None for the weights, which are not computed.

    Raises:
        ValueError: it is given something that it cannot compute with.
    """
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    if unknown := sorted(given - BESIDES):
        raise ValueError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, of which xFormers knows nothing and "
            "which would silently be lost: leave enable_xformers out for this model"
        )
    ops = import_module("xformers.ops")
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (key, value))
    causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1
    bias: Any = None
    if attention_mask is not None or position_bias is not None:
        bias = _bias(query, key.shape[2], attention_mask, position_bias, is_causal=causal)
    elif causal:
        bias = ops.LowerTriangularMask()
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]  # a cache may be longer
    out_BQND = ops.memory_efficient_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_bias=bias,
        p=dropout,
        scale=scaling,
    )
    if (
        attention_mask is not None and attention_mask.dtype == torch.bool
    ):  # who sees nothing gets 0, as by sdpa
        out_BQND = out_BQND * attention_mask.any(-1, keepdim=True).transpose(1, 2)
    return out_BQND.contiguous(), None


def _bias(
    query: Tensor, num_keys: int, mask: Tensor | None, position_bias: Tensor | None, *, is_causal: bool
) -> Tensor:
    """Bias of the scores: (B, N, Q, K) in the queries' format, with rows aligned as the kernels need them."""
    least = torch.finfo(query.dtype).min  # finite, so that a query that sees nothing gets numbers
    batch, heads, num_queries, _ = query.shape
    if mask is None and is_causal:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()[None, None]
    added = (
        torch.zeros((), dtype=query.dtype, device=query.device) if position_bias is None else position_bias
    )
    if mask is not None:
        added = torch.where(mask, added, least) if mask.dtype == torch.bool else added + mask
    whole = added.to(query.dtype).expand(batch, heads, num_queries, num_keys)
    padding = -num_keys % _ALIGNMENT
    return nn.functional.pad(whole.contiguous(), (0, padding))[..., :num_keys]


FLASH_ATTENTION_2 = "flash_attention_2"
SDPA = "sdpa"
FLASH_ATTN_DTYPES = (torch.float16, torch.bfloat16)  # what the flash-attn package computes in

# By name of transformers, the kernel in words, and the attribute of model classes that says whether they know it.
_KERNELS = {
    FLASH_ATTENTION_2: ("flash_attention_2 (the flash-attn package)", "_supports_flash_attn"),
    SDPA: ("sdpa (torch's fused attention)", "_supports_sdpa"),
    XFORMERS: ("xFormers", None),
}

# Whose masks transformers drops in silence with flash-attn: tokens of an image see each other, also those behind them.
_BOTH_WAYS = ("gemma3", "gemma4", "gemma4_unified", "molmo2", "paligemma", "pi0")
# Whose decoders attend to an encoder's states without a mask.
_WHOLE_STATES = ("vision-encoder-decoder", "whisper")


def flash_kernel(device: torch.device) -> str:
    """Kernel of flash attention on a device, by transformers' name."""
    return FLASH_ATTENTION_2 if is_cuda(device) else SDPA


def attention_errors(model: nn.Module, kernel: str, option: str) -> list[str]:
    """Why a model cannot compute attention with a kernel and get the same; empty when it can.

    Args:
        model: a whole one.
        kernel: a key of `_KERNELS`.
        option: what was asked for, in the user's words.
    """
    parts = _parts(model)
    if not parts:
        return [
            f"{option}: a {type(model).__name__} is no model of transformers, whose attention can be chosen: leave "
            f"{option} out"
        ]
    return [
        f"{option}: {type(part).__name__}{f' ({path})' if path else ''} {reason}: {advice}leave {option} out"
        for path, part in parts.items()
        for reason, advice in _reasons(part, kernel)
    ]


def set_attention(model: nn.Module, kernel: str) -> None:
    """Let a model and its parts compute attention with a kernel; `attention_errors` found nothing against it."""
    chosen: Any = model
    chosen.set_attn_implementation(kernel)
    for part in _parts(model).values():  # some releases do not reach all of them from the model
        if part.config._attn_implementation != kernel:
            part.set_attn_implementation(kernel)
            assert part.config._attn_implementation == kernel, (part, kernel)


def _parts(model: nn.Module) -> dict[str, PreTrainedModel]:
    """The models with a config of their own, by path: where a config names the attention."""
    found: dict[int, tuple[str, PreTrainedModel]] = {}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            found.setdefault(id(module.config), (path, module))
    return dict(found.values())


def _fixed_classes(part: PreTrainedModel) -> list[Mapping[str, type[nn.Module]]]:
    """By kernel, the classes of attention among which models of a file choose when they are built."""
    names = vars(sys.modules[type(part).__module__]).values()
    return [
        each
        for each in names
        if isinstance(each, dict)
        and each.keys() & {"eager", SDPA}
        and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in each.values())
    ]


def _reasons(part: PreTrainedModel, kernel: str) -> Iterator[tuple[str, str]]:
    """Why a part cannot compute attention with a kernel, each with what to do besides leaving the option out."""
    (words, flag), config = _KERNELS[kernel], part.config
    build = f"build it with attn_implementation={kernel!r}, or "
    present = {type(module) for module in part.modules()}
    fixed = [
        each
        for each in _fixed_classes(part)
        if present & set(each.values()) and each.get(kernel) not in present
    ]
    if flag is not None and not getattr(part, flag):
        yield f"cannot compute attention with {words}, as its class in transformers says", ""
    elif fixed:
        names = sorted(each.__name__ for each in present & set(fixed[0].values()))
        can_be_built = build if kernel in fixed[0] else ""
        yield f"chose {', '.join(names)} when it was built, which is not {words}", can_be_built
    elif config._attn_implementation != kernel and not part._can_set_attn_implementation():
        yield "takes its attention once and for all when it is built", build if flag is not None else ""
    caps = [
        f"{name}={each}"
        for name, each in vars(config).items()
        if "attn" in name and "softcap" in name and each
    ]
    if kernel != FLASH_ATTENTION_2 and caps:
        yield f"caps its attention scores ({', '.join(caps)}), which {words} cannot", ""
    if kernel == FLASH_ATTENTION_2 and (lost := _lost_mask(part)):
        yield lost, ""
    if getattr(config, "output_attentions", False):
        yield (
            f"is to return attention weights, which {words} does not compute",
            "set config.output_attentions=False, or ",
        )


def _lost_mask(part: PreTrainedModel) -> str | None:
    """Describe the mask of a part that transformers drops with flash-attn; None where it drops none."""
    kind = part.config.model_type
    if kind in _BOTH_WAYS:
        return "lets the tokens of an image see those behind them, which transformers drops with flash-attn"
    if getattr(part.config, "alibi", False):
        return "adds slopes of the heads to its scores (alibi=True), which it cannot with flash-attn"
    if "local" in getattr(part.config, "attention_layers", ()):
        return "has layers that see the last tokens alone (attention_layers), which see all with flash-attn"
    if part.config.is_encoder_decoder and kind not in _WHOLE_STATES:
        return (
            "attends from its decoder to an encoder's states, where transformers with flash-attn takes the padding of "
            "the states for that of the decoder's tokens"
        )
    return None
