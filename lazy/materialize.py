"""Making a lazily built model real: what it holds once it is cut, or all of it."""

from collections.abc import Iterator

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten_with_path

from .memory import make
from .tensor import LazyTensor, content_of
from .value import Geometry

_HELD = ("_parameters", "_buffers")


def materialize(module: nn.Module, *, verbose: bool = False) -> nn.Module:
    """Compute every lazily built tensor that a module holds, one after the other, in place; returns the module.

    Each becomes a plain tensor, and stays the same object: optimizers and ties go on holding it. Modules that were not
    built lazily are left as they are. Communicates nothing.

    Args:
        module: a model; parameters, buffers and other tensors of all its modules are found.
        verbose: print how many tensors were made real, and how large they are together.

    Raises:
        RuntimeError: it is called inside of LazyInitContext.
        ValueError: tensors cannot be made real; names all of them. None was.
    """
    if isinstance(torch.empty(1), LazyTensor):
        raise RuntimeError(
            "a lazily built model is made real, or boosted, after the block of LazyInitContext"
        )
    held = list(_tensors_of(module))
    lazy = {name: tensor for name, tensor in held if isinstance(tensor, LazyTensor)}
    faults = [fault for name, tensor in held for fault in _faults(name, tensor)]
    if lazy and faults:
        raise ValueError("; ".join(faults))
    made: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
    for name, tensor in lazy.items():
        _make_real(name, tensor, made)
    if verbose:
        num_bytes = sum(real.nbytes() for _, real in made.values())
        print(f"{len(lazy)} lazily built tensors were made real: {num_bytes / 2**20:.1f} MiB")
    return module


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a module or one below it holds, once, by the first of its names."""
    seen = set()
    for path, each in module.named_modules():
        for keys, leaf in tree_flatten_with_path(vars(each))[0]:
            if isinstance(leaf, Tensor) and id(leaf) not in seen:
                seen.add(id(leaf))
                names = [str(getattr(key, "key", getattr(key, "idx", key))) for key in keys]
                yield ".".join([*filter(None, [path]), *(name for name in names if name not in _HELD)]), leaf


def _faults(name: str, tensor: Tensor) -> list[str]:
    """Why a tensor of a lazily built model cannot be made real, or be one that is."""
    if not isinstance(tensor, LazyTensor):
        return [f"{name} is on the meta device and holds nothing"] if tensor.is_meta else []
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        return [f"{name} has hooks, which would be lost: register them once the model is real"]
    return []


def _make_real(name: str, tensor: LazyTensor, made: dict[int, tuple[UntypedStorage, UntypedStorage]]) -> None:
    """Replace a lazy tensor by a real one in the same object.

    Args:
        name: for errors.
        tensor: the tensor.
        made: the memory that is real already, with the lazy one whose content it has, by the id of the latter.
    """
    lazy, content = tensor.untyped_storage(), content_of(tensor)
    if id(lazy) not in made:
        try:
            made[id(lazy)] = lazy, make(content.value).to(device=content.device)
        except RuntimeError as error:
            raise RuntimeError(f"{name} could not be made real: {error}") from error
    plain = Geometry.of(tensor).of_memory(made[id(lazy)][1])
    is_parameter = isinstance(tensor, Parameter)
    real = (
        Parameter(plain, tensor.requires_grad) if is_parameter else plain.requires_grad_(tensor.requires_grad)
    )
    vars(real).update({key: value for key, value in vars(tensor).items() if key != "_is_param"})
    try:
        torch.utils.swap_tensors(tensor, real)
    except RuntimeError as error:
        raise RuntimeError(
            f"{name} could not be made real, since something besides its module refers to it, a view perhaps: {error}"
        ) from error
