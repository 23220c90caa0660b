"""LoRA by peft: add adapters to a model, and remove peft's wrapper before boosting."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from ..checkpoint.local_tensors import Adapter
from ..checkpoint.model import ADAPTER_SAFETENSORS, ADAPTER_TORCH
from ..cluster.errors import raise_errors
from ..cluster.transformers_api import modeling_auto
from ..shardformer.layers.lora import adapted
from ..shardformer.layers.parallel_module import is_of_peft
from ..shardformer.refusals import is_parallelized

_PREFIX = "base_model.model."  # of the transformers model's names in a PeftModel


class Unwrapped(NamedTuple):
    """A transformers model with adapter layers, without peft's wrapper, and the description of its adapters."""

    model: nn.Module
    adapters: tuple[Adapter, ...]


def require_peft() -> Any:
    """Import peft.

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
    """Return the transformers model inside a PeftModel with LoRA, and the description of its adapters.

    Any other model is returned unchanged, without adapters. No copy.
    """
    if not _is_peft_model(model) or peft_model_errors(model):
        return Unwrapped(model, ())
    peft_model: Any = model
    base_model = peft_model.get_base_model()
    first_name: dict[int, str] = {}  # by id of a tensor, since tied ones have several names
    state = base_model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first_name.setdefault(id(tensor), name)
    adapters = tuple(
        Adapter(
            folder="" if adapter == "default" else adapter,
            names={
                key: first_name[id(state[name.removeprefix(_PREFIX)])]
                for key, name in names_by_key(peft_model, adapter).items()
            },
            write_config=_config_writer(base_model, config),
        )
        for adapter, config in peft_model.peft_config.items()
    )
    return Unwrapped(base_model, adapters)


def peft_model_errors(model: nn.Module) -> list[str]:
    """List reasons why a PeftModel cannot be boosted; none for any other model."""
    if not _is_peft_model(model):
        return []
    peft_model: Any = model
    types = {
        str(getattr(config.peft_type, "value", config.peft_type))
        for config in peft_model.peft_config.values()
    }
    return [
        f"the model has adapters of peft's type {peft_type}, but only LoRA is supported: use LoraConfig, or "
        "TorchDDPPlugin"
        for peft_type in sorted(types - {"LORA"})
    ]


def names_by_key(peft_model: Any, adapter: str) -> dict[str, str]:
    """Return by the name of each tensor in an adapter's file its name in the PeftModel.

    Args:
        peft_model: the PeftModel.
        adapter: the adapter's name in it, "default" for the first.
    """
    # peft filters a state dict by keys and renames them. With names as values, its result maps new names to old ones.
    names = {name: name for name in peft_model.state_dict(keep_vars=True)}
    state_dict = require_peft().get_peft_model_state_dict
    names_in_model: dict[str, str] = state_dict(
        peft_model, names, adapter_name=adapter, save_embedding_layers=False
    )
    return names_in_model


def _is_peft_model(model: nn.Module) -> bool:
    return is_of_peft(model) and hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _config_writer(model: nn.Module, config: Any) -> Any:
    """Return a function that writes an adapter's configuration into a folder, as peft's `save_pretrained` does.

    In inference mode, and with the model's class if the configuration names no task. Checkpoints are written in the
    background, so the function has a copy of the configuration.
    """
    saved_config = copy.deepcopy(config)
    saved_config.inference_mode = True
    model_class = type(model)
    auto_mapping = {"base_model_class": model_class.__name__, "parent_library": model_class.__module__}
    return partial(_write_config, saved_config, auto_mapping if saved_config.task_type is None else None)


def _write_config(config: Any, auto_mapping: dict[str, str] | None, folder: Path) -> None:
    config.save_pretrained(str(folder), auto_mapping_dict=auto_mapping)


# transformers' list of model classes for each task of peft.
_TASKS = {
    "CAUSAL_LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "SEQ_2_SEQ_LM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "QUESTION_ANS": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}


def enable_lora(
    model: nn.Module,
    pretrained_dir: str | Path | None,
    lora_config: Any,
    bnb_quantization_config: Any,
    quantize: bool,
) -> nn.Module:
    """Return peft's PeftModel around a model, with new or saved adapters; see `Booster.enable_lora`."""
    peft = require_peft()
    rules = (
        (
            bnb_quantization_config is not None or quantize,
            "bnb_quantization_config and quantize are not supported: leave them out, since weights of 4 or 8 "
            "bits cannot be sharded or cast",
        ),
        (
            (pretrained_dir is None) == (lora_config is None),
            "give either lora_config, for new adapters, or pretrained_dir, a folder with saved ones (whose "
            f"configuration is in it); got lora_config={lora_config!r} and pretrained_dir={pretrained_dir!r}",
        ),
        (
            pretrained_dir is not None and not Path(pretrained_dir, "adapter_config.json").is_file(),
            f"pretrained_dir={str(pretrained_dir)!r} has no adapter_config.json: give a folder that "
            "booster.save_lora_as_pretrained or peft's save_pretrained wrote",
        ),
        (
            is_parallelized(model),
            "the model is already boosted or sharded: call booster.enable_lora before booster.boost",
        ),
        (
            is_of_peft(model) or next(adapted(model), None) is not None,
            "the model already has adapters of peft: give the plain transformers model, once",
        ),
    )
    raise_errors([message for is_wrong, message in rules if is_wrong])
    if lora_config is not None:
        raise_errors(_config_errors(model, lora_config, peft))
    with _silence_peft_warnings():
        if pretrained_dir is None:
            return peft.get_peft_model(model, lora_config)
        return _load_adapters(model, Path(pretrained_dir), peft)


def _config_errors(model: nn.Module, config: Any, peft: Any) -> list[str]:
    """List reasons why new adapters with this configuration do not fit this model.

    The task must fit the model's class, unless transformers lists the class for no task. Every named module must
    exist: peft skips an unknown name silently if it finds another one of the list.
    """
    if type(config) is not peft.LoraConfig:
        return [f"lora_config is a {type(config).__name__}: give a peft.LoraConfig"]
    errors = []
    task_type, class_name = getattr(config.task_type, "value", config.task_type), type(model).__name__
    tasks = [
        task for task, listing in _TASKS.items() if class_name in getattr(modeling_auto, listing).values()
    ]
    if task_type in _TASKS and tasks and task_type not in tasks:
        errors.append(
            f"lora_config is for task_type={task_type!r}, and the model is a {class_name}: use "
            f"task_type={' or '.join(map(repr, tasks))}"
        )
    modules = dict(model.named_modules())
    linear = sorted({name.rpartition(".")[2] for name, module in modules.items() if _is_linear(module)})
    for option in ("target_modules", "modules_to_save"):
        names = getattr(config, option)
        # A string is a pattern, or "all-linear".
        for name in [] if names is None or isinstance(names, str) else sorted(names):
            if not any(path == name or path.endswith(f".{name}") for path in modules):
                errors.append(
                    f"{option} names {name!r}, and the model has no such module; its linear layers are "
                    f"{', '.join(linear)}"
                )
    return errors


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _load_adapters(model: nn.Module, folder: Path, peft: Any) -> nn.Module:
    """Add the adapters of a folder to a model, trainable; return the PeftModel. Each rank reads the folder.

    Raises:
        ValueError: they are not LoRA, or the names in the file are not those of the model.
    """
    peft_model: nn.Module = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    raise_errors(peft_model_errors(peft_model))
    needed, stored = set(names_by_key(peft_model, "default")), set(_stored_names(folder))
    errors = [f"{name} is missing" for name in sorted(needed - stored)]
    in_model = set(peft_model.state_dict())
    errors += [f"{name} is not in the model" for name in sorted(stored - needed - in_model)]
    if errors:
        raise ValueError(f"the adapters in {folder} do not fit this model: {'; '.join(errors)}")
    return peft_model


def _stored_names(folder: Path) -> list[str]:
    """Return the names of an adapter's tensors in its file, safetensors if there is one."""
    path = folder / ADAPTER_SAFETENSORS.single
    if path.is_file():
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    return list(torch.load(folder / ADAPTER_TORCH.single, map_location="meta", weights_only=True))


@contextmanager
def _silence_peft_warnings() -> Iterator[None]:
    """Silence warnings of peft that the caller cannot act on, or that are raised as errors here."""
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.23 has renamed; it can go when peft reads the new one.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        yield
