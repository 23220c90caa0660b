"""One forward and backward of a small copy as the calls of its modules, with all tensors."""

import inspect
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..pipeline.stage_plan import OutputStructure
from .build import Copy
from .double import StaysDouble
from .inputs import tensors_in


class ModuleCall(NamedTuple):
    """A call of a module, with its tensors; `start` and `stop` count the starts and ends of all calls.

    `inputs` are all tensors in the arguments, `named` the arguments that are tensors, in the order of the signature.
    """

    path: str
    start: int
    stop: int
    inputs: tuple[Tensor, ...]
    output: Any
    named: dict[str, Tensor]


def calls_of(copy: Copy) -> list[ModuleCall]:
    """Trace one forward and backward of a copy; return the calls of its modules in the order of their starts.

    The gradients stay in the copy, and in all outputs: they tell what was used.
    """
    paths: dict[nn.Module, str] = {}
    for path, module in copy.model.named_modules():
        paths.setdefault(module, path)
    clock, begun, calls, handles = [0], list[tuple[str, int]](), list[ModuleCall](), []

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        clock[0] += 1
        begun.append((paths[module], clock[0]))

    def after(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        clock[0] += 1
        path, start = begun.pop()
        kept = tree_map(lambda leaf: leaf, output)  # the model may change the object afterwards
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.retain_grad()
        inputs = tuple(tensors_in([args, kwargs]))
        calls.append(ModuleCall(path, start, clock[0], inputs, kept, _named(module, args, kwargs)))

    for module in paths:
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        copy.model.zero_grad()
        with StaysDouble():  # `float()` in a model's code would round what is compared later
            copy.loss().backward()
    finally:
        for handle in handles:
            handle.remove()
    return sorted(calls, key=lambda call: call.start)


def _named(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the arguments of a call that are tensors, by name, in the order of the signature."""
    names = list(inspect.signature(module.forward).parameters)
    arguments = dict(zip(names, args, strict=False)) | kwargs
    ordered = {name: arguments[name] for name in names if name in arguments} | arguments
    return {name: value for name, value in ordered.items() if isinstance(value, Tensor)}


def structure_of(output: Any) -> OutputStructure:
    """Return the structure of a call's output; tensors that no gradient reached are `detached`.

    Raises:
        ValueError: it cannot travel between stages.
    """
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    untrained = [
        number for number, tensor in enumerate(tensors) if tensor.requires_grad and tensor.grad is None
    ]
    return replace(OutputStructure.of(output), detached=frozenset(untrained))
