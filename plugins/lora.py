"""A model with LoRA by peft, as plugins boost it. Putting it in is lora_enable.py, splitting it shardformer/layer/."""

import copy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..checkpoint.lora import Adapter
from ..shardformer.adapted import is_of_peft

_PREFIX = "base_model.model."  # of the transformers model, in peft's


class Unwrapped(NamedTuple):
    """A transformers model with adapters in it, as it is boosted, and what peft's wrapper knew of them."""

    model: nn.Module
    adapters: tuple[Adapter, ...]


def require_peft() -> Any:
    """The package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return import_module("peft")
    except ImportError as error:
        raise ImportError(
            'enable_lora needs the package peft, which is not installed: pip install "echelon[lora]", or peft itself'
        ) from error


def unwrapped(model: nn.Module) -> Unwrapped:
    """The transformers model inside of a PeftModel with LoRA, and its adapters; any other model as it is."""
    if not _is_peft_model(model) or peft_model_faults(model):
        return Unwrapped(model, ())
    peft_model: Any = model
    inside = peft_model.get_base_model()
    first: dict[int, str] = {}
    state = inside.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    adapters = tuple(
        Adapter(
            folder="" if adapter == "default" else adapter,
            names={
                key: first[id(state[name.removeprefix(_PREFIX)])]
                for key, name in names_by_key(peft_model, adapter).items()
            },
            write_config=_config_writer(inside, config),
        )
        for adapter, config in peft_model.peft_config.items()
    )
    return Unwrapped(inside, adapters)


def peft_model_faults(model: nn.Module) -> list[str]:
    """Why a PeftModel cannot be boosted; empty for any other model."""
    if not _is_peft_model(model):
        return []
    peft_model: Any = model
    kinds = {
        str(getattr(config.peft_type, "value", config.peft_type))
        for config in peft_model.peft_config.values()
    }
    return [
        f"the model has adapters of peft's type {kind}, and only LoRA is trained here: use LoraConfig, or "
        "TorchDDPPlugin"
        for kind in sorted(kinds - {"LORA"})
    ]


def names_by_key(peft_model: Any, adapter: str) -> dict[str, str]:
    """The names of an adapter's tensors in the PeftModel, by those in the file."""
    # peft filters a state by its keys and renames those: given names for tensors, it says which became which.
    names = {name: name for name in peft_model.state_dict(keep_vars=True)}
    state_dict = require_peft().get_peft_model_state_dict
    found: dict[str, str] = state_dict(peft_model, names, adapter_name=adapter, save_embedding_layers=False)
    return found


def _is_peft_model(model: nn.Module) -> bool:
    return is_of_peft(model) and hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _config_writer(model: nn.Module, config: Any) -> Any:
    """What writes an adapter's configuration as peft does: for inference; without a task, with the model's class."""
    written = copy.deepcopy(config)
    written.inference_mode = True
    kind = type(model)
    auto_mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return partial(_write_config, written, auto_mapping if written.task_type is None else None)


def _write_config(config: Any, auto_mapping: dict[str, str] | None, folder: Path) -> None:
    config.save_pretrained(str(folder), auto_mapping_dict=auto_mapping)
