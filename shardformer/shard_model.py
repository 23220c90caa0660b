"""`shard_model`: a model split over all processes by one call. With more to say: shard_former.py."""

import torch.distributed as dist
from torch import nn

from ..cluster.launch import launch_from_torch
from .policy import Policy
from .shard_config import ShardConfig
from .shard_former import ShardFormer
from .table import Table


def shard_model(model: nn.Module, policy: Policy | Table | None = None) -> nn.Module:
    """Split a model over all processes of torchrun, in place: the world is the tensor axis.

    Starts the process group where nobody has, by `launch_from_torch()`, which seeds all ranks equally; a plain `python
    script.py` is a world of one. The model comes to this rank's device. Collective over the world.

    Args:
        model: equal on all ranks, not yet split.
        policy: how, by a policy or a table; None takes the table of the model's type.

    Raises:
        ValueError: no policy is known, it cannot do what is asked, or models differ; on every rank alike.
    """
    if not dist.is_initialized():
        launch_from_torch()
    shard_former = ShardFormer(ShardConfig(tensor_parallel_size=dist.get_world_size()))
    shard_former.init_distributed()
    return shard_former.shard_model(model, policy)
