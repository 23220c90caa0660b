"""The kind of update that an optimizer makes, by trial: of entries, of parameters, or of all parameters together."""

import inspect
from collections.abc import Sequence
from copy import deepcopy
from enum import Enum, auto
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .combined import members_of
from .muon import Muon

KNOWN = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
# These need full parameters. They are not tried, since with `blocks` they need other shapes.
_KNOWN_FULL = frozenset({torch.optim.Adafactor, torch.optim.Muon, Muon})
# Shapes of parameters in a trial: a matrix, and its entries as two 1-D slices. They are above the sizes from which some
# optimizers treat matrices differently, or quantize states in blocks.
_MATRIX = (160, 144)
_SIZE = 160 * 144
_FIRST_SLICE = 10_000  # ends inside a row, so that rows and columns are cut too
_TWO_SLICES = [(_FIRST_SLICE,), (_SIZE - _FIRST_SLICE,)]
_STEPS = 3


class UpdateKind(Enum):
    """The entries on which the update of an entry depends."""

    ELEMENT = auto()  # on no others: slices of parameters may be updated apart
    PARAMETER = auto()  # on those of its parameter (Muon, Adafactor, LAMB): one rank updates all of them


def update_kinds(optimizer: Optimizer) -> list[UpdateKind]:
    """Return the kind of update of every parameter group.

    An unknown class is tried with the options of every group, since they may select another update. New optimizers of
    the class step a full matrix, and the same entries as two 1-D slices. If the results differ, one optimizer steps two
    matrices, and two optimizers step one each.

    Raises:
        ValueError: updates of a parameter depend on other parameters, or the optimizer cannot be tested.
    """
    return [kind for member in members_of(optimizer) for kind in _update_kinds(member)]


def require_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose updates of slices of a parameter differ from those of the full parameter.

    Raises:
        ValueError: the optimizer is not element-wise, or cannot be tested.
    """
    for member in members_of(optimizer):
        if any(kind is not UpdateKind.ELEMENT for kind in update_kinds(member)):
            raise ValueError(
                f"{_name(member)} is not element-wise: it updates a slice of a parameter differently than the full "
                f"one, and this plugin gives it slices: use HybridParallelPlugin or TorchDDPPlugin, or {_ADVICE}"
            )


_ADVICE = (
    "one that updates every element independently, such as torch.optim's "
    f"{', '.join(sorted(kind.__name__ for kind in KNOWN))}"
)


def _name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _update_kinds(optimizer: Optimizer) -> list[UpdateKind]:
    """Return the kind of update of every parameter group; groups with equal options share a trial."""
    for known, kind in ((KNOWN, UpdateKind.ELEMENT), (_KNOWN_FULL, UpdateKind.PARAMETER)):
        if type(optimizer) in known:
            return [kind] * len(optimizer.param_groups)
    options = [_options(group) for group in optimizer.param_groups]
    distinct = {repr(group_options): group_options for group_options in options}
    try:
        with torch.random.fork_rng(devices=[]):
            kinds = {key: _tried_kind(optimizer, group_options) for key, group_options in distinct.items()}
    except _Coupled:
        raise ValueError(
            f"{_name(optimizer)} couples parameters: it updates two together differently than each alone, and no rank "
            f"has all parameters: use TorchDDPPlugin, which does not shard them, or {_ADVICE}"
        ) from None
    except Exception as error:
        raise ValueError(
            f"{_name(optimizer)} could not be tried on a matrix ({type(error).__name__}: {error}), so it may couple "
            f"parameters: use TorchDDPPlugin, which does not shard them, or {_ADVICE}"
        ) from error
    return [kinds[repr(group_options)] for group_options in options]


class _Coupled(Exception):
    """Updates of a parameter depend on other parameters."""


def _tried_kind(optimizer: Optimizer, options: dict[str, Any]) -> UpdateKind:
    """Return the kind of update of an optimizer class under these options, by trial.

    Raises:
        _Coupled: updates of two matrices in one optimizer differ from those in an optimizer each.
    """
    full = _trial_updates(optimizer, options, [[_MATRIX]])
    try:
        sliced = _trial_updates(optimizer, options, [[shape] for shape in _TWO_SLICES])  # an optimizer each
    except Exception:  # Muon accepts no slices
        sliced = None
    if sliced is not None and _are_close(full, sliced):
        return UpdateKind.ELEMENT
    together = _trial_updates(optimizer, options, [[_MATRIX, _MATRIX]])
    apart = _trial_updates(optimizer, options, [[_MATRIX], [_MATRIX]])
    if not _are_close(together, apart):
        raise _Coupled
    return UpdateKind.PARAMETER


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, with a learning rate that changes parameters."""
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    if options.get("lr") == 0:
        options["lr"] = 1e-2  # a step without an update would prove nothing
    return options


def _are_close(updates: Tensor, others: Tensor) -> bool:
    return torch.allclose(updates, others, rtol=1e-4, atol=1e-4 * updates.abs().max().item())


def _trial_updates(
    optimizer: Optimizer, options: dict[str, Any], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> Tensor:
    """Step new optimizers on random parameters; return the changes of all parameters, 1-D.

    The random values depend only on the total number of entries, so trials can be compared.

    Args:
        optimizer: the user's, whose class and constructor arguments the new ones have.
        options: the options of the only group of each.
        shapes: for each new optimizer, the shapes of its parameters.
    """
    optimizer_class = type(optimizer)
    accepted = inspect.signature(optimizer_class).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    generator = torch.Generator().manual_seed(0)
    all_shapes = [shape for optimizer_shapes in shapes for shape in optimizer_shapes]
    sizes = [prod(shape) for shape in all_shapes]
    start = torch.randn(sum(sizes), dtype=torch.float32, generator=generator)
    parameters = [
        Parameter(piece.clone().view(shape))
        for piece, shape in zip(start.split(sizes), all_shapes, strict=True)
    ]
    remaining = iter(parameters)
    trials = [
        optimizer_class(list(islice(remaining, len(optimizer_shapes))), **arguments)
        for optimizer_shapes in shapes
    ]
    for trial in trials:
        trial.param_groups[0].update(deepcopy(options))
    torch.manual_seed(0)
    for _ in range(_STEPS):
        gradient = torch.randn(sum(sizes), dtype=torch.float32, generator=generator)
        gradient[_FIRST_SLICE:] *= 100  # so that the slices, and two matrices, have different norms
        for parameter, piece in zip(parameters, gradient.split(sizes), strict=True):
            parameter.grad = piece.clone().view(parameter.shape)
        for trial in trials:
            trial.step()
    return torch.cat([parameter.detach().view(-1) for parameter in parameters]) - start
