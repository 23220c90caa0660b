"""The base class of the models that `booster.boost` returns."""

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

from ..checkpoint.lora import Adapter


class BoostedModule(nn.Module):
    """A boosted model; `unwrap()` is the model itself.

    Args:
        adapters: what is saved of it as LoRA.
    """

    module: nn.Module

    def __init__(self, adapters: Sequence[Adapter] = ()) -> None:
        super().__init__()
        self.adapters = tuple(adapters)

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
