"""The fused kernels that a model is to use, and whether it can."""

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..cluster.device import is_cuda
from .fused_code import compile_elementwise
from .fused_norm import fuse_norms
from .layers.attention import (
    FLASH_ATTENTION_2,
    FLASH_ATTN_DTYPES,
    XFORMERS,
    XFORMERS_DEVICES,
    attention_errors,
    flash_kernel,
    register_xformers,
    set_attention,
)
from .layers.chunked_loss import chunked_loss_errors, route_chunked_loss

_LOG = logging.getLogger("echelon")


@dataclass(frozen=True, kw_only=True)
class FusedKernels:
    """Kernels that were asked for.

    Args:
        flash_attention: attention by the flash-attn package on CUDA, elsewhere by torch's fused kernels.
        xformers: attention by xFormers.
        normalization: norms by apex, Liger or torch; see fused_norm.py.
        jit: activation formulas and dropout + addition compiled by torch; see fused_code.py.
        loss: the causal loss from what enters the head; see layers/chunked_loss.py.
    """

    flash_attention: bool = False
    xformers: bool = False
    normalization: bool = False
    jit: bool = False
    loss: bool = False

    def errors(self, device: torch.device, dtype: torch.dtype | None) -> list[str]:
        """List what this machine lacks or what contradicts itself, each with what would work. No communication.

        Args:
            device: where the model will compute.
            dtype: in which format; None is not known.
        """
        is_flash_attn = self.flash_attention and flash_kernel(device) == FLASH_ATTENTION_2
        compilers = filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++"))
        devices = ", ".join(XFORMERS_DEVICES)
        sdpa = "leave it out: transformers then takes torch's own fused attention"
        rows = (
            (
                self.flash_attention and self.xformers,
                "enable_flash_attention=True and enable_xformers=True both choose the attention: ask for one of them",
            ),
            (
                is_flash_attn and find_spec("flash_attn") is None,
                "enable_flash_attention=True needs the package flash-attn on CUDA: install it "
                f"(pip install flash-attn --no-build-isolation), or {sdpa}",
            ),
            (
                is_flash_attn and dtype is not None and dtype not in FLASH_ATTN_DTYPES,
                "enable_flash_attention=True: flash-attn computes in 16 bits alone: use precision='bf16' or 'fp16', or "
                f"{sdpa}",
            ),
            (
                self.xformers and find_spec("xformers") is None,
                "enable_xformers=True needs the package xformers: install it (pip install xformers), or leave it out",
            ),
            (
                self.xformers and device.type not in XFORMERS_DEVICES,
                f"enable_xformers=True: xFormers computes on {devices} and not on {device.type}: use "
                "enable_flash_attention=True, which is torch's fused attention there",
            ),
            (
                self.jit and is_cuda(device) and find_spec("triton") is None,
                "enable_jit_fused=True needs the package triton on CUDA: install it (pip install triton), or leave it "
                "out",
            ),
            (
                self.jit and device.type == "cpu" and not any(map(shutil.which, compilers)),
                "enable_jit_fused=True needs a C++ compiler on the CPU: install g++, name another one in the "
                "environment variable CXX, or leave it out",
            ),
        )
        return [message for is_wrong, message in rows if is_wrong]

    def model_errors(self, model: nn.Module, device: torch.device) -> list[str]:
        """Why a whole model cannot use the attention or the loss that was asked for. No communication."""
        found = []
        if self.flash_attention:
            found += attention_errors(model, flash_kernel(device), "enable_flash_attention")
        if self.xformers:
            found += attention_errors(model, XFORMERS, "enable_xformers")
        return found + [f"enable_fused_loss: {each}" for each in chunked_loss_errors(model) if self.loss]

    def choose_attention(self, model: nn.Module, device: torch.device) -> None:
        """Set the attention, of a whole model that has no errors."""
        if self.flash_attention:
            set_attention(model, flash_kernel(device))
        if self.xformers:
            register_xformers()
            set_attention(model, XFORMERS)

    def takes_loss(self, model: nn.Module) -> bool:
        """Return True where the loss is to be computed by chunks, and this rank has the head."""
        return self.loss and not chunked_loss_errors(model)

    def route_loss(self, model: nn.Module, *, parallel_output: bool) -> None:
        """Let a model that is split compute its loss by chunks, if it is asked for and does not yet; see `fuse`."""
        if self.takes_loss(model):
            route_chunked_loss(model, parallel_output=parallel_output)

    def fuse(self, model: nn.Module, dtype: torch.dtype, *, parallel_output: bool = True) -> None:
        """Fuse norms, elementwise code and the loss, of a model that is split already. Logs what finds nothing to fuse.

        Args:
            model: this rank's.
            dtype: in which it computes.
            parallel_output: leave logits uncomputed after training calls with labels, if the loss needs none.
        """
        kind = type(model).__name__
        lines = []
        if self.normalization:
            fused, unknown = fuse_norms(model, dtype)
            if unknown:
                names = ", ".join(f"{count} × {name}" for name, count in unknown.items())
                lines.append(
                    f"enable_fused_normalization: of {kind} stay as they are: {names}; they compute otherwise than the "
                    "fused kernels"
                )
            elif not fused:
                lines.append(
                    f"enable_fused_normalization: {kind} has no norms that are known here; nothing was fused"
                )
        if self.jit and not compile_elementwise(model):
            lines.append(
                f"enable_jit_fused: {kind} has no activation by a formula and no sum behind a dropout; nothing was "
                "compiled"
            )
        self.route_loss(model, parallel_output=parallel_output)
        if not dist.is_initialized() or dist.get_rank() == 0:
            for line in lines:
                _LOG.warning(line)


def switch_errors(given: Mapping[str, Any]) -> list[str]:
    """Errors of settings that are neither True nor False."""
    return [
        f"{name}={value!r} must be True or False"
        for name, value in given.items()
        if not isinstance(value, bool)
    ]
