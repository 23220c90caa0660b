"""All-gather of updated parameters, at once or overlapped with the next forward; copies of an offloaded step.

[Note: parameters in flight] An overlapped all-gather returns while parameters are still in flight. Until it is complete
such a parameter is empty (its `data` is deferred), so that no kernel can read old or incomplete values. A look-up
through a module waits: `_parameters` of each module is replaced by a dictionary that waits. This covers every use of a
weight: by its module, by an enclosing module (`self.embedding.weight`), by `state_dict` or `parameters()`. A reference
to the data that was taken before is an empty tensor, which most kernels refuse; so are the values of
`dict(module._parameters)`, which does not wait.

[Note: copies between device and CPU] All copies of an offloaded step are asynchronous, on the device's current stream,
from and to pinned memory. Gradients are copied to the CPU after their reduction and scaling, which the same stream runs
or waits for. Before the host reads any of them, `wait_for_stream` waits for the stream, once for all buckets.
Parameters are copied to the device before the all-gather and the next forward, which the stream runs or waits for.
In the next step the host writes to masters only after `wait_for_stream` or after reading the parameters. Both come
after that copy on the stream, so the copy no longer reads them. Loading a state may write to masters at any time. A
copy of all masters on the same stream follows, and overwrites a torn copy.
"""

from collections.abc import Container, ItemsView, Iterable, Mapping, Sequence, ValuesView
from typing import Any

from torch import nn
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ..cluster.collectives import Handle
from ..cluster.errors import raise_errors
from .bucket import Bucket, round_masters


class ParameterGather:
    """All-gathers updated parameters from the masters of all ranks, in the order of the buckets.

    Args:
        buckets: the buckets of the parameters.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = list(buckets)
        self._arrivals: dict[Bucket, Arrival] = {}  # of sharded buckets, if overlapped

    def overlap_with_forward(self, model: nn.Module) -> None:
        """Overlap later all-gathers with the next forward, in the order of the model.

        Replaces `_parameters` of the model's modules, so that a look-up waits; see [Note: parameters in flight].

        Raises:
            ValueError: an attribute in the model refers to another module's parameter, or a module is compiled.
        """
        arrivals = {bucket: Arrival(bucket) for bucket in self._buckets if bucket.partition.num_slices > 1}
        arrival_of = {
            slot.parameter: arrival for bucket, arrival in arrivals.items() for slot in bucket.slots
        }
        raise_errors([*_reference_errors(model, arrival_of), *_compile_errors(model)])
        order = {parameter: index for index, parameter in enumerate(model.parameters())}
        self._buckets.sort(key=lambda bucket: min(order[slot.parameter] for slot in bucket.slots))
        self._arrivals = arrivals
        for module in model.modules():
            by_name = {
                name: arrival_of[parameter]
                for name, parameter in module._parameters.items()
                if parameter in arrival_of
            }
            if by_name:
                module.__dict__["_parameters"] = AwaitedParameters(module._parameters, by_name)

    def gather(self) -> None:
        """Copy the masters into the parameters and all-gather these, or begin to if overlapped.

        One all-gather per sharded bucket. Call `wait` before it.
        """
        in_flight = []
        round_masters([bucket for bucket in self._buckets if not bucket.is_offloaded])
        for bucket in self._buckets:
            if bucket.is_offloaded:  # the next copy overlaps with this all-gather
                round_masters([bucket])
            gathering = bucket.partition.gather_(bucket.parameters)
            if gathering is not None and bucket in self._arrivals:
                self._arrivals[bucket].expect(gathering)
            elif gathering is not None:
                in_flight.append(gathering)
            # As in torch, autograd then refuses a graph that was built with the previous parameters.
            increment_version([slot.parameter for slot in bucket.slots])
            bucket.note_versions()
        for gathering in in_flight:
            gathering.wait()

    def wait(self) -> None:
        """Wait for all parameters."""
        for arrival in self._arrivals.values():
            arrival.wait()


class Arrival:
    """All-gather of a bucket's parameters, in flight or complete; see [Note: parameters in flight].

    Args:
        bucket: the parameters.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._weights = [(slot.parameter, slot.weight) for slot in bucket.slots]
        self._empty = bucket.parameters.new_empty(0)
        self._work: Handle | None = None

    def expect(self, work: Handle) -> None:
        """Set the parameters to empty tensors until `wait`, while this all-gather is in flight."""
        self._work = work
        for parameter, _ in self._weights:
            parameter.data = self._empty

    def wait(self) -> None:
        """Wait for the all-gather, and set the parameters to their values again."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            for parameter, weight in self._weights:
                parameter.data = weight


class AwaitedParameters(dict[str, Parameter | None]):
    """A module's own parameters by name; a look-up waits for those in flight.

    Args:
        parameters: the module's parameters.
        arrivals: the arrivals of parameters that may be in flight.
    """

    def __init__(self, parameters: Mapping[str, Parameter | None], arrivals: Mapping[str, Arrival]) -> None:
        super().__init__(parameters)
        self._arrivals = arrivals

    def __getitem__(self, name: str) -> Parameter | None:
        if name in self._arrivals:
            self._arrivals[name].wait()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Wait as a look-up does, then as in a dictionary."""
        if name in self._arrivals:
            self._arrivals[name].wait()
        return super().get(name, default)

    def values(self) -> ValuesView[Parameter | None]:  # type: ignore[override]
        """Wait as a look-up does, then as in a dictionary."""
        self._wait()
        return super().values()

    def items(self) -> ItemsView[str, Parameter | None]:  # type: ignore[override]
        """Wait as a look-up does, then as in a dictionary."""
        self._wait()
        return super().items()

    def copy(self) -> dict[str, Parameter | None]:
        """Return a plain dictionary."""
        return dict(self.items())

    def __reduce__(self) -> Any:  # a copy of the module has parameters of its own
        return dict, (self.copy(),)

    def _wait(self) -> None:
        for arrival in self._arrivals.values():
            arrival.wait()


def _reference_errors(model: nn.Module, gathered: Container[Parameter]) -> list[str]:
    """Return errors for module attributes that refer to a parameter directly and would not wait for it."""
    return [
        f"{path or 'the model'} ({type(module).__name__}) keeps references to parameters in {name}, and may read them "
        "while they are in flight: use overlap_allgather=False"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "_parameters"
        and any(isinstance(item, Parameter) and item in gathered for item in _entries(value))
    ]


def _compile_errors(model: nn.Module) -> list[str]:
    """Return errors for compiled modules, whose code reads parameters without a look-up."""
    return [
        f"{path or 'the model'} is compiled, and compiled code does not wait for parameters in flight: use "
        "overlap_allgather=False"
        for path, module in model.named_modules()
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None
    ]


def _entries(value: object) -> Iterable[object]:
    """Return the entries of an attribute, one level deep."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else (value,)
