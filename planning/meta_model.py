"""Models on the meta device, from a config, a folder or a model type."""

from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from ..cluster.errors import did_you_mean
from ..cluster.transformers_api import creation_on_meta
from ..derive.tasks import task_of, tasks_of

_LIMITS = ("max_position_embeddings", "max_target_positions")  # names of settings
_MOST_SKIPPED = 2  # rows of a table of positions that no token has, as those of padding


def load_config(name: str) -> PreTrainedConfig:
    """Return the config of a folder, of a config.json, or the default config of a model type.

    Raises:
        ValueError: there is none.
    """
    path = Path(name).expanduser()
    if path.exists():
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except Exception as error:  # of any config class, which checks its settings
            has_code = "trust_remote_code" in str(error)
            reason = "its code is not run here" if has_code else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"--model {name} has no config that transformers accepts: {reason}: mend it, or give another folder, "
                "file or model type"
            ) from None
        return config
    if name not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"--model {name!r} is no folder, file or model type of transformers: "
            f"{did_you_mean(name, transformers.CONFIG_MAPPING)}give a folder with config.json, the path of a "
            "config.json, or a type as llama"
        )
    default: PreTrainedConfig = transformers.CONFIG_MAPPING[name]()
    return default


def build_on_meta(config: PreTrainedConfig, head: str | None) -> tuple[nn.Module, str]:
    """Return the model of a config on the meta device, and its task as transformers names it.

    Args:
        config: of the model.
        head: the name of a class or of a task; None is the class that the config names, or else the usual one.

    Raises:
        ValueError: there is no such class.
    """
    by_task = tasks_of(config.model_type)
    architectures = [name for name in config.architectures or [] if hasattr(transformers, name)]
    if head is None:
        name = next(iter([*architectures, *by_task.values()]), None)
    else:
        name = by_task.get(head.upper(), head if hasattr(transformers, head) else None)
    if name is None:
        known = ", ".join(task.lower() for task in by_task) or "none that trains"
        raise ValueError(f"--head {head!r} of a {config.model_type!r} is not known: use one of {known}")
    kind: Any = getattr(transformers, name)
    with torch.device("meta"), creation_on_meta():
        model: nn.Module = kind(config)
    return model, task_of(kind) or "CAUSAL_LM"


def length_errors(model: nn.Module, length: int) -> list[str]:
    """List the reason why a text has more tokens than the model has learned positions; empty if it has enough."""
    if "input_ids" not in signature(model.forward).parameters:
        return []
    text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]  # of transformers' models
    limits = {limit for name in _LIMITS if isinstance(limit := getattr(text, name, None), int)}
    positions = [
        min(limit, module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and any(word in name.rpartition(".")[2] for word in ("position", "wpe"))
        for limit in limits
        if limit <= module.num_embeddings <= limit + _MOST_SKIPPED
    ]
    if not positions or length <= (most := min(positions)):
        return []
    return [
        f"--seq {length}: this {type(model).__name__} has {most} learned positions: use at most --seq {most}, or a "
        "config with more"
    ]
