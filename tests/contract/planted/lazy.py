"""Faults in lazy initialization: values that differ from those of an eager build."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from echelon import LazyInitContext
from echelon.lazy import materialize
from echelon.lazy.recorded_calls import Value
from echelon.verify.model_choice import ModelChoice

from ...lazy.compare import differences
from ..mutations import around, fault


def built() -> str | None:
    """Return the difference between a lazily and an eagerly built model, or in the numbers drawn afterwards."""
    builds: list[Any] = []
    for context in (LazyInitContext(), nullcontext()):
        torch.manual_seed(0)
        with context:
            model = ModelChoice(model_type="llama").build(1)
            nn.init.orthogonal_(model.lm_head.weight)
            weight: Any = model.lm_head.weight.data
            early = weight * 2
            weight[1:3] *= 2
            model.register_buffer("sum", early + weight)
            model.register_buffer("other_way_round", weight * 3 + early)
        builds.append((model, torch.rand(3)))
    (lazy, drawn), (eager, expected) = builds
    errors = differences(materialize(lazy), eager) + ([] if torch.equal(drawn, expected) else ["drawn next"])
    return "; ".join(errors) or None


def without_state(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Draw from the generator in its current state instead of the recorded one."""
    return replace(call(*args, **kwargs), generator_state=None)


def forgetting(value: type[Value], **fields: Any) -> Any:
    """Forget the rest of a tensor when a call writes to a part of it."""
    return value(**fields | {"before": None})


def overwriting(made: Callable[..., Any], value: Any, needs: Any, *, is_kept: Any) -> Any:
    """Compute a value in the memory of another that is still needed."""
    return made(value, needs, is_kept=False)


# fmt: off
FAULTS = {
    "numbers are drawn anew": fault("lazy.tensor:_call", around(without_state), built, num_ranks=1, quick=True),
    "values that are not overwritten are lost": fault("lazy.tensor:Value", around(forgetting), built, num_ranks=1,
        notice="lm_head.weight"),
    "a value is made in memory that another needs": fault("lazy.recorded_calls:_made_of", around(overwriting), built,
        num_ranks=1),
}
# fmt: on
