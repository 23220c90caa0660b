"""Modules of peft in a model, known by their classes. peft is optional, so nothing here imports it."""

from collections.abc import Iterator
from typing import Any

from torch import nn

_LORA = ("peft.tuners.lora.layer", "Linear")


def is_of_peft(module: nn.Module) -> bool:
    """Return True where a module is of one of peft's classes, or of one made from them."""
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)


def is_lora(module: nn.Module) -> bool:
    """Return True for LoRA around a linear layer, as peft puts it around nn.Linear and transformers' Conv1D."""
    return (type(module).__module__, type(module).__name__) == _LORA


def plain(module: nn.Module) -> Any:
    """The linear layer inside of LoRA, or the module itself."""
    return module.base_layer if is_lora(module) else module


def plain_path(root: nn.Module, path: str) -> str:
    """Where the linear layer at a path is, which may be inside of LoRA."""
    return f"{path}.base_layer" if is_lora(root.get_submodule(path)) else path


def adapted(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All that peft has put around modules, with the paths; not what lies in another of peft's."""
    within = ""
    for path, module in root.named_modules():
        if is_of_peft(module) and not (within and path.startswith(within)):
            within = f"{path}."
            yield path, module
