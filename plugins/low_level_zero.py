"""LowLevelZeroPlugin: the hybrid plugin with data parallelism and ZeRO alone."""

from typing import Any

import torch

from .base import own_arguments
from .colossalai import ZERO, unavailable_errors
from .hybrid_parallel import HybridParallelPlugin

# Arguments by HybridParallelPlugin's names for them, which its errors use.
_RENAMED = {"stage": "zero_stage", "reduce_bucket_size_in_m": "zero_bucket_size_in_m"}


class LowLevelZeroPlugin(HybridParallelPlugin):
    """Data parallelism with optimizer states, or gradients too, sharded over the ranks (ZeRO, arXiv:1910.02054).

    Args:
        stage: 2 shards gradients and optimizer states, 1 states alone, 0 neither.
        precision: "fp32", "bf16" or "fp16"; None is fp32 on a CPU, bf16 on a GPU that computes in it, else fp16.
        initial_scale, min_scale, growth_factor, growth_interval, backoff_factor, hysteresis, max_scale: the
            loss scale of fp16.
        max_norm: clip gradients to this norm; 0 disables clipping.
        reduce_bucket_size_in_m: bucket size in millions (2**20) of gradient elements. None is 12 on CPUs; on CUDA 40,
            or the number of ranks if that is larger.
        zero_size: the number of neighbouring ranks over which a stage above 0 shards. -1 or 0: all; 1: no sharding.
        cpu_offload: keep master weights and optimizer states on the CPU, and update them there.
        overlap_communication, overlap_allgather, communication_dtype: see `HybridParallelPlugin`.
        num_microbatches, microbatch_size: the split of a batch by `execute_pipeline`; None is one microbatch.
        gradient_accumulation_steps, check_every: see `HybridParallelPlugin`.
        others: further arguments of ColossalAI's plugin, accepted if they change nothing (see `colossalai.ZERO`).

    Raises:
        ValueError: arguments are invalid or do not fit together; all errors at once.
    """

    _unavailable = ZERO

    def __init__(
        self,
        stage: int = 1,
        precision: str | None = None,
        initial_scale: float = 2**32,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        *,
        reduce_bucket_size_in_m: float | None = None,
        zero_size: int = -1,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        communication_dtype: torch.dtype | str | None = None,
        cpu_offload: bool = False,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        gradient_accumulation_steps: int = 1,
        check_every: int = 100,
        **others: Any,
    ) -> None:
        arguments = own_arguments(locals())
        unavailable_errors(type(self), ZERO, others)  # an unknown name may be one of HybridParallelPlugin
        renamed = {_RENAMED.get(name, name): value for name, value in arguments.items()}
        try:
            super().__init__(**renamed, **others)
        except ValueError as error:
            text = str(error)
            for name, other in _RENAMED.items():
                text = text.replace(other, name)
            raise ValueError(text) from None
