"""One rank of a large world on one GPU: its memory and kernel launches, under torch's fake process group.

Collectives of the fake group return at once, with this rank's inputs. All but the numbers equals a rank of 4,096: its
stages and shards of the model, its schedule, its buckets. Inputs from other stages are random. Without a GPU a tiny
model runs in the same way, and only the figures of the ledger are reported.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from echelon import Booster, HybridParallelPlugin, LazyInitContext
from echelon.cluster.device import default_device

from ..fakes import one_rank
from .results import Row

GIB = 2**30
STEPS = 3  # timed steps, after as many that compare ranks by messages


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Llama on a large world.

    Args:
        sizes: sizes of the config.
        axes: ranks along tp, pp and dp.
        length: tokens of a sample; microbatches have one sample.
        options: further arguments of the plugin.
    """

    sizes: dict[str, int]
    axes: tuple[int, int, int] = (8, 8, 64)
    length: int = 4096
    microbatches: int = 16
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def ranks(self) -> dict[str, int]:
        """Return the ranks to measure: the first, one of a middle stage, and the last."""
        tp, pp, dp = self.axes
        return {"first": 0, "middle": pp // 2 * dp * tp, "last": tp * pp * dp - 1}


WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers")
HEADS = ("num_attention_heads", "num_key_value_heads", "vocab_size")


def llama(*sizes: int) -> dict[str, int]:
    """Return the sizes of a config by the names of WIDTHS and HEADS."""
    return dict(zip((*WIDTHS, *HEADS), sizes, strict=True))


SEQUENCES = (("enable_sequence_parallelism", True), ("sequence_parallelism_mode", "split_gather"))
FUSED = (("enable_fused_loss", True),)
EIGHT = llama(4096, 14336, 32, 32, 8, 128256)
SEVENTY = llama(8192, 28672, 80, 64, 8, 128256)
CLUSTERS = {
    "8B tp8·pp8·dp64": Cluster(sizes=EIGHT),
    "70B tp8·pp8·dp64": Cluster(sizes=SEVENTY, options=SEQUENCES + FUSED),
}
TINY = {
    "tiny tp2·pp4·dp4": Cluster(
        sizes=llama(64, 128, 8, 4, 2, 256), axes=(2, 4, 4), length=32, microbatches=4, options=SEQUENCES
    )
}


def rows() -> dict[str, Callable[[], Row]]:
    """Return the measured ranks of all clusters by name."""
    known = CLUSTERS if torch.cuda.is_available() else TINY
    return {
        f"{name}, {place} rank": partial(measure, cluster, rank)
        for name, cluster in known.items()
        for place, rank in cluster.ranks.items()
    }


@contextmanager
def one_of_many(cluster: Cluster, rank: int) -> Iterator[None]:
    """Simulate a rank of a cluster, which receives hidden states in bf16 from other stages."""
    tp, pp, dp = cluster.axes
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    scattered = dict(cluster.options).get("enable_sequence_parallelism", False)
    hidden = torch.Size((1, cluster.length // (tp if scattered else 1), cluster.sizes["hidden_size"]))
    backends = ",".join(f"{kind}:fake" for kind in kinds)
    with one_rank(backends, rank, tp * pp * dp, arrives=((hidden, torch.bfloat16),)):
        yield


def lazy_model(cluster: Cluster) -> LlamaForCausalLM:
    """Make a lazy Llama with constant weights: drawing 70 billion random numbers on the host would take minutes."""

    def fill(module: Any) -> None:
        nn.init.constant_(module.weight, 0.01)

    with ExitStack() as stack:
        for kind in (nn.Linear, nn.Embedding):
            stack.enter_context(patch.object(kind, "reset_parameters", fill))
        stack.enter_context(patch.object(PreTrainedModel, "init_weights", lambda model: None))
        stack.enter_context(LazyInitContext())
        return LlamaForCausalLM(LlamaConfig(**cluster.sizes, max_position_embeddings=cluster.length))


def measure(cluster: Cluster, rank: int) -> Row:
    """Measure peak memory, kernels and times of a warm step."""
    with one_of_many(cluster, rank):
        try:
            figures = _figures(cluster)
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return {"figures": figures}


def plugin_of(cluster: Cluster) -> HybridParallelPlugin:
    """Make the plugin for a rank of the cluster."""
    tp, pp, _ = cluster.axes
    options = dict(zero_stage=1, precision="bf16", max_norm=1.0, num_microbatches=cluster.microbatches)
    return HybridParallelPlugin(tp_size=tp, pp_size=pp, **options, **dict(cluster.options))


def _figures(cluster: Cluster) -> dict[str, Any]:
    plugin = plugin_of(cluster)
    booster, device = Booster(plugin=plugin), default_device()
    torch.set_num_threads(min(8, os.cpu_count() or 1))  # for initialization on the host
    model = lazy_model(cluster)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    boosted, optimizer, *_ = booster.boost(model, adamw)
    for parameter in boosted.parameters():
        parameter.data.normal_(std=0.02)
    optimizer.refresh_masters()
    shape = (cluster.microbatches, cluster.length)
    tokens = torch.randint(cluster.sizes["vocab_size"], shape, device=device)

    def step() -> float:
        start = time.perf_counter()
        batches = iter([{"input_ids": tokens, "labels": tokens}])
        booster.execute_pipeline(batches, boosted, optimizer=optimizer)
        launched = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad()
        return launched

    for _ in range(3):
        step()
    held = plugin.ledger(optimizer).held or {}
    figures: dict[str, Any] = {
        "parameters": f"{sum(parameter.numel() for parameter in boosted.parameters()) / 1e6:.3g} M",
        **{f"{name}, GiB": f"{nbytes / GIB:.3g}" for name, nbytes in held.items() if nbytes},
    }
    if device.type != "cuda":
        step()
        return figures
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times, launches = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        launches.append(step())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.self_device_time_total for event in kernels) / 1e3
    return {
        **figures,
        "true peak, GiB": round(peak / GIB, 2),
        "step, ms": round(1e3 * median(times), 1),
        "host until launched, ms": round(1e3 * median(launches), 1),
        "GPU busy, ms": round(busy, 1),
        "kernels": len(kernels) or "none was seen: may this user profile?",
    }
