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
    """A recorded call of torch that makes a tensor of the batch's tensors.

    Args:
        function: the called function.
        args, kwargs: its arguments; each tensor is replaced by the LabelFunction that made it.
        depends_on_batch: a tensor of the batch is among its inputs; False if it is a constant, as `torch.arange`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    depends_on_batch: bool = True


_BATCH_TENSORS = LabelFunction(list)  # the tensors of the batch itself, in the order of its tree


class LabelFunctions:
    """The functions that ran so far on one microbatch's tensors, by their results; see [Note: label functions].

    Args:
        microbatch: a tree of tensors.
    """

    def __init__(self, microbatch: Any) -> None:
        # By id of a tensor: the tensor, which keeps its id in use, its version, and the function that made it.
        self._recorded: dict[int, tuple[Tensor, int, LabelFunction]] = {}
        for index, tensor in enumerate(_tensors(microbatch)):
            self._add(tensor, LabelFunction(operator.getitem, (_BATCH_TENSORS, index)))

    def of(self, tensor: Any) -> LabelFunction | None:
        """Return the function that made a tensor; None if it was not recorded, or the tensor changed since."""
        recorded, version, label_function = self._recorded.get(id(tensor), (None, 0, None))
        return label_function if recorded is tensor and version == version_of(recorded) else None

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Record a call and its result, if it is deterministic and all its tensors are recorded.

        Args:
            function: the called function of torch.
            args, kwargs: its arguments.
            result: a tensor, or a sequence with tensors; any other is not recorded.
        """
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = list(map(self.of, tensors))
        name = getattr(function, "__name__", "")
        if None in inputs or any(word in name for word in _RANDOM):
            return
        args, kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
        depends_on_batch = any(
            label_function is not None and label_function.depends_on_batch for label_function in inputs
        )
        call = LabelFunction(function, tuple(args), kwargs, depends_on_batch)
        if isinstance(result, Tensor):
            self._add(result, call)
        elif isinstance(result, (tuple, list)):
            for index, tensor in enumerate(result):
                if isinstance(tensor, Tensor):
                    self._add(tensor, LabelFunction(operator.getitem, (call, index), None, depends_on_batch))

    def _add(self, tensor: Tensor, label_function: LabelFunction) -> None:
        self._recorded[id(tensor)] = (tensor, version_of(tensor), label_function)


class LabelEvaluator:
    """Computes recorded label functions for another microbatch; each function once.

    Args:
        microbatch: a tree of the same structure as the recorded one.
    """

    def __init__(self, microbatch: Any) -> None:
        self._results: dict[LabelFunction, Any] = {_BATCH_TENSORS: _tensors(microbatch)}

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
