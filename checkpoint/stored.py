"""Tensors on disk, by name, as whatever loads them sees them. Formats are files of their own."""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from .box import Box


class Stored(Protocol):
    """Tensors on disk. Reading takes no more memory than what is asked for, and communicates nothing."""

    @property
    def names(self) -> Collection[str]:
        """All of them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole one."""

    def dtype(self, name: str) -> torch.dtype:
        """The format that it is stored in."""

    def read(self, name: str, box: Box) -> Tensor:
        """A box of it, on the CPU, in the stored format."""
