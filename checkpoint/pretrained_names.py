"""Tensors by the names that a model has for them, from those that files have, by transformers' own rules."""

import copy
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def known_to(model: nn.Module, stored: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Tensors of files by the names of a model, converted into what the model holds.

    Tied tensors are found under each of their names, if they are stored under one. Those that nothing explains keep
    their names.

    Args:
        model: of transformers; it may be cut.
        stored: what files hold, lazy or real.
        path: where from, for errors.

    Raises:
        ValueError: tensors cannot be converted, or differ although the model ties them; names all of them.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return _tied(dict(stored), model, path)
    outline = outline_of(model)
    found, unknown = _renamed(stored, outline, path)
    ignored = _ignored(outline)
    unknown = {name: tensor for name, tensor in unknown.items() if not ignored(name)}
    return _tied(found, outline, path) | unknown


def outline_of(model: Any) -> Any:
    """A model of transformers as its config says, whole, on the meta device; draws nothing at random.

    Raises:
        ValueError: its class cannot be built from its config alone.
    """
    from transformers import initialization

    safely = getattr(initialization, "meta_device_safe_creation_ops", nullcontext)  # since 5.1
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), safely():
            outline = type(model)(copy.deepcopy(model.config))
            outline.tie_weights()  # transformers 5.0 ties nothing on the meta device by itself
            return outline
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__} cannot be built from its config alone ({error}), which shows how its weights are "
            "named: let it take a config"
        ) from error


def _renamed(
    stored: Mapping[str, Tensor], outline: Any, path: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the model knows, under its names, and what it does not know."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(outline)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, state = outline.base_model_prefix, outline.state_dict()
    found: dict[str, Tensor] = {}
    unknown: dict[str, Tensor] = {}
    to_convert: dict[str, Any] = {}
    for name in sorted(stored, key=dot_natural_key):  # the order of numbers: experts are put together in it
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state or target in found or (pattern is None and target in to_convert):
            unknown[name] = stored[name]
        elif pattern is None:
            found[target] = stored[name]
        else:
            if target not in to_convert:
                to_convert[target] = copy.deepcopy(converter_of[pattern])
            to_convert[target].add_tensor(target, name, pattern, stored[name])
    return found | _converted(to_convert, outline, path), unknown


def _converted(converters: Mapping[str, Any], outline: Any, path: Path) -> dict[str, Tensor]:
    """What converters make of the tensors that they have collected."""
    found: dict[str, Tensor] = {}
    faults = []
    for target, converter in converters.items():
        sources = sorted(set().union(*converter.layer_targets.values()))
        try:
            made = converter.convert(target, model=outline, config=outline.config)
        except Exception as error:  # conversions may raise anything
            faults.append(f"{target} from {sources}: {type(error).__name__}: {error}")
            continue
        made = made[0] if isinstance(made, tuple) else made  # transformers 5.0 returns errors beside
        found |= {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
    if faults:
        raise ValueError(f"weights of {path} cannot be converted into the model's: {'; '.join(faults)}")
    return found


def _ignored(outline: Any) -> Any:
    """Which names of files `from_pretrained` passes over in silence, as a function of a name."""
    buffers = [name for name, _ in outline.named_buffers()]
    patterns = set(outline._keys_to_ignore_on_load_unexpected or ())
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):  # each layer had one
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):  # it was saved
        patterns.add(r"(^|\.)position_ids$")
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _tied(found: dict[str, Tensor], outline: nn.Module, path: Path) -> dict[str, Tensor]:
    """Tensors that the model ties, under each of their names."""
    tied: dict[int, list[str]] = {}
    for name, tensor in outline.state_dict(keep_vars=True).items():
        tied.setdefault(id(tensor), []).append(name)
    faults = []
    for names in tied.values():
        present = [name for name in names if name in found]
        if not present:
            continue
        first = found[present[0]]
        faults += [f"{present[0]} and {name}" for name in present[1:] if not _are_equal(first, found[name])]
        found |= dict.fromkeys(names, first)
    if faults:
        raise ValueError(
            f"the model ties weights that differ in {path}: {'; '.join(faults)}: build it with "
            "tie_word_embeddings=False"
        )
    return found


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
