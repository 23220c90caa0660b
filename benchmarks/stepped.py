"""Base classes of contenders with a torch optimizer, and the simplest one: a single process."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from workload import MakeOptimizer, Workload, adamw


class Stepped:
    """The optimizer's part of a contender.

    Args:
        optimizer: a torch optimizer or a similar one; None on a rank without work.
        clip: clips the gradients before a step, unless the optimizer does.
    """

    def __init__(self, optimizer: Any | None, *, clip: Callable[[], Any] | None = None) -> None:
        self._optimizer: Any = optimizer
        self._clip = clip

    def update(self) -> None:
        """Clip the gradients, step the optimizer and drop them. Communicates if one of them does."""
        if self._clip is not None:
            self._clip()
        if self._optimizer is not None:
            self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def states(self) -> Mapping[Any, dict[str, Any]]:
        """Return the optimizer's state on this rank, by parameter."""
        return {} if self._optimizer is None else self._optimizer.state


class OneBatch(Stepped):
    """A contender with one forward and backward per batch.

    Args:
        model: a transformers model, or a wrapper of one; called with the batch.
        optimizer: its optimizer.
        backward: computes gradients of a loss.
        batch: this rank's batch.
        clip: see `Stepped`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        backward: Callable[[Tensor], None] = Tensor.backward,
        batch: Mapping[str, Tensor],
        clip: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(optimizer, clip=clip)
        self._model = model
        self._backward = backward
        self._batch = batch
        self._loss: Tensor | None = None

    @property
    def model(self) -> nn.Module:
        """The module that is called with the batch."""
        return self._model

    def compute(self) -> None:
        """Compute loss and gradients of the batch. Communicates over the world."""
        loss = self._model(**self._batch).loss
        self._backward(loss)
        self._loss = loss.detach()

    def loss(self) -> Tensor | None:
        """Return the mean loss of this rank's batch."""
        return self._loss


class OneProcess(Stepped):
    """The full batch on one rank, microbatch by microbatch; the others wait, or do the same independently.

    Args:
        workload: the computation.
        device: its device.
        works: True if this rank computes.
        make_optimizer: its optimizer.
    """

    name = "one process"

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        *,
        works: bool,
        make_optimizer: MakeOptimizer = adamw,
    ) -> None:
        self._works = works
        self._loss: Tensor | None = None
        if works:
            self._model = workload.model().to(device)
            data = workload.data(device)
            size = workload.batch // workload.microbatches
            self._microbatches = [
                dict(zip(data, parts, strict=True))
                for parts in zip(*(tensor.split(size) for tensor in data.values()), strict=True)
            ]
            super().__init__(
                make_optimizer(self._model), clip=clipping(self._model.parameters(), workload.max_norm)
            )
        else:
            super().__init__(None)

    def compute(self) -> None:
        """Compute loss and gradients of the batch."""
        if not self._works:
            return
        losses = []
        for microbatch in self._microbatches:
            loss = self._model(**microbatch).loss / len(self._microbatches)
            loss.backward()
            losses.append(loss.detach())
        self._loss = torch.stack(losses).sum()

    def loss(self) -> Tensor | None:
        """Return the mean loss."""
        return self._loss

    def gradients(self) -> Mapping[str, Tensor]:
        """Return gradients by name."""
        return gradients_of(self._model) if self._works else {}


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a module's parameters, by name."""
    return {
        name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None
    }


def clipping(parameters: Iterable[nn.Parameter], max_norm: float) -> Callable[[], Any] | None:
    """Return torch's clipping of the gradients of one process or of replicas; None for a `max_norm` of 0."""
    return partial(nn.utils.clip_grad_norm_, list(parameters), max_norm) if max_norm else None
