"""The names of a whole model's tensors, taken before it is cut."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ..shardformer.partial_state import local_state

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
        first = {name: known.setdefault(id(tensor), name) for name, tensor in local_state(model).items()}
        own = {_unwrapped(name): each for name, each in first.items()}
        return TensorNames(needed=tuple(known.values()), first={**own, **first})

    def of_model(self) -> dict[str, str]:
        """By each needed name the one that it has in the model that peft wrapped; the same where peft did not."""
        own = {name: _unwrapped(name) for name in self.needed}
        return {name: each if self.first[each] == name else name for name, each in own.items()}


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model, or of what a rank has of it, by name.

    Raises:
        ValueError: modules have an extra state, which would not be restored.
    """
    state = local_state(model)
    if extra := [name for name in state if name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX]:
        raise ValueError(
            f"{', '.join(extra)} cannot be saved or loaded: a model's files hold parameters and buffers alone. Make a "
            "buffer of what get_extra_state returns, or keep it in `user` of save_checkpoint"
        )
    return state


def _unwrapped(name: str) -> str:
    for wrapped in _WRAPPED:
        name = name.replace(wrapped, ".")
    return name
