"""Small models of types that no settings of models.py describe: built, with their batches, by the rules of derive/."""

from functools import cache
from typing import Any

import torch
import transformers
from torch import nn

from ..derive.build import Copy, small_copy
from ..derive.small import LAYERS, depths_of
from ..derive.tasks import tasks_of
from ..shardformer.tables.table import table_for

# Model types without a table that the settings of models.py suit.
# fmt: off
WITHOUT_TABLE = (
    "apertus", "arcee", "cwm", "dbrx", "deepseek_v2", "doge", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe",
    "gemma", "glm4_moe", "granite_swa", "granitemoe", "helium", "hy_v3", "hyperclovax", "internlm3", "iquestcoder",
    "jais2", "laguna", "longcat_flash", "mellum", "minicpm3", "ministral", "ministral3", "olmo", "qwen3_5_text",
    "vitpose_backbone",
)
# fmt: on

# Heads of generic choices whose loss is one mean over labels.
LABELLED = ("causal_lm", "seq_to_seq_causal_lm", "masked_lm", "image_text_to_text", "multimodal_lm",
            "sequence_classification", "image_classification", "audio_classification")  # fmt: skip


def has_no_recipe(model_type: str) -> bool:
    """Return True if model and batches of a type are made by general rules."""
    is_known = model_type in WITHOUT_TABLE or table_for(model_type) is not None
    return not is_known and bool(tasks_of(model_type))  # not a type that a script registered


def generic_heads(model_type: str) -> dict[str, type[nn.Module]]:
    """Return the classes of a model type by head: the task in lower case, the preferred one first."""
    return {task.lower(): getattr(transformers, name) for task, name in tasks_of(model_type).items()}


def generic_errors(model_type: str, head: str, settings: tuple[tuple[str, object], ...]) -> list[str]:
    """List the errors of a choice: its head, its settings, and a model that does not train."""
    heads = generic_heads(model_type)
    if head not in heads:
        known = f"use one of {', '.join(heads)}" if heads else "nor with any other head that can be verified"
        return [f"transformers has no {model_type!r} with head {head!r}: {known}"]
    try:
        generic_copy(model_type, head, settings)
    except ValueError as error:
        return [str(error)]
    return []


def depth_settings(model_type: str, num_layers: int) -> dict[str, object]:
    """Return the settings that give a model type fewer layers than general rules do; empty for their number.

    Raises:
        ValueError: general rules give it no such number of layers.
    """
    if num_layers == LAYERS:
        return {}
    names = depths_of(transformers.CONFIG_MAPPING[model_type]())
    if not names or not 1 <= num_layers < LAYERS:
        allowed = f"use 1 to {LAYERS}" if names else "its config has no number of layers, leave layers out"
        raise ValueError(
            f"layers={num_layers} of a {model_type!r}, which is built by general rules: {allowed}"
        )
    return dict.fromkeys(names, num_layers)


@cache
def generic_copy(model_type: str, head: str, settings: tuple[tuple[str, object], ...] = ()) -> Copy:
    """Return the small copy of a model type, the same in every process; the random state stays as it is.

    Args:
        model_type: the type.
        head: a key of `generic_heads`.
        settings: settings of its config that it has instead of small ones, as (name, value).

    Raises:
        ValueError: none trains, or its config does not take one of the settings.
    """
    config = transformers.CONFIG_MAPPING[model_type]()
    if unknown := [name for name, _ in settings if not hasattr(config, name)]:
        raise ValueError(f"the config of a {model_type!r} has no {', '.join(unknown)}: leave it out")
    config = transformers.CONFIG_MAPPING[model_type](**dict(settings))
    kept = [config.attribute_map.get(name, name) for name, _ in settings]
    try:
        with torch.random.fork_rng(devices=[]):
            copy = small_copy(generic_heads(model_type)[head], config, head.upper(), kept)
    except ValueError as error:
        raise ValueError(f"no small {model_type!r} with head {head!r} trains: {error}") from None
    built: Any = copy.model.config
    for name, value in settings:
        if getattr(built, name, None) != value:
            raise ValueError(
                f"a small {model_type!r} has {name}={getattr(built, name, None)!r}, and does not take {value!r}: leave "
                f"{name} out"
            )
    return copy
