"""Tensors of a checkpoint under other names and in other formats. Writing them is convert.py."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .box import Box
from .opened import Opened
from .stored import Stored
from .tensor_file import dtype_name
from .trained import MASTER

_MASTER = f"{MASTER}/"
_PART = 2**18  # entries


class Source(NamedTuple):
    """A stored tensor, and the format that it is wanted in."""

    stored: Stored
    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Rearranged:
    """Tensors that are read from others; `Stored`.

    Args:
        sources: by name.
    """

    sources: Mapping[str, Source]

    @property
    def names(self) -> Collection[str]:
        """All tensors."""
        return self.sources.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one."""
        source = self.sources[name]
        return source.stored.shape(source.name)

    def dtype(self, name: str) -> torch.dtype:
        """The format that one is wanted in."""
        return self.sources[name].dtype

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one.

        Raises:
            ValueError: the format that is wanted cannot hold its numbers.
        """
        source = self.sources[name]
        found = source.stored.read(source.name, box)
        wanted = found.to(source.dtype)
        if found.dtype != wanted.dtype and not _alike_finite(found, wanted):
            raise ValueError(
                f"{name} has numbers up to {found[found.isfinite()].abs().max().item():.3g}, which "
                f"{dtype_name(source.dtype)} cannot hold: take bfloat16 or float32"
            )
        return wanted


def model_tensors(opened: Opened, dtype: torch.dtype | None, *, from_masters: bool) -> Rearranged:
    """The weights in a format.

    Args:
        dtype: of all floating-point tensors; None leaves each as it is, and gives one from a master its own format.
        from_masters: take the float32 master of each weight that has one.
    """
    masters = master_names(opened) if from_masters else {}
    sources = {}
    for name in opened.model.names:
        stored, there = (opened.optimizer, masters[name]) if name in masters else (opened.model, name)
        assert stored is not None
        sources[name] = Source(stored, there, _format(stored, there, dtype))
    return Rearranged(sources)


def state_tensors(opened: Opened, dtype: torch.dtype | None) -> Rearranged:
    """The optimizer's tensors, beside weights of a format.

    Float32 masters are there where the weights are in 16 bits and in no other case, as a run of that precision has
    them: so none is lost, and none is kept twice.

    Args:
        dtype: of the weights; None leaves all as it is.
    """
    states, model = opened.optimizer, opened.model
    if states is None:
        return Rearranged({})
    sources = {name: Source(states, name, states.dtype(name)) for name in states.names}
    if dtype == torch.float32:
        return Rearranged({name: each for name, each in sources.items() if not name.startswith(_MASTER)})
    if dtype is not None:
        for name in trained_names(opened):
            if model.dtype(name) == torch.float32:
                sources.setdefault(_MASTER + name, Source(model, name, torch.float32))
    return Rearranged(sources)


def master_names(opened: Opened) -> dict[str, str]:
    """The name of its float32 master for every weight that has one."""
    if opened.optimizer is None:
        return {}
    return {name.removeprefix(_MASTER): name for name in opened.optimizer.names if name.startswith(_MASTER)}


def trained_names(opened: Opened) -> list[str]:
    """The weights that the optimizer has."""
    return [name for group in opened.groups["groups"] for name in group["parameters"]]


def _alike_finite(a: Tensor, b: Tensor) -> bool:
    """Whether the same entries are numbers; part by part, to need little memory."""
    parts = zip(a.view(-1).split(_PART), b.view(-1).split(_PART), strict=True)
    return all(torch.equal(x.isfinite(), y.isfinite()) for x, y in parts)


def _format(stored: Stored, name: str, dtype: torch.dtype | None) -> torch.dtype:
    own = stored.dtype(name)
    return own if dtype is None or not own.is_floating_point else dtype
