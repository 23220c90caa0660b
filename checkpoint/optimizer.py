"""The state of an optimizer: its tensors by parameter, groups, numbers and float32 masters, saved and loaded."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .background import Copies
from .box import coverage_errors
from .commit import Replaced
from .consent import alike, errors_of_all, on_all_ranks, on_first_rank
from .dcp import INDEX, StateFiles, save_states
from .local import LocalTensor
from .pretrained import read_into
from .tensor_file import FileRecord, read_values, write_values

GROUPS = "groups.pt"
MASTER = "master"
STATES = Replaced(entries=(INDEX,), others=(GROUPS, "rank-*.safetensors"))
# Options of how a step is computed, which this run decides and not the one that saved.
_OWN_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


class TrainedPiece(NamedTuple):
    """A rank's part of a parameter, as its optimizer steps it.

    Args:
        name: of the parameter.
        key: the tensor that the optimizer steps in its place.
        local: this rank's part of a tensor of `key`'s shape, under a name.
    """

    name: str
    key: Tensor
    local: Callable[[str, Tensor], LocalTensor]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """An optimizer and the pieces of parameters that this rank steps.

    Args:
        inner: the torch optimizer.
        groups: this rank's pieces by parameter group, in its order.
        has_masters: whether the float32 weights that are stepped are others than the model's own.
        extra: loss scale and counts, plain values; equal on all ranks.
        install: takes torch's state dict of `inner` and such values, once masters were filled.
        is_whole: whether every rank steps all parameters whole, so that states may have any shape.
    """

    inner: Optimizer
    groups: Sequence[Sequence[TrainedPiece]]
    has_masters: bool
    extra: Mapping[str, Any]
    install: Callable[[dict[str, Any], Mapping[str, Any]], None]
    is_whole: bool = False

    @property
    def pieces(self) -> list[TrainedPiece]:
        """All of this rank."""
        return [piece for group in self.groups for piece in group]

    @cached_property
    def masters(self) -> dict[str, LocalTensor]:
        """This rank's part of the float32 weights that are stepped, by parameter."""
        return {piece.name: piece.local(piece.name, piece.key) for piece in self.pieces}


@dataclass(frozen=True, kw_only=True)
class SavedStates:
    """An optimizer about to be written.

    Args:
        tensors: this rank's, by the name in files.
        described: groups, numbers and the like, written by the first rank.
    """

    tensors: Mapping[str, LocalTensor]
    described: Mapping[str, Any]

    def copied(self, copies: Copies) -> "SavedStates":
        """The same with the memory as it is now, once the copies are finished; without what others save."""
        tensors = {name: each.copied(copies) for name, each in self.tensors.items() if each.counts}
        return SavedStates(tensors=tensors, described=self.described)

    def write(self, folder: Path, group: dist.ProcessGroup) -> dict[str, FileRecord]:
        """Write it into a folder that is there, and return this rank's files. Collective over the group."""
        records = save_states(self.tensors, folder, group=group)
        described = alike(lambda: self._describe(folder) if group.rank() == 0 else {}, group)
        return records | described

    def _describe(self, folder: Path) -> dict[str, FileRecord]:
        return {GROUPS: write_values(folder / GROUPS, self.described)}


class Number(NamedTuple):
    """A 0-D tensor as ranks exchange it: to pickle a tensor takes many times as long."""

    value: bool | int | float | complex
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """The same, on the CPU."""
        return torch.tensor(self.value, dtype=self.dtype, device="cpu")


class ReportedStates(NamedTuple):
    """A rank's report of an optimizer's state: numbers by parameter, and its parameters of each group."""

    scalars: dict[str, dict[str, Any]]
    groups: list[list[str]]


def local_states(trained: Trained) -> tuple[dict[str, LocalTensor], ReportedStates]:
    """An optimizer's state on this rank now, tensors by their names in files.

    Raises:
        ValueError: some state is neither a number nor of the shape of its parameter, of which ranks step pieces; names
            it.
    """
    tensors: dict[str, LocalTensor] = {}
    if trained.has_masters:
        tensors = {f"{MASTER}/{name}": each for name, each in trained.masters.items()}
    scalars: dict[str, dict[str, Any]] = {}
    for piece in trained.pieces:
        for key, value in trained.inner.state.get(piece.key, {}).items():
            if _is_piece(key, value, piece):
                tensors[f"{key}/{piece.name}"] = piece.local(f"{key}/{piece.name}", value)
            else:
                scalars.setdefault(piece.name, {})[key] = _scalar(key, value, piece.name, trained.is_whole)
    return tensors, ReportedStates(scalars, [[piece.name for piece in pieces] for pieces in trained.groups])


def states_to_save(
    trained: Trained, tensors: Mapping[str, LocalTensor], every: Sequence[ReportedStates]
) -> SavedStates:
    """An optimizer as it is written, from this rank's tensors and the reports of all ranks, in their order."""
    described = {
        "optimizer": type(trained.inner).__name__,
        "groups": [
            {"options": saved_options(options), "parameters": names}
            for options, names in zip(
                trained.inner.param_groups, _members([report.groups for report in every]), strict=True
            )
        ],
        "scalars": {name: _tensors(values) for report in every for name, values in report.scalars.items()},
        "extra": dict(trained.extra),
    }
    return SavedStates(tensors=tensors, described=described)


@dataclass(frozen=True, kw_only=True)
class FittingStates:
    """A stored optimizer that fits this one.

    Args:
        trained: this one.
        stored: the tensors.
        described: groups, numbers and the like.
        group: all ranks, over the CPU.
    """

    trained: Trained
    stored: StateFiles
    described: Mapping[str, Any]
    group: dist.ProcessGroup

    @property
    def has_masters(self) -> bool:
        """True where there are float32 weights in it."""
        return any(name.startswith(f"{MASTER}/") for name in self.stored.names)

    def load(self) -> None:
        """Let the optimizer go on from it; its state is made anew. Collective over the group and the data axis.

        Raises:
            OSError, ValueError: a file cannot be read; on every rank.
        """
        tensors = {f"{MASTER}/{name}": each for name, each in self.trained.masters.items()}
        states: dict[Tensor, dict[str, Any]] = {}
        by_parameter = _states_by_parameter(self.stored)
        for piece in self.trained.pieces:
            state = states[piece.key] = dict(self.described["scalars"].get(piece.name, {}))
            for key in by_parameter.get(piece.name, ()):
                name = f"{key}/{piece.name}"
                state[key] = torch.zeros_like(piece.key, dtype=self.stored.dtype(name), requires_grad=False)
                tensors[name] = piece.local(name, state[key])
        alike(lambda: read_into(tensors, self.stored), self.group)
        self.trained.install(_torch_state(self.trained, self.described, states), self.described["extra"])


def fit_trained(trained: Trained, folder: Path, group: dist.ProcessGroup) -> FittingStates:
    """Compare the state in a folder with an optimizer of all ranks. Collective over the group.

    Raises:
        ValueError: it belongs to another optimizer, other parameter groups or another model; all of it, on every rank.
        FileNotFoundError: there is none.
    """
    described = on_first_rank(lambda: _described(folder), group)
    stored = alike(lambda: StateFiles(folder), group)
    members = _members(on_all_ranks(lambda: [[p.name for p in each] for each in trained.groups], group))
    if errors := errors_of_all(lambda: _errors(trained, described, members, stored), group):
        raise ValueError(f"{folder} does not fit this optimizer: {'; '.join(errors)}")
    return FittingStates(trained=trained, stored=stored, described=described, group=group)


def _described(folder: Path) -> Mapping[str, Any]:
    if not (folder / GROUPS).is_file():
        raise FileNotFoundError(
            f"{folder} holds no optimizer: give that of save_optimizer, or `optimizer` in that of a step"
        )
    described: Mapping[str, Any] = read_values(folder / GROUPS)
    return described


def _torch_state(
    trained: Trained, described: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]
) -> dict[str, Any]:
    """The argument of `Optimizer.load_state_dict`."""
    groups: list[dict[str, Any]] = []
    by_number: dict[int, dict[str, Any]] = {}
    count = 0
    for own, saved in zip(trained.inner.param_groups, described["groups"], strict=True):
        kept = {name: own[name] for name in _OWN_OPTIONS if name in own}
        numbers = {count + place: parameter for place, parameter in enumerate(own["params"])}
        by_number |= {number: states[key] for number, key in numbers.items() if states.get(key)}
        groups.append({**saved["options"], **kept, "params": list(numbers)})
        count += len(numbers)
    return {"state": by_number, "param_groups": groups}


def _errors(
    trained: Trained, described: Mapping[str, Any], members: Sequence[Sequence[str]], stored: StateFiles
) -> list[str]:
    own = type(trained.inner).__name__
    if described["optimizer"] != own:
        return [f"it is of {described['optimizer']}, and {own} is to go on from it"]
    if len(described["groups"]) != len(members):
        return [f"it has {len(described['groups'])} parameter groups, and there are {len(members)} here"]
    there = _group_of([each["parameters"] for each in described["groups"]])
    here = _group_of(members)
    errors = [f"{name} is in no group there" for name in here if name not in there]
    errors += [f"{name} is in no group here" for name in there if name not in here]
    errors += [
        f"{name} is in group {there[name]} there and in group {here[name]} here"
        for name in here
        if name in there and there[name] != here[name]
    ]
    if errors:
        return errors
    if not trained.is_whole:
        errors += [
            f"{key} of {name} has shape {tuple(value.shape)}, which is not that of its parameter: such states load "
            "under TorchDDPPlugin alone"
            for name, values in described["scalars"].items()
            for key, value in values.items()
            if isinstance(value, Tensor) and value.dim() > 0
        ]
    by_parameter = _states_by_parameter(stored)
    for piece in trained.pieces:
        shape = piece.local(piece.name, piece.key.detach()).shape
        for name in (f"{key}/{piece.name}" for key in by_parameter.get(piece.name, ())):
            if stored.shape(name) != shape:
                errors.append(f"{name} has shape {stored.shape(name)} there and {shape} here")
        errors += _holes([*by_parameter.get(piece.name, ()), MASTER], piece.name, stored)
    return errors


def _holes(keys: Sequence[str], parameter: str, stored: StateFiles) -> list[str]:
    """Errors of states of a parameter that are not stored whole."""
    names = [name for key in keys if (name := f"{key}/{parameter}") in stored.names]
    return [
        f"{name}: {error}"
        for name in names
        for error in coverage_errors(stored.shape(name), [each.box for each in stored.boxes[name]])
    ]


def _group_of(members: Sequence[Sequence[str]]) -> dict[str, int]:
    return {name: index for index, names in enumerate(members) for name in names}


def _states_by_parameter(stored: StateFiles) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in stored.names:
        key, _, parameter = name.partition("/")
        if key != MASTER:
            found.setdefault(parameter, []).append(key)
    return found


def _members(every: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """The parameters of each group of the whole model, from those of each rank."""
    return [
        list(dict.fromkeys(name for names in of_ranks for name in names))
        for of_ranks in zip(*every, strict=True)
    ]


def saved_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group as they are now: a scheduler changes a learning rate that is a tensor in its place."""
    return {name: deepcopy(value) for name, value in group.items() if name not in _OWN_OPTIONS}


def _is_piece(key: str, value: Any, piece: TrainedPiece) -> bool:
    """True for a state with an entry for every entry of the parameter; of a scalar parameter "step" is none."""
    if not isinstance(value, Tensor) or value.shape != piece.key.shape:
        return False
    return value.dim() > 0 or key != "step"


def _tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tensor() if isinstance(value, Number) else value for key, value in values.items()}


def _scalar(key: str, value: Any, name: str, is_whole: bool) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor):
        if value.dim() > 0 and is_whole:
            return value.cpu()
        if value.dim() > 0:
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)}, which is not that of its parameter: such an "
                "optimizer cannot be saved for other layouts"
            )
        return Number(value.item(), value.dtype)
    return value
