"""Echelon trains Hugging Face transformers over many processes. This module only exports the public names.

They are imported when they are used, so that `import echelon` and the command line's help import no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .migration.names import install, names_of

if TYPE_CHECKING:  # for editors and type checkers; at run time __getattr__ does the same
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
    from .trainer import Trainer
    from .zero.combined import CombinedOptimizer
    from .zero.muon import Muon

__version__ = "0.1.0"

__all__ = [
    "Booster",
    "CombinedOptimizer",
    "DistCoordinator",
    "HybridParallelPlugin",
    "LazyInitContext",
    "LowLevelZeroPlugin",
    "Muon",
    "ParallelMesh",
    "PipelineGradientCheckpointConfig",
    "Plugin",
    "ShardConfig",
    "ShardFormer",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "Trainer",
    "clip_grad_norm_",
    "launch_from_torch",
    "shard_model",
]

# The module that defines each public name, and the sub-packages, which are attributes without an import of their own.
_HOMES = {
    "Booster": "booster",
    "CombinedOptimizer": "zero.combined",
    "DistCoordinator": "cluster.coordinator",
    "HybridParallelPlugin": "plugins",
    "LazyInitContext": "lazy",
    "LowLevelZeroPlugin": "plugins",
    "Muon": "zero.muon",
    "ParallelMesh": "cluster.mesh",
    "PipelineGradientCheckpointConfig": "shardformer",
    "Plugin": "plugins",
    "ShardConfig": "shardformer",
    "ShardFormer": "shardformer",
    "TorchDDPPlugin": "plugins",
    "TorchFSDPPlugin": "plugins",
    "Trainer": "trainer",
    "clip_grad_norm_": "shardformer",
    "launch_from_torch": "cluster.launch",
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
