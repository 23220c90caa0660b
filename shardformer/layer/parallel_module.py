"""The base of all parallel layers: made from a native module, which it replaces under the same name."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ...lazy.tensor import LazyTensor

# Where a module keeps what runs around its forward; accelerate puts a forward of its own on the instance.
AROUND_FORWARD = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class ParallelModule(nn.Module, ABC):
    """A module that holds one rank's part of a native module's parameters.

    A subclass keeps the native module's Parameter objects (only their data are cut, by
    `cluster.placement.place`), so an optimizer that holds them goes on holding them.
    """

    @staticmethod
    @abstractmethod
    def from_native_module(module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any) -> nn.Module:
        """The parallel module that takes the native one's place. Communicates nothing."""


def native_faults(module: nn.Module, *kinds: type[nn.Module]) -> list[str]:
    """Why no parallel layer can take this module's place and compute the same; empty when one can.

    A parallel layer takes over weight and bias alone: what a subclass (an adapter, a quantized layer), a hook
    or a special tensor does besides would silently be lost.

    Args:
        module: what is to be replaced.
        kinds: the classes that the parallel layer knows; not their subclasses.
    """
    if type(module) not in kinds:
        known = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        return [
            f"is a {type(module).__module__}.{type(module).__qualname__} and not a plain {known}: what it does of its "
            "own would be lost. Split the plain model, or write a policy that knows this class"
        ]
    found = []
    if "forward" in vars(module) or any(getattr(module, name) for name in AROUND_FORWARD):
        found.append(
            "has hooks or a forward of its own, which would be lost: register them after the model is split"
        )
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) not in (Parameter, LazyTensor) or not parameter.is_floating_point():
            found.append(
                f"has a {name} of {type(parameter).__name__} in {parameter.dtype}, which cannot be cut: quantize or "
                "distribute the model after it is split, or not at all"
            )
    return found


def require_native(module: nn.Module, *kinds: type[nn.Module]) -> None:
    """Raise TypeError where `native_faults` finds any."""
    if faults := native_faults(module, *kinds):
        raise TypeError(f"this {type(module).__name__} {'; it '.join(faults)}")


def require_all(is_valid: Tensor, tell: Callable[[], str]) -> None:
    """Raise ValueError unless all are valid; on an accelerator a device-side assertion, as torch's own look-ups."""
    if is_valid.device.type == "cpu":
        if not bool(is_valid.all()):
            raise ValueError(tell())
    elif not is_valid.is_meta:
        torch._assert_async(is_valid.all())  # looking at the result here would wait for the device
