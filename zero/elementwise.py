"""Refusal of optimizers that are not element-wise."""

import inspect
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

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
# Above the thresholds of optimizers: some treat small matrices differently, or quantize states of large ones in blocks.
_SHAPE = (160, 144)
_SIZE = 160 * 144
_CUT = 10_000  # inside a row, so that rows and columns are cut too
_STEPS = 3


def require_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose updates of slices of a parameter differ from those of the full parameter.

    An unknown class is tested: it steps a full matrix, and the same entries as two 1-D slices. The options of each
    parameter group are tested, since they may select another update. Each slice has its own optimizer, as on a rank,
    since some optimizers adapt to all of their parameters.

    Raises:
        ValueError: the optimizer is not element-wise, or cannot be tested.
    """
    kind = type(optimizer)
    if kind in KNOWN:
        return
    name = f"{kind.__module__}.{kind.__qualname__}"
    known = ", ".join(sorted(each.__name__ for each in KNOWN))
    advice = (
        f"use one that updates every element independently, such as torch.optim's {known}; or TorchDDPPlugin, which "
        "does not shard parameters"
    )
    try:
        with torch.random.fork_rng(devices=[]):
            alike = all(_treats_alike(optimizer, options) for options in _options(optimizer))
    except Exception as error:
        raise ValueError(
            f"{name} could not be tried on slices of a parameter ({type(error).__name__}: {error}), so it "
            f"may not be element-wise, which sharding its states needs: {advice}"
        ) from error
    if not alike:
        raise ValueError(
            f"{name} is not element-wise: it updates a slice of a parameter differently than the full one, so its "
            f"states cannot be sharded: {advice}"
        )


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the distinct options of the parameter groups."""
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        if options.get("lr") == 0:
            options["lr"] = 1e-2  # a step without an update would prove nothing
        found.setdefault(repr(options), options)
    return list(found.values())


def _treats_alike(optimizer: Optimizer, options: dict[str, Any]) -> bool:
    """Return True if the updates of a matrix and of its slices are equal."""
    whole, pieces = (_updates(optimizer, options, lengths) for lengths in ((_SIZE,), (_CUT, _SIZE - _CUT)))
    return torch.allclose(whole, pieces, rtol=1e-4, atol=1e-4 * whole.abs().max().item())


def _updates(optimizer: Optimizer, options: dict[str, Any], lengths: tuple[int, ...]) -> Tensor:
    """Return the 1-D updates of a matrix in a few steps; several slices are 1-D, with one optimizer each."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, dtype=torch.float32, generator=generator)
    pieces = [start] if len(lengths) == 1 else start.view(-1).split(lengths)
    parameters = [Parameter(piece.clone()) for piece in pieces]
    trials = [kind([parameter], **arguments) for parameter in parameters]
    for trial in trials:
        trial.param_groups[0].update(deepcopy(options))
    torch.manual_seed(0)
    for _ in range(_STEPS):
        gradient = torch.randn(_SIZE, dtype=torch.float32, generator=generator)
        gradient[_CUT:] *= 100  # so that the slices have different norms
        for trial, parameter, piece in zip(trials, parameters, gradient.split(lengths), strict=True):
            parameter.grad = piece.clone().view(parameter.shape)
            trial.step()
    return torch.cat([parameter.detach().view(-1) for parameter in parameters]) - start.view(-1)
