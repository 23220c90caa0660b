"""Peak memory and time of the chunked loss and of Liger's kernel, and pinned memory of offload, on one GPU."""

import re
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from echelon import Booster, HybridParallelPlugin
from echelon.cluster.device import default_device
from echelon.shardformer.layers.chunked_loss import (
    ChunkLoss,
    chunk_length,
    liger_chunk_loss,
    torch_chunk_loss,
)
from echelon.shardformer.layers.embedding import VocabRange

from .many import GIB, llama
from .results import Row, Unavailable
from .speed import WORKS, Work, model_of, tokens_of

RATE = 1e-3
LOSS_OFF = 2e-2  # tolerance in bf16, relative

# Memory of the chunked loss.

# The head of a Llama 3 after one narrow layer.
LOSS_WORK = Work(sizes=llama(4096, 4096, 1, 32, 8, 128256), length=8192)


def loss_peaks() -> Row:
    """Compare the peak memory of 8,192 tokens, forward and backward, with the plain loss and with the chunked loss."""
    is_cuda = default_device().type == "cuda"
    work = LOSS_WORK if is_cuda else WORKS["tiny"]
    (expected, plain), (loss, fused) = (loss_and_peak(work, is_fused=is_fused) for is_fused in (False, True))
    off = abs(loss - expected) / expected
    departure = f"losses are off by {off:.2g}" if off > LOSS_OFF else ""
    if not is_cuda and not departure:
        raise Unavailable("only CUDA's allocator tells peaks; here the losses agree")
    if is_cuda and fused >= plain:
        departure = departure or f"it saves nothing: {fused} bytes, and {plain} with the plain loss"
    figures = {"plain loss, GiB": plain, "fused loss, GiB": fused, "saved, GiB": plain - fused}
    rounded = {name: round(num_bytes / GIB, 2) for name, num_bytes in figures.items()}
    return {"departure": departure, "figures": rounded}


def loss_and_peak(work: Work, *, is_fused: bool) -> tuple[float, int]:
    """Return the loss of a second step, and the peak bytes of its forward and backward; 0 on a CPU."""
    torch.manual_seed(0)
    model, tokens = model_of(work, torch.bfloat16), tokens_of(work, 1)
    model.model.embed_tokens.requires_grad_(False)  # its gradient is as large as that of the head
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16", enable_fused_loss=is_fused))
    sgd = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=RATE)
    boosted, optimizer, *_ = booster.boost(model, sgd)

    def compute() -> Tensor:
        loss: Tensor = boosted(**tokens).loss
        booster.backward(loss, optimizer)
        return loss.detach()

    compute()
    optimizer.step()
    optimizer.zero_grad()
    if default_device().type != "cuda":
        return compute().item(), 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = compute()
    return loss.item(), torch.cuda.max_memory_allocated() - before


# Pinned memory of the host.

# 71 M parameters in two buckets: twice 148 and 124 MiB, or 256 and 128 if rounded to powers of two.
PINNED_WORK = Work(sizes=llama(1024, 4096, 4, 16, 8, 4096), length=32)
PINNED_OFF = 2**23  # for other shared memory of the process


def pinned_memory() -> Row:
    """Check that offload pins exactly the bytes of masters and gradients, and none by torch's allocator."""
    if default_device().type != "cuda":
        raise Unavailable("memory is pinned for CUDA alone; tests/zero/test_offload.py plays CUDA's side")
    model = model_of(PINNED_WORK, torch.bfloat16)
    plugin = HybridParallelPlugin(precision="bf16", zero_stage=1, cpu_offload=True)
    booster = Booster(plugin=plugin)
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    before = _shared_bytes(), _bytes_of_torch()
    boosted, optimizer, *_ = booster.boost(model, adamw)
    booster.backward(boosted(**tokens_of(PINNED_WORK, 1)).loss, optimizer)
    optimizer.step()
    shared, of_torch = _shared_bytes() - before[0], _bytes_of_torch() - before[1]
    buffers = [
        buffer for bucket in optimizer.buckets for buffer in (bucket.masters, bucket.stepped_gradients)
    ]
    expected = sum(buffer.nbytes for buffer in buffers)
    departure = ""
    if not all(buffer.is_pinned() for buffer in buffers):
        departure = "masters or gradients are not pinned"
    elif abs(shared - expected) > PINNED_OFF or of_torch > PINNED_OFF:
        departure = f"it takes {shared} bytes, and {of_torch} of torch's allocator, for {expected}"
    figures = {"buffers, GiB": expected, "taken, GiB": shared, "of torch's allocator, GiB": of_torch}
    rounded = {name: round(num_bytes / GIB, 3) for name, num_bytes in figures.items()}
    return {"departure": departure, "figures": rounded}


def _shared_bytes() -> int:
    """Return the resident memory of shared mappings, such as pinned buffers."""
    (kilobytes,) = re.findall(r"^RssShmem:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return 1024 * int(kilobytes)


def _bytes_of_torch() -> int:
    """Return the pinned memory that torch's own allocator has ever requested from CUDA."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.allocated"])


# The loss of a chunk by Liger's kernel and by torch.


def liger_chunk() -> Row:
    """Compare a chunk of `LOSS_WORK`'s head by Liger's kernel and by torch: loss, gradient, time and peak memory."""
    device = default_device()
    if device.type != "cuda" or find_spec("liger_kernel") is None:
        raise Unavailable("Liger's kernel takes CUDA and the package liger_kernel")
    hidden, vocab_size = (LOSS_WORK.sizes[name] for name in ("hidden_size", "vocab_size"))
    length = chunk_length(LOSS_WORK.length, hidden, vocab_size)
    torch.manual_seed(0)
    chunk_logits = 3 * torch.randn(length, vocab_size, device=device, dtype=torch.bfloat16)
    labels = torch.randint(vocab_size, (length,), device=device)
    labels[::5] = -100
    settings = dict(
        entries=VocabRange(vocab_size=vocab_size, first=0, width=vocab_size, valid=vocab_size),
        group=None,
        ignore_index=-100,
        needs_gradient=True,
    )

    def compute(chunk_loss: ChunkLoss) -> tuple[Tensor, Tensor, float, float]:
        """Return loss, gradient, milliseconds per chunk and peak MiB."""
        loss, gradient = chunk_loss(chunk_logits, labels, head=Tensor.clone, **settings)
        logits = chunk_logits.clone()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CHUNKS):  # in place; the time does not depend on the logits
            chunk_loss(chunk_logits, labels, head=lambda _: logits, **settings)
        end.record()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return loss, gradient, begin.elapsed_time(end) / CHUNKS, peak / 2**20

    (expected, wanted, torch_ms, torch_peak), (loss, gradient, ms, peak) = map(
        compute, (torch_chunk_loss, liger_chunk_loss)
    )
    off = {
        "loss": ((loss - expected).abs() / expected).item(),
        "gradient": ((gradient - wanted).float().abs().max() / wanted.float().abs().max()).item(),
    }
    too_far = [name for name, allowed in CHUNK_OFF.items() if not off[name] <= allowed]
    figures = {"torch, ms": torch_ms, "Liger, ms": ms, "torch, MiB more": torch_peak, "Liger, MiB more": peak}
    return {
        "departure": f"departs: {off}, allowed {CHUNK_OFF}" if too_far else "",
        "off": off,
        "figures": {name: round(figure, 2) for name, figure in figures.items()},
    }


CHUNKS = 10
# Tolerances relative to the largest value: float32 sums in another order, and bf16 rounding.
CHUNK_OFF = {"loss": 1e-5, "gradient": 2**-7}
