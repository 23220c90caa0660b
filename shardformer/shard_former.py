"""ShardFormer: a model in, this rank's part of it out. For training with it, see plugins/ and booster/."""

import torch
from torch import Tensor, nn

from ..cluster.launch import default_device
from . import tables as tables  # registers them
from .derived import derived_table
from .policy import Policy
from .shard_config import ShardConfig
from .sharder import ModelSharder
from .table import model_types, table_for, table_for_class
from .table_policy import TablePolicy


class ShardFormer:
    """Splits transformers models as a config asks.

    Example:
        ShardFormer(ShardConfig(tensor_parallel_process_group=group)).optimize(model)
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config

    def optimize(
        self, model: nn.Module, policy: Policy | None = None
    ) -> tuple[nn.Module, list[dict[int, Tensor]]]:
        """Cut the model down to this rank's stage and split it over the tensor axis, in place.

        Parameter objects and names stay; a split one holds this rank's piece (`cluster.placement`). Every
        rank calls with an equal model. Communicates nothing.

        Args:
            model: a whole model, not yet split.
            policy: how; None takes the table of the model's type.

        Returns:
            The model, and the parameters that several stages hold: for each, its tensor by stage.

        Raises:
            ValueError: no policy is known, or it cannot do what is asked; all reasons at once.
        """
        fused, device, dtype = self.shard_config.fused, *_computing(model)
        faults = fused.faults(device, dtype) + fused.model_faults(model, device)
        try:
            sharder = ModelSharder(model, policy or policy_for(model), self.shard_config)
        except ValueError as error:
            faults += str(error).split("\n")
        if faults:
            raise ValueError("\n".join(faults))
        fused.choose_attention(model, device)
        shared = sharder.shard()
        fused.fuse(sharder.model, dtype)
        return sharder.model, shared


def _computing(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a model computes, and in which format, as its first parameter says."""
    first = next(model.parameters(), torch.empty(0))
    return default_device() if first.is_meta else first.device, first.dtype


def policy_for(model: nn.Module) -> Policy:
    """The policy of a model's type: by its table, or by one that transformers' own plans give (derived.py).

    Where it has no config that of its class.

    Raises:
        ValueError: there is neither.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    table = table_for_class(type(model)) if model_type is None else table_for(model_type)
    try:
        return TablePolicy(table or derived_table(model))
    except ValueError as error:
        raise ValueError(
            f"no table says how to split a {type(model).__name__} (model_type={model_type!r}), and {error}; there are "
            f"tables for {', '.join(model_types())}. Write one (echelon.shardformer.Table) and register it for this "
            "model type, or give a policy of your own (custom_policy=...), or use tp_size=1 and pp_size=1"
        ) from None
