"""Telling Echelon's own hooks on a parameter from those of a user."""

from collections.abc import Callable
from typing import TypeVar

from torch.nn import Parameter

_MARK = "_echelon_hook"
Hook = TypeVar("Hook", bound=Callable)


def own(hook: Hook) -> Hook:
    """Mark a hook as one that needs no gradient to look at."""
    setattr(hook, _MARK, True)
    return hook


def has_foreign_hooks(parameter: Parameter) -> bool:
    """Whether someone else wants to see the parameter's gradient when autograd has it."""
    hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return any(not hasattr(hook, _MARK) for registered in hooks for hook in (registered or {}).values())
