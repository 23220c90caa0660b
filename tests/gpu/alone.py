"""Parity of one process with plain torch: every precision with every feature, over NCCL on a GPU and gloo on a CPU.

Most rows are the parity check of `echelon verify`: loss, every gradient, the norm and every updated weight of three
steps, within the tolerances of verify/compare.py. In 16 bits the tolerance is the difference between the plain loop in
the same format and in float32. The plain loop is verify/reference.py, on the same device.

    python -m tests.gpu alone
"""

import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from echelon import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    launch_from_torch,
)
from echelon.cluster.device import default_device
from echelon.shardformer import PipelineGradientCheckpointConfig
from echelon.verify.batch import make_batch
from echelon.verify.layout_choice import Layout, Training
from echelon.verify.model_choice import ModelChoice
from echelon.verify.resume import Leg, Relay, compare_legs, run_leg

from ..contract.row import ParityRow
from .kernels import LLAMA, attention_rows, require_available, unpadded
from .memory import liger_chunk, loss_peaks, pinned_memory
from .results import ROOT, Row, Unavailable
from .streams import stream_rows

NO_HASHES = "xxhash is not installed, without which nothing is saved"
KINDS = ("gpt2", "bert", "t5", "vit", "whisper", "mixtral")

FEATURES: dict[str, Layout] = {
    "plain": Layout(microbatches=1),
    "accumulation": Layout(microbatches=3),
    "clipping": Layout(max_norm=0.1),
    "recomputation": Layout(recompute=1.0),
    "recomputation of modules": Layout(recompute=1.0, recompute_modules=("self_attn", "mlp"), max_norm=0.1),
    "recomputation, inputs on the host": Layout(recompute=1.0, options=("activation_offload",)),
    "half of the layers recomputed": Layout(recompute=0.5, max_norm=0.1),
    "fused loss": Layout(options=("enable_fused_loss",)),
    "fused norm": Layout(options=("enable_fused_normalization",)),
    "jit": Layout(options=("enable_jit_fused",)),
    "flash attention": Layout(options=("enable_flash_attention",)),
    "all optimizations": Layout(options=("enable_all_optimization",), max_norm=0.1),
    "ZeRO-1": Layout(zero=1, max_norm=0.1),
    "ZeRO-1, parameters late": Layout(zero=1, overlap_allgather=True),
    "ZeRO-2": Layout(zero=2, max_norm=0.1),
    "offload": Layout(zero=1, options=("cpu_offload",), max_norm=0.1),
}
# Only in bf16, since it takes long: the layers, with and without recomputation, are compiled for one shape.
COMPILED = {
    "compiled layers": Layout(options=("compile_layers",), microbatches=1),
    "compiled layers, recomputation": Layout(options=("compile_layers",), microbatches=1, recompute=1.0),
}
# The gradients of the second step are not finite.
OVERFLOW = Training(overflow_step=1)
STEPS, RATE = 4, 1e-3
# Tolerances for torch's plugins compared with a plain loop: each loss, relative to the plain loop's in float32.
LOSS_OFF = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
# Tolerance for the weights after the steps, in float32, as a fraction of their largest possible update.
WEIGHT_OFF = 1e-2


def rows() -> dict[str, Callable[[], Row]]:
    """Return all rows by name, the most informative first, since time may run out. They share a group of one rank."""
    launch_from_torch()
    by_name = rows_in("bf16")
    for feature, layout in FEATURES.items():
        by_name[f"host reads, {feature}, bf16"] = partial(host_reads, replace(layout, precision="bf16"))
    by_name |= {f"{name}, fp32": partial(compare, row) for name, row in stream_rows().items()}
    by_name["peak memory of the loss, bf16"] = loss_peaks
    by_name["a chunk's loss by Liger's kernel, bf16"] = liger_chunk
    by_name["pinned memory of offload, bf16"] = pinned_memory
    overflow = ParityRow(choice=LLAMA, layout=clipped("fp16"), training=OVERFLOW)
    by_name["overflow, fp16"] = partial(compare, overflow)
    for precision in ("fp32", "fp16"):
        plain = replace(FEATURES["plain"], precision=precision)
        by_name[f"host reads, plain, {precision}"] = partial(host_reads, plain)
        by_name |= rows_in(precision)
    by_name |= {name: partial(compare, row) for name, row in attention_rows().items()}
    for feature, layout in COMPILED.items():
        in_bf16 = replace(layout, precision="bf16")
        by_name[f"{feature}, bf16"] = partial(compare_compiled, ParityRow(choice=LLAMA, layout=in_bf16))
        by_name[f"host reads, {feature}, bf16"] = partial(host_reads, in_bf16)
    return by_name


def rows_in(precision: str) -> dict[str, Callable[[], Row]]:
    """Return rows of features, other models, adapters, checkpoints, dropout and plugins, compared with a plain loop."""
    by_name: dict[str, Callable[[], Row]] = {}
    for feature, layout in FEATURES.items():
        converted = replace(layout, precision=precision)
        by_name[f"{feature}, {precision}"] = partial(compare, ParityRow(choice=LLAMA, layout=converted))
    for kind in KINDS:
        row = ParityRow(choice=ModelChoice(model_type=kind, num_layers=2), layout=clipped(precision))
        by_name[f"{kind}, {precision}"] = partial(compare, row)
    by_name[f"LoRA, {precision}"] = partial(lora, precision)
    by_name[f"checkpoint, {precision}"] = partial(checkpoint, precision)
    by_name[f"dropout and recomputation, {precision}"] = partial(dropout, precision)
    for name in PLUGINS:
        by_name[f"{name}, {precision}"] = partial(torch_plugin, name, precision)
    return by_name


def clipped(precision: str) -> Layout:
    """Return the layout of one process with gradient clipping."""
    return Layout(precision=precision, max_norm=0.1)


def compare(row: ParityRow) -> Row:
    """Run the parity check on one rank."""
    if row.missing:
        raise Unavailable(row.missing)
    require_available(row.layout.arguments)
    report = row.compare()
    last = report.steps[-1]
    off = {name: f"{last.measure(name).distance:.2g}" for name in ("loss", "gradient", "norm", "weight")}
    return {"departure": report.departure or "", "loss": round(last.loss, 6), "off": off}


def compare_compiled(row: ParityRow) -> Row:
    """Run the parity check with compiled layers."""
    if default_device().type != "cuda":
        raise Unavailable(
            "for a CPU inductor compiles minutes; tests/plugins/test_compiled_layers.py has its code"
        )
    return compare(row)


def lora(precision: str) -> Row:
    """Run the parity check of a Llama with adapters."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise Unavailable("peft is not installed") from error
    from ..booster.adapters import Adapted

    choice = Adapted(model_type="llama", num_layers=2)
    return compare(ParityRow(choice=choice, layout=clipped(precision)))


def checkpoint(precision: str) -> Row:
    """Save a run after two steps and resume it; compare with an uninterrupted plain loop."""
    if find_spec("xxhash") is None:
        raise Unavailable(NO_HASHES)
    leg = Leg(layout=Layout(precision=precision, zero=1), num_steps=2)
    relay = Relay(choice=LLAMA, legs=(leg, leg))
    with tempfile.TemporaryDirectory(prefix="echelon-gpu-") as folder:
        for number in range(2):
            run_leg(relay, number, Path(folder))
        report = compare_legs(relay, Path(folder))
    return {
        "departure": report.departure or "",
        "handovers": [str(handover) for handover in report.handovers],
    }


def dropout(precision: str) -> Row:
    """Check that recomputed layers repeat their dropout, and that another seed changes it."""
    settings = (("resid_pdrop", 0.2), ("attn_pdrop", 0.2), ("embd_pdrop", 0.2))
    choice = ModelChoice(model_type="gpt2", num_layers=2, settings=settings)

    def losses(seed: int, **options: Any) -> list[float]:
        model = choice.build()
        plugin = HybridParallelPlugin(precision=precision, num_microbatches=2, **SCALE, **options)
        booster = Booster(plugin=plugin)
        return train_boosted(booster, model, batches(choice), seed)[0]

    again = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
    plain, recomputed = losses(0), losses(0, gradient_checkpoint_config=again)
    other = losses(1)
    allowed = 1e-5 if precision == "fp32" else 1e-2
    off = max(abs(one - two) / one for one, two in zip(plain, recomputed, strict=True))
    departure = f"losses are off by {off:.2g}, {allowed} is allowed" if off > allowed else ""
    return {"departure": departure or ("two seeds have equal losses" if other == plain else ""), "off": off}


def batches(choice: ModelChoice) -> list[dict[str, Tensor]]:
    """Return a batch for each step, on the host."""
    return [make_batch(choice, num_samples=4, seed=step) for step in range(STEPS)]


def train_boosted(
    booster: Booster, model: nn.Module, data: Sequence[dict[str, Tensor]], seed: int = 0
) -> tuple[list[float], nn.Module, Any]:
    """Train a boosted model whose forwards have this seed; return the losses, the model and the optimizer."""
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE)
    boosted, optimizer, *_ = booster.boost(model, adamw)
    booster.seed(boosted, seed)
    losses = []
    for batch in data:
        batch = {name: value.to(default_device()) for name, value in batch.items()}
        loss = boosted(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, boosted, optimizer


def train_plainly(
    model: nn.Module, data: Sequence[dict[str, Tensor]], max_norm: float
) -> tuple[list[float], nn.Module]:
    """Train by transformers and torch only, in float32; return the losses and the model."""
    model = model.to(default_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for batch in data:
        loss = model(**{name: value.to(default_device()) for name, value in batch.items()}).loss
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


# A loss scale of fp16 with which no step overflows.
SCALE = {"initial_scale": 2.0**8}
PLUGINS: dict[str, Callable[[str], Booster]] = {
    "TorchDDPPlugin": lambda precision: Booster(plugin=TorchDDPPlugin(), mixed_precision=precision),
    "TorchFSDPPlugin": lambda precision: Booster(plugin=TorchFSDPPlugin(precision=precision, **SCALE)),
    "LowLevelZeroPlugin, stage 1": lambda precision: Booster(
        plugin=LowLevelZeroPlugin(stage=1, precision=precision, **SCALE)
    ),
    "LowLevelZeroPlugin, stage 2": lambda precision: Booster(
        plugin=LowLevelZeroPlugin(stage=2, precision=precision, **SCALE)
    ),
}


def torch_plugin(name: str, precision: str) -> Row:
    """Compare the other plugins with a plain loop: losses, and in float32 the saved weights."""
    booster, data = PLUGINS[name](precision), batches(LLAMA)
    expected, plain = train_plainly(LLAMA.build(), data, 0.0)
    losses, boosted, _ = train_boosted(booster, LLAMA.build(), data)
    off = max(abs(one - two) / two for one, two in zip(losses, expected, strict=True))
    departure = (
        f"losses are off by {off:.2g}, {LOSS_OFF[precision]} is allowed" if off > LOSS_OFF[precision] else ""
    )
    figures: Row = {"off": off}
    if precision == "fp32" and not departure and find_spec("xxhash") is None:
        raise Unavailable(f"{NO_HASHES}; losses agree")
    if precision == "fp32":
        with tempfile.TemporaryDirectory(prefix="echelon-gpu-") as folder:
            booster.save_model(boosted, f"{folder}/model.safetensors")
            from safetensors.torch import load_file

            saved = load_file(f"{folder}/model.safetensors")
        parameters = dict(plain.named_parameters())
        worst = max((saved[key] - parameters[key].detach().cpu()).abs().max().item() for key in saved)
        figures["weights off"] = worst
        if worst > WEIGHT_OFF * RATE * STEPS:
            departure = f"weights are off by {worst:.2g}, {WEIGHT_OFF * RATE * STEPS:.2g} is allowed"
    return {"departure": departure, **figures}


# Host reads of the device in a warm step.

WARM = 4  # the first three calls compare by messages, see docs/cuda.md


def host_reads(layout: Layout) -> Row:
    """Check that a warm step waits for the device only where docs/cuda.md lists it, as detected by CUDA."""
    is_cuda = default_device().type == "cuda"
    arguments = layout.arguments | {"max_norm": layout.max_norm or 1.0}
    require_available(arguments)
    if layout.options == COMPILED["compiled layers"].options and not is_cuda:
        raise Unavailable("only CUDA tells where the host waits")
    booster, model = Booster(plugin=HybridParallelPlugin(**arguments)), LLAMA.build()
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    boosted, optimizer, *_ = booster.boost(model, adamw)
    # Flash attention packages read the mask on the host.
    takes_mask = not arguments.get("enable_flash_attention") and not arguments.get("enable_all_optimization")
    batch = (make_batch if takes_mask else unpadded)(LLAMA, num_samples=6, seed=0)
    waits: Counter[str] = Counter()
    for step in range(WARM + 1):
        # As from a dataloader.
        pinned = {name: value.pin_memory() if is_cuda else value for name, value in batch.items()}
        if is_cuda:
            torch.cuda.synchronize()
        with _waits(waits) if step == WARM and is_cuda else nullcontext():
            booster.execute_pipeline(iter([pinned]), boosted, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()
    if not is_cuda:
        where = "tests/contract/test_budgets.py counts on CPUs"
        raise Unavailable(f"only CUDA tells where the host waits, and here it trains; {where}")
    offload = "cpu_offload" in layout.options
    terms = {"m": layout.microbatches, "ring_attn": False, "padded": takes_mask, "offload": offload}
    allowed = documented_reads(terms)
    wrong = {place: waits[place] for place in {**waits, **allowed} if waits[place] != allowed.get(place, 0)}
    departure = f"the host waits at {wrong}, allowed {allowed}" if wrong else ""
    return {"departure": departure, "waits": dict(waits)}


@contextmanager
def _waits(waits: Counter[str]) -> Iterator[None]:
    """Count waits for the device by file and function."""

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" not in str(message):
            return
        frame = sys._getframe(1)
        while frame.f_back is not None and (
            "/torch/" in (file := frame.f_code.co_filename)
            or file == __file__
            or file.endswith("warnings.py")  # since 3.14 there are two such files
        ):
            frame = frame.f_back
        waits["/".join(frame.f_code.co_filename.split("/")[-2:]) + " " + frame.f_code.co_name] += 1

    with warnings.catch_warnings(), patch.object(warnings, "showwarning", note):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def documented_reads(terms: dict[str, int]) -> dict[str, int]:
    """Return the table of docs/cuda.md: number of reads at "file function"."""
    page = (ROOT / "docs" / "cuda.md").read_text()
    (section,) = re.findall(r"^## What a step reads on the host$(.*?)(?=^## |\Z)", page, re.M | re.S)
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip().strip("`") for cell in line] for line in lines]
    return {
        f"{file} {function}": int(eval(count.replace("·", "*"), {}, terms))
        for file, function, count, _ in cells
    }
