"""Faults in plugins around a step, noticed by scripts of the public calls."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from echelon.verify.layout_choice import Layout

from ...plugins.test_batch_norm import plain, trained
from ...plugins.test_torch_plugins import evaluate_before_a_step
from ...plugins.test_whole_batch import departure as of_whole_batch
from ..mutations import around, fault, returning
from ..script import SCRIPTS


def always_first(self: Any) -> tuple[int, int]:
    """Let every replica train on the first one's samples."""
    return 0, 2


def departing_statistics(name: str) -> str | None:
    """Compare running statistics and weights of two replicas with a plain loop."""
    state, expected = trained(name), plain(2)
    far = [key for key in expected if not torch.allclose(state[key], expected[key], atol=1e-5)]
    return f"not those of a plain loop: {far}" if far else None


def old_weights() -> str | None:
    """Compare the loss of a step with and without an evaluation before it."""
    with_evaluation, without = evaluate_before_a_step()
    return None if with_evaluation == without else f"{with_evaluation} instead of {without}"


def of_one_label(counted: Callable[..., Any], *args: Any) -> Any:
    """Let every loss count one label."""
    record = counted(*args)
    return None if record is None else record._replace(denominator=torch.ones_like(record.denominator))


# fmt: off
FAULTS = {
    "replicas do not average their running statistics": fault("shardformer.layers.batch_norm:RunningStatistics.average",
        returning(None), partial(departing_statistics, "replicas"), notice="running_mean"),
    "DistributedDataParallel broadcasts the first replica's statistics": fault(
        "plugins.torch_ddp:TorchDDPModel.exclude_buffers", returning(None), partial(departing_statistics, "ddp"),
        notice="running_mean"),
    "FSDP steps beside parameters that an evaluation gathered": fault(
        "plugins.torch_fsdp:TorchFSDPModel.free_unsharded_parameters", returning(None), old_weights),
    "a loss over the global batch is not corrected": fault("plugins.engine:set_gradient_factor", returning(None),
        SCRIPTS["a loss exact over the global batch"].departure),
    "microbatches weigh equally, whatever their labels": fault("pipeline.counted_loss:LossObserver.record_of",
        around(of_one_label), of_whole_batch),
    "the terms of a loss are weighed together": fault("plugins.microbatch_weights:terms_of", returning([]),
        partial(of_whole_batch, "several terms")),
    "microbatches of pairs weigh equally, whatever their samples": fault("plugins.microbatch_weights:batch_size",
        returning(1), "clip", Layout(dp=2)),
    "every replica trains on the first one's samples": fault("plugins.base:Plugin.data_rank", property(always_first),
        SCRIPTS["LowLevelZeroPlugin"].departure),
}
# fmt: on
