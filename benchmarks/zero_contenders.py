"""Contenders of the benchmarks of ZeRO: Echelon's stages, and torch's of zero_peers.py."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from data_parallel import DataParallel, local_samples
from memory import held_at_stage, require_held
from torch import Tensor
from workload import MakeOptimizer, Workload, adamw
from zero_peers import TorchDDP, TorchFSDP, TorchZero

from echelon import Booster, HybridParallelPlugin
from echelon.zero.slot import ShardedGradient

STAGES = (0, 1, 2)


class EchelonZero(DataParallel):
    """A stage of HybridParallelPlugin over all ranks of the run, without tensor or pipeline parallelism.

    Args:
        stage: one of `STAGES`.
        workload: the computation.
        make_optimizer: its optimizer.
    """

    def __init__(self, stage: int, workload: Workload, make_optimizer: MakeOptimizer = adamw) -> None:
        self.name = name_of(stage)
        self._stage = stage
        plugin = HybridParallelPlugin(
            tp_size=1, pp_size=1, zero_stage=stage, precision="fp32", max_norm=workload.max_norm
        )
        booster = Booster(plugin=plugin)
        model = workload.model()
        boosted, optimizer, *_ = booster.boost(model, make_optimizer(model))
        super().__init__(
            boosted,
            optimizer,
            backward=partial(booster.backward, optimizer=optimizer),
            batch=local_samples(workload, plugin.mesh.device),
        )

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the averaged gradients, gathered. Communicates over the world."""
        self._optimizer.reduce_gradients()
        return self._optimizer.gradients()

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors, by kind; at stage 2 `parameter.grad` is a placeholder for the ranks' slices."""
        tensors = super().tensors()
        unsharded = [grad for grad in tensors["gradients"] if not isinstance(grad, ShardedGradient)]
        return {
            **tensors,
            "gradients": [*unsharded, *(bucket.gradient_slice for bucket in self._optimizer.buckets)],
        }

    def held(self) -> dict[str, int]:
        """Return the bytes that the ledger counts on this rank, after a step.

        Raises:
            ValueError: they differ from the stage's formula.
        """
        held, num_ranks = self._optimizer.held_bytes(), dist.get_world_size()
        sizes = [parameter.numel() for parameter in self._model.parameters()]
        expected = held_at_stage(self._stage, elements=sum(sizes), num_ranks=num_ranks)
        unit = 16 * num_ranks  # a bucket is padded to a multiple of it
        is_padded = any(size % unit for size in sizes)
        require_held(self.name, held, expected, padding=unit * len(self._optimizer.buckets) * is_padded)
        return held


def name_of(stage: int) -> str:
    """Return the name of a stage of Echelon in the tables."""
    return f"echelon stage {stage}"


def contender_makers(workload: Workload, device: torch.device) -> dict[str, Callable[[], DataParallel]]:
    """Return a maker for each contender, by name, with equal weights. A maker is collective over the world."""
    return {
        **{name_of(stage): partial(EchelonZero, stage, workload) for stage in STAGES},
        TorchDDP.name: partial(TorchDDP, workload, device),
        TorchZero.name: partial(TorchZero, workload, device),
        **{
            TorchFSDP.names[reshard]: partial(TorchFSDP, workload, device, reshard=reshard)
            for reshard in (True, False)
        },
    }
