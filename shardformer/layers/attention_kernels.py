"""Attention kernels by name: the requirements of each, and the models for which it is refused."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel

from ...cluster.device import compute_capability, is_cuda
from ...cluster.transformers_api import (
    BESIDES_ATTENTION,
    SUPPORTS_FLASH,
    SUPPORTS_FLEX,
    SUPPORTS_SDPA,
    attention_name,
    can_set_attention,
    register_attention,
)

# B batch, N query heads, M key-value heads, Q queries, K keys, D width of a head

_ALIGNMENT = 8  # rows of a bias begin at multiples of so many entries


def is_causal_call(module: nn.Module, is_causal: bool | None) -> bool:
    """Return the argument `is_causal` of an attention call; None takes the module's, and that is True by default."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


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
        module: the attention; its `is_causal` applies where the argument is None.
        query: (B, N, Q, D).
        key, value: (B, M, K, D), where M divides N.
        attention_mask: (B or 1, N or 1, Q, K): True, or 0, where a query sees a key. Without a mask a query sees all
            keys, or with `is_causal` the previous ones.
        dropout: probability, 0 outside of training.
        scaling: of the scores; None is D to the power of -1/2.
        position_bias: (B or 1, N or 1, Q, K), added to the scores; it may have a gradient.

    Returns:
        (B, Q, N, D), and None for the weights, which are not computed.

    Raises:
        ValueError: an argument is not supported.
    """
    used = {name for name, value in kwargs.items() if value is not None and value is not False}
    if unknown := sorted(used - BESIDES_ATTENTION):
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which xFormers does not "
            "support: leave enable_xformers out for this model"
        )
    ops = import_module("xformers.ops")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = is_causal_call(module, is_causal) and query.shape[2] > 1
    bias: Any = None
    if attention_mask is not None or position_bias is not None:
        bias = _score_bias(query, key.shape[2], attention_mask, position_bias, is_causal=causal)
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
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        # A query that sees no key gets 0, as with sdpa.
        out_BQND = out_BQND * attention_mask.any(-1, keepdim=True).transpose(1, 2)
    return out_BQND.contiguous(), None


def _score_bias(
    query: Tensor, num_keys: int, mask: Tensor | None, position_bias: Tensor | None, *, is_causal: bool
) -> Tensor:
    """Combine a mask and a position bias to numbers that are added to the scores.

    Args:
        query: (B, N, Q, D).
        num_keys: K.
        mask, position_bias, is_causal: as in `xformers_attention`; without a mask a causal one is made.

    Returns:
        (B, N, Q, K) in the queries' format, a view whose rows are aligned for the kernels.
    """
    least = torch.finfo(query.dtype).min  # finite, so that a query that sees no key gets no NaN
    batch, heads, num_queries, _ = query.shape
    if mask is None and is_causal:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()[None, None]
    bias = torch.zeros((), dtype=query.dtype, device=query.device) if position_bias is None else position_bias
    if mask is not None:
        bias = torch.where(mask, bias, least) if mask.dtype == torch.bool else bias + mask
    bias = bias.to(query.dtype).expand(batch, heads, num_queries, num_keys)
    padding = -num_keys % _ALIGNMENT
    return nn.functional.pad(bias.contiguous(), (0, padding))[..., :num_keys]


def torch_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    backend: SDPBackend,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it with "sdpa", by one of torch's kernels, without a fallback.

    Raises:
        ValueError: a mask for a kernel that takes none.
        RuntimeError: from torch, if this kernel does not support the inputs; its warnings say why.
    """
    if backend == SDPBackend.FLASH_ATTENTION and attention_mask is not None and is_cuda(query.device):
        raise ValueError(
            f"torch's flash kernel supports no mask, but {type(module).__name__} has one, for padding, packed texts or "
            f"a window: use enable_flash_attention={SDPA_CUDNN!r}, {FLEX_ATTENTION!r} or {SDPA!r}"
        )
    with sdpa_kernel(backend):
        result: tuple[Tensor, None] = AttentionInterface()[SDPA](
            module, query, key, value, attention_mask, **kwargs
        )
    return result


EAGER, SDPA, XFORMERS = "eager", "sdpa", "xformers"
# Not "sdpa_flash": transformers treats every name with "flash" in it as a package.
SDPA_FA, SDPA_CUDNN = "sdpa_fa", "sdpa_cudnn"
FLEX_ATTENTION = "flex_attention"
FLASH_ATTENTION_2, FLASH_ATTENTION_3 = FLASH_PACKAGES = "flash_attention_2", "flash_attention_3"

_AMPERE = (8, 0)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """An attention kernel.

    Args:
        description: its description.
        flag: the attribute of model classes that tells if they support it; None is not checked.
        module: the module that it imports.
        package: the package of that module, and how to install it.
        needs_cuda: it runs on CUDA only.
        is_16_bit_only: it computes in 16-bit formats only.
        capability: the minimum compute capability of a CUDA device.
        supports_dropout: it supports attention dropout.
        supports_softcap: it supports capped scores (softcap).
        attend: for kernels that transformers does not have, the function to call, with sdpa's masks.
    """

    description: str
    flag: str | None = None
    module: str | None = None
    package: str = ""
    needs_cuda: bool = True
    is_16_bit_only: bool = False
    capability: tuple[int, int] = (0, 0)
    supports_dropout: bool = True
    supports_softcap: bool = True
    attend: Callable[..., tuple[Tensor, None]] | None = None

    def errors(self, device: torch.device, dtype: torch.dtype | None, option: str) -> list[str]:
        """List the packages or hardware that the kernel needs and this machine lacks, each with an alternative.

        Args:
            device: the device of the model.
            dtype: the format in which it computes; None if not known.
            option: the option as the user wrote it.
        """
        capability, instead = compute_capability(device), f"enable_flash_attention={SDPA!r}, torch's own"
        rows = (
            (
                self.needs_cuda and not is_cuda(device),
                f"computes on cuda and not on {device.type}: use {instead}",
            ),
            (
                self.module is not None and find_spec(self.module) is None,
                f"needs the package {self.package}, or use {instead}",
            ),
            (
                self.is_16_bit_only and dtype not in (torch.float16, torch.bfloat16, None),
                f"computes only in 16 bits: use precision='bf16' or 'fp16', or {instead}",
            ),
            (
                capability is not None and capability < self.capability,
                f"needs a GPU of compute capability {self.capability[0]}.{self.capability[1]} (Ampere) or later, and "
                f"this one has {'.'.join(map(str, capability or ()))}: use {instead}",
            ),
        )
        return [f"{option}: {self.description} {message}" for is_wrong, message in rows if is_wrong]


_SDPA = Kernel(
    description="sdpa (torch's fused attention)", flag=SUPPORTS_SDPA, needs_cuda=False, supports_softcap=False
)
_PACKAGE = Kernel(description="", flag=SUPPORTS_FLASH, is_16_bit_only=True, capability=_AMPERE)
_TORCH = replace(_SDPA, needs_cuda=True, is_16_bit_only=True, capability=_AMPERE)

# By the names of transformers, except for three that transformers does not have.
KERNELS = {
    EAGER: Kernel(description="eager (the model's own code)", needs_cuda=False),
    SDPA: _SDPA,
    SDPA_FA: replace(
        _TORCH,
        description="sdpa_fa (torch's flash kernel)",
        attend=partial(torch_attention, backend=SDPBackend.FLASH_ATTENTION),
    ),
    SDPA_CUDNN: replace(
        _TORCH,
        description="sdpa_cudnn (cuDNN's kernel)",
        attend=partial(torch_attention, backend=SDPBackend.CUDNN_ATTENTION),
    ),
    FLASH_ATTENTION_2: replace(
        _PACKAGE,
        description="flash_attention_2 (the flash-attn package)",
        module="flash_attn",
        package="flash-attn (pip install flash-attn --no-build-isolation)",
    ),
    FLASH_ATTENTION_3: replace(
        _PACKAGE,
        description="flash_attention_3 (the flash-attn-3 package)",
        module="flash_attn_interface",
        package="flash-attn-3 (install it from the folder hopper of github.com/Dao-AILab/flash-attention)",
        supports_dropout=False,
    ),
    FLEX_ATTENTION: Kernel(
        description="flex_attention (torch's FlexAttention)",
        flag=SUPPORTS_FLEX,
        module="triton",
        package="triton (pip install triton)",
        supports_dropout=False,
    ),
    XFORMERS: Kernel(
        description="xFormers",
        module="xformers",
        package="xformers (pip install xformers)",
        supports_softcap=False,
        attend=xformers_attention,
    ),
}


def register_kernels() -> None:
    """Register the kernels that transformers does not have. Repeated calls change nothing."""
    for name, kernel in KERNELS.items():
        if kernel.attend is not None:
            register_attention(name, kernel.attend, SDPA)


# Models whose masks transformers silently drops with flash-attn: the tokens of an image see each other, later ones too.
_BIDIRECTIONAL_IMAGES = ("gemma3", "gemma4", "gemma4_unified", "molmo2", "paligemma", "pi0")
# Models whose decoders attend to an encoder's states without a mask.
_UNMASKED_STATES = ("vision-encoder-decoder", "whisper")


def attention_errors(model: nn.Module, kernel: str, option: str) -> list[str]:
    """Return the reasons why a model cannot compute the same attention with a kernel; empty if it can.

    Args:
        model: the full model, before it is sharded.
        kernel: a key of KERNELS.
        option: the option as the user wrote it.
    """
    submodels = _models_by_path(model)
    if not submodels:
        return [
            f"{option}: a {type(model).__name__} is not a transformers model, and its attention cannot be "
            f"chosen: leave {option} out"
        ]
    return [
        f"{option}: {type(submodel).__name__}{f' ({path})' if path else ''} {error}: {advice}leave {option} out"
        for path, submodel in submodels.items()
        for error, advice in _kernel_errors(submodel, kernel)
    ]


def set_attention(model: nn.Module, kernel: str) -> None:
    """Select the attention kernel of a model and its sub-models, after `attention_errors` found none."""
    register_kernels()
    chosen: Any = model
    chosen.set_attn_implementation(kernel)
    for submodel in _models_by_path(model).values():  # some releases do not reach all of them from the model
        if attention_name(submodel.config) != kernel:
            submodel.set_attn_implementation(kernel)
            assert attention_name(submodel.config) == kernel, (submodel, kernel)


def _models_by_path(model: nn.Module) -> dict[str, PreTrainedModel]:
    """Return the models in a model (itself too) by path, one for each config: the config names the attention kernel."""
    path_and_model: dict[int, tuple[str, PreTrainedModel]] = {}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            path_and_model.setdefault(id(module.config), (path, module))
    return dict(path_and_model.values())


def _attention_classes(submodel: PreTrainedModel) -> list[Mapping[str, type[nn.Module]]]:
    """Return the dicts of a model's file that have an attention class for each kernel; empty in most files.

    The model selects one of the classes when it is built.
    """
    names = vars(sys.modules[type(submodel).__module__]).values()
    mappings = [value for value in names if isinstance(value, dict) and value.keys() & {"eager", SDPA}]
    return [
        mapping
        for mapping in mappings
        if all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in mapping.values())
    ]


def _kernel_errors(submodel: PreTrainedModel, name: str) -> Iterator[tuple[str, str]]:
    """Yield the reasons why a sub-model cannot use a kernel, named as in `KERNELS`.

    Yields:
        An error, to follow the sub-model's name, and a remedy that ends with ", or "; empty if there is none.
    """
    kernel, config = KERNELS[name], submodel.config
    rebuild = f"build it with attn_implementation={name!r}, or " if kernel.attend is None else ""
    present = {type(module) for module in submodel.modules()}
    wrong_classes = [
        classes
        for classes in _attention_classes(submodel)
        if present & set(classes.values()) and classes.get(name) not in present
    ]
    if kernel.flag is not None and not getattr(submodel, kernel.flag):
        yield (
            f"cannot compute attention with {kernel.description}, according to its class in transformers",
            "",
        )
    elif wrong_classes:
        names = sorted(kind.__name__ for kind in present & set(wrong_classes[0].values()))
        yield (
            f"was built with {', '.join(names)}, which is not {kernel.description}",
            rebuild if name in wrong_classes[0] else "",
        )
    elif attention_name(config) != name and not can_set_attention(submodel):
        yield "has the attention that was chosen when it was built, which cannot be changed", rebuild
    if not kernel.supports_softcap and (caps := _settings(submodel, "attn", "softcap")):
        yield f"caps its attention scores ({caps}), which {kernel.description} does not support", ""
    if not kernel.supports_dropout and (dropout := _settings(submodel, "att", "drop")):
        yield (
            f"uses attention dropout ({dropout}), which {kernel.description} does not support",
            "set that to 0 in the config, or ",
        )
    if name in FLASH_PACKAGES and (ignored := _ignored_mask(submodel)):
        yield ignored, ""
    if name != EAGER and getattr(config, "output_attentions", False):
        yield (
            f"has output_attentions=True, but {kernel.description} does not compute",
            "set config.output_attentions=False, or ",
        )


def _settings(submodel: PreTrainedModel, *words: str) -> str:
    """Return, as text, the nonzero settings of a config whose names contain all of these words."""
    settings = vars(submodel.config).items()
    return ", ".join(
        f"{name}={value}" for name, value in settings if value and all(word in name for word in words)
    )


def _ignored_mask(submodel: PreTrainedModel) -> str | None:
    """Describe the mask of a sub-model that transformers ignores with flash-attn; None if it ignores none."""
    kind = submodel.config.model_type
    if kind in _BIDIRECTIONAL_IMAGES:
        return "lets the tokens of an image see later ones, which transformers ignores with flash-attn"
    if getattr(submodel.config, "alibi", False):
        return "adds ALiBi slopes to its scores (alibi=True), which flash-attn does not support"
    if "local" in getattr(submodel.config, "attention_layers", ()):
        return "has layers with a local window (attention_layers), which transformers ignores with flash-attn"
    if submodel.config.is_encoder_decoder and kind not in _UNMASKED_STATES:
        return (
            "has a decoder with cross-attention, where transformers with flash-attn applies the decoder's "
            "padding to the encoder's states"
        )
    return None
