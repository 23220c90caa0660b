"""Bitwise comparison of all tensors of two models, for tests of lazy initialization."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from echelon import LazyInitContext
from echelon.lazy.tensor import LazyTensor


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers and other tensors of a model by name; tied ones under all their names."""
    return {
        f"{path}.{name}": tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (vars(module) | module._parameters | module._buffers).items()
        if isinstance(tensor, Tensor)
    }


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    """Return differences of the tensors of two models: names, ties, classes, memory layouts, or any bit."""
    tensors, others = tensors_of(model), tensors_of(expected)
    if tensors.keys() != others.keys():
        return [f"names: {sorted(tensors.keys() ^ others.keys())}"]
    errors = [
        f"{name}: {_look(tensors[name])}, not {_look(others[name])}"
        for name in tensors
        if not _alike(tensors, others, name)
    ]
    ties = [
        [{name for name in all_ if all_[name] is one} for one in all_.values()] for all_ in (tensors, others)
    ]
    return errors + ([] if ties[0] == ties[1] else ["ties"])


def _alike(tensors: dict[str, Tensor], others: dict[str, Tensor], name: str) -> bool:
    bits = [
        tensor.detach().clone().contiguous().view(torch.uint8)
        for tensor in (tensors[name][None], others[name][None])
    ]
    return _look(tensors[name]) == _look(others[name]) and torch.equal(*bits)


def _look(tensor: Tensor) -> str:
    kind = type(tensor).__name__
    return f"{kind} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device} {tensor.requires_grad}"


def built_in_both_ways(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Build a model lazily and eagerly, and draw random numbers after each.

    All parameters of the lazy model are lazy, except scalars: those of an activation may be computed at once.
    """
    torch.manual_seed(3)
    eager = build()
    drawn_after_eager = torch.rand(7)
    torch.manual_seed(3)
    with LazyInitContext():
        lazy = build()
    drawn_after_lazy = torch.rand(7)
    real = [name for name, tensor in lazy.named_parameters() if not isinstance(tensor, LazyTensor)]
    assert [name for name in real if lazy.get_parameter(name).numel() > 1] == []
    return lazy, eager, drawn_after_lazy, drawn_after_eager
