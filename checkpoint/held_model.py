"""A boosted model as checkpoints see it, whichever plugin boosted it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from .held import HeldTensor
from .lora import Adapter
from .names import TensorNames


@dataclass(frozen=True, kw_only=True)
class HeldModel:
    """What this rank holds of a model.

    Args:
        module: the transformers model, whose config is saved with it.
        names: of the whole model.
        tensors: by their first names.
        loaded: called once they were written to.
        adapters: those of them that are adapters, and how peft calls them.
    """

    module: nn.Module
    names: TensorNames
    tensors: Mapping[str, HeldTensor]
    loaded: Callable[[], None]
    adapters: tuple[Adapter, ...] = ()
