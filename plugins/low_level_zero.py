"""LowLevelZeroPlugin: the hybrid plugin with data parallelism and ZeRO alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .colossalai import ZERO, unavailable_errors
from .hybrid_parallel import HybridParallelPlugin


class LowLevelZeroPlugin(HybridParallelPlugin):
    """Data parallelism with optimizer states, or gradients too, split over the ranks (ZeRO, arXiv:1910.02054).

    Args:
        stage: 2 splits gradients and optimizer states, 1 states alone, 0 neither.
        precision: "fp32", "bf16" or "fp16"; None is fp32 on a CPU, bf16 on a GPU that computes in it, else fp16.
        initial_scale, min_scale, growth_factor, growth_interval, backoff_factor, hysteresis, max_scale: the
            loss scale of fp16.
        max_norm: clip gradients to this norm; 0 does not.
        reduce_bucket_size_in_m: millions (2**20) of gradient elements that are reduced together.
        zero_size: over how many neighbouring ranks a stage above 0 splits; -1 or 0 is all of them, 1 none.
        cpu_offload: keep masters and optimizer states on the CPU, and step there.
        overlap_communication, overlap_allgather, communication_dtype: see `HybridParallelPlugin`.
        num_microbatches, microbatch_size: how `execute_pipeline` cuts a batch; None takes it whole.
        gradient_accumulation_steps, check_every: see `HybridParallelPlugin`.
        others: further arguments of ColossalAI's, taken where they ask for nothing (see `colossalai.ZERO`).

    Raises:
        ValueError: what is asked for does not fit; all faults at once.
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
        reduce_bucket_size_in_m: float = 12,
        *,
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
        unavailable_errors(
            type(self), ZERO, others
        )  # of an unknown name here: it may be one of HybridParallelPlugin
        with _own_names():
            super().__init__(
                precision=precision,
                zero_stage=stage,
                zero_size=zero_size,
                overlap_communication=overlap_communication,
                overlap_allgather=overlap_allgather,
                communication_dtype=communication_dtype,
                cpu_offload=cpu_offload,
                num_microbatches=num_microbatches,
                microbatch_size=microbatch_size,
                gradient_accumulation_steps=gradient_accumulation_steps,
                check_every=check_every,
                initial_scale=initial_scale,
                min_scale=min_scale,
                growth_factor=growth_factor,
                growth_interval=growth_interval,
                backoff_factor=backoff_factor,
                hysteresis=hysteresis,
                max_scale=max_scale,
                max_norm=max_norm,
                zero_bucket_size_in_m=reduce_bucket_size_in_m,
                **others,
            )


@contextmanager
def _own_names() -> Iterator[None]:
    """Let what is refused be told by the names that this plugin has for it."""
    try:
        yield
    except ValueError as error:
        told = str(error).replace("zero_stage", "stage")
        raise ValueError(told.replace("zero_bucket_size_in_m", "reduce_bucket_size_in_m")) from None
