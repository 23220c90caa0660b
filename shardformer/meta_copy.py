"""Copies of models on the meta device, on which changes are tried: see [Note: dry run] in sharder.py."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PretrainedConfig

from ..lazy.tensor import LazyTensor


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy a model and its configs, with parameters and buffers on the meta device. All else is shared."""
    copies: dict[int, Any] = {}  # by the id of a module or tensor: shared ones stay shared
    configs: dict[int, Any] = {}  # memo of `deepcopy`

    def copy_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _meta_tensor(tensor)
        copied: Tensor = copies[id(tensor)]
        return copied

    modules = dict.fromkeys(model.modules())
    for module in modules:
        copies[id(module)] = copied = type(module).__new__(type(module))
        vars(copied).update({name: _copied_attribute(value, configs) for name, value in vars(module).items()})
    for module in modules:
        copied = copies[id(module)]
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else copies[id(child)]
        for tensors in (copied._parameters, copied._buffers):
            for name, tensor in tensors.items():
                tensors[name] = None if tensor is None else copy_of(tensor)
    meta_model: nn.Module = copies[id(model)]
    return meta_model


def _copied_attribute(value: Any, configs: dict[int, Any]) -> Any:
    """Return an attribute for a module's copy: a copy of a config or a plain container, anything else as it is.

    Args:
        value: the attribute of the original module.
        configs: memo of `deepcopy`, by which modules that share a config share its copy.
    """
    if isinstance(value, PretrainedConfig):
        return copy.deepcopy(value, configs)
    return value.copy() if type(value) in (dict, OrderedDict, list, set) else value


def _meta_tensor(tensor: Tensor) -> Tensor:
    """Return an empty tensor of this shape on the meta device: a plain one for a buffer, or else a Parameter.

    A subclass of Parameter becomes an empty subclass of the same name, for `native_errors` to refuse it by.
    """
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, (Parameter, LazyTensor)):
        return empty
    if type(tensor) in (Parameter, LazyTensor):  # lazy: a Parameter once it is materialized
        return Parameter(empty, requires_grad=tensor.requires_grad)
    subclass: Any = type(type(tensor).__name__, (Parameter,), {})
    copied: Tensor = subclass(empty, requires_grad=tensor.requires_grad)
    return copied
