"""Functions of a microbatch's labels, recorded in one microbatch and computed for the others.

[Note: label functions] A loss of several terms needs the counts of all microbatches before its first backward. Models
make the target of a loss from the labels of the batch by few functions: a view, a shift, a clamp. These are recorded
as they run, and applied to the labels of the other microbatches. No layer runs, and nothing waits for the device. A
tensor that depends on anything else, is random, or was changed in place has no recorded function.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .microbatch import map_tensors

_RANDOM = ("rand", "bernoulli", "multinomial", "normal")


@dataclass(frozen=True, eq=False)
class LabelFunction:
    """A call whose tensors are functions of the batch too.

    Args:
        function: of torch.
        args, kwargs: with label functions in place of tensors.
        of_batch: the batch is among its inputs; False if it is a constant, as `torch.arange`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    of_batch: bool = True


_ENTRIES = LabelFunction(list)  # the tensors of the batch itself, in the order of its tree


class LabelFunctions:
    """The functions of one microbatch's tensors that ran so far.

    Args:
        microbatch: a tree of tensors.
    """

    def __init__(self, microbatch: Any) -> None:
        # By id the tensor, which is thereby kept, its version and its function.
        self._recorded: dict[int, tuple[Tensor, int, LabelFunction]] = {}
        for index, tensor in enumerate(_tensors(microbatch)):
            self._add(tensor, LabelFunction(operator.getitem, (_ENTRIES, index)))

    def of(self, tensor: Any) -> LabelFunction | None:
        """Return the function that made a tensor, None if it is not known."""
        known, version, made = self._recorded.get(id(tensor), (None, 0, None))
        return made if known is tensor and version == version_of(known) else None

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Record a call, if all its tensors are functions of the batch."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = list(map(self.of, tensors))
        name = getattr(function, "__name__", "")
        if None in inputs or any(word in name for word in _RANDOM):
            return
        args, kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
        of_batch = any(label_function is not None and label_function.of_batch for label_function in inputs)
        call = LabelFunction(function, tuple(args), kwargs, of_batch)
        if isinstance(result, Tensor):
            self._add(result, call)
        elif isinstance(result, (tuple, list)):
            for index, tensor in enumerate(result):
                if isinstance(tensor, Tensor):
                    self._add(tensor, LabelFunction(operator.getitem, (call, index), None, of_batch))

    def _add(self, tensor: Tensor, made: LabelFunction) -> None:
        self._recorded[id(tensor)] = (tensor, version_of(tensor), made)


class OfMicrobatch:
    """Computes label functions of a microbatch; each call once.

    Args:
        microbatch: a tree of the same structure as the recorded one.
    """

    def __init__(self, microbatch: Any) -> None:
        self._results: dict[LabelFunction, Any] = {_ENTRIES: _tensors(microbatch)}

    def __call__(self, label_function: LabelFunction) -> Any:
        """Return the result of a function."""
        if label_function not in self._results:
            args, kwargs = tree_map_only(
                LabelFunction, self, (label_function.args, label_function.kwargs or {})
            )
            self._results[label_function] = label_function.function(*args, **kwargs)
        return self._results[label_function]


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a batch in order."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(tree, collect)
    return tensors


def version_of(tensor: Tensor) -> int:
    """Return a number that changes with every change in place; tensors of inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version
