"""What stands in the place of modules that a stage does not hold. Which stands where is cut.py."""

from typing import Any

import torch
from torch import Tensor, nn


class StageExit(Exception):
    """Leaves a model's forward at a stage's end. Not an error: `Stage.forward` catches it."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__("the stage's last layer is done")
        self.tensors = tensors


class Inbox:
    """What the stage before sent for the microbatch that is being computed; one per cut model."""

    def __init__(self) -> None:
        self.received: tuple[Tensor, ...] = ()

    def take(self) -> tuple[Tensor, ...]:
        """The tensors that arrived."""
        if not self.received:
            raise AssertionError("a stage after the first was called without a received tensor")
        return self.received


class StandIn(nn.Module):
    """In the place of a module that another stage holds: no parameters, its attributes readable.

    The native module is kept out of the module tree, for attribute look-ups alone. Where another rank holds
    it, it has no memory.
    """

    def __init__(self, native: nn.Module, inbox: Inbox, device: torch.device, arity: int = 0) -> None:
        super().__init__()
        self.__dict__.update(native=native, inbox=inbox, device=device, arity=arity)
        self.train(native.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["native"], name)

    def extra_repr(self) -> str:
        return f"for {type(self.__dict__['native']).__name__}, held by another stage"


class Placeholder(StandIn):
    """For an entry module: zeros in the shape of what it would have returned, without memory."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        arrived = self.inbox.take()[0]
        width = getattr(self.native, "embedding_dim", arrived.shape[-1])
        return arrived.detach().new_zeros(()).expand(*arrived.shape[:-1], width)


class Passing(StandIn):
    """For a layer of an earlier stage."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple:
        return self._as_layer(hidden)

    def _as_layer(self, hidden: Tensor) -> Tensor | tuple:
        return (hidden, *(None,) * (self.arity - 1)) if self.arity else hidden


class Arriving(Passing):
    """For the layer right before the stage's first: what the stage before sent."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple:
        return self._as_layer(self.inbox.take()[0])


class Leaving(StandIn):
    """For the layer right after the stage's last."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise StageExit((hidden,))


class Absent(StandIn):
    """For what runs on another stage alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{type(self.native).__name__} was called on a stage that does not hold it")
