"""LowLevelZeroPlugin: the hybrid plugin with data parallelism and ZeRO alone."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..cluster.options import arguments_like, option_like
from .base import init_from_options, require_process_group
from .colossalai import ZERO
from .deepspeed import plugin_arguments
from .hybrid_config import DataOptions, HybridConfig
from .hybrid_parallel import HybridParallelPlugin


@dataclass(frozen=True)
class ZeroConfig(DataOptions):
    """Options of LowLevelZeroPlugin: those of HybridParallelPlugin, some under another name."""

    stage: int = option_like(HybridConfig, "zero_stage", default=1)
    precision: str | None = option_like(HybridConfig, "precision")
    _: KW_ONLY
    initial_scale: float = option_like(HybridConfig, "initial_scale", default=2**32)
    reduce_bucket_size_in_m: float | None = option_like(HybridConfig, "zero_bucket_size_in_m")


class LowLevelZeroPlugin(HybridParallelPlugin):
    """Data parallelism with optimizer states, or gradients too, sharded over the ranks (ZeRO, arXiv:1910.02054).

    Its arguments are the options of `ZeroConfig`, documented there and by `help(LowLevelZeroPlugin.__init__)`. Further
    arguments of ColossalAI's plugin are accepted if they change nothing (see `colossalai.ZERO`).

    Raises:
        ValueError: arguments are invalid or do not fit together; all errors at once.
    """

    @init_from_options(ZeroConfig, ZERO)
    def __init__(self, config: ZeroConfig, errors: list[str]) -> None:
        try:
            self._configure(HybridConfig(**arguments_like(config)), errors)
        except ValueError as error:
            text = str(error)  # names the options of HybridConfig
            for option in fields(config):
                text = text.replace(option.metadata.get("name", option.name), option.name)
            raise ValueError(text) from None

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | str | Path, *, without: Sequence[str] = (), **others: Any
    ) -> "LowLevelZeroPlugin":
        """Make a plugin from a DeepSpeed configuration; see docs/coming-from-deepspeed.md.

        Args:
            config: the configuration, or the path of its .json file.
            without: "optimizer", "scheduler": sections that are not read, since the script builds these objects.
            others: arguments of the plugin, which override those of the configuration.

        Raises:
            ValueError: keys or values are unknown or unsupported; all errors at once.
            RuntimeError: no process group is started.
        """
        require_process_group()
        arguments = plugin_arguments(config, num_replicas=dist.get_world_size(), without=without)
        return cls(**arguments | others)
