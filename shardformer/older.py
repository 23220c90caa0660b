"""A table as the installed transformers needs it. In older releases modules have other names, layers return tuples."""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from ..pipeline.plan import StagePlan
from .forward_code import says_tuple
from .lookup import has_submodule, layers_of
from .table import Table


def table_as_installed(table: Table, model: nn.Module, from_model: Callable[[str], str]) -> Table:
    """The table with the names that this model has, and with the arity that the code of its layers says.

    Args:
        table: the one for the newest release.
        model: whole; may be without memory.
        from_model: turns a path seen from the base model into one seen from the model.
    """
    found = next(
        (older for path, older in table.older.items() if has_submodule(model, from_model(path))), table
    )
    if isinstance(found.stage, StagePlan):
        return replace(found, stage=_with_arity(found.stage, model, from_model))
    return found


def _with_arity(plan: StagePlan, model: nn.Module, from_model: Callable[[str], str]) -> StagePlan:
    """The plan for layers that return a tuple where it says a tensor; whoever calls them reads its first entry."""
    encoder = None if plan.encoder is None else _with_arity(plan.encoder, model, from_model)
    path = from_model(plan.layers)
    layers = layers_of(model, [path]) if has_submodule(model, path) else {}
    by_class = {type(layer): layer for layer in layers.values()}
    is_tuple = plan.arity == 0 and any(says_tuple(layer) for layer in by_class.values())
    return replace(plan, arity=1 if is_tuple else plan.arity, encoder=encoder)
