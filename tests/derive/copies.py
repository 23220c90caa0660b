"""Small copies of model types, for the tests of what is derived from them."""

from typing import Any

import transformers

from echelon.derive.build import Copy, small_copy
from echelon.derive.double import in_double
from echelon.derive.tasks import tasks_of


def copy_of(model_type: str, **settings: Any) -> Copy:
    """Return a small copy of a type with the preferred head; `settings` are those of its full config."""
    task, name = next(iter(tasks_of(model_type).items()))
    config = transformers.CONFIG_MAPPING[model_type](**settings)
    return small_copy(getattr(transformers, name), config, task)


def double_copy_of(model_type: str, **settings: Any) -> Copy:
    """Return the same copy in float64."""
    return in_double(copy_of(model_type, **settings))
