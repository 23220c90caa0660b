"""The composition: one plugin per way of training."""

from .base import Plugin
from .hybrid_parallel import HybridParallelPlugin
from .low_level_zero import LowLevelZeroPlugin
from .torch_ddp import TorchDDPPlugin

__all__ = ["HybridParallelPlugin", "LowLevelZeroPlugin", "Plugin", "TorchDDPPlugin"]
