"""Refusal of arguments that are no usable model, and of state dicts of a model that this rank has only in part."""

from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.tensor import DTensor

from ..cluster.errors import first_of
from ..cluster.placement import is_sharded
from ..lazy.tensor import LazyTensor
from ..pipeline.stand_ins import StandIn
from .gradients import is_split
from .policy import Policy
from .tables.table import Table

_PARALLELIZED = "_echelon_parallelized"
_TRAINED = "_echelon_trained"


def mark_parallelized(model: nn.Module) -> None:
    """Mark a model as processed by a plugin; its copies are not marked."""
    vars(model)[_PARALLELIZED] = id(model)


def _is_marked(module_or_parameter: nn.Module | Tensor) -> bool:
    """Return True for an object that was marked as parallelized, False for its copies, which have its id as mark."""
    return vars(module_or_parameter).get(_PARALLELIZED) == id(module_or_parameter)


def mark_all_parallelized(model: nn.Module) -> None:
    """Mark all modules and parameters of a full model that will be cut or sharded: no other model may use them.

    Modules without tensors are not marked: models share activations, of which transformers has one for all.
    """
    modules = (
        module
        for module in model.modules()
        if any(True for _ in chain(module.parameters(), module.buffers()))
    )
    for module_or_parameter in chain(modules, model.parameters()):
        vars(module_or_parameter)[_PARALLELIZED] = id(module_or_parameter)


def mark_trained(model: nn.Module) -> None:
    """Mark the parameters that a sharded optimizer has moved to its memory: no other optimizer may step them."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            vars(parameter)[_TRAINED] = id(parameter)


def trained_errors(model: nn.Module) -> list[str]:
    """List the error of parameters that the optimizer of another boosted model trains; empty if there are none."""
    names = [
        name for name, parameter in model.named_parameters() if vars(parameter).get(_TRAINED) == id(parameter)
    ]
    if not names:
        return []
    return [
        f"{first_of(names)} of this {type(model).__name__} is already trained by another model's optimizer: copy it "
        "(copy.deepcopy) before the first boost, or boost one module that contains both, with one optimizer"
    ]


def _is_parallelized_as_one(model: nn.Module) -> bool:
    """Return True if one marked module has all parameters of the model: the model itself, or one in a wrapper."""
    parameters = set(model.parameters())
    return any(_is_marked(module) and set(module.parameters()) == parameters for module in model.modules())


def _parallelized_inside(model: nn.Module) -> list[str]:
    """Return the names of the outermost marked modules, and of marked parameters outside of these."""
    names: list[str] = []
    for name, module_or_parameter in chain(model.named_modules(), model.named_parameters()):
        is_inside = any(name.startswith(f"{outer}.") for outer in names)
        if _is_marked(module_or_parameter) and not is_inside:
            names.append(name)
    return names


def is_parallelized(model: nn.Module) -> bool:
    """Return True if a plugin or ShardFormer processed the model, or a model inside it."""
    return is_split(model) or any(_is_marked(module) for module in model.modules())


def unfit_model_errors(model: object) -> list[str]:
    """List reasons why an object cannot be sharded or boosted as a model, with any options; empty if it can.

    For example it is not a module, has parameters without values, or was boosted or sharded before. Call this before
    other checks, which rely on it.
    """
    if not isinstance(model, nn.Module):
        return [f"a model is a torch.nn.Module, and this is a {type(model).__name__}: give the model itself"]
    if isinstance(model, OptimizedModule):
        return [
            "the model is wrapped by torch.compile, which renames its parameters: give the plain model, and "
            "call model.compile() on the returned one"
        ]
    if not _is_parallelized_as_one(model) and (shared := _parallelized_inside(model)):
        return [
            f"{first_of(shared)} of this {type(model).__name__} is already boosted, or sharded by ShardFormer, in "
            "another model: copy it (copy.deepcopy) before the first boost, or boost one module that contains both"
        ]
    if is_parallelized(model):
        return [
            "the model is already boosted, or sharded by ShardFormer: give the plain transformers model, once"
        ]
    new = torch.empty(0)
    if isinstance(new, LazyTensor) or new.is_meta:  # a small copy of the model would have no values, either
        context = "a LazyInitContext" if isinstance(new, LazyTensor) else "torch.device('meta')"
        return [f"a model is boosted, or sharded, within {context}: do it after the block"]
    named = chain(model.named_parameters(), model.named_buffers())
    empty = [name for name, tensor in named if tensor.is_meta and not isinstance(tensor, LazyTensor)]
    if not empty:
        return []
    subject = f"and {len(empty) - 1} more of the model are" if len(empty) > 1 else "of the model is"
    return [
        f"{empty[0]} {subject} on the meta device, without values: build or load the model in a "
        "LazyInitContext(), which can materialize them, or on a device"
    ]


def policy_errors(name: str, policy: object) -> list[str]:
    """List the error of an argument, given by this name, that is neither a policy, a table nor None."""
    if policy is None or isinstance(policy, (Policy, Table)):
        return []
    is_class = isinstance(policy, type) and issubclass(policy, (Policy, Table))
    received = f"the class {policy.__name__}" if isinstance(policy, type) else repr(policy)
    advice = "give an instance of it" if is_class else "leave it out for the table of the model's type"
    return [f"{name} is {received} and must be a shardformer.Policy or a shardformer.Table: {advice}"]


def refuse_partial_state(model: nn.Module) -> None:
    """Make `state_dict` and `load_state_dict` raise for the model and each module that this rank has only in part.

    So do their callers: `save_pretrained`, peft, torch.distributed.checkpoint. Pickling the model raises too.
    Nothing changes if this rank has the full model.

    Args:
        model: already cut into stages or sharded.
    """
    modules = list(model.modules())
    stand_ins = [module for module in modules if isinstance(module, StandIn)]
    elsewhere = [module for stand_in in stand_ins for module in stand_in.native.modules()]
    partial = [module for module in (*modules, *elsewhere) if _is_partial(module)]
    if not partial:
        return
    refusal = PartialState(type(model).__name__.removeprefix("FSDP"))
    for module in dict.fromkeys([model, *partial]):
        module.register_state_dict_pre_hook(refusal)
        module.register_load_state_dict_pre_hook(refusal.refuse_loading)
    # Pickle visits attributes in order: this hook must come before others, which may be closures that pickle refuses.
    attributes = dict(vars(model))
    vars(model).clear()
    vars(model).update({name: attributes[name] for name in ("_state_dict_pre_hooks", *attributes)})


def is_partial(tensor: Tensor | None) -> bool:
    """Return True if this rank has only a shard of a tensor, or nothing of it."""
    if isinstance(tensor, DTensor):
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        return any(placement.is_shard() and size > 1 for placement, size in sizes)
    if tensor is None:
        return False
    return tensor.is_meta or is_sharded(tensor)


class PartialState:
    """Hook that refuses to read or write the state dict of a model that this rank has only in part.

    See `refuse_partial_state`. The object itself is the hook of `state_dict`, `refuse_loading` that of loading.

    Args:
        kind: name of the model's class, for the message.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, *_: Any) -> NoReturn:
        raise RuntimeError(self._message)

    def refuse_loading(self, module: nn.Module, *_: Any) -> NoReturn:
        """Raise RuntimeError for any state dict, of full tensors or of shards."""
        raise RuntimeError(
            f"this rank has only a part of this {self._kind}, into which load_state_dict() cannot load full "
            "tensors: call booster.load_model(model, path) on every rank, or load the plain model before it "
            "is sharded"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "PartialState":
        return self  # a copy of a part is a part

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(self._message)

    @property
    def _message(self) -> str:
        """The error of writing a part of a model by other means than Echelon's."""
        return (
            f"this rank has only a part of this {self._kind}, so state_dict(), save_pretrained and "
            "torch.save would write an incomplete one: call booster.save_model(model, path) or "
            "booster.save_checkpoint on every rank, for adapters booster.save_lora_as_pretrained, and "
            "without a booster SplitCheckpoints.save_model"
        )


def _is_partial(module: nn.Module) -> bool:
    """Return True if the module's own tensors are shards, or are on another stage."""
    if isinstance(module, StandIn):
        return next(chain(module.native.parameters(), module.native.buffers()), None) is not None
    return any(is_partial(tensor) for tensor in chain(module._parameters.values(), module._buffers.values()))
