"""Tokens that a run in 16 bits routes to other experts than one process, where rounding decides between near scores."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..cluster.device import default_device
from ..cluster.gathering import gather_objects
from ..lazy import materialize
from ..pipeline.microbatch import batch_size
from ..plugins.hybrid_model import HybridParallelModule
from ..shardformer.layers.expert_parallel import Interface
from ..shardformer.layers.sequence_axis import axis_of
from ..shardformer.tables.experts import modules_of_experts
from ..zero.precision import DTYPES
from . import reference
from .batch import microbatches_of
from .layout_choice import Layout

# N tokens, K choices of each; B samples, S positions

_PADDING = -1  # a choice at a position that no sample has


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The routing of the first step beside one process with the same rounded weights.

    Args:
        num_tokens: of all replicas; one counts in every mixture layer.
        num_flipped: those whose sets of experts differ.
    """

    num_tokens: int
    num_flipped: int

    def __str__(self) -> str:
        return (
            f"routing of the first step: {self.num_flipped} of {self.num_tokens} tokens, over all mixture layers, have "
            "other experts than in one process"
        ) + ("; rounding decides between near scores" if self.num_flipped else "")


class RoutingCheck:
    """Counts tokens that a run routes to other experts than one process. Only in 16 bits, and for mixtures.

    Args:
        model: the plain model, before boost.
        layout: the layout of the run.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._alone: nn.Module | None = None
        # Hooks would change what a compiled layer is.
        if (
            layout.precision != "fp32"
            and "compile_layers" not in layout.options
            and modules_of_experts(model)
        ):
            plain = materialize(copy.deepcopy(model)).to(default_device())
            self._alone = reference.computing_copy(plain, DTYPES[layout.precision])
            self._sizes = {
                path: getattr(module, kind.counts[0])
                for path, (module, kind) in modules_of_experts(model).items()
            }
            self._choices: dict[str, list[Tensor]] = {}

    def watch(self, model: HybridParallelModule) -> None:
        """Record the choices of this rank's layers from now on."""
        if self._alone is not None:
            self._choices = _recorded(model.module, self._sizes, self._layout.microbatches)

    def result(self, model: HybridParallelModule, batches: Sequence[Mapping[str, Tensor]]) -> Routing | None:
        """Compare the first step; None if nothing is counted. Collective over the world.

        Args:
            model: the watched model.
            batches: those of the first step, by replica.
        """
        if self._alone is None:
            return None
        mesh, number = model.mesh, self._layout.microbatches
        config = getattr(self._alone, "config", None)
        microbatches = microbatches_of(batches[mesh.rank("dp")], number, config)
        expected = _recorded(self._alone, self._sizes, number)
        with torch.no_grad():
            for microbatch in microbatches:
                self._alone(**reference.converted(microbatch, next(self._alone.parameters())))
        axis = next(filter(None, map(axis_of, model.module.modules())), None) if mesh.size("sp") > 1 else None
        total = flipped = 0
        for path in self._choices if mesh.rank("tp") == 0 else ():  # its neighbours have the same tokens
            for choices, expected_NK, batch in zip(
                self._choices[path], expected[path], microbatches, strict=False
            ):
                if axis is not None:
                    expected_BSK = expected_NK.unflatten(0, (batch_size(batch), -1))
                    expected_NK = axis.shard(expected_BSK, 1, padding=_PADDING).flatten(0, 1)
                is_token = (expected_NK != _PADDING).all(-1)
                total += int(is_token.sum())
                flipped += int(((choices != expected_NK).any(-1) & is_token).sum())
        counts = gather_objects((total, flipped))
        return Routing(
            num_tokens=sum(tokens for tokens, _ in counts), num_flipped=sum(flips for _, flips in counts)
        )


def _recorded(model: nn.Module, sizes: Mapping[str, int], most: int) -> dict[str, list[Tensor]]:
    """Return lists to which forwards add the sorted choices (N, K) of their tokens, by path of the experts.

    Args:
        model: a plain or a boosted model.
        sizes: the numbers of all experts with parameters, by path.
        most: the number of forwards that add something: the microbatches of the first step.
    """
    choices: dict[str, list[Tensor]] = {}
    for path, (module, interface) in modules_of_experts(model).items():
        hook = partial(_record, choices.setdefault(path, []), interface, sizes[path], most)
        module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)  # before tokens are sent
    return choices


def _record(
    choices: list[Tensor],
    interface: Interface,
    count: int,
    most: int,
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
) -> None:
    if len(choices) < most and torch._C._current_graph_task_id() == -1:  # not in a recomputed forward
        inputs = {str(place): value for place, value in enumerate((*args, *kwargs.values()))}
        choices.append(interface.call(inputs, count).index_NK.flatten(0, -2).sort(-1).values.cpu())
