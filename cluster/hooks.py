"""Hooks on a parameter: marks on Echelon's, to find those of a user, and when autograd calls them."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

_MARK = "_echelon_hook"
Hook = TypeVar("Hook", bound=Callable)


def mark_internal(hook: Hook) -> Hook:
    """Mark a hook as Echelon's own, which `has_foreign_hooks` and `has_foreign_last_hooks` then ignore."""
    setattr(hook, _MARK, True)
    return hook


def has_foreign_hooks(parameter: Parameter) -> bool:
    """Return True if someone else wants to see the parameter's gradient when autograd has it."""
    return _has_foreign(parameter._backward_hooks) or has_foreign_last_hooks(parameter)


def has_foreign_last_hooks(parameter: Parameter) -> bool:
    """Return True if someone else may change the parameter's gradient after autograd has added to it."""
    return _has_foreign(parameter._post_accumulate_grad_hooks)


def report_added(parameter: Parameter) -> None:
    """Call Echelon's hooks on a parameter with None, as autograd does if a backward has no gradient left to add."""
    hooks: Mapping[int, Callable] = parameter._backward_hooks or {}
    for hook in hooks.values():
        if hasattr(hook, _MARK):
            hook(None)


def accumulates(parameter: Parameter) -> bool:
    """Return True if the running backward accumulates the parameter's gradient; that of autograd.grad does not."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:  # refused for leaves under autograd.grad
        return False


def _has_foreign(hooks: Mapping[int, Callable] | None) -> bool:
    return any(not hasattr(hook, _MARK) for hook in (hooks or {}).values())
