"""Calls of a model without a cache of keys and values, as far as that leaves its masks what they are.

[Note: packed texts] transformers keeps texts apart whose `position_ids` begin anew within a row, but only in a call
that has neither an `attention_mask` nor a cache. Whether there is a cache `use_cache` says, in the call or else in the
config, where it is True by default; some models have none in training. Such a call is made as the user wrote it, with
the cache that it makes, so that its masks are those of `model(**batch)` without Echelon. The cache is not returned.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import Cache


def argument(model: nn.Module, args: tuple, kwargs: Mapping[str, Any], name: str) -> Any:
    """An argument of a model's call, given by name or by place; None where it is not given."""
    if name in kwargs or not args:
        return kwargs.get(name)
    return dict(zip(inspect.signature(model.forward).parameters, args, strict=False)).get(name)


def depends_on_cache(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may have other masks with a cache than without: see [Note: packed texts]."""
    is_given = argument(model, args, kwargs, "position_ids") is not None
    return is_given and argument(model, args, kwargs, "attention_mask") is None


def without_cache(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call that makes no cache, unless its masks depend on one.

    Args:
        model: takes `use_cache`.
        args, kwargs: of its call.
    """
    return dict(kwargs) if depends_on_cache(model, args, kwargs) else {**kwargs, "use_cache": False}


def drop_cache(outputs: Any) -> Any:
    """A model's outputs without the cache that it made, of which each rank would have a part."""
    if isinstance(outputs, tuple):
        return tuple(each for each in outputs if not isinstance(each, Cache))
    if isinstance(getattr(outputs, "past_key_values", None), Cache):
        return dataclasses.replace(outputs, past_key_values=None)
    return outputs
