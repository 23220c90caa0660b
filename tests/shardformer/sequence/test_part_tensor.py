"""What stands for a whole sequence: what it tells, and that anything else is done with the whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from echelon.shardformer.sequence.part_tensor import PartTensor


def stands_for(whole: Tensor) -> tuple[PartTensor, list[int]]:
    """A part of half the length, and how often the whole was made."""
    made: list[int] = []

    def make() -> Tensor:
        made.append(1)
        return whole

    return PartTensor(whole[:, : whole.shape[1] // 2], length=whole.shape[1], make_whole=make), made


def test_shape_and_kind_are_told_without_the_whole() -> None:
    x, made = stands_for(torch.ones(2, 6, 4, requires_grad=True))
    told = (x.shape, x.size(1), x.ndim, x.dim(), len(x), x.dtype, x.device.type, x.is_floating_point())
    assert told == ((2, 6, 4), 6, 3, 3, 2, torch.float32, "cpu", True)
    assert x.requires_grad and isinstance(x, Tensor) and {x: 1}[x] == 1
    assert not made and x.part is not None and x.part.shape == (2, 3, 4)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x * 2,
        lambda x: torch.ones(4) + x,
        lambda x: torch.nn.functional.layer_norm(x, (4,)),
        lambda x: x[:, -1],
        lambda x: torch.cat([x, x], 1),
        lambda x: x.clone().masked_fill_(x > 3, 0.0),
        lambda x: x.to(torch.float64),
    ],
    ids=["times", "plus", "norm", "entry", "cat", "in place", "dtype"],
)
def test_whatever_computes_with_it_computes_with_the_whole(use: Callable[[Tensor], Tensor]) -> None:
    whole = torch.arange(48.0).view(2, 6, 4).requires_grad_()
    x, made = stands_for(whole)
    found = use(x)
    assert type(found) is Tensor and torch.equal(found, use(whole))
    found.sum().backward()
    gradient, whole.grad = whole.grad, None
    use(whole).sum().backward()
    assert gradient is not None and torch.equal(gradient, whole.grad)  # type: ignore[arg-type]
    assert made == [1] and x.part is None  # parts are of the whole from here on


def test_who_reads_without_gradients_takes_none_away() -> None:
    weight = torch.ones(4, requires_grad=True)
    x = PartTensor(torch.ones(2, 3, 4), length=6, make_whole=lambda: torch.ones(2, 6, 4) * weight)
    with torch.no_grad():
        assert x.sum() == 48
    x.whole().sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [12.0] * 4


class Doubled(Function):
    """Computes with what it is given behind the back of what stands for it."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.ones(2, 6, 4)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def test_a_gradient_that_would_be_lost_fails() -> None:
    x, _ = stands_for(torch.ones(2, 6, 4, requires_grad=True))
    with pytest.raises(AssertionError, match="would be lost"):
        Doubled.apply(x).sum().backward()


def test_what_reads_it_below_python_fails() -> None:
    x, _ = stands_for(torch.ones(2, 6, 4))
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(AssertionError, match="a part for the whole"):
        x + 1
