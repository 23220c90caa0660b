"""Choice of the layers whose weights are sharded over the weight axis (wp_size).

[Note: replicated layers] Only the weights of plain linear layers inside the model's layers are sharded. Heads,
embeddings, biases and norms stay replicated. A subclass of nn.Linear stays replicated, because it may compute something
else, unless a table lists it as `native`. A weight that is also used elsewhere stays replicated too, for example one
that is tied to an embedding, and so does a layer whose weight is no parameter, but computed from others (weight_norm).
So do experts that are modules (Switch, NLLB-MoE), which compute only if they get a token.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from ..pipeline.stage_plan import layer_drop_errors, settings_of
from .layers.gathered_linear import KINDS, ShardedLinear, WeightPool
from .layers.parallel_module import native_errors
from .policy import Policy
from .policy_choice import policy_for
from .recompute import recomputable_layers
from .table_policy import TablePolicy
from .tables.experts import interface_of
from .tables.table import Table, table_for


def plan_weight_sharding(
    model: nn.Module, errors: list[str], *, policy: Policy | Table | None = None
) -> list[nn.Module] | None:
    """Return the layers whose weights are sharded; None if they cannot be, with the reasons added to `errors`.

    Args:
        model: the full model.
        errors: reasons are appended.
        policy: names the layers if transformers does not mark them; None takes the policy of the model type.
    """
    layers = model_layers(model, policy)
    if layers is None:
        errors.append(
            f"wp_size > 1 shards weights inside layers, but the layers of a {type(model).__name__} are "
            "unknown: it has no GradientCheckpointingLayer of transformers and no table. Give a policy with "
            "a stage_plan (custom_policy=...), or use wp_size=1"
        )
        return None
    weight_errors = weight_model_errors(model, layers)
    errors += weight_errors
    return None if weight_errors else layers


def weight_model_errors(model: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    """List reasons why the weights of a model's linear layers cannot be sharded; empty if they can.

    Args:
        model: the model.
        layers: its layers.
    """
    linear = _linear_layers(model, layers)
    errors = [
        f"{path} {error}"
        for path, module in linear.items()
        for error in native_errors(module, *KINDS, type(module))
    ]
    errors += layer_drop_errors(
        settings_of(model).get("the model's config", {}),
        "the model's config",
        who="the ranks that share weights",
        instead="use wp_size=1",
    )
    if not linear:
        kinds = sorted({type(module).__name__ for layer in layers for module in layer.modules()})
        errors.append(
            "wp_size > 1 shards the weights of nn.Linear and transformers' Conv1D, but there are none in the "
            f"model's {len(layers)} layers (of {', '.join(kinds) or 'nothing'}): use wp_size=1, and "
            "zero_stage to shard optimizer states and gradients"
        )
    return errors


def apply_weight_sharding(
    model: nn.Module,
    layers: Sequence[nn.Module],
    group: dist.ProcessGroup,
    *,
    overlap: bool = True,
    gradient_dtype: torch.dtype = torch.float32,
) -> None:
    """Replace each linear layer inside these layers by a `ShardedLinear`. No communication.

    Called after the model is cut into stages, before an optimizer is wrapped; parameters stay the same objects. See
    [Note: replicated layers].

    Args:
        model: the local model.
        layers: layers of the full model; layers of other stages are skipped.
        group: the weight axis, `mesh.group("wp")`.
        overlap, gradient_dtype: see `WeightPool`.
    """
    pool = WeightPool(group, overlap=overlap, gradient_dtype=gradient_dtype)
    for module in _linear_layers(model, layers).values():
        sharded = ShardedLinear(module, group, native_class=type(module), pool=pool)
        attributes = [
            (parent, name)
            for parent in model.modules()
            for name, child in parent._modules.items()
            if child is module
        ]
        for parent, name in attributes:
            setattr(parent, name, sharded)


def model_layers(model: nn.Module, policy: Policy | Table | None) -> list[nn.Module] | None:
    """Return the layers of a full model; None if they are unknown.

    Layers are the modules that transformers can recompute, or else the layers of the policy's stage plan.

    Args:
        model: the full model.
        policy: a policy or a table; None takes the policy of the model type.
    """
    if layers := recomputable_layers(model):
        return layers
    try:
        if isinstance(policy, Table):
            policy = TablePolicy(policy)
        policy = policy or policy_for(model)
    except ValueError:
        return None
    policy.set_model(model)
    plan = policy.stage_plan()
    if plan is None:
        return None
    # A module that stands at several paths is one layer.
    return list(dict.fromkeys(model.get_submodule(path) for path in plan.layer_paths(model)))


def _linear_layers(model: nn.Module, layers: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the linear layers whose weights are sharded, by path, in the order of the model.

    [Note: replicated layers] lists the exceptions.
    """
    table = table_for(getattr(getattr(model, "config", None), "model_type", ""))
    native = () if table is None else table.native
    inside = {
        module
        for layer in layers
        for module in layer.modules()
        if type(module) in KINDS or (isinstance(module, nn.Linear) and type(module).__name__ in native)
    }
    for experts in model.modules():
        if (interface := interface_of(experts)) is not None and interface.has_module_per_expert:
            inside.difference_update(experts.modules())
    users: dict[Parameter, set[nn.Module]] = {}  # the modules that have each parameter
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(parameter, set()).add(module)

    def has_unshared_weight(module: nn.Module) -> bool:
        weight = module._parameters.get("weight")
        return weight is not None and users[weight] <= inside

    return {
        path: module
        for path, module in model.named_modules()
        if module in inside and has_unshared_weight(module)
    }
