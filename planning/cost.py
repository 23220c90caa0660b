"""Costs of a computation on fake tensors: live bytes, operations and communication, section by section.

[Note: sections] A forward is cut where a layer begins or ends. Between two cuts lies a section. Its backward begins
when the gradient of its output arrives, and ends when that of its input does. For each section and direction a `Meter`
notes the bytes that are live at its end, the peak in between, the operations and the messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..cluster.traffic import Count, Traffic, tensors_of
from .result_cache import ResultCache

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_DRAWS = (_aten.randint, _aten.random_)


@dataclass(frozen=True)
class Operation:
    """One operation on tensors.

    Args:
        flops: floating-point operations of its products, two for a multiplication with addition; 0 for all others.
        nbytes: bytes that it reads and writes.
    """

    flops: int
    nbytes: int


@dataclass
class Measured:
    """The needs of one section in one direction.

    Attributes:
        start, end: live bytes at its start and end.
        moments: live bytes where it was entered, and after each operation that added some; from the same base.
        operations: those that move data.
        traffic: messages by axis and kind.
    """

    start: int = 0
    end: int = 0
    moments: list[int] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    traffic: dict[tuple[str, str], Count] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The maximum of live bytes."""
        return max(self.moments, default=0)


class LiveBytes(TorchDispatchMode):
    """A context that counts the live storages created inside it.

    Resident memory would include memory of the backend and of the allocator, and hooks of saved tensors miss other
    tensors that an autograd function keeps.

    Attributes:
        now: live bytes.
        peak: the maximum of `now`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: WeakKeyDictionary[torch.UntypedStorage, bool] = WeakKeyDictionary()  # a set, by its keys

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its new storages; an operation on a DTensor is counted on its local tensors."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return self.run(func, args, kwargs or {})[0]

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
        """Run an operation; return its result, its input tensors, and the tensors with new storages."""
        inputs = [*tensors_of(args), *tensors_of(kwargs.values())]
        for tensor in inputs:
            self._known.setdefault(tensor.untyped_storage(), True)  # a view of it adds nothing
        result = self._compute(func, args, kwargs)
        outputs = tensors_of((result,))
        return result, inputs, [output for output in outputs if self._count(output)]

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _count(self, tensor: Tensor) -> bool:
        """Count a tensor's storage until it is freed; return True if it is a new one."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return False
        self._known[storage] = True
        nbytes = storage.nbytes()
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        finalize(storage, self._forget, nbytes)
        return True

    def _forget(self, nbytes: int) -> None:
        self.now -= nbytes


class Meter(LiveBytes):
    """A context that measures the computation inside it, section by section; see [Note: sections].

    Tensors have no values. A read of a truth value is answered by True: all tokens are valid, no mask hides anything.
    A random number, as a seed, is 1.

    Args:
        traffic: counts the messages.
        results: of operations in previous traces, to which those of this one are added.

    Attributes:
        measured: by section and direction, in the order of their first visits.
    """

    def __init__(self, traffic: Traffic, results: ResultCache) -> None:
        super().__init__()
        self.traffic, self._messages, self._results = traffic, _totals(traffic), results
        self.measured: dict[Any, Measured] = {}
        self._drawn: WeakKeyDictionary[torch.UntypedStorage, bool] = WeakKeyDictionary()
        self._current: Measured | None = None

    def enter_section(self, key: Any) -> None:
        """End the current section, and start this one, or go on with it."""
        self.end_section()
        self._current = self.measured.setdefault(key, Measured(self.now))
        self._current.moments.append(self.now)

    def end_section(self) -> None:
        """End the current section, if there is one."""
        messages = _totals(self.traffic)
        if self._current is not None:
            self._current.end = self.now
            for key, total in messages.items():
                sent = total - self._messages.get(key, Count())
                self._current.traffic[key] = self._current.traffic.get(key, Count()) + sent
        self._messages, self._current = messages, None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note its bytes and its new storages."""
        kwargs = kwargs or {}
        if func is _DEVICE:  # more than half of all calls: autograd asks for the device of every tensor
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self._answered(args[0])
        self.traffic.note(func, args)
        result, inputs, made = self.run(func, args, kwargs)
        if made and self._current is not None:
            self._current.moments.append(self.now)
        if func._overloadpacket in _DRAWS:
            self._drawn |= {output.untyped_storage(): True for output in made}
        if self._current is not None and func.namespace == "aten" and (made or func._schema.is_mutable):
            nbytes = sum(tensor.nbytes for tensor in (*inputs, *made))
            self._current.operations.append(Operation(_flops(func, args, kwargs, result), nbytes))
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._results.run(func, args, kwargs)

    def _answered(self, tensor: Tensor) -> int:
        """Return the answer of a read on the host."""
        if tensor.dtype == torch.bool or tensor.untyped_storage() in self._drawn:
            return True
        raise ValueError("its forward reads numbers of a tensor on the host, which have no values in a plan")


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of a product."""
    packet = func._overloadpacket
    if packet is _aten._grouped_mm:
        # (R, K) × (E, K, N), or (K, R) × (R, N) for gradients of weights
        return 2 * prod(args[0].shape) * int(args[1].shape[-1])
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*_equal_heads(args[:3])))
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*_equal_heads(args[:4])))
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _equal_heads(tensors: Sequence[Tensor]) -> list[torch.Size]:
    """Return the shapes of an attention's tensors with the heads of the first one, as torch 2.11 requires."""
    heads = tensors[0].shape[1]
    return [torch.Size((batch, heads, *rest)) for batch, _, *rest in (tensor.shape for tensor in tensors)]


def _totals(traffic: Traffic) -> dict[tuple[str, str], Count]:
    return {key: count + Count() for key, count in traffic.counts.items()}  # copies, which do not grow
