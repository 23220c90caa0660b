"""Choice of the policy of a model: by its table, or derived."""

from torch import nn

from . import tables as tables  # registers them
from .derived import derived_table
from .derived_policy import DerivedPolicy, without_table
from .policy import Policy
from .table_policy import TablePolicy
from .tables.table import table_for, table_for_class


def policy_for(model: nn.Module, *, sequences_alone: bool = False) -> Policy:
    """Return the policy of a model type: by its table, or derived from transformers' plans and by running it.

    A model without a config takes the table of its class.

    Args:
        model: the model.
        sequences_alone: the policy is for sequence parallelism without a tensor or a pipeline axis.

    Raises:
        ValueError: there is no table, and nothing can be derived for the request.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    table = table_for_class(type(model)) if model_type is None else table_for(model_type)
    if table is None and model_type is not None and not sequences_alone:
        return DerivedPolicy(model)
    try:
        return TablePolicy(table or derived_table(model))
    except ValueError as error:
        options = (
            "enable_sequence_parallelism and sp_size out" if sequences_alone else "tp_size and pp_size at 1"
        )
        raise ValueError(without_table(error, model_type, options)) from None
