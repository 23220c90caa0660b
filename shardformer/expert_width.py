"""Widths of a rank's part of experts, as far as the product of all of them at once takes them."""

from typing import Any

import torch
from torch import Tensor, nn

_GROUPED = "grouped_mm"  # transformers' name for it
_ROW = 16  # rows are multiples of so many bytes


def expert_width_faults(model: nn.Module, *, tp_size: int, dtype: torch.dtype) -> list[str]:
    """Why torch's grouped product cannot compute with a rank's part of experts; empty when it can.

    Args:
        model: a whole one, whose experts are split by their inner width.
        tp_size: over so many ranks.
        dtype: in which they are computed.
    """
    paths: dict[int, list[str]] = {}  # by width
    for path, module in model.named_modules():
        if (width := _grouped_width(module)) is not None:
            paths.setdefault(width, []).append(path)
    found = []
    for width, names in paths.items():
        if width % tp_size or _is_taken(width // tp_size, dtype):
            continue
        sizes = [size for size in range(1, tp_size) if width % size == 0 and _is_taken(width // size, dtype)]
        others = f"use tp_size={' or '.join(map(str, sizes))}, or call" if sizes else "call"
        found.append(
            f"tp_size={tp_size} leaves {width // tp_size} of the {width} columns of {names[0]} to a rank, and torch's "
            f"grouped product takes rows of a multiple of {_ROW} bytes: {others} "
            "model.set_experts_implementation('eager') before boost"
        )
    return found


def _is_taken(width: int, dtype: torch.dtype) -> bool:
    return width * dtype.itemsize % _ROW == 0


def _grouped_width(module: nn.Module) -> int | None:
    """The inner width of experts that are computed by the grouped product; None for other modules."""
    config: Any = getattr(module, "config", None)
    weight, is_transposed = getattr(module, "down_proj", None), getattr(module, "is_transposed", None)
    is_grouped = getattr(config, "_experts_implementation", None) == _GROUPED and is_transposed is not None
    return weight.shape[1 if is_transposed else 2] if is_grouped and isinstance(weight, Tensor) else None
