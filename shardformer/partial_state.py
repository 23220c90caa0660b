"""State dicts of a model of which each rank has a part: refused to users, read by our own checkpoints."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..cluster.placement import Shard, placement_of
from ..pipeline.stand_ins import StandIn


def refuse_partial_state(model: nn.Module) -> None:
    """Let `state_dict` and `load_state_dict` raise for the model and each part of it that this rank has not whole.

    What calls them raises too: `save_pretrained`, peft's, torch.distributed.checkpoint. So does pickling the model.
    Nothing changes where this rank has all of it.

    Args:
        model: already split, cut or sharded.
    """
    modules = list(model.modules())
    elsewhere = [
        each for module in modules if isinstance(module, StandIn) for each in module.native.modules()
    ]
    partial = [module for module in (*modules, *elsewhere) if _is_partial(module)]
    if not partial:
        return
    refusal = PartialState(type(model).__name__.removeprefix("FSDP"))
    for module in dict.fromkeys([model, *partial]):
        module.register_state_dict_pre_hook(refusal)
        module.register_load_state_dict_pre_hook(refusal.refuse_loading)
    # Pickle goes through attributes in their order, and would stumble over closures among other hooks first.
    attributes = dict(vars(model))
    vars(model).clear()
    vars(model).update({name: attributes[name] for name in ("_state_dict_pre_hooks", *attributes)})


def local_state(model: nn.Module) -> dict[str, Tensor]:
    """What this rank has of a model's parameters and persistent buffers, by name; the tensors themselves."""
    hooks = [hook for module in model.modules() for hook in module._state_dict_pre_hooks.values()]
    with ExitStack() as lifted:
        for refusal in {hook for hook in hooks if isinstance(hook, PartialState)}:
            lifted.enter_context(refusal.lifted())
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return state


def is_partial(tensor: Tensor | None) -> bool:
    """Return True where this rank has only a piece of a tensor, or nothing of it."""
    if isinstance(tensor, DTensor):
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        return any(placement.is_shard() and size > 1 for placement, size in sizes)
    if tensor is None:
        return False
    placement = placement_of(tensor)
    return tensor.is_meta or (isinstance(placement, Shard) and placement.size > 1)


class PartialState:
    """The hook of `refuse_partial_state`.

    Args:
        kind: the model's class, to be named.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._is_lifted = False

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._is_lifted:
            raise RuntimeError(self._told)

    def refuse_loading(self, module: nn.Module, *_: Any) -> NoReturn:
        """Refuse whole tensors, and pieces of whatever layout."""
        raise RuntimeError(
            f"this rank has only a part of this {self._kind}, into which load_state_dict() puts no whole tensors: call "
            "booster.load_model(model, path) on every rank, or load the plain model before it is split"
        )

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let the state be read inside."""
        self._is_lifted = True
        try:
            yield
        finally:
            self._is_lifted = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "PartialState":
        return self  # a copy of a part is a part

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(self._told)

    @property
    def _told(self) -> str:
        return (
            f"this rank has only a part of this {self._kind}, which state_dict(), save_pretrained and torch.save would "
            "write for the whole: call booster.save_model(model, path) or booster.save_checkpoint on every rank, for "
            "adapters booster.save_lora_as_pretrained, and without a booster SplitCheckpoints.save_model"
        )


def _is_partial(module: nn.Module) -> bool:
    """Return True where the module's own tensors are pieces, or are on another stage."""
    if isinstance(module, StandIn):
        return next(chain(module.native.parameters(), module.native.buffers()), None) is not None
    return any(is_partial(each) for each in chain(module._parameters.values(), module._buffers.values()))
