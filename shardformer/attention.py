"""With which kernel a model computes attention. xFormers' is attention_xformers.py, all others are transformers'."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .attention_xformers import XFORMERS

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
    """What flash attention is on a device, by transformers' name."""
    return FLASH_ATTENTION_2 if device.type == "cuda" else SDPA


def attention_faults(model: nn.Module, kernel: str, option: str) -> list[str]:
    """Why a model cannot compute attention with a kernel and get the same; empty when it can.

    Args:
        model: a whole one.
        kernel: a key of `_KERNELS`.
        option: what was asked for, in the user's words.
    """
    parts = _parts(model)
    if not parts:
        return [
            f"{option}: a {type(model).__name__} is no model of transformers, and its attention cannot be chosen from "
            f"outside: leave {option} out; it goes on computing attention as its code has it"
        ]
    return [
        f"{option}: {type(part).__name__}{f' ({path})' if path else ''} {reason}"
        for path, part in parts.items()
        for reason in _part_faults(part, kernel, option)
    ]


def set_attention(model: nn.Module, kernel: str) -> None:
    """Let a model and its parts compute attention with a kernel; `attention_faults` found nothing against it."""
    chosen: Any = model
    chosen.set_attn_implementation(kernel)
    others = {
        path: part.config._attn_implementation
        for path, part in _parts(model).items()
        if part.config._attn_implementation != kernel
    }
    if others:
        raise AssertionError(f"transformers took {kernel!r} for none of {others}")


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


def _part_faults(part: PreTrainedModel, kernel: str, option: str) -> list[str]:
    words, _ = _KERNELS[kernel]
    found = [_choice_fault(part, kernel, option)]
    caps = [
        f"{name}={value}"
        for name, value in vars(part.config).items()
        if "attn" in name and "softcap" in name and value
    ]
    if kernel != FLASH_ATTENTION_2 and caps:
        found.append(
            f"caps its attention scores ({', '.join(caps)}), which {words} cannot: leave {option} out, or set that to "
            "None in the config and train another model"
        )
    if kernel == FLASH_ATTENTION_2 and (lost := _lost_mask(part)):
        found.append(
            f"{lost}: leave {option} out; transformers then takes torch's own fused attention, with the mask"
        )
    if getattr(part.config, "output_attentions", False):
        found.append(
            f"is to return attention weights, which {words} does not compute: config.output_attentions=False"
        )
    return [each for each in found if each is not None]


def _lost_mask(part: PreTrainedModel) -> str | None:
    """What transformers makes of a part's masks with flash-attn, where that is not what they say."""
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


def _choice_fault(part: PreTrainedModel, kernel: str, option: str) -> str | None:
    """Why transformers cannot set this kernel for a part."""
    words, flag = _KERNELS[kernel]
    if flag is not None and not getattr(part, flag):
        return (
            f"cannot compute attention with {words}, as its class in transformers says: leave {option} out, and it "
            "computes attention with its own code"
        )
    for classes in _fixed_classes(part):
        held = {type(module) for module in part.modules()} & set(classes.values())
        if held and classes.get(kernel) not in held:
            names = ", ".join(sorted(each.__name__ for each in held))
            can_be_built = f"build it with attn_implementation={kernel!r}, or " if kernel in classes else ""
            return f"chose {names} when it was built, which is not {words}: {can_be_built}leave {option} out"
    if part.config._attn_implementation != kernel and not part._can_set_attn_implementation():
        can_be_built = f"build it with attn_implementation={kernel!r}, or " if flag is not None else ""
        return f"takes its attention once and for all when it is built: {can_be_built}leave {option} out"
    return None
