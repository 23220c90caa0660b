"""Choice of the experts that are distributed over the expert axis (ep_size).

Every module with the interface of transformers' experts is distributed: it is called with tokens, the indices of their
experts and weights, and all its parameters have a row for each expert. Routers, shared experts and all other modules
stay as they are.
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from ..cluster.placement import Shard, place
from ..cluster.transformers_api import is_experts
from .layers.expert_parallel import ExpertParallel
from .layers.lora import is_adapted_parameter


def expert_errors(model: nn.Module, ep_size: int) -> list[str]:
    """List reasons why the experts of a full model cannot be distributed over `ep_size` ranks; empty if they can."""
    experts: dict[str, Any] = {path: each for path, each in model.named_modules() if is_experts(each)}
    if not experts:
        return [
            f"ep_size={ep_size} distributes the experts of a mixture, but a {type(model).__name__} has none with the "
            "interface of transformers' experts: use ep_size=1"
        ]
    found = []
    for path, module in experts.items():
        count = module.num_experts
        if count % ep_size:
            found.append(f"ep_size={ep_size} does not divide the {count} experts of {path}: use a divisor")
        found += [
            f"{path}.{name} of shape {tuple(parameter.shape)} has no row for each of {count} experts: use ep_size=1"
            for name, parameter in module.named_parameters()
            if parameter.shape[:1] != (count,)
        ]
    return list(dict.fromkeys(found))


def apply_expert_sharding(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Leave each module its rank's experts, and let tokens travel to them, in place. No communication.

    Called after the model is cut into stages and sharded over tp, before an optimizer is wrapped.

    Args:
        model: the local model.
        group: the expert axis, `mesh.group("ep")`.
    """
    for module in model.modules():
        if is_experts(module):
            _distribute(module, group)
        elif is_adapted_parameter(module):
            _place_adapters(module, group)


def _distribute(experts: Any, group: dist.ProcessGroup) -> None:
    for parameter in experts.parameters():
        _place(parameter, group, dim=0, blocks=(experts.num_experts,))
    experts.num_experts //= group.size()
    ExpertParallel(experts, group)


def _place_adapters(wrapper: Any, group: dist.ProcessGroup) -> None:
    """Leave peft's adapters of experts' parameters the rows and columns of this rank's experts.

    For E experts and rank r, A has the shape (E·r, inputs), and B (outputs, r·E) with the experts innermost.
    """
    count = wrapper.num_experts
    for adapter in wrapper.lora_A:
        _place(wrapper.lora_A[adapter].weight, group, dim=0, blocks=(count * wrapper.r[adapter],))
        _place(wrapper.lora_B[adapter].weight, group, dim=1, blocks=(count,) * wrapper.r[adapter])
    wrapper.num_experts = count // group.size()


def _place(parameter: Parameter, group: dist.ProcessGroup, *, dim: int, blocks: tuple[int, ...]) -> None:
    place(parameter, Shard(size=group.size(), dim=dim, blocks=blocks, axis="ep"), group.rank())
