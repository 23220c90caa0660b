"""Tokens per second, utilisation and peak memory of a Llama on one device, compared with others; and host time.

Each contender runs in its own process, with random weights made on the device, and repeats one batch. Utilisation
counts 6 operations per token and parameter (without the input embedding) and 6 · layers · hidden · length for causal
attention; recomputation is not counted. See docs/cuda.md.

    python -m tests.gpu.speed "1B" "Echelon"
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from echelon import Booster, HybridParallelPlugin, launch_from_torch
from echelon.cluster.device import default_device
from echelon.shardformer import PipelineGradientCheckpointConfig

from .kernels import require_available
from .many import GIB, llama
from .results import ROOT, Row, Unavailable

# Dense bf16 TFLOP/s by a part of the device's name; PEAK_TFLOPS in the environment takes precedence.
PEAK = {
    "H200": 989,
    "H100": 989,
    "H800": 989,
    "B200": 2250,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "4090": 165,
}
WARM, TIMED = 4, 5  # numbers of steps; Echelon's first three compare ranks
PATIENCE = 150.0
Step = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model and its batch: samples of a microbatch, and microbatches of a step."""

    sizes: dict[str, int]
    length: int = 4096
    samples: int = 1
    microbatches: int = 4
    tied: bool = False

    @property
    def config(self) -> LlamaConfig:
        """Return the config, for training without a cache."""
        settings = dict(max_position_embeddings=self.length, tie_word_embeddings=self.tied, use_cache=False)
        return LlamaConfig(**self.sizes, **settings, attn_implementation="sdpa")

    def operations(self, num_parameters: int) -> float:
        """Return the floating-point operations of a step."""
        layers, hidden = self.sizes["num_hidden_layers"], self.sizes["hidden_size"]
        embedding = 0 if self.tied else self.sizes["vocab_size"] * hidden
        per_token = 6 * (num_parameters - embedding) + 6 * layers * hidden * self.length
        return float(per_token * self.tokens)

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.samples * self.microbatches * self.length


WORKS = {
    "1B": Work(sizes=llama(2048, 8192, 16, 32, 8, 128256), samples=2, tied=True),
    "7B": Work(sizes=llama(4096, 11008, 32, 32, 32, 32000), samples=2),
    "tiny": Work(sizes=llama(64, 128, 2, 4, 2, 256), length=32),
}


def model_of(work: Work, dtype: torch.dtype) -> Any:
    """Make a model with random weights on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with default_device():
            return LlamaForCausalLM(work.config).train()
    finally:
        torch.set_default_dtype(before)


def tokens_of(work: Work, samples: int) -> dict[str, torch.Tensor]:
    """Make a batch on the device."""
    tokens = torch.randint(work.sizes["vocab_size"], (samples, work.length), device=default_device())
    return {"input_ids": tokens, "labels": tokens}


def echelon(work: Work, *, recompute: bool = False, **options: Any) -> tuple[Step, int]:
    """Make Echelon's step: bf16 weights with float32 masters, and gradients accumulated in float32."""
    again = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0) if recompute else None
    arguments = dict(
        precision="bf16",
        max_norm=1.0,
        num_microbatches=work.microbatches,
        gradient_checkpoint_config=again,
        **options,
    )
    require_available(arguments)
    plugin = HybridParallelPlugin(**arguments)
    booster, model = Booster(plugin=plugin), model_of(work, torch.bfloat16)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    boosted, optimizer, *_ = booster.boost(model, adamw)
    batch = tokens_of(work, work.samples * work.microbatches)

    def step() -> None:
        booster.execute_pipeline(iter([batch]), boosted, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in boosted.parameters())


def plain(
    work: Work,
    *,
    recompute: bool = False,
    weights: torch.dtype = torch.float32,
    compiled: bool = False,
    liger: bool = False,
    sharded: bool = False,
) -> tuple[Step, int]:
    """Make the step of transformers and torch: float32 weights under autocast, or all in `weights`."""
    if liger:
        try:
            from liger_kernel.transformers import apply_liger_kernel_to_llama
        except ImportError as error:
            raise Unavailable("liger_kernel is not installed") from error
        apply_liger_kernel_to_llama()
    model = model_of(work, weights)
    count = sum(parameter.numel() for parameter in model.parameters())
    if recompute:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(default_device().type, (1,))
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    parts = [tokens_of(work, work.samples) for _ in range(work.microbatches)]
    has_autocast = weights is torch.float32 and not sharded

    def step() -> None:
        for microbatch in parts:
            with torch.autocast(default_device().type, torch.bfloat16) if has_autocast else nullcontext():
                loss = forward(**microbatch).loss
            (loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, count


Contender = Callable[[Work], tuple[Step, int]]
FUSED = dict(enable_all_optimization=True, enable_fused_loss=True)
# Without optional packages: "sdpa_cudnn" needs CUDA.
OF_TORCH = dict(enable_flash_attention="sdpa_cudnn", enable_fused_normalization=True, enable_fused_loss=True)
CONTENDERS: dict[str, Contender] = {
    "Echelon": echelon,
    "Echelon, torch's fused kernels": partial(echelon, **OF_TORCH),
    "Echelon, all optimizations": partial(echelon, **FUSED),
    "Echelon, compiled layers": partial(echelon, compile_layers=True, enable_fused_loss=True),
    "torch, autocast": plain,
    "torch, FSDP2": partial(plain, sharded=True),
    "torch, autocast, compiled": partial(plain, compiled=True),
    "torch, autocast, Liger": partial(plain, liger=True),
    "torch, all in bf16": partial(plain, weights=torch.bfloat16),
    "Echelon, recomputation": partial(echelon, recompute=True),
    "Echelon, recomputation, torch's fused kernels": partial(echelon, recompute=True, **OF_TORCH),
    "Echelon, recomputation, all optimizations": partial(echelon, recompute=True, **FUSED),
    "torch, autocast, recomputation": partial(plain, recompute=True),
    "torch, FSDP2, recomputation": partial(plain, recompute=True, sharded=True),
    "torch, all in bf16, recomputation": partial(plain, recompute=True, weights=torch.bfloat16),
}
# Measurements, the most informative first, since time may run out.
ORDER: dict[str, Sequence[str]] = {
    "7B": (
        *("Echelon, recomputation, torch's fused kernels", "torch, autocast, recomputation"),
        *("Echelon, recomputation", "torch, FSDP2, recomputation", "torch, all in bf16, recomputation"),
        "Echelon, recomputation, all optimizations",
    ),
    "1B": (
        *("Echelon, torch's fused kernels", "torch, autocast", "Echelon", "torch, FSDP2"),
        *("torch, all in bf16", "Echelon, all optimizations", "torch, autocast, Liger"),
        *("Echelon, compiled layers", "torch, autocast, compiled", "Echelon, recomputation"),
    ),
    "tiny": [contender for contender in CONTENDERS if "compiled" not in contender],
}
# Host time per layer, see benchmarks/host_time.py; the rows set further environment variables.
HOST_TIME = ("benchmarks/host_time.py", "--rounds", "10", "--warmup", "3")
HOSTS = {"host time, tensors on the CPU": {"CUDA_VISIBLE_DEVICES": ""}, "host time, tensors on the GPU": {}}


def rows() -> dict[str, Callable[[], Row]]:
    """Return every contender on every model, with both models early in the order."""
    names = ("1B", "7B") if torch.cuda.is_available() else ("tiny",)
    pairs = [(place, name, contender) for name in names for place, contender in enumerate(ORDER[name])]
    hosts = {name: partial(host_time, **more) for name, more in HOSTS.items()}
    return hosts | {
        f"{name}, {contender}": partial(contend, name, contender) for _, name, contender in sorted(pairs)
    }


def contend(name: str, contender: str) -> Row:
    """Measure a contender in a new process with its own memory."""
    figures: Row = json.loads(last_line("-m", "tests.gpu.speed", name, contender))
    if "reason" in figures:
        raise Unavailable(figures["reason"])
    return {"figures": figures}


def host_time(**more: str) -> Row:
    """Return the last line of the benchmark as figures.

    Args:
        **more: further environment variables.
    """
    if not more and not torch.cuda.is_available():
        raise Unavailable("there is no GPU")
    pairs = (pair.split("=") for pair in last_line(*HOST_TIME, **more).split())
    return {"figures": {name: float(value) for name, value in pairs}}


def last_line(*command: str, **more: str) -> str:
    """Return the last line that a new Python process prints.

    Args:
        *command: arguments of the process.
        **more: further environment variables.
    """
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    alone = {key: value for key, value in os.environ.items() if key not in of_ranks}
    options = {"cwd": ROOT, "env": alone | more, "capture_output": True, "text": True, "timeout": PATIENCE}
    try:
        done = subprocess.run([sys.executable, *command], **options, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"it was not over after {PATIENCE:.0f} s") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(" | ".join(done.stderr.strip().splitlines()[-5:])[-1500:])
    return lines[-1]


def measure(work: Work, contender: Contender) -> dict[str, Any]:
    """Measure a contender in this process."""
    step, num_parameters = contender(work)
    is_cuda = default_device().type == "cuda"

    def timed() -> float:
        start = time.perf_counter()
        step()
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(WARM):
        timed()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = median(timed() for _ in range(TIMED))
    figures: dict[str, Any] = {
        "parameters": f"{num_parameters / 1e9:.2f} B" if num_parameters > 1e8 else num_parameters,
        "step, ms": round(1e3 * seconds, 1),
        "tokens/s": round(work.tokens / seconds),
    }
    if is_cuda:
        name = torch.cuda.get_device_name()
        peak = os.environ.get("PEAK_TFLOPS") or next((str(PEAK[gpu]) for gpu in PEAK if gpu in name), "")
        share = work.operations(num_parameters) / seconds / (float(peak) * 1e12) if peak else None
        figures["utilisation"] = "set PEAK_TFLOPS" if share is None else f"{share:.1%}"
        figures["peak, GiB"] = round(torch.cuda.max_memory_allocated() / GIB, 1)
    return figures


def main() -> None:
    """Print the figures of one contender as JSON."""
    name, contender = sys.argv[1:]
    launch_from_torch()
    try:
        figures = measure(WORKS[name], CONTENDERS[contender])
    except Unavailable as reason:
        figures = {"reason": str(reason)}
    except torch.OutOfMemoryError:
        figures = {"step, ms": "out of memory"}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
