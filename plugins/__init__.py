"""The composition: one plugin per way of training."""

from .base import Plugin
from .hybrid_parallel import HybridParallelPlugin
from .low_level_zero import LowLevelZeroPlugin
from .torch_ddp import TorchDDPPlugin
from .torch_fsdp import TorchFSDPPlugin

__all__ = ["HybridParallelPlugin", "LowLevelZeroPlugin", "Plugin", "TorchDDPPlugin", "TorchFSDPPlugin"]
