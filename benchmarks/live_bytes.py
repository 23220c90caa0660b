"""Live bytes of a computation, counted by the tensors that torch's operations create.

Resident memory would include memory of gloo and the allocator, and hooks of saved tensors miss other tensors that
an autograd function keeps. Here every storage that an operation creates is counted until it is freed.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echelon.shardformer.sequence.before_layers import PartTensor


class LiveBytes(TorchDispatchMode):
    """A context that counts the live storages created inside it.

    Attributes:
        now: live bytes.
        peak: the maximum of `now`.
        kept: live bytes at the start of the first backward inside: saved by forward, with its outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.kept: int | None = None
        self._known: WeakKeyDictionary[torch.UntypedStorage, bool] = WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its new storages; an operation on a DTensor is counted on its local tensors."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if self.kept is None and torch._C._current_graph_task_id() >= 0:  # type: ignore[attr-defined]
            self.kept = self.now
        for given in tree_leaves((args, kwargs)):
            self._meet(given, is_made=False)  # a view of an existing storage adds nothing
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            self._meet(each, is_made=True)
        return result

    def _meet(self, value: Any, *, is_made: bool) -> None:
        if not isinstance(value, Tensor) or (storage := value.untyped_storage()) in self._known:
            return
        self._known[storage] = is_made
        if is_made:
            nbytes = storage.nbytes()
            self.now += nbytes
            self.peak = max(self.peak, self.now)
            finalize(storage, self._forget, nbytes)

    def _forget(self, nbytes: int) -> None:
        self.now -= nbytes


def training_bytes(compute: Callable[[], None]) -> tuple[int, int]:
    """Return the bytes that a forward keeps for its backward, and the peak of both, including the new gradients.

    Args:
        compute: runs both, once.
    """
    with LiveBytes() as live:
        compute()
    if live.kept is None:
        raise AssertionError("nothing ran backward")
    return live.kept, live.peak


def bytes_before_layers(compute: Callable[[], None], *, embedding: nn.Module, first_layer: nn.Module) -> int:
    """Return the peak bytes before the first layer's forward and after its backward.

    Args:
        compute: runs forward and backward, once.
        embedding: its output is the input of the layers.
        first_layer: gets that as its first argument.
    """
    with LiveBytes() as live:
        most: list[int] = []

        def arrive(*_: Any) -> None:
            most.append(live.peak)

        def begin_again(*_: Any) -> None:
            live.peak = live.now

        def watch(module: nn.Module, args: Any, output: Tensor) -> None:
            part = output.part if isinstance(output, PartTensor) else None  # this rank's shard of the output
            (output if part is None else part).register_hook(arrive)

        handles = (
            first_layer.register_forward_pre_hook(arrive),
            first_layer.register_full_backward_hook(begin_again),
            embedding.register_forward_hook(watch),
        )
        compute()
        for handle in handles:
            handle.remove()
    return max(most)
