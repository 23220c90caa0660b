"""Save and load the state of an optimizer: tensors by parameter, groups, scalars and float32 master weights."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..cluster.box import coverage_errors
from ..cluster.gathering import on_all_ranks, on_first_rank, run_or_raise_together
from ..zero.combined import name_of
from .background import Keep
from .commit import Replaced
from .dcp import INDEX, StateFiles, save_states
from .local_tensors import LocalTensor
from .pretrained import raise_of_all, read_into
from .tensor_file import Records, Write, read_values, write_values

GROUPS = "groups.pt"
MASTER = "master"
STATES = Replaced(entries=(INDEX,), others=(GROUPS, "rank-*.safetensors"))
# Options that select the implementation of a step: the current run's values are kept, not the saved ones.
_KEPT_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


class TrainedPiece(NamedTuple):
    """The local part of a parameter that this rank's optimizer steps.

    Args:
        name: the parameter's name.
        key: the tensor that the optimizer steps, its key in the optimizer's state.
        local: makes a `LocalTensor` from its name in files, and a tensor of `key`'s shape, or of any if `is_full`.
        is_full: True if `key` is the full parameter, whose states may have any shape.
    """

    name: str
    key: Tensor
    local: Callable[[str, Tensor], LocalTensor]
    is_full: bool = False


@dataclass(frozen=True, kw_only=True)
class Trained:
    """An optimizer and the pieces of parameters that this rank steps.

    Args:
        inner: the torch optimizer.
        groups: this rank's pieces by parameter group, in its order.
        has_masters: True if the optimizer steps float32 master weights instead of the model's own parameters.
        extra: loss scale and counts, plain values; equal on all ranks.
        install: loads torch's state dict of `inner` and the extra values, after the masters were filled.
    """

    inner: Optimizer
    groups: Sequence[Sequence[TrainedPiece]]
    has_masters: bool
    extra: Mapping[str, Any]
    install: Callable[[dict[str, Any], Mapping[str, Any]], None]

    @property
    def pieces(self) -> list[TrainedPiece]:
        """All pieces of this rank."""
        return [piece for group in self.groups for piece in group]

    @cached_property
    def masters(self) -> dict[str, LocalTensor]:
        """This rank's part of the stepped weights (float32 masters, if any), by parameter."""
        return {piece.name: piece.local(piece.name, piece.key) for piece in self.pieces}


class Number(NamedTuple):
    """A 0-D tensor in the form that ranks exchange: pickling a tensor takes many times as long."""

    value: bool | int | float | complex
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Return the number as a tensor on the CPU."""
        return torch.tensor(self.value, dtype=self.dtype, device="cpu")


class _Report(NamedTuple):
    """A rank's report of an optimizer's state: scalars by parameter, and the names of its parameters by group."""

    scalars: dict[str, dict[str, Any]]
    groups: list[list[str]]


def prepare_states(trained: Trained, keep: Keep, group: dist.ProcessGroup) -> Write:
    """Collect the current state of an optimizer. One all-gather of objects over the group.

    Args:
        trained: the optimizer.
        keep: returns the memory to save for a tensor (a copy for asynchronous saves).
        group: all ranks, on the CPU backend.

    Returns:
        A function that writes the state into an existing folder and returns the records of this rank's files;
        collective over the group.

    Raises:
        ValueError: a rank has only a part of a parameter, of which a state is neither a scalar nor of its shape; names
            the state, on every rank.
    """
    tensors: dict[str, LocalTensor] = {}
    reports = on_all_ranks(lambda: _collect(trained, tensors), group)
    kept = {name: tensor.kept(keep) for name, tensor in tensors.items() if tensor.may_save}
    members = _members([report.groups for report in reports])
    described = {
        "optimizer": name_of(trained.inner),
        "groups": [
            {"options": saved_options(options), "parameters": names}
            for options, names in zip(trained.inner.param_groups, members, strict=True)
        ],
        "scalars": {name: _tensors(values) for report in reports for name, values in report.scalars.items()},
        "extra": dict(trained.extra),
    }

    def write(folder: Path) -> Records:
        records = save_states(kept, folder, group=group)
        content = run_or_raise_together(
            lambda: write_values(folder / GROUPS, described) if group.rank() == 0 else None, group
        )
        return records if content is None else records | {GROUPS: content}

    return write


def _collect(trained: Trained, tensors: dict[str, LocalTensor]) -> _Report:
    """Add this rank's state tensors to `tensors`, by their names in files, and return the rest of the state."""
    if trained.has_masters:
        tensors |= {f"{MASTER}/{name}": master for name, master in trained.masters.items()}
    scalars: dict[str, dict[str, Any]] = {}
    for piece in trained.pieces:
        for key, value in trained.inner.state.get(piece.key, {}).items():
            if _is_tensor_state(key, value, piece):
                tensors[f"{key}/{piece.name}"] = piece.local(f"{key}/{piece.name}", value)
            else:
                scalars.setdefault(piece.name, {})[key] = _scalar(key, value, piece.name)
    return _Report(scalars, [[piece.name for piece in pieces] for pieces in trained.groups])


class FittingStates(NamedTuple):
    """A stored optimizer state that fits the optimizer of this run.

    Args:
        has_masters: True if it contains float32 master weights.
        load: replaces the optimizer's state by the stored one; collective over all ranks. It raises OSError or
            ValueError on every rank if a file cannot be read.
    """

    has_masters: bool
    load: Callable[[], None]


def fit_trained(trained: Trained, folder: Path, group: dist.ProcessGroup) -> FittingStates:
    """Check that the state in a folder fits the optimizer, on all ranks. Collective over the group.

    Returns:
        The state, which is not loaded yet: `load` reads the tensors and changes the optimizer.

    Raises:
        ValueError: the state is of another optimizer, other parameter groups or another model; lists all errors, on
            every rank.
        FileNotFoundError: the folder has no optimizer state.
    """
    described = on_first_rank(lambda: _described(folder), group)  # groups, scalars and extra values
    stored = run_or_raise_together(lambda: StateFiles(folder), group)  # the tensors
    local_groups = [[piece.name for piece in pieces] for pieces in trained.groups]
    members = _members(on_all_ranks(lambda: local_groups, group))
    errors = _errors(trained, described, members, stored)
    raise_of_all(errors, f"{folder} does not fit this optimizer", group)

    def load() -> None:
        """Read masters and states into this rank's memory, and install them. Collective over the group."""
        # Without masters in the folder, these stay: only tensors that are stored are read.
        tensors = {f"{MASTER}/{name}": master for name, master in trained.masters.items()}
        states: dict[Tensor, dict[str, Any]] = {}
        by_parameter = _states_by_parameter(stored)
        for piece in trained.pieces:
            state = states[piece.key] = dict(described["scalars"].get(piece.name, {}))
            for key in by_parameter.get(piece.name, ()):
                name = f"{key}/{piece.name}"
                dtype = stored.dtype(name)
                state[key] = (
                    piece.key.new_zeros(stored.shape(name), dtype=dtype)
                    if piece.is_full
                    else torch.zeros_like(piece.key, dtype=dtype)  # a DTensor if the parameter is one
                )
                tensors[name] = piece.local(name, state[key])
        run_or_raise_together(lambda: read_into(tensors, stored), group)
        trained.install(_torch_state(trained, described, states), described["extra"])

    has_masters = any(name.startswith(f"{MASTER}/") for name in stored.names)
    return FittingStates(has_masters, load)


def _described(folder: Path) -> Mapping[str, Any]:
    """Return the values that `prepare_states` wrote besides the tensors: groups, scalars and extra values."""
    if not (folder / GROUPS).is_file():
        raise FileNotFoundError(
            f"{folder} contains no optimizer: give the folder of save_optimizer, or `optimizer` in the folder of a step"
        )
    described: Mapping[str, Any] = read_values(folder / GROUPS)
    return described


def _torch_state(
    trained: Trained, described: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]
) -> dict[str, Any]:
    """Return the argument of `Optimizer.load_state_dict`."""
    groups: list[dict[str, Any]] = []
    by_number: dict[int, dict[str, Any]] = {}
    count = 0
    for group, saved in zip(trained.inner.param_groups, described["groups"], strict=True):
        kept = {name: group[name] for name in _KEPT_OPTIONS if name in group}
        numbers = {count + place: parameter for place, parameter in enumerate(group["params"])}
        by_number |= {number: states[key] for number, key in numbers.items() if states.get(key)}
        groups.append({**saved["options"], **kept, "params": list(numbers)})
        count += len(numbers)
    return {"state": by_number, "param_groups": groups}


def _errors(
    trained: Trained, described: Mapping[str, Any], members: Sequence[Sequence[str]], stored: StateFiles
) -> list[str]:
    """Return the errors of a stored state ("there") that does not fit the optimizer ("here"); empty if it fits."""
    name_here = name_of(trained.inner)
    if described["optimizer"] != name_here:
        return [f"it is of {described['optimizer']}, but {name_here} would load it"]
    if len(described["groups"]) != len(members):
        return [f"it has {len(described['groups'])} parameter groups, but there are {len(members)} here"]
    there = _group_of([group["parameters"] for group in described["groups"]])
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
    by_parameter = _states_by_parameter(stored)
    for piece in trained.pieces:
        shape = piece.local(piece.name, piece.key.detach()).shape
        for name in (f"{key}/{piece.name}" for key in (*by_parameter.get(piece.name, ()), MASTER)):
            if name not in stored.names:
                continue
            if stored.shape(name) != shape and (not piece.is_full or name.startswith(f"{MASTER}/")):
                errors.append(f"{name} has shape {stored.shape(name)} there and {shape} here")
            boxes = [stored_box.box for stored_box in stored.boxes[name]]
            errors += [f"{name}: {error}" for error in coverage_errors(stored.shape(name), boxes)]
    return errors


def _group_of(members: Sequence[Sequence[str]]) -> dict[str, int]:
    return {name: index for index, names in enumerate(members) for name in names}


def _states_by_parameter(stored: StateFiles) -> dict[str, list[str]]:
    """Return the keys of each parameter's stored states, without its master."""
    keys: dict[str, list[str]] = {}
    for name in stored.names:
        key, _, parameter = name.partition("/")
        if key != MASTER:
            keys.setdefault(parameter, []).append(key)
    return keys


def _members(groups_by_rank: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Return the names of the full model's parameters by group, from the names that each rank has by group."""
    names_by_rank = zip(*groups_by_rank, strict=True)  # of each group
    return [list(dict.fromkeys(chain.from_iterable(of_group))) for of_group in names_by_rank]


def saved_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's options. Copied since schedulers change a tensor learning rate in place."""
    return {name: deepcopy(value) for name, value in group.items() if name not in _KEPT_OPTIONS}


def _is_tensor_state(key: str, value: Any, piece: TrainedPiece) -> bool:
    """Return True for a state that is saved as a tensor, in boxes; others are saved as scalars.

    Such a tensor has the parameter's shape, or any shape if the rank has the full parameter.
    """
    if not isinstance(value, Tensor):
        return False
    if value.dim() == 0:  # of a scalar parameter, except for the counter of steps
        return piece.key.dim() == 0 and key != "step"
    return value.shape == piece.key.shape or piece.is_full


def _tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tensor() if isinstance(value, Number) else value for key, value in values.items()}


def _scalar(key: str, value: Any, name: str) -> Any:
    """Return a state of the parameter `name` in the form in which scalars are saved.

    Raises:
        ValueError: the state has several entries, but not the parameter's shape.
    """
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor):
        if value.dim() > 0:
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)}, which is not that of its parameter: such an "
                "optimizer cannot be saved for other layouts"
            )
        return Number(value.item(), value.dtype)
    return value
