"""Tasks of model types, by transformers' own mappings to classes."""

from collections.abc import Mapping

from torch import nn

from ..cluster.transformers_api import modeling_auto

_PREFIX, _SUFFIX = "MODEL_FOR_", "_MAPPING_NAMES"
_PREFERRED = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "AUDIO_CLASSIFICATION",
)
_LAST = ("PRETRAINING", "BACKBONE", "IMAGE", "TEXT_ENCODING")
_FAMILIES = {
    "CAUSAL_LM": "causal LM",
    "SEQ_TO_SEQ_CAUSAL_LM": "seq2seq LM",
    "MASKED_LM": "masked LM",
    "IMAGE_TEXT_TO_TEXT": "image-text",
    "MULTIMODAL_LM": "image-text",
    "SEQUENCE_CLASSIFICATION": "sequence classification",
    "IMAGE_CLASSIFICATION": "image classification",
    "CTC": "audio",
    "SPEECH_SEQ_2_SEQ": "audio",
    "AUDIO_CLASSIFICATION": "audio",
}


def mappings() -> dict[str, Mapping[str, str | tuple[str, ...]]]:
    """Return for each task, the preferred ones first, the names of its classes by model type."""
    by_task = {
        name.removeprefix(_PREFIX).removesuffix(_SUFFIX): mapping
        for name, mapping in vars(modeling_auto).items()
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX)
    }
    order = [*_PREFERRED, *(name for name in by_task if name not in (*_PREFERRED, *_LAST)), *_LAST]
    return {name: by_task[name] for name in order if name in by_task}


def model_types() -> list[str]:
    """Return all model types that have a class for a task, sorted."""
    return sorted({model_type for mapping in mappings().values() for model_type in mapping})


def tasks_of(model_type: str) -> dict[str, str]:
    """Return the names of a model type's classes by task, the preferred one first."""
    named = {task: mapping[model_type] for task, mapping in mappings().items() if model_type in mapping}
    return {task: name if isinstance(name, str) else name[0] for task, name in named.items()}


def task_of(kind: type[nn.Module]) -> str:
    """Return the task of a model class; empty if transformers has it for none."""
    names = {base.__name__ for base in kind.__mro__}
    for task, mapping in mappings().items():
        for name in mapping.values():
            if not names.isdisjoint([name] if isinstance(name, str) else name):
                return task
    return ""


def family_of(task: str) -> str:
    """Return the family by which model types are counted."""
    return _FAMILIES.get(task, "other")
