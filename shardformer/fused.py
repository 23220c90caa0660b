"""Choice of fused kernels for a model, and the errors of a choice that is not possible."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..cluster.device import is_cuda
from .fused_code import compile_elementwise, compiler_errors
from .fused_norm import fuse_norms
from .layers.attention_kernels import (
    EAGER,
    FLASH_ATTENTION_2,
    KERNELS,
    SDPA,
    XFORMERS,
    attention_errors,
    set_attention,
)
from .layers.chunked_loss import chunk_loss_errors, chunked_loss_errors, route_chunked_loss

_LOG = logging.getLogger("echelon")


@dataclass(frozen=True, kw_only=True)
class FusedKernels:
    """Requested kernels.

    Args:
        flash_attention: attention by a kernel of `attention_kernels.KERNELS`, by name; True takes `flash_kernel`.
        xformers: attention by xFormers.
        normalization: norms by apex, Liger or torch; see fused_norm.py.
        jit: activation formulas and dropout + addition compiled by torch; see fused_code.py.
        loss: the causal loss from the input of the head, in chunks; see layers/chunked_loss.py.
        is_ring: attention is ring attention, which has kernels of its own.
    """

    flash_attention: bool | str = False
    xformers: bool = False
    normalization: bool = False
    jit: bool = False
    loss: bool = False
    is_ring: bool = False

    def errors(self, device: torch.device, dtype: torch.dtype | None) -> list[str]:
        """List missing packages or hardware and contradictory options, each with advice. No communication.

        Args:
            device: where the model will compute.
            dtype: format of the computation; None if not known.
        """
        flash = f"enable_flash_attention={self.flash_attention!r}"
        rows = (
            (
                self.flash_attention and self.xformers,
                f"{flash} and enable_xformers=True both choose the attention kernel: give one of them",
            ),
            (
                self.is_ring and self.flash_attention not in (False, True, SDPA, EAGER),
                f"{flash} with sequence_parallelism_mode='ring_attn', which has kernels of its own: use "
                "enable_flash_attention=True, or sequence_parallelism_mode='all_to_all'",
            ),
            (
                self.is_ring and self.xformers,
                "enable_xformers=True with sequence_parallelism_mode='ring_attn', which has kernels of its own: leave "
                "it out, or use sequence_parallelism_mode='all_to_all'",
            ),
        )
        kernels = [
            error
            for option, name in self._attention_kernels(device)
            if name in KERNELS
            for error in KERNELS[name].errors(device, dtype, option)
        ]
        compiler = compiler_errors("enable_jit_fused=True", device) if self.jit else []
        loss = [f"enable_fused_loss: {error}" for error in (chunk_loss_errors(device) if self.loss else ())]
        return [*(message for is_wrong, message in rows if is_wrong), *kernels, *compiler, *loss]

    def _attention_kernels(self, device: torch.device) -> Iterator[tuple[str, str]]:
        """Yield each option that chooses an attention kernel, as the user wrote it, with the kernel's name."""
        if isinstance(self.flash_attention, str):
            yield f"enable_flash_attention={self.flash_attention!r}", self.flash_attention
        elif self.flash_attention:
            yield "enable_flash_attention", SDPA if self.is_ring else flash_kernel(device)
        if self.xformers:
            yield "enable_xformers", XFORMERS

    def model_errors(self, model: nn.Module, device: torch.device) -> list[str]:
        """List reasons why an uncut model cannot use the requested attention or loss. No communication."""
        errors = []
        for option, name in self._attention_kernels(device):
            errors += attention_errors(model, name, option)
        if self.loss:
            errors += [f"enable_fused_loss: {error}" for error in chunked_loss_errors(model)]
        return errors

    def choose_attention(self, model: nn.Module, device: torch.device) -> None:
        """Set the requested attention kernel of an uncut model without `model_errors`, in place."""
        for _, name in self._attention_kernels(device):
            set_attention(model, name)

    def takes_loss(self, model: nn.Module) -> bool:
        """Return True if the loss in chunks is requested, and the model has a head on this rank that supports it."""
        return self.loss and not chunked_loss_errors(model)

    def route_loss(self, model: nn.Module, *, parallel_output: bool) -> None:
        """Compute the loss of a sharded model in chunks, if requested and not yet done; see `fuse`."""
        if self.takes_loss(model):
            route_chunked_loss(model, parallel_output=parallel_output)

    def fuse(self, model: nn.Module, dtype: torch.dtype, *, parallel_output: bool = True) -> None:
        """Fuse norms, elementwise code and the loss of a model that is already sharded. Logs options without effect.

        Args:
            model: the local model.
            dtype: format of its computation.
            parallel_output: leave logits uncomputed after training calls with labels, if the loss needs none.
        """
        kind = type(model).__name__
        warnings = []
        if self.normalization:
            fused, unknown = fuse_norms(model, dtype)
            if unknown:
                names = ", ".join(f"{count} × {name}" for name, count in unknown.items())
                warnings.append(
                    f"enable_fused_normalization: norms of {kind} were not fused: {names}; the fused kernels "
                    "do not compute the same"
                )
            elif not fused:
                warnings.append(
                    f"enable_fused_normalization: {kind} has no supported norms; nothing was fused"
                )
        if self.jit and not compile_elementwise(model):
            warnings.append(
                f"enable_jit_fused: {kind} has no elementwise activation function and no dropout followed by "
                "a sum; nothing was compiled"
            )
        self.route_loss(model, parallel_output=parallel_output)
        if not dist.is_initialized() or dist.get_rank() == 0:
            for warning in warnings:
                _LOG.warning(warning)


def flash_kernel(device: torch.device) -> str:
    """Return the default kernel of flash attention on a device."""
    return FLASH_ATTENTION_2 if is_cuda(device) else SDPA
