"""Filling what ranks hold from what is stored. What is stored where is Stored's."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from .consent import alike, faults_of_all
from .held import HeldTensor
from .names import TensorNames
from .stored import Stored


class Fitting(NamedTuple):
    """Stored tensors that fit what this rank holds.

    Args:
        held: by the first names.
        stored: under any of the names.
        places: under which of its names each of them is stored.
        group: all ranks, over the CPU.
    """

    held: Mapping[str, HeldTensor]
    stored: Stored
    places: Mapping[str, str]
    group: dist.ProcessGroup

    def load(self) -> None:
        """Read this rank's boxes into its memory. Collective over the group.

        Raises:
            OSError, ValueError: a file cannot be read; on every rank.
        """
        alike(lambda: _read(self.held, self.stored, self.places), self.group)


def fit(
    held: Mapping[str, HeldTensor],
    stored: Stored,
    *,
    names: TensorNames,
    strict: bool,
    what: str,
    group: dist.ProcessGroup,
) -> Fitting:
    """Compare what is stored with what all ranks hold. Collective over the group.

    Args:
        held: by the first names.
        stored: under any of the names.
        names: of the whole model.
        strict: refuse what is missing or extra; else that is left as it is. Shapes have to fit in any case.
        what: to be named in errors.
        group: over the CPU.

    Raises:
        ValueError: tensors are missing, extra or of another shape; lists all of them, on every rank.
    """
    places = _places(stored, names)
    faults = _name_faults(stored, names, places) if strict else []
    faults += _shape_faults(held, stored, places)
    if every := faults_of_all(lambda: faults, group):
        raise ValueError(f"{what} does not fit this model: {'; '.join(every)}")
    return Fitting(held, stored, places, group)


@torch.no_grad()
def _read(held: Mapping[str, HeldTensor], stored: Stored, places: Mapping[str, str]) -> None:
    for name, each in held.items():
        if name in places:
            for part in each.parts:
                part.local.copy_(stored.read(places[name], part.box))


def _places(stored: Stored, names: TensorNames) -> dict[str, str]:
    """Under which of its names each tensor is stored."""
    places: dict[str, str] = {}
    for name in stored.names:
        first = names.first.get(name)
        if first is not None and (name == first or first not in places):
            places[first] = name
    return places


def _name_faults(stored: Stored, names: TensorNames, places: Mapping[str, str]) -> list[str]:
    faults = [f"{name} is missing" for name in names.needed if name not in places]
    return faults + [f"{name} is not in the model" for name in stored.names if name not in names.first]


def _shape_faults(held: Mapping[str, HeldTensor], stored: Stored, places: Mapping[str, str]) -> list[str]:
    return [
        f"{name} has shape {stored.shape(places[name])} in the file and {each.shape} in the model"
        for name, each in held.items()
        if name in places and tuple(stored.shape(places[name])) != each.shape
    ]
