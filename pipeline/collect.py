"""Stages of models that read the outputs of all layers: backbones, semantic segmentation.

[Note: collecting] What every earlier layer returned travels with what the stage's own layers return, and stands in for
them: an earlier layer is a Recalled, which returns what it did return. So whatever a model or transformers collects on
the way, from what layers return or by hooks on them, is complete on the last stage. Hooks are registered by the class
of a module, so these stand-ins give the class of what they stand for, and share its hooks: a rank of several stages
has them all, whichever stage runs first.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .stand_in import Inbox, Outline, Passing, StageExit, StandIn

_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class _Hooked(StandIn):
    """Is hooked as what it stands for."""

    def __init__(self, native: nn.Module, *args: Any) -> None:
        super().__init__(native, *args)
        for name in _HOOKS:
            self.__dict__[name] = native.__dict__[name]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["native"])


class RecalledEntry(Outline):
    """For an entry that returns more than a tensor: what it returned, the first of all that arrived."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        first = self.inbox.take()[0]
        self.inbox.returned[0] = first  # where the entry is held, the hook on it noted its outline
        return (first, *outputs[1:]) if isinstance(outputs, tuple) else first


class Recalled(_Hooked, Passing):
    """For a layer of an earlier stage, or the entry: what it returned."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple:
        return self._as_layer(self.inbox.take()[self.arrives_as])


class LeavingWithAll(_Hooked):
    """For the layer right after the stage's last: what all layers returned goes along, the last one's as it is here."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before = [self.inbox.returned[index] for index in sorted(self.inbox.returned)]
        raise StageExit((*before[:-1], hidden))


def note_returns(model: nn.Module, inbox: Inbox, entry: str, layers: Sequence[str]) -> None:
    """Note what the entry (0) and the layers (from 1) return while a stage runs, where they are held.

    Args:
        model: cut already.
        inbox: takes the notes.
        entry, layers: their paths.
    """
    for index, path in enumerate((entry, *layers)):
        module = model.get_submodule(path)
        if not isinstance(module, StandIn):
            module.register_forward_hook(_note(inbox, index))


def _note(inbox: Inbox, index: int) -> Any:
    def note(module: nn.Module, args: tuple, output: Any) -> None:
        inbox.returned[index] = output[0] if isinstance(output, tuple) else output

    return note
