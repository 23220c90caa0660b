"""Configs of transformers that belong to one model alone, so that sharding may change them."""

import copy
from typing import Any

from torch import nn
from transformers import PretrainedConfig


def copy_configs(model: nn.Module) -> None:
    """Replace the configs of a model and its modules by copies; modules that shared a config share its copy.

    Sharding writes the attention and numbers of heads into configs, which the script may use for other models.
    """
    copies: dict[int, Any] = {}  # memo of `deepcopy`
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PretrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copies)
