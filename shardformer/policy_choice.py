"""Choice of the policy of a model: by its table, or derived."""

from torch import nn

from . import tables as tables  # registers them
from .derived import derived_table
from .derived_policy import DerivedPolicy, without_table
from .policy import Policy
from .table_policy import TablePolicy
from .tables.table import table_for, table_for_class


def policy_for(model: nn.Module) -> Policy:
    """Return the policy of a model type: by its table, or derived from transformers' plans and by running it.

    A model without a config takes the table of its class.

    Raises:
        ValueError: there is no table, and the model has no config.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    table = table_for_class(type(model)) if model_type is None else table_for(model_type)
    if table is None and model_type is not None:
        return DerivedPolicy(model)
    try:
        return TablePolicy(table or derived_table(model))
    except ValueError as error:
        raise ValueError(without_table(error, model_type, "tp_size and pp_size at 1")) from None
