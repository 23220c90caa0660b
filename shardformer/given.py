"""What was given for a model and a policy: whether it is one, has values, and was not split or boosted before."""

from itertools import chain

from torch import nn
from torch._dynamo import OptimizedModule

from ..lazy.tensor import LazyTensor
from .policy import Policy
from .table import Table
from .whole_gradients import is_split

_TAKEN = "_echelon_taken"


def mark_taken(model: nn.Module) -> None:
    """Remember that a plugin had a model; a copy of it is another one."""
    vars(model)[_TAKEN] = id(model)


def is_taken(model: nn.Module) -> bool:
    """Whether a plugin or ShardFormer had a model, or one inside of it."""
    return is_split(model) or any(vars(each).get(_TAKEN) == id(each) for each in model.modules())


def given_faults(model: object) -> list[str]:
    """Why what was given for a model is none that has values; empty when it is."""
    if not isinstance(model, nn.Module):
        return [f"a model is a torch.nn.Module, and this is a {type(model).__name__}: give the model itself"]
    if isinstance(model, OptimizedModule):
        return [
            "the model is torch.compile's, whose parameters have other names: give the plain model, and call "
            "model.compile() on what is returned"
        ]
    named = chain(model.named_parameters(), model.named_buffers())
    empty = [name for name, each in named if each.is_meta and not isinstance(each, LazyTensor)]
    if not empty:
        return []
    several = f"and {len(empty) - 1} more of the model are" if len(empty) > 1 else "of the model is"
    return [
        f"{empty[0]} {several} on the meta device, without values: build or "
        "load the model in a LazyInitContext(), which knows how to make them, or on a device"
    ]


def policy_faults(name: str, policy: object) -> list[str]:
    """Why what was given by this name for a policy is neither one nor a table; empty where it is, or None."""
    if policy is None or isinstance(policy, (Policy, Table)):
        return []
    is_class = isinstance(policy, type) and issubclass(policy, (Policy, Table))
    given = f"the class {policy.__name__}" if isinstance(policy, type) else repr(policy)
    advice = "give an object of it" if is_class else "leave it out for the table of the model's type"
    return [f"{name} is {given} and must be a shardformer.Policy or a shardformer.Table: {advice}"]
