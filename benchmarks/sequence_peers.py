"""A peer of Echelon's sequence parallelism, besides those of tensor_peers.py: torch's context parallelism."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from stepped import OneBatch, gradients_of
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface
from workload import Workload, adamw

# B batch, S local sequence, N heads, D width of a head
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ATTENTION = "benchmark_torch_ring"
_SEQUENCE_DIM = 2


class TorchContext(OneBatch):
    """The ring of torch's `context_parallel`, which balances causal attention by two segments per rank.

    `context_parallel` itself has no kernel for CPUs (see `why_not_itself`). Its ring takes any kernel, here torch's for
    CPUs. The model computes on this rank's tokens in DistributedDataParallel.

    Args:
        workload: the computation; its sequence must be divisible by twice the number of ranks.
        device: a CPU.
    """

    name = "torch context parallel"

    def __init__(self, workload: Workload, device: torch.device) -> None:
        AttentionInterface.register(_ATTENTION, _attend)
        self._plain = workload.model().to(device)
        self._plain.set_attn_implementation(_ATTENTION)
        model = DistributedDataParallel(self._plain, gradient_as_bucket_view=True, static_graph=True)
        data = workload.data(device)
        targets = F.pad(data["labels"], (0, 1), value=-100)[:, 1:]
        self._num_targets = int((targets != -100).sum())
        positions = torch.arange(workload.sequence, device=device)[None]
        self._targets = local_segments(targets)
        batch = {"input_ids": local_segments(data["input_ids"]), "position_ids": local_segments(positions)}
        super().__init__(model, adamw(self._plain), batch=batch)

    def compute(self) -> None:
        """Compute loss and gradients of the batch. Communicates over the world."""
        logits = self._model(**self._batch).logits
        loss = F.cross_entropy(logits.flatten(0, 1), self._targets.flatten(), reduction="sum")
        loss = loss * dist.get_world_size() / self._num_targets  # gradients are averaged
        loss.backward()
        self._loss = loss.detach()

    def loss(self) -> Tensor | None:
        """Return the mean loss of the full sequence. Communicates."""
        assert self._loss is not None
        mean = self._loss / dist.get_world_size()
        dist.all_reduce(mean)
        return mean

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the averaged gradients, replicated on every rank."""
        return gradients_of(self._plain)


def local_segments(x: Tensor) -> Tensor:
    """Return this rank's two of the 2·ranks segments of dim 1: segment `rank` from the start and from the end."""
    size, rank = dist.get_world_size(), dist.get_rank()
    stretches = x.chunk(2 * size, dim=1)
    return torch.cat([stretches[rank], stretches[-1 - rank]], dim=1)


def why_not_itself(device: torch.device) -> str | None:
    """Return the error of `context_parallel` for causal attention on this device; None if it works. Communicates."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    x_BNSD = torch.ones(1, 1, 2 * dist.get_world_size(), 16, device=device)
    try:
        with context_parallel(mesh, buffers=[x_BNSD], buffer_seq_dims=[_SEQUENCE_DIM]):
            F.scaled_dot_product_attention(x_BNSD, x_BNSD, x_BNSD, is_causal=True)
    except NotImplementedError as error:
        return str(error).splitlines()[0]
    return None


def _attend(
    module: nn.Module,
    query_BNSD: Tensor,
    key_BNSD: Tensor,
    value_BNSD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: causal, without mask and dropout."""
    if attention_mask is not None:
        raise AssertionError("torch's ring attention takes no mask")
    mixed_BNSD = _Ring.apply(query_BNSD, key_BNSD, value_BNSD, scaling)
    return mixed_BNSD.transpose(1, 2).contiguous(), None


class _Ring(Function):
    """torch's ring attention over the world, with torch's kernel for CPUs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out, logsumexp = _templated_ring_attention(
            dist.group.WORLD, _SEQUENCE_DIM, _FORWARD, query, key, value, is_causal=True, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        gradients = _templated_ring_attention_backward(
            dist.group.WORLD,
            _SEQUENCE_DIM,
            _BACKWARD,
            grad_out=gradient,
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            is_causal=True,
            dropout_p=0.0,
            scale=ctx.scale,
        )
        return (*gradients, None)
