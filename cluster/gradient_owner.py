"""Who owns gradients that a layer's backward adds to by itself, in less than the whole gradients that autograd adds."""

from collections import Counter
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import Parameter

# N rows that are looked up, or that a layer was given; R, C rows and columns of a weight


class GradientOwner(Protocol):
    """Memory in which gradients accumulate."""

    def takes(self, parameter: Parameter) -> bool:
        """Whether the backward that is running is one that adds to this parameter's gradient."""
        ...

    def add_rows(self, parameter: Parameter, rows_N: Tensor, values_NC: Tensor) -> None:
        """Add to rows of the parameter's gradient, as autograd adds a whole one."""
        ...

    def add_product(self, parameter: Parameter, left_RN: Tensor, right_NC: Tensor) -> None:
        """Add a product to the parameter's gradient, as autograd adds one that was made first."""
        ...

    def note(self, parameter: Parameter) -> None:
        """Outside of autograd: the parameter's gradient of this backward is complete."""
        ...


class Owner:
    """Whom to ask for a `GradientOwner`: nobody once it is gone, since a model may outlive its optimizer.

    A copy of it, within this process or in a file, belongs to another model and asks nobody.
    """

    def __init__(self, owner: GradientOwner | None = None) -> None:
        self._owner = None if owner is None else ref(owner)

    def __call__(self) -> GradientOwner | None:
        return None if self._owner is None else self._owner()

    def of(self, parameter: Parameter) -> GradientOwner | None:
        """The owner, where it takes this parameter's gradient now."""
        owner = self()
        return owner if owner is not None and owner.takes(parameter) else None

    def __reduce__(self) -> tuple[type["Owner"], tuple[()]]:
        return Owner, ()


def is_transformed() -> bool:
    """Whether a call is not for its own sake: it is traced, compiled, or run under functorch."""
    is_traced = torch.jit.is_tracing() or torch.compiler.is_compiling()
    return is_traced or torch._C._are_functorch_transforms_active()


def give_gradients_to(owner: GradientOwner, model: nn.Module) -> None:
    """Let the layers of a model that have an attribute `gradient_owner` add their weights' gradients by themselves.

    A weight that several modules use is left to autograd, which sums over its uses before it adds to what is there.
    """
    uses = Counter(weight for module in model.modules() for weight in module._parameters.values())
    for module in model.modules():
        if hasattr(module, "gradient_owner"):
            is_used_once = uses[module.weight] == 1  # type: ignore[index]
            module.gradient_owner = Owner(owner) if is_used_once else None  # type: ignore[assignment]
