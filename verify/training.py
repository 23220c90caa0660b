"""How a model is trained, whatever its layout, as data. What is done with it is parity.py."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

LEARNING_RATE = 1e-3
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the steps of a parity check go through besides forward, backward and update.

    Args:
        vector_rate: the learning rate of biases and norms, which have a parameter group of their own.
        frozen: which parameters do not train: none, the lower half of the model (with the embedding), or every
            second one.
        overflow_step: the step, from 0, in which the gradients of one rank are not finite; None is none.
        extra_samples: samples of a replica's batch beyond two for each microbatch, by step + replica, over again
            from the first. 1 makes microbatches of unequal size.
    """

    vector_rate: float = LEARNING_RATE
    frozen: Literal["none", "lower half", "every second"] = "none"
    overflow_step: int | None = None
    extra_samples: tuple[int, ...] = (1,)

    def freeze(self, model: nn.Module) -> None:
        """Switch off the gradients of what is frozen."""
        parameters = list(model.parameters())
        chosen = {
            "none": [],
            "lower half": parameters[: len(parameters) // 2],
            "every second": parameters[::2],
        }
        for parameter in chosen[self.frozen]:
            parameter.requires_grad_(False)

    def num_samples(self, *, step: int, replica: int, microbatches: int) -> int:
        """How many samples a replica's batch has."""
        return 2 * microbatches + self.extra_samples[(step + replica) % len(self.extra_samples)]
