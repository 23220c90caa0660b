"""Echelon trains Hugging Face transformers over many processes. This module only exports the public names."""

from .booster import Booster
from .cluster.coordinator import DistCoordinator
from .cluster.launch import launch_from_torch
from .cluster.mesh import ParallelMesh
from .lazy import LazyInitContext
from .plugins import HybridParallelPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from .shardformer import (
    PipelineGradientCheckpointConfig,
    ShardConfig,
    ShardFormer,
    clip_grad_norm_,
    shard_model,
)

__version__ = "0.1.0"

__all__ = [
    "Booster",
    "DistCoordinator",
    "HybridParallelPlugin",
    "LazyInitContext",
    "LowLevelZeroPlugin",
    "ParallelMesh",
    "PipelineGradientCheckpointConfig",
    "Plugin",
    "ShardConfig",
    "ShardFormer",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "clip_grad_norm_",
    "launch_from_torch",
    "shard_model",
]
