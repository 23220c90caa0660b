"""Peers of Echelon's ZeRO: torch's DDP, ZeroRedundancyOptimizer and FSDP2 with their best options."""

from collections.abc import Mapping
from inspect import signature
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from data_parallel import DataParallel, local_samples
from stepped import clipping, gradients_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from workload import ADAMW, MakeOptimizer, Workload, adamw

# Llama's buffers never change. torch 2.13 warns about the older name of the argument.
_NAMES = signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


class TorchDDP(DataParallel):
    """DistributedDataParallel: everything replicated, gradients averaged during backward."""

    name = "torch DDP"

    def __init__(
        self, workload: Workload, device: torch.device, make_optimizer: MakeOptimizer = adamw
    ) -> None:
        self._plain = workload.model().to(device)
        model = DistributedDataParallel(
            self._plain, gradient_as_bucket_view=True, static_graph=True, **{_SYNC_BUFFERS: False}
        )
        super().__init__(
            model,
            make_optimizer(self._plain),
            batch=local_samples(workload, device),
            clip=clipping(self._plain.parameters(), workload.max_norm),
        )

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the averaged gradients, replicated on every rank."""
        return gradients_of(self._plain)


class TorchZero(TorchDDP):
    """DDP with ZeroRedundancyOptimizer: each parameter has its optimizer states on one rank.

    Without `overlap_with_ddp`, which refuses gloo.
    """

    name = "torch DDP + ZeroRedundancyOptimizer"

    def __init__(self, workload: Workload, device: torch.device) -> None:
        super().__init__(workload, device, _sharded_adamw)

    def states(self) -> Mapping[Any, dict[str, Any]]:
        """Return the state of the parameters of this rank."""
        return self._optimizer.optim.state


class TorchFSDP(DataParallel):
    """FSDP2: `fully_shard` on every layer and the root.

    Args:
        workload: the computation.
        device: its device.
        reshard: free a layer's parameters between its forward and its backward, FSDP2's default: less memory, one
            more all-gather.
        make_optimizer: its optimizer.
    """

    names: ClassVar[dict[bool, str]] = {
        True: "torch FSDP2",
        False: "torch FSDP2, no resharding",
    }  # by `reshard`

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        *,
        reshard: bool,
        make_optimizer: MakeOptimizer = adamw,
    ) -> None:
        self.name = self.names[reshard]
        model = workload.model().to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        after_forward = None if reshard else False  # None keeps the root, whose backward follows at once
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=after_forward)
        super().__init__(
            model,
            make_optimizer(model),
            batch=local_samples(workload, device),
            clip=clipping(model.parameters(), workload.max_norm),
        )

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the averaged gradients, gathered. One all-gather for each."""
        return {name: gradient.full_tensor() for name, gradient in gradients_of(self._model).items()}


def _sharded_adamw(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )
