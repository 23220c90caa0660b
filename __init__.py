"""Echelon trains Hugging Face transformers over many processes. This module only exports the public names.

They are imported when they are used, so that `import echelon` and the command line's help import no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .migration.names import install, names_of

if TYPE_CHECKING:  # for editors and type checkers; at run time __getattr__ does the same
    from .booster import Booster
    from .booster.flags import ArgumentParser, add_plugin_arguments, plugin_from_arguments
    from .booster.flops import flops_per_token
    from .booster.interruption import Interruption
    from .booster.metrics import Metrics
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
    from .trainer import Trainer
    from .zero.combined import CombinedOptimizer
    from .zero.muon import Muon

__version__ = "0.2.0"

__all__ = [
    "ArgumentParser",
    "Booster",
    "CombinedOptimizer",
    "DistCoordinator",
    "HybridParallelPlugin",
    "Interruption",
    "LazyInitContext",
    "LowLevelZeroPlugin",
    "Metrics",
    "Muon",
    "ParallelMesh",
    "PipelineGradientCheckpointConfig",
    "Plugin",
    "ShardConfig",
    "ShardFormer",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "Trainer",
    "add_plugin_arguments",
    "clip_grad_norm_",
    "flops_per_token",
    "launch_from_torch",
    "plugin_from_arguments",
    "shard_model",
]

# The module that defines each public name, and the sub-packages, which are attributes without an import of their own.
_HOMES = {
    "ArgumentParser": "booster.flags",
    "Booster": "booster",
    "CombinedOptimizer": "zero.combined",
    "DistCoordinator": "cluster.coordinator",
    "HybridParallelPlugin": "plugins",
    "Interruption": "booster.interruption",
    "LazyInitContext": "lazy",
    "LowLevelZeroPlugin": "plugins",
    "Metrics": "booster.metrics",
    "Muon": "zero.muon",
    "ParallelMesh": "cluster.mesh",
    "PipelineGradientCheckpointConfig": "shardformer",
    "Plugin": "plugins",
    "ShardConfig": "shardformer",
    "ShardFormer": "shardformer",
    "TorchDDPPlugin": "plugins",
    "TorchFSDPPlugin": "plugins",
    "Trainer": "trainer",
    "add_plugin_arguments": "booster.flags",
    "clip_grad_norm_": "shardformer",
    "flops_per_token": "booster.flops",
    "launch_from_torch": "cluster.launch",
    "plugin_from_arguments": "booster.flags",
    "shard_model": "shardformer",
}
_PACKAGES = (
    "booster",
    "checkpoint",
    "cluster",
    "lazy",
    "pipeline",
    "plugins",
    "shardformer",
    "trainer",
    "verify",
    "zero",
)

install()  # ColossalAI's modules below this one

if not TYPE_CHECKING:  # to a type checker a module with __getattr__ has every name

    def __getattr__(name: str) -> Any:
        """Import a public name or a sub-package when it is first used."""
        if name in _PACKAGES:
            return import_module(f".{name}", __name__)
        if name not in _HOMES:
            return names_of("")(name)
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})
