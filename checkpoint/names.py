"""The names of a whole model's tensors, taken before it is cut."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn


class TensorNames(NamedTuple):
    """The names of a whole model's parameters and persistent buffers.

    Args:
        needed: one for each tensor, in the model's order.
        first: for every name the one of these under which its tensor is known; a tied one has several.
    """

    needed: tuple[str, ...]
    first: Mapping[str, str]

    @staticmethod
    def of(model: nn.Module) -> "TensorNames":
        """The names of a whole model, before it is cut."""
        known: dict[int, str] = {}
        first = {
            name: known.setdefault(id(tensor), name)
            for name, tensor in model.state_dict(keep_vars=True).items()
        }
        return TensorNames(needed=tuple(known.values()), first=first)
