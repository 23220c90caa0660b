"""Find the weights in a Hugging Face folder or file, map their names to those of a model, and read them by boxes.

[Note: reading by boxes] A tensor that is stored in the model's form is read by boxes. A tensor that transformers'
conversions make from several stored ones (experts, for example) is recorded with lazy tensors. It is materialized
unsharded at its first read, and boxes are cut from it.
"""

import copy
import re
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..cluster.box import Box, Stored
from ..cluster.gathering import on_all_ranks, run_or_raise_together
from ..cluster.transformers_api import (
    WeightConverter,
    WeightRenaming,
    converted,
    creation_on_meta,
    dot_natural_key,
    get_model_conversion_mapping,
    rename_source_key,
)
from ..lazy.context import refuse_quantized
from ..lazy.files import open_tensors, read_json
from ..lazy.tensor import LazyTensor, lazily, real
from .local_tensors import LocalTensor, TensorNames

# File names that are tried in a folder, in the order of `from_pretrained`.
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_INDEX = ".index.json"
_OF_SEVERAL = re.compile(r"-(\d+)-of-(\d+)\.")


class Weights:
    """The tensors of a file or folder by their stored names; implements `Stored`. Opening reads no tensor.

    Raises:
        FileNotFoundError: the path does not exist, or contains no model.
        ValueError: a file is damaged or of another kind, or two files have a tensor of the same name; names the file.
    """

    def __init__(self, path: Path) -> None:
        self.paths: dict[str, Path] = {}
        self.tensors: dict[str, Tensor] = {}
        self._made: tuple[str, Tensor] | None = None  # the name and value of the tensor last materialized
        for file in tensor_files(path):
            tensors = open_tensors(file)
            if twice := sorted(self.paths.keys() & tensors.keys()):
                raise ValueError(
                    f"{file} contains tensors that another file of {file.parent} contains too: {twice}"
                )
            self.paths |= dict.fromkeys(tensors, file)
            self.tensors |= tensors

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype."""
        return self.tensors[name].dtype

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor; see [Note: reading by boxes]."""
        tensor = self.tensors[name]
        if Box.full(tensor.shape).common(box) != box and box.numel:
            raise AssertionError(f"{box} of {name}, which has shape {tuple(tensor.shape)}")
        if isinstance(tensor, LazyTensor):
            if self._made is None or self._made[0] != name:
                self._made = None  # frees the previous one
                self._made = name, real(tensor)
            tensor = self._made[1]
        return tensor[box.within(Box.full(tensor.shape))]


def open_pretrained(path: Path | str, model: nn.Module | None = None) -> Weights:
    """Open the tensors of a file or folder by the names of a model, without reading them.

    Names are mapped as `from_pretrained` does. The base model's prefix may be missing or added, names may be older or
    of other formats, and experts may be stored one by one. A tensor that is not in the model keeps its stored name,
    unless `from_pretrained` ignores it silently: then it is left out. Communicates nothing.

    Args:
        path: a safetensors or torch file of any name, an index of several files, or a folder of these.
        model: a transformers model, possibly cut into stages: only its class and its config are used. With None or
            another module, names are not mapped.

    Raises:
        FileNotFoundError: the path does not exist, or contains no model.
        ValueError: files are damaged, incomplete, quantized or of another kind, or cannot be converted.
    """
    path = Path(path)
    refuse_quantized(tensor_files(path)[0].parent)
    weights = Weights(path)
    if model is not None:
        weights.tensors = known_to(model, weights.tensors, path)
    return weights


def tensor_files(path: Path) -> list[Path]:
    """Return the files with the tensors of a model.

    Args:
        path: a file, an index of files, or a folder.

    Raises:
        FileNotFoundError: the path does not exist or contains no model, or files of an index or a numbered set are
            missing.
        ValueError: an index cannot be read, or the folder contains an adapter.
    """
    if path.is_file():
        return _of_index(path) if path.name.endswith(_INDEX) else [path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {path}: give one that holds a model's weights")
    for name in _NAMES:
        if (path / name).is_file():
            return tensor_files(path / name)
    if (path / "adapter_config.json").is_file():
        raise ValueError(
            f"{path} contains an adapter, not a model: give the folder of the model that it belongs to"
        )
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        if files := sorted(path.glob(pattern)):
            return _all_of_several(files)
    present = sorted(file.name for file in path.iterdir())[:20]
    raise FileNotFoundError(
        f"{path} contains no model: expected one of {', '.join(_NAMES)} or other safetensors files, but found {present}"
    )


def _of_index(path: Path) -> list[Path]:
    """Return the files that an index lists."""
    try:
        names = set(read_json(path)["weight_map"].values())
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no index of tensors: {type(error).__name__}: {error}") from error
    files = [path.parent / name for name in sorted(names)]
    if not files:
        raise ValueError(f"{path} is not an index of tensors: it names no file")
    if missing := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"files that {path} names are missing: {', '.join(missing)}")
    return files


def _all_of_several(files: list[Path]) -> list[Path]:
    """Return files that have no index, after a check that no file of a numbered set is missing."""
    for path in files:
        match = _OF_SEVERAL.search(path.name)
        if match is None:
            continue
        number, count = match.groups()
        start, end = path.name[: match.start()], path.name[match.end() :]
        names = [f"{start}-{index:0{len(number)}}-of-{count}.{end}" for index in range(1, int(count) + 1)]
        present = {file.name for file in files}
        if missing := [name for name in names if name not in present]:
            raise FileNotFoundError(f"files of {path.parent} are missing: {', '.join(missing)}")
    return files


def known_to(model: nn.Module, stored: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Map stored tensors to the names of a model and convert them to its form.

    A tied tensor that is stored under one of its names is returned under all of them. Tensors that are not in the model
    keep their stored names.

    Args:
        model: a transformers model, possibly cut into stages.
        stored: tensors by their stored names.
        path: path of the files, for errors.

    Raises:
        ValueError: tensors cannot be converted, or differ although the model ties them; names all of them.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return _tied(dict(stored), model, path)
    outline = outline_of(type(model), model.config)
    known, unknown = _renamed(stored, outline, path)
    ignored = _ignored(outline)
    unknown = {name: tensor for name, tensor in unknown.items() if not ignored(name)}
    return _tied(known, outline, path) | unknown


def outline_of(model_class: Any, config: Any) -> Any:
    """Build the full transformers model of a config on the meta device, without changing the random state.

    Raises:
        ValueError: the class cannot be built from its config alone.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), creation_on_meta():
            outline = model_class(copy.deepcopy(config))
            outline.tie_weights()  # transformers 5.0 does not tie weights on the meta device
            return outline
    except TypeError as error:
        raise ValueError(
            f"{model_class.__name__} cannot be built from only its config ({error}), as the names of its weights "
            "require: make its constructor take one"
        ) from error


def _renamed(
    stored: Mapping[str, Tensor], outline: Any, path: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that the model has, by its names, and the others, by their stored names."""
    rules = get_model_conversion_mapping(outline)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, state = outline.base_model_prefix, outline.state_dict()
    known: dict[str, Tensor] = {}
    unknown: dict[str, Tensor] = {}
    to_convert: dict[str, Any] = {}
    for name in sorted(stored, key=dot_natural_key):  # numeric order, in which experts are joined
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:  # the model itself has the name that a rule replaces
            target, pattern = rename_source_key(name, [], [], prefix, state)
        is_taken = target in known or (pattern is None and target in to_convert)
        if target not in state or is_taken:
            unknown[name] = stored[name]
        elif pattern is None:
            known[target] = stored[name]
        else:
            if target not in to_convert:
                to_convert[target] = copy.deepcopy(converter_of[pattern])
            to_convert[target].add_tensor(target, name, pattern, lazily(stored[name]))
    return known | _converted(to_convert, outline, path), unknown


def _converted(converters: Mapping[str, Any], outline: Any, path: Path) -> dict[str, Tensor]:
    """Run converters on the tensors that they have collected, and return the results.

    Args:
        converters: copies of transformers' rules, with the tensors of one target each, by its name.
        outline: the model on the meta device.
        path: path of the files, for errors.
    """
    tensors: dict[str, Tensor] = {}
    errors = []
    for target, converter in converters.items():
        sources = sorted(set().union(*converter.layer_targets.values()))
        try:
            results = converted(converter, target, outline)
        except Exception as error:  # conversions may raise anything
            errors.append(f"{target} from {sources}: {type(error).__name__}: {error}")
            continue
        for name, result in results.items():
            # A tensor that no operation changes is still in a list, as collected.
            tensors[name] = result[0] if isinstance(result, list) else result
    if errors:
        raise ValueError(f"weights of {path} cannot be converted into the model's: {'; '.join(errors)}")
    return tensors


def _ignored(outline: Any) -> Callable[[str], bool]:
    """Return a predicate of stored names that `from_pretrained` ignores silently."""
    buffers = [name for name, _ in outline.named_buffers()]
    patterns = set(outline._keys_to_ignore_on_load_unexpected or ())
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):  # older releases saved one per layer
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):  # older releases saved it
        patterns.add(r"(^|\.)position_ids$")
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _tied(tensors: dict[str, Tensor], outline: nn.Module, path: Path) -> dict[str, Tensor]:
    """Add tied tensors under each of their names."""
    tied: dict[int, list[str]] = {}
    for name, tensor in outline.state_dict(keep_vars=True).items():
        tied.setdefault(id(tensor), []).append(name)
    errors = []
    for names in tied.values():
        present = [name for name in names if name in tensors]
        if not present:
            continue
        first = tensors[present[0]]
        errors += [f"{present[0]} and {name}" for name in present[1:] if not _are_equal(first, tensors[name])]
        tensors |= dict.fromkeys(names, first)
    if errors:
        raise ValueError(
            f"the model ties weights that differ in {path}: {'; '.join(errors)}: build it with "
            "tie_word_embeddings=False"
        )
    return tensors


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def fit(
    local: Mapping[str, LocalTensor],
    *,
    stored: Stored,
    names: TensorNames,
    strict: bool,
    what: str,
    group: dist.ProcessGroup,
) -> Callable[[], None]:
    """Check that stored tensors fit the model, on all ranks. Collective over the group.

    Args:
        local: this rank's tensors, by their first names.
        stored: the stored tensors, by any of their names.
        names: the names of the full model's tensors.
        strict: refuse missing and extra tensors; else they are ignored. Shapes must fit in any case.
        what: name of the stored tensors in errors.
        group: all ranks, on the CPU backend.

    Returns:
        A function that reads this rank's boxes into its memory. Collective over the group; raises OSError or ValueError
        on every rank if a file cannot be read.

    Raises:
        ValueError: tensors are missing, extra or of another shape; lists all of them, on every rank.
    """
    shapes = {name: tensor.shape for name, tensor in local.items()}
    raise_of_all(
        fitting_errors(shapes, stored, names, strict=strict), f"{what} does not fit this model", group
    )
    places = _places(stored, names)
    return lambda: run_or_raise_together(lambda: read_into(local, stored, places), group)


def fitting_errors(
    shapes: Mapping[str, tuple[int, ...]], stored: Stored, names: TensorNames, *, strict: bool
) -> list[str]:
    """Return errors of stored tensors that do not fit these shapes (by first name) and names; see `fit`."""
    places = _places(stored, names)
    errors = [
        f"{name} has shape {stored.shape(places[name])} in the file and {shape} in the model"
        for name, shape in shapes.items()
        if name in places and tuple(stored.shape(places[name])) != shape
    ]
    if strict:
        errors += [f"{name} is missing" for name in names.needed if name not in places]
        errors += [f"{name} is not in the model" for name in stored.names if name not in names.first]
    return errors


def raise_of_all(errors: list[str], what: str, group: dist.ProcessGroup) -> None:
    """Raise the errors that any rank found, without duplicates. Collective over the group.

    Raises:
        ValueError: some rank has errors; on every rank.
    """
    by_rank = on_all_ranks(lambda: errors, group)
    if distinct := dict.fromkeys(chain.from_iterable(by_rank)):
        raise ValueError(f"{what}: {'; '.join(distinct)}")


@torch.no_grad()
def read_into(
    local: Mapping[str, LocalTensor], stored: Stored, places: Mapping[str, str] | None = None
) -> None:
    """Read this rank's boxes from stored tensors; tensors that are not stored are unchanged.

    Args:
        local: this rank's tensors by name.
        stored: the stored tensors.
        places: the stored name by the name in `local`; None if they are the same.
    """
    places = {name: name for name in stored.names} if places is None else places
    for name, tensor in local.items():
        if name in places:
            for piece in tensor.boxes:
                piece.local.copy_(stored.read(places[name], piece.box))


def _places(stored: Stored, names: TensorNames) -> dict[str, str]:
    """Return the stored name of each tensor, by its first name."""
    places: dict[str, str] = {}
    for name in stored.names:
        first = names.first.get(name)
        if first is not None and (name == first or first not in places):
            places[first] = name
    return places
