"""Choice of the experts that are distributed over the expert axis (ep_size).

Every module with an interface is distributed: the common one of transformers' experts (called with tokens, the indices
of their experts and weights; all parameters have rows for each expert), or one of tables/experts.py. Routers, shared
experts and all other modules stay as they are.
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from ..cluster.placement import Shard, place
from .layers.expert_parallel import ExpertParallel, Interface
from .layers.lora import is_adapted_parameter
from .tables.experts import REFUSED, interface_of


def expert_errors(model: nn.Module, ep_size: int) -> list[str]:
    """List reasons why the experts of a full model cannot be distributed over `ep_size` ranks; empty if they can."""
    refused = {type(module).__name__ for module in model.modules()} & REFUSED.keys()
    if refused:
        return [
            f"ep_size={ep_size} cannot distribute the {name} of a {type(model).__name__}: use ep_size=1; "
            + REFUSED[name]
            for name in sorted(refused)
        ]
    experts = {
        path: (module, interface)
        for path, module in model.named_modules()
        if (interface := interface_of(module))
    }
    if not experts:
        return [
            f"ep_size={ep_size} distributes the experts of a mixture, but a {type(model).__name__} has none with the "
            "interface of transformers' experts: use ep_size=1"
        ]
    errors = []
    for path, (module, interface) in experts.items():
        errors += [
            f"ep_size={ep_size} does not divide the {count} experts of {path}: use a divisor"
            for count in _numbers(module, interface)
            if count % ep_size
        ]
        errors += [
            f"{path}.{name} of shape {tuple(parameter.shape)} has no rows for each of "
            f"{_numbers(module, interface)[0]} experts: use ep_size=1"
            for name, parameter in module.named_parameters()
            if not interface.is_apart and _blocks(parameter, _numbers(module, interface)) is None
        ]
    return list(dict.fromkeys(errors))


def _numbers(experts: nn.Module, interface: Interface) -> list[int]:
    """Return the number of experts with parameters, and that of all others if a parameter has rows for them."""
    first, *others = (getattr(experts, name) for name in interface.counts)
    return [first, *(each - first for each in others if each > first)]


def _blocks(parameter: Parameter, numbers: list[int]) -> tuple[int, ...] | None:
    """Return the blocks of rows that are sharded separately; None if there are no rows for each expert."""
    rows = len(parameter) if parameter.ndim else 0
    if rows == sum(numbers):
        return tuple(numbers)
    return (rows,) if rows and rows % numbers[0] == 0 else None


def apply_expert_sharding(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Leave each module its rank's experts, and let tokens travel to them, in place. No communication.

    Called after the model is cut into stages and sharded over tp, before an optimizer is wrapped.

    Args:
        model: the local model.
        group: the expert axis, `mesh.group("ep")`.
    """
    for module in model.modules():
        interface = interface_of(module)
        if interface is not None:
            _distribute(module, interface, group)
        elif is_adapted_parameter(module):
            _place_adapters(module, group)


def _distribute(experts: Any, interface: Interface, group: dist.ProcessGroup) -> None:
    """Leave one module of experts this rank's experts, divide its counts by the ranks, and hook its communication."""
    numbers = _numbers(experts, interface)
    if interface.is_apart:
        for index, expert in enumerate(experts.children()):
            _own(expert, index * group.size() // numbers[0], group)
    else:
        for parameter in experts.parameters():
            _place(parameter, group, dim=0, blocks=_blocks(parameter, numbers))
        for name in interface.counts:
            setattr(experts, name, getattr(experts, name) // group.size())
    ExpertParallel(experts, group, interface)


def _own(expert: nn.Module, owner: int, group: dist.ProcessGroup) -> None:
    """Leave an expert's parameters to one rank."""
    for parameter in expert.parameters():
        shard = Shard(size=group.size(), dim=0, blocks=(len(parameter),), axis="ep", owner=owner)
        place(parameter, shard, group.rank())


def _place_adapters(wrapper: Any, group: dist.ProcessGroup) -> None:
    """Leave peft's adapters of experts' parameters the rows and columns of this rank's experts.

    For E experts and rank r, A has the shape (E·r, inputs), and B (outputs, r·E) with the experts innermost.
    """
    count = wrapper.num_experts
    for adapter in wrapper.lora_A:
        _place(wrapper.lora_A[adapter].weight, group, dim=0, blocks=(count * wrapper.r[adapter],))
        _place(wrapper.lora_B[adapter].weight, group, dim=1, blocks=(count,) * wrapper.r[adapter])
    wrapper.num_experts = count // group.size()


def _place(
    parameter: Parameter, group: dist.ProcessGroup, *, dim: int, blocks: tuple[int, ...] | None
) -> None:
    assert blocks is not None  # expert_errors
    place(parameter, Shard(size=group.size(), dim=dim, blocks=blocks, axis="ep"), group.rank())
