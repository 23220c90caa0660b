"""The names of a whole model's tensors, taken before it is cut."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

# What peft puts into the name of a tensor of the model that it has wrapped, beside adapters.
_WRAPPED = (".base_layer.", ".original_module.")


class TensorNames(NamedTuple):
    """The names of a whole model's parameters and persistent buffers.

    Args:
        needed: one for each tensor, in the model's order.
        first: for every name the one of these under which its tensor is known; a tied one has several, and so has one
            that peft wrapped: the model's own.
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
        own = {_unwrapped(name): each for name, each in first.items()}
        return TensorNames(needed=tuple(known.values()), first={**own, **first})

    def of_model(self) -> dict[str, str]:
        """By each needed name the one that it has in the model that peft wrapped; the same where peft did not."""
        own = {name: _unwrapped(name) for name in self.needed}
        return {name: each if self.first[each] == name else name for name, each in own.items()}


def _unwrapped(name: str) -> str:
    for wrapped in _WRAPPED:
        name = name.replace(wrapped, ".")
    return name
