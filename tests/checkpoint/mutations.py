"""Parts of a run that go on from a checkpoint, in which something goes wrong: the checks must see each."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.checkpoint import optimizer
from echelon.checkpoint.dcp import StateFiles
from echelon.checkpoint.local import LocalTensor, Part
from echelon.plugins import state as plugin_state
from echelon.verify.resume import Relay, run_part


def run_wrong(relay: Relay, number: int, folder: Path, *, mutation: str) -> None:
    """A part with one of MUTATIONS."""
    with MUTATIONS[mutation]():
        run_part(relay, number, folder)


@contextmanager
def a_box_off_by_one_row() -> Iterator[None]:
    """What a rank reads into the first box of a tensor lies one row further on than it should."""
    original = plugin_state.local_slice

    def shifted(*args: Any, **kwargs: Any) -> LocalTensor:
        held = original(*args, **kwargs)
        first = next(iter(held.parts), None)
        if first is None or not held.shape or first.box.ends()[0] == held.shape[0]:
            return held
        start, *rest = first.box.offset
        moved = Part(first.box._replace(offset=(start + 1, *rest)), first.local)
        return replace(held, parts=(moved, *held.parts[1:]))

    with patch.object(plugin_state, "local_slice", shifted):
        yield


@contextmanager
def masters_not_loaded() -> Iterator[None]:
    """They are what the 16-bit weights say."""
    original = optimizer.read_into

    def load(held: Mapping[str, LocalTensor], stored: StateFiles) -> None:
        without = {name: each for name, each in held.items() if not name.startswith("master/")}
        original(without, stored)

    with patch.object(optimizer, "read_into", load):
        yield


@contextmanager
def the_number_of_steps_lost() -> Iterator[None]:
    """AdamW begins anew to correct the bias of its averages."""
    original = optimizer._torch_state

    def state(*args: Any) -> dict[str, Any]:
        found = original(*args)
        for each in found["state"].values():
            each["step"] = torch.zeros_like(each["step"])
        return found

    with patch.object(optimizer, "_torch_state", state):
        yield


@contextmanager
def a_state_left_at_zero() -> Iterator[None]:
    """One tensor of one rank's states is not read."""
    original = optimizer.read_into

    def load(held: Mapping[str, LocalTensor], stored: StateFiles) -> None:
        left = next(name for name in held if name.startswith("exp_avg_sq/") and held[name].parts)
        kept: dict[str, LocalTensor] = dict(held)
        if dist.get_rank() == dist.get_world_size() - 1:
            parts = tuple(Part(part.box, part.local.clone()) for part in kept[left].parts)
            kept[left] = replace(kept[left], parts=parts)
        original(kept, stored)

    with patch.object(optimizer, "read_into", load):
        yield


def the_scaler_not_restored() -> AbstractContextManager[Any]:
    """The loss scale begins where it began."""
    return patch("echelon.zero.precision.DynamicScaler.load_state_dict", lambda self, state: None)


def random_states_not_restored() -> AbstractContextManager[Any]:
    """Generators are where building the model left them."""
    return patch("echelon.checkpoint.step._restore_random", lambda *_: None)


@contextmanager
def options_not_loaded() -> Iterator[None]:
    """Learning rates are those that the optimizer was built with."""
    original = optimizer._torch_state

    def state(own: Any, described: Mapping[str, Any], states: Mapping[Tensor, Any]) -> dict[str, Any]:
        found = original(own, described, states)
        for group, present in zip(found["param_groups"], own.inner.param_groups, strict=True):
            group["lr"] = present["lr"] * 2
        return found

    with patch.object(optimizer, "_torch_state", state):
        yield


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a box off by one row": a_box_off_by_one_row,
    "masters not loaded": masters_not_loaded,
    "the number of steps lost": the_number_of_steps_lost,
    "a state left at zero": a_state_left_at_zero,
    "the scaler not restored": the_scaler_not_restored,
    "random states not restored": random_states_not_restored,
    "options not loaded": options_not_loaded,
}
