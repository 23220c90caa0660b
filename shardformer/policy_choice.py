"""Choice of the policy of a model: by its table, or derived."""

from torch import nn

from . import tables as tables  # registers them
from .derived_policy import DerivedPolicy
from .policy import Policy
from .table_policy import TablePolicy
from .tables.table import table_for, table_for_class


def policy_for(model: nn.Module) -> Policy:
    """Return the policy of a model type: by its table, or derived from transformers' plans and by running it.

    A model without a config of transformers takes the table of its class.

    Raises:
        ValueError: there is no such table.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    table = table_for_class(type(model)) if model_type is None else table_for(model_type)
    if table is not None:
        return TablePolicy(table)
    if model_type is not None:
        return DerivedPolicy(model)
    kind = type(model).__name__
    raise ValueError(
        f"a {kind} has no config of transformers to derive its layers from: leave tp_size and pp_size at 1, register "
        "a Table for its class (register_class, docs/policies.md), or give one as custom_policy"
    )
