"""Small models of types that no settings of models.py describe: built, with their batches, by the rules of derive/."""

from functools import cache

import torch
import transformers
from torch import nn

from ..derive.build import Copy, small_copy
from ..derive.small import LAYERS
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


def generic_errors(model_type: str, head: str, *, is_plain: bool) -> list[str]:
    """List the errors of a choice.

    Args:
        model_type: the type.
        head: the head.
        is_plain: True if the choice has no settings of its own.
    """
    heads = generic_heads(model_type)
    if head not in heads:
        known = f"use one of {', '.join(heads)}" if heads else "nor with any other head that can be verified"
        return [f"transformers has no {model_type!r} with head {head!r}: {known}"]
    if not is_plain:
        return [
            f"a {model_type!r} is built by general rules, with {LAYERS} layers: leave tied, settings and layers out"
        ]
    try:
        generic_copy(model_type, head)
    except ValueError as error:
        return [f"no small {model_type!r} with head {head!r} trains: {error}"]
    return []


@cache
def generic_copy(model_type: str, head: str) -> Copy:
    """Return the small copy of a model type, the same in every process; the random state stays as it is.

    Raises:
        ValueError: none trains.
    """
    config = transformers.CONFIG_MAPPING[model_type]()
    with torch.random.fork_rng(devices=[]):
        return small_copy(generic_heads(model_type)[head], config, head.upper())
