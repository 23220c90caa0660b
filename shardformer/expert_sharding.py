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
        counts = _expert_counts(module, interface)
        errors += [
            f"ep_size={ep_size} does not divide the {count} experts of {path}: use a divisor"
            for count in counts
            if count % ep_size
        ]
        if interface.has_module_per_expert:
            continue  # a rank gets modules, so parameters need no rows by expert
        errors += [
            f"{path}.{name} of shape {tuple(parameter.shape)} has no rows for each of {counts[0]} experts: "
            "use ep_size=1"
            for name, parameter in module.named_parameters()
            if _row_blocks(parameter, counts) is None
        ]
    return list(dict.fromkeys(errors))


def _expert_counts(experts: nn.Module, interface: Interface) -> list[int]:
    """Return the number of experts with parameters, then the number of others with rows in a parameter, if any."""
    num_with_parameters, *totals = (getattr(experts, name) for name in interface.counts)
    return [
        num_with_parameters,
        *(total - num_with_parameters for total in totals if total > num_with_parameters),
    ]


def _row_blocks(parameter: Parameter, counts: list[int]) -> tuple[int, ...] | None:
    """Return the lengths of a parameter's blocks of rows, each sharded separately; None if it has no rows by expert.

    Args:
        parameter: a parameter of a module of experts.
        counts: see `_expert_counts`: rows of experts without parameters are a block of their own.
    """
    rows = len(parameter) if parameter.ndim else 0
    if rows == sum(counts):
        return tuple(counts)
    return (rows,) if rows and rows % counts[0] == 0 else None


def apply_expert_sharding(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Shard all modules of experts over the ranks, in place, and hook the exchange of tokens. No communication.

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
    """Shard one module of experts: its parameters, its counts of experts, and the exchange of tokens by hooks.

    With a module for every expert the counts stay: its forward gets indices into the experts of all ranks.
    """
    counts = _expert_counts(experts, interface)
    if interface.has_module_per_expert:
        for index, expert in enumerate(experts.children()):
            _assign_to_rank(expert, index * group.size() // counts[0], group)
    else:
        for parameter in experts.parameters():
            _place_shard(parameter, group, dim=0, blocks=_row_blocks(parameter, counts))
        for name in interface.counts:
            setattr(experts, name, getattr(experts, name) // group.size())
    ExpertParallel(experts, group, interface)  # adds its hooks


def _assign_to_rank(expert: nn.Module, owner: int, group: dist.ProcessGroup) -> None:
    """Place the parameters of one expert, a module, on the rank `owner` alone; they are empty on the others."""
    for parameter in expert.parameters():
        shard = Shard(size=group.size(), dim=0, blocks=(len(parameter),), axis="ep", owner=owner)
        place(parameter, shard, group.rank())


def _place_adapters(wrapper: Any, group: dist.ProcessGroup) -> None:
    """Shard peft's adapters of experts' parameters by experts, like the parameters.

    For E experts and rank r, A has the shape (E·r, inputs), and B (outputs, r·E) with the experts innermost.
    """
    count = wrapper.num_experts
    for adapter in wrapper.lora_A:
        _place_shard(wrapper.lora_A[adapter].weight, group, dim=0, blocks=(count * wrapper.r[adapter],))
        _place_shard(wrapper.lora_B[adapter].weight, group, dim=1, blocks=(count,) * wrapper.r[adapter])
    wrapper.num_experts = count // group.size()


def _place_shard(
    parameter: Parameter, group: dist.ProcessGroup, *, dim: int, blocks: tuple[int, ...] | None
) -> None:
    """Shard a parameter over the expert axis along `dim`, each of these blocks separately."""
    assert blocks is not None  # expert_errors
    place(parameter, Shard(size=group.size(), dim=dim, blocks=blocks, axis="ep"), group.rank())
