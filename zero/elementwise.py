"""Which optimizers may be given slices of parameters: those that treat every entry on its own."""

import inspect
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
_SHAPE = (4, 6)
_CUT = 10  # inside a row, so that rows and columns are cut too
_STEPS = 3


def require_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that gives other numbers on slices of a parameter than on the whole.

    An unknown class is tried: it steps a small matrix whole, and the same entries as two 1-D pieces.

    Raises:
        ValueError: the optimizer is not element-wise, or cannot be tried.
    """
    kind = type(optimizer)
    if kind in KNOWN:
        return
    name = f"{kind.__module__}.{kind.__qualname__}"
    known = ", ".join(sorted(each.__name__ for each in KNOWN))
    advice = f"use one that updates every entry on its own, such as torch.optim's {known}"
    try:
        with torch.random.fork_rng(devices=[]):
            whole, pieces = _updates(optimizer, cut=False), _updates(optimizer, cut=True)
    except Exception as error:
        raise ValueError(
            f"{name} could not be tried on slices of a parameter ({type(error).__name__}: {error}), so it "
            f"may not be element-wise, which sharing out its states needs: {advice}"
        ) from error
    if not torch.allclose(whole, pieces, rtol=1e-4, atol=1e-4 * whole.abs().max().item()):
        raise ValueError(
            f"{name} is not element-wise: it updates a slice of a parameter otherwise than the whole, "
            f"so its states cannot be shared out: {advice}"
        )


def _updates(optimizer: Optimizer, *, cut: bool) -> Tensor:
    """How far each entry of a matrix moves in a few steps, 1-D; with `cut` it is held as two 1-D pieces."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator)
    parameters = [Parameter(piece.clone()) for piece in _pieces(start, cut)]
    trial = type(optimizer)(parameters, **_arguments(optimizer))
    torch.manual_seed(0)
    for _ in range(_STEPS):
        gradient = torch.randn(_SHAPE, generator=generator)
        gradient.view(-1)[_CUT:] *= 100  # so that what depends on a norm differs between the pieces
        for parameter, piece in zip(parameters, _pieces(gradient, cut), strict=True):
            parameter.grad = piece.clone()
        trial.step()
    return torch.cat([parameter.detach().view(-1) for parameter in parameters]) - start.view(-1)


def _pieces(x: Tensor, cut: bool) -> tuple[Tensor, ...]:
    return x.view(-1).split([_CUT, x.numel() - _CUT]) if cut else (x,)


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's own defaults, as far as its constructor takes them."""
    accepted = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    if arguments.get("lr") == 0:
        arguments["lr"] = 1e-2  # a step that moves nothing would prove nothing
    return arguments
