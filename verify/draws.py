"""Random numbers that are equal for all samples: a run under a layout then draws those of one process.

Small copies have no dropout, but some forwards draw masks, jitter or noise nevertheless, and boost seeds them by stage,
replica and microbatch (docs/random.md).
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..cluster.device import default_device
from ..cluster.forward_random import seed_torch
from .model_choice import ModelChoice

# Operators that draw each entry by itself.
_DRAWS = {"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "bernoulli",
          "uniform_", "normal_", "bernoulli_", "exponential_", "random_"}  # fmt: skip


class EqualDraws(TorchDispatchMode):
    """Inside, what torch draws depends on the shape of a sample alone: all samples get the numbers of the first one.

    Operators are seen also inside functions of torch that call them, such as `gumbel_softmax`.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator; one that draws begins at the same seed in each call."""
        if func.overloadpacket.__name__ not in _DRAWS:
            return func(*args, **(kwargs or {}))
        seed_torch(0, default_device())
        drawn: Tensor = func(*args, **(kwargs or {}))
        if drawn.dim() and len(drawn) > 1:
            drawn[1:] = drawn[:1].clone()
        return drawn


def equal_draws(choice: ModelChoice) -> AbstractContextManager[Any]:
    """Return a context in which a model draws equal numbers for all samples, if its forward draws any."""
    return EqualDraws() if choice.is_generic and _draws(choice) else nullcontext()


@cache
def _draws(choice: ModelChoice) -> bool:
    """Return True if the forward of a small copy moves torch's random state, which stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        seeded = torch.get_rng_state()
        choice.copy().loss()  # seeds so, too
        return not torch.equal(torch.get_rng_state(), seeded)
