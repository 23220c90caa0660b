"""ColossalAI's names under the same modules of `echelon`: a script runs with `colossalai` renamed to `echelon`.

[Note: imported names] A name is its counterpart, or a class that can be imported, compared by `isinstance` and
inherited from, and raises when it is constructed: a script learns what is refused before it trains. Modules that
Echelon lacks are made when they are imported, by a finder behind all others.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_PACKAGE = __package__.partition(".")[0]
_PLUGINS = ("HybridParallelPlugin", "LowLevelZeroPlugin", "Plugin", "TorchDDPPlugin", "TorchFSDPPlugin")
_OPTIMIZERS = ("CPUAdam", "FusedAdam", "HybridAdam")
_SCHEDULERS = (
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiplicativeLR",
    "StepLR",
)


def _all_of(home: str, *names: str) -> dict[str, str]:
    """Return the counterparts of names that are the same in a module here."""
    return {name: f"{home}.{name}" for name in names}


# By module and name: the counterpart here.
_COUNTERPARTS: dict[str, dict[str, str]] = {
    "accelerator": _all_of("cluster.accelerator", "get_accelerator"),
    "booster.plugin": _all_of("plugins", *_PLUGINS),
    "booster.plugin.dp_plugin_base": {"DPPluginBase": "plugins.Plugin"},
    "cluster": {
        **_all_of("cluster.coordinator", "DistCoordinator"),
        **_all_of("cluster.mesh", "ParallelMesh"),
    },
    "cluster.dist_coordinator": _all_of("cluster.coordinator", "DistCoordinator"),
    "initialize": _all_of("cluster.launch", "launch_from_torch"),
    "logging": _all_of(
        "migration.logger", "DistributedLogger", "disable_existing_loggers", "get_dist_logger"
    ),
    "nn": {
        **_all_of("migration.adam", *_OPTIMIZERS),
        **_all_of("migration.lr_scheduler", *_SCHEDULERS),
    },
    "nn.optimizer": _all_of("migration.adam", *_OPTIMIZERS),
    "nn.lr_scheduler": _all_of("migration.lr_scheduler", *_SCHEDULERS),
    "pipeline.schedule": {},
    "pipeline.schedule.v_schedule": {},
    "shardformer.policies": {},
    "shardformer.policies.base_policy": _all_of(
        "shardformer", "ModulePolicyDescription", "Policy", "SubModuleReplacementDescription"
    ),
    "utils": _all_of("cluster.accelerator", "get_current_device", "set_seed"),
}
# Echelon's own packages that pass ColossalAI's names. In all other modules every name is ColossalAI's.
_SHARED = ("", "cluster", "zero")
# Packages of ColossalAI whose modules are not here. A module has the counterparts of the packages around it.
_ABSENT = (
    "amp",
    "auto_parallel",
    "autochunk",
    "booster.accelerator",
    "booster.mixed_precision",
    "booster.plugin",
    "checkpoint_io",
    "cluster.device_mesh_manager",
    "cluster.process_group_mesh",
    "context",
    "device",
    "fx",
    "gemini",
    "inference",
    "interface",
    "kernel",
    "legacy",
    "logging",
    "moe",
    "nn",
    "pipeline.p2p",
    "pipeline.schedule",
    "quantization",
    "shardformer.layer",
    "shardformer.modeling",
    "shardformer.policies",
    "shardformer.shard",
    "tensor",
    "testing",
    "utils",
    "zero.gemini",
    "zero.low_level",
)
# What to use instead of a name that is refused.
_INSTEAD = {
    "CAME": "torch's Adafactor",
    "Adafactor": "torch's or transformers' Adafactor",
    "DeviceMesh": "echelon.ParallelMesh",
    "FusedSGD": "torch.optim.SGD(..., fused=True)",
    "GeminiPlugin": "HybridParallelPlugin(zero_stage=1), or TorchFSDPPlugin, which shards parameters too",
    "GeminiDDP": "HybridParallelPlugin(zero_stage=1), or TorchFSDPPlugin, which shards parameters too",
    "GeminiOptimizer": "the optimizer that booster.boost returns with HybridParallelPlugin(zero_stage=1)",
    "LowLevelZeroOptimizer": "the optimizer that booster.boost returns with LowLevelZeroPlugin",
    "MoeHybridParallelPlugin": "HybridParallelPlugin(ep_size=...)",
    "PipelineGraph": 'pp_style="zbv" alone: it needs no costs',
    "ProcessGroupMesh": "echelon.ParallelMesh",
    "FusedLayerNorm": "torch's layer norm, and enable_fused_normalization=True",
    "FusedRMSNorm": "the model's norm, and enable_fused_normalization=True",
    "get_autopolicy": "the policies that boost chooses by model_type",
    "launch": "echelon.launch_from_torch under torchrun",
    "launch_from_openmpi": "echelon.launch_from_torch under torchrun",
    "launch_from_slurm": "echelon.launch_from_torch under `srun torchrun` (docs/cuda.md)",
    "LazyTensor": "echelon.LazyInitContext",
    "spawn": "torch.multiprocessing.spawn",
}
_PAGE = "docs/coming-from-colossalai.md"


def names_of(module: str) -> Callable[[str], Any]:
    """Return the function `__getattr__` of a module of Echelon, which finds the names that ColossalAI has there.

    Args:
        module: its path below `echelon`; "" is `echelon` itself.
    """
    return lambda name: _named(module, name)


def install() -> None:
    """Let Python find ColossalAI's modules below `echelon`; see [Note: imported names]. Repeated calls add nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def _named(module: str, name: str) -> Any:
    """Return the counterpart of a name, or the class that refuses it.

    Raises:
        AttributeError: a module of Echelon's own lacks the name, and so does ColossalAI's, as far as is known here.
    """
    packages = [".".join(module.split(".")[:depth]) for depth in range(module.count(".") + 1, 0, -1)]
    for package in packages:
        if (counterpart := _COUNTERPARTS.get(package, {}).get(name)) is not None:
            home, _, other_name = counterpart.rpartition(".")
            return getattr(import_module(f"{_PACKAGE}.{home}"), other_name)
    path = f"{module}.{name}".lstrip(".")
    if path in _COUNTERPARTS or path in _ABSENT:
        return import_module(f"{_PACKAGE}.{path}")
    is_of_colossalai = module not in _SHARED or name in _INSTEAD
    if name.startswith("_") or not is_of_colossalai:
        raise AttributeError(
            f"module '{_PACKAGE}{module and '.'}{module}' has no attribute {name!r}", name=name
        )
    advice = f"use {_INSTEAD[name]}" if name in _INSTEAD else "leave it out"
    error = f"colossalai.{path} has no counterpart in Echelon: {advice}; {_PAGE} lists what has one"
    return _Refusal(name, (), {"_error": error})


def _is_known(module: str) -> bool:
    """Return True for a module that ColossalAI has and Echelon lacks, as far as is known here."""
    return module in _COUNTERPARTS or any(
        module.startswith(f"{package}.") or module == package for package in _ABSENT
    )


class _Refusal(type):
    """The class of names that are refused: their instances cannot be made, and they have no attributes."""

    _error: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(cls._error)

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(name if name.startswith("__") else cls._error)


class _Finder(MetaPathFinder, Loader):
    """Finds ColossalAI's modules below `echelon`, and makes each with the names of this file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package != _PACKAGE or not _is_known(module):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = names_of(module.__name__.partition(".")[2])
