"""The attention that a module computes where nothing is split, by the name that transformers has for it."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..attention import FLASH_ATTENTION_2, SDPA, XFORMERS, register_xformers
from ..config_view import ConfigView

EAGER = "eager"
KERNELS = (EAGER, SDPA, FLASH_ATTENTION_2, XFORMERS)


class AttentionView:
    """Answers as an attention module does, but for the attributes that are given."""

    def __init__(self, module: Any, /, **own: Any) -> None:
        self.__dict__.update(own, _module=module)

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # while it is being copied, before it has one
            raise AttributeError(name)
        return getattr(self._module, name)


def kernel_of(module: nn.Module, name: str) -> Callable[..., tuple[Tensor, Any]]:
    """The attention that transformers would call for a module, called as that is.

    Args:
        module: an attention of a model.
        name: one of KERNELS.
    """
    function = _function_of(module, name)

    def attend(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        # Flash attention looks in the config for which of its versions to run.
        if (config := getattr(module, "config", None)) is not None:
            module = AttentionView(module, config=ConfigView(config, _attn_implementation=name))
        result: tuple[Tensor, Any] = function(module, *args, **kwargs)
        return result

    return attend


def mask_of(name: str) -> Callable[..., Any]:
    """The function that makes masks for a kernel."""
    register_xformers()
    found: Callable[..., Any] = AttentionMaskInterface()[name]
    return found


def _function_of(module: nn.Module, name: str) -> Callable[..., tuple[Tensor, Any]]:
    if name == EAGER:
        found = _first(module, "eager_attention_forward")
    else:
        register_xformers()
        functions = _first(module, "ALL_ATTENTION_FUNCTIONS")  # a file may have some of its own
        found = (functions if isinstance(functions, AttentionInterface) else AttentionInterface())[name]
    if found is None:
        raise AssertionError(f"{type(module).__module__} has no attention by {name!r}")
    function: Callable[..., tuple[Tensor, Any]] = found
    return function


def _first(module: nn.Module, name: str) -> Any:
    """What has a name in the file that the module's class is written in, or those that it is made from; else None."""
    files = (sys.modules[each.__module__] for each in type(module).__mro__)
    return next((found for file in files if (found := getattr(file, name, None)) is not None), None)
