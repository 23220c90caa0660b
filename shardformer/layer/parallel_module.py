"""The base of all parallel layers: made from a native module, which it replaces under the same name."""

from abc import ABC, abstractmethod
from typing import Any

import torch.distributed as dist
from torch import nn


class ParallelModule(nn.Module, ABC):
    """A module that holds one rank's part of a native module's parameters.

    A subclass keeps the native module's Parameter objects (only their data are cut, by
    `cluster.placement.place`), so an optimizer that holds them goes on holding them.
    """

    @staticmethod
    @abstractmethod
    def from_native_module(module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any) -> nn.Module:
        """The parallel module that takes the native one's place. Communicates nothing."""
