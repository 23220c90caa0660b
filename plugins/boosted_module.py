"""The base class of the models that `booster.boost` returns."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ..checkpoint.lora import Adapter
from ..cluster.faults import naming_failures


class BoostedModule(nn.Module):
    """A boosted model; `unwrap()` is the model itself.

    Args:
        adapters: what is saved of it as LoRA.
    """

    module: nn.Module

    def __init__(self, adapters: Sequence[Adapter] = ()) -> None:
        super().__init__()
        self.adapters = tuple(adapters)

    @abstractmethod
    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model's outputs."""

    @abstractmethod
    def ranks_of_call(self) -> Sequence[int] | None:
        """The ranks that have to make the same call; None is all, () none but this one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; a rank that fails meanwhile is named on those that wait for it."""
        if torch.compiler.is_compiling():  # torch.compile cannot trace the watch over the ranks
            return self.compute(*args, **kwargs)
        with naming_failures("model(**batch)", self.ranks_of_call()):
            return self.compute(*args, **kwargs)

    def unwrap(self) -> nn.Module:
        """The model without the wrapper."""
        return self.module

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Call the model's own `save_pretrained`.

        Raises:
            RuntimeError: this rank has a part of the model alone, or the model has adapters; it says what to call.
        """
        if self.adapters:  # their layers have names that from_pretrained does not know
            raise RuntimeError(
                "save_pretrained of a model with adapters writes names that from_pretrained does not know: call "
                "booster.save_lora_as_pretrained(model, folder) on every rank, or booster.save_model"
            )
        self.module.save_pretrained(*args, **kwargs)  # type: ignore[operator]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a boosted model has process groups and cannot be copied or pickled: call booster.save_model(model, path) "
            "on every rank, or booster.save_checkpoint"
        )
