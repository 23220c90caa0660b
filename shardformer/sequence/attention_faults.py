"""Why a model's attention cannot be that of attention.py, told before anything is split."""

import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from .attention import ALL_TO_ALL, KNOWN, RING, models_around
from .native import EAGER, KERNELS

TENSOR_INSTEAD = "use sequence_parallelism_mode='split_gather' or 'ring'"
_RING_INSTEAD = "use sequence_parallelism_mode='all_to_all', 'split_gather' or 'ring'"
_MIXERS = (_ConvNd, _BatchNorm, nn.RNNBase)  # what is at one position comes from others too
_MIXER_NAMES = re.compile("Attention|Mixer|Mamba|Recurrent|DeltaNet|SSM|Lightning|Rwkv")
_CROSS = re.compile("cross_?att|encoder_attn|EncDecAttention", re.IGNORECASE)
_CALL = re.compile(r"attention_interface\((.*?)\n\s*\)", re.DOTALL)
# transformers before 5.1 looked attention up by itself.
_INTERFACE = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")
_DEFAULT = re.compile(r"(?:get_interface\([^,]*,\s*|attention_interface: Callable = )(\w*eager\w*)")
_READS_MASK = re.compile(r"attention_mask\s*(\.|\[|\+|\*)")
_ARGUMENT = re.compile(r"^\s*(\w+)=", re.MULTILINE)


def sequence_attention_faults(
    model: nn.Module, mode: str, option: str, layers: Sequence[nn.Module] | None = None
) -> list[str]:
    """Why the layers of a model cannot hold parts of sequences and get the same; empty when they can.

    Which heads there are is not asked here: see `heads_faults`.

    Args:
        model: a whole one.
        mode: one of MODES.
        option: what was asked for, in the user's words.
        layers: those that are to hold parts; None is all that stand in a list and compute attention.
    """
    if layers is None:
        layers = _attending(model)
    wanted = {id(layer) for layer in layers}
    parts = models_around(model, lambda module: id(module) in wanted)
    if not parts:
        return [
            f"{option}: no layers of {type(model).__name__} call attention through transformers' AttentionInterface, "
            f"by which alone each can see the whole sequence: {TENSOR_INSTEAD}, or leave {option} out"
        ]
    reasons = [reason for part in parts for reason in _part_reasons(part)]
    reasons += [reason for layer in layers for reason in _layer_reasons(layer, mode)]
    return [f"{option}: {reason}" for reason in dict.fromkeys(reasons)]


def _attending(model: nn.Module) -> list[nn.Module]:
    """The entries of the outermost lists of modules of which some call attention through the interface."""
    found: list[nn.Module] = []
    inside = [model]
    while inside:
        for child in inside.pop().children():
            if not isinstance(child, nn.ModuleList):
                inside.append(child)
            elif any(_is_attention(each) for each in child.modules()):
                found.extend(child)
    return found


def _part_reasons(part: PreTrainedModel) -> Iterator[str]:
    name, config = type(part).__name__, part.config
    kernel = config._attn_implementation
    if kernel not in KERNELS:
        yield (
            f"{name} computes attention by {kernel!r}, and it can be one of {', '.join(KERNELS)}: build it with "
            "attn_implementation='sdpa' or 'eager'"
        )
    if not part._can_set_attn_implementation():
        yield f"{name} takes its attention once and for all when it is built: {TENSOR_INSTEAD}"
    if config.is_encoder_decoder:
        yield f"{name} has a decoder that attends to another sequence than its own: {TENSOR_INSTEAD}"
    if getattr(config, "output_attentions", False):
        yield f"{name} is to return attention weights, which no rank has: config.output_attentions=False"
    if kernel == EAGER and getattr(config, "reorder_and_upcast_attn", False):
        yield (
            f"{name} computes attention of its own (config.reorder_and_upcast_attn): set that to False, or "
            f"{TENSOR_INSTEAD}"
        )


def _layer_reasons(layer: nn.Module, mode: str) -> Iterator[str]:
    attentions = [each for each in layer.modules() if _is_attention(each)]
    inside = {id(each) for attention in attentions for each in attention.modules()}
    mixers = [each for each in layer.modules() if _is_mixer(each, inside)]
    for name in dict.fromkeys(type(each).__name__ for each in mixers):
        yield (
            f"{type(layer).__name__} mixes positions by {name}, which sees those of one rank alone: {TENSOR_INSTEAD}"
        )
    if not attentions and not mixers:
        yield f"{type(layer).__name__} computes no attention through transformers' AttentionInterface: {TENSOR_INSTEAD}"
    for path, module in layer.named_modules():
        name = type(module).__name__
        is_around = any(_is_attention(each) for each in module.modules())
        if is_around and _CROSS.search(path.rpartition(".")[2]):
            yield f"{type(layer).__name__} attends to another sequence than its own ({path}): {TENSOR_INSTEAD}"
        if "arange(" in _code(type(module)) and module not in mixers:
            yield f"{name} counts positions by itself, and would count those of one rank alone: {TENSOR_INSTEAD}"
    for attention in attentions:
        yield from _argument_reasons(attention, mode)


def _is_mixer(module: nn.Module, inside: set[int]) -> bool:
    """Whether a module, which is none of those inside attention, brings together what is at several positions."""
    if isinstance(module, _MIXERS):
        return True
    is_named_so = _MIXER_NAMES.search(type(module).__name__) is not None
    return is_named_so and id(module) not in inside and not any(map(_is_attention, module.modules()))


def _argument_reasons(attention: nn.Module, mode: str) -> Iterator[str]:
    """What the module hands to attention that would be lost there."""
    name, instead = type(attention).__name__, _RING_INSTEAD if mode == RING else TENSOR_INSTEAD
    given = {
        argument for call in _CALL.findall(_code(type(attention))) for argument in _ARGUMENT.findall(call)
    }
    known = KNOWN[mode] | {"query", "key", "value", "attention_mask", "output_attentions"}
    if mode == RING and getattr(attention, "sinks", None) is not None:
        yield f"{name} has sinks, logits of its own beside the scores: {instead}"
        given -= {"s_aux"}
    others = set(_DEFAULT.findall(_code(type(attention)))) - {"eager_attention_forward"}
    config: Any = attention.config
    if mode == ALL_TO_ALL and others and config._attn_implementation == EAGER:
        yield (
            f"{name} computes attention by {', '.join(sorted(others))}, which cannot be found by that name: build it "
            "with attn_implementation='sdpa'"
        )
    if _READS_MASK.search(_code(type(attention))):
        yield f"{name} computes with the mask itself, which is that of the whole sequence: {TENSOR_INSTEAD}"
    if unknown := sorted(given - known):
        yield f"{name} hands {', '.join(unknown)} to its attention, of which this one knows nothing: {instead}"


def _is_attention(module: nn.Module) -> bool:
    """Whether a module calls attention through transformers' interface."""
    return _INTERFACE.search(_code(type(module))) is not None


def _code(kind: type[nn.Module]) -> str:
    """The source of a class, empty for one of torch or without any."""
    return "" if kind.__module__.partition(".")[0] == "torch" else _source(cast("Any", kind))


@cache
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
