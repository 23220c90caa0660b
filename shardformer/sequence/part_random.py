"""What layers draw at random where each rank computes on a part of the sequence."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...cluster.random import SplitRandom, common_seed, seed_torch, split_seed

# Parts of the names under which layers and configs keep probabilities and widths of what they draw.
_CHANCES = ("drop", "jitter")
# What drops whole samples, which have parts on all ranks.
_BY_SAMPLE = "DropPath"


def draws(layer: nn.Module) -> bool:
    """Whether a layer may draw random numbers in training."""
    held: list[Any] = [vars(module) for module in layer.modules()]
    held += [vars(own["config"]) for own in held if hasattr(own.get("config"), "__dict__")]
    return any(
        isinstance(value, float) and value > 0
        for own in held
        for name, value in (*own.items(), ("dropout", own.get("p")))
        if any(part in name for part in _CHANCES)
    )


def samplewise(layer: nn.Module) -> list[str]:
    """The paths of modules that draw once for a whole sample, so that all ranks have to draw the same."""
    return [name for name, module in layer.named_modules() if type(module).__name__.endswith(_BY_SAMPLE)]


class PartRandom:
    """Marks a layer whose random numbers differ from rank to rank, by hooks."""

    @staticmethod
    def from_native_module(module: nn.Module, process_group: dist.ProcessGroup) -> nn.Module:
        """Switch random states around the layer; see `SplitRandom`."""
        SplitRandom(process_group.rank(), next(module.parameters()).device).around(module)
        return module


class CommonRandom:
    """Marks a module inside of a `PartRandom` that draws the same on every rank, by hooks.

    The state that the ranks have in common follows from this rank's own one, and behind the module this rank's from
    that, so that nothing has to be remembered: computing the layer again draws the same numbers again.
    """

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, *, layer: nn.Module
    ) -> nn.Module:
        """Switch random states around the module while `layer`, a `PartRandom`, trains."""
        rank, device = process_group.rank(), next(layer.parameters()).device

        def enter(module: nn.Module, args: tuple) -> None:
            if layer.training:
                seed_torch(common_seed(torch.initial_seed(), rank), device)

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            if layer.training:
                seed_torch(split_seed(int(torch.randint(0, 2**62, (), device="cpu")), rank), device)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module
