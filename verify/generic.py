"""Small models, and their batches, by the rules of derive/: of types that no settings of model_choice.py describe."""

from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from ..derive.build import Copy, small_copy
from ..derive.small import LAYERS, depths_of
from ..derive.tasks import tasks_of
from ..shardformer.tables.table import table_for

# Model types without a table that the settings of model_choice.py suit.
# fmt: off
WITHOUT_TABLE = (
    "apertus", "arcee", "cwm", "dbrx", "deepseek_v2", "doge", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe",
    "gemma", "glm4_moe", "granite_swa", "granitemoe", "helium", "hy_v3", "hyperclovax", "internlm3", "iquestcoder",
    "jais2", "laguna", "longcat_flash", "mellum", "minicpm3", "ministral", "ministral3", "olmo", "qwen3_5_text",
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


@cache
def generic_copy(
    model_type: str, head: str, tied: bool, num_layers: int, settings: tuple[tuple[str, object], ...]
) -> Copy:
    """Return the small copy of a choice, the same in every process; the random state stays as it is.

    Args: see `ModelChoice`.

    Raises:
        ValueError: there is no such head, none trains, or its config does not take one of the settings.
    """
    heads = generic_heads(model_type)
    if head not in heads:
        known = f"use one of {', '.join(heads)}" if heads else "nor with any other head that can be verified"
        raise ValueError(f"transformers has no {model_type!r} with head {head!r}: {known}")
    config = transformers.CONFIG_MAPPING[model_type]()
    chosen = {
        **_depths(config, num_layers),
        **({"tie_word_embeddings": True} if tied else {}),
        **dict(settings),
    }
    if unknown := [name for name in chosen if not hasattr(config, name)]:
        raise ValueError(f"the config of a {model_type!r} has no {', '.join(unknown)}: leave it out")
    config = transformers.CONFIG_MAPPING[model_type](**chosen)
    kept = [config.attribute_map.get(name, name) for name in chosen]
    try:
        with torch.random.fork_rng(devices=[]):
            copy = small_copy(heads[head], config, head.upper(), kept)
    except ValueError as error:
        raise ValueError(f"no small {model_type!r} with head {head!r} trains: {error}") from None
    built: Any = copy.model.config
    for name, value in chosen.items():
        if getattr(built, name, None) != value:
            raise ValueError(
                f"a small {model_type!r} has {name}={getattr(built, name, None)!r}, and does not take {value!r}: leave "
                f"{name} out"
            )
    return copy


def _depths(config: PreTrainedConfig, num_layers: int) -> dict[str, int]:
    """Return the settings that give a model a number of layers; empty for the number that general rules give it."""
    if num_layers == LAYERS:
        return {}
    depths = depths_of(config)
    if not depths or not 1 <= num_layers < LAYERS:
        allowed = f"use 1 to {LAYERS}" if depths else "its config has no number of layers, leave layers out"
        raise ValueError(
            f"layers={num_layers} of a {config.model_type!r}, which is built by general rules: {allowed}"
        )
    return dict.fromkeys(depths, num_layers)
