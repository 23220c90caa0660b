"""All-gather of updated parameters, at once or overlapped with the next forward; copies of an offloaded step.

[Note: parameters in flight] An overlapped all-gather returns while parameters are still in flight. Until they have
arrived a parameter has no entries (its `data` is withheld), so that no kernel can read old or half of the new ones.
Whoever reaches it through a module waits: modules look their parameters up in `_parameters`, which is replaced by a
dictionary that waits. So it does not matter who uses a weight: the module that has it, one around it
(`self.embedding.weight`), `state_dict` or `parameters()`. A reference that was taken before sees an empty tensor, and
most kernels refuse that.

[Note: copies between device and CPU] All copies of an offloaded step are made on the device's current stream, from and
to pinned memory, without waiting. Gradients go out behind whatever reduced and scaled them, since that was given to the
same stream or waited for by it; before the host reads any of them `wait_for_stream` waits for the stream, once for all
buckets. Parameters come in behind it: the all-gather and the next forward are given to the stream, or wait for it,
after them. The host writes to masters while a copy to the device may still read them only in the next step, and there
after `wait_for_stream`, or after reading the parameters, both of which are behind that copy on the stream. Loading a
state writes to them at any time, and is followed by a copy of all masters on the same stream, so that what was torn by
it is overwritten.
"""

from collections.abc import Container, ItemsView, Iterable, Mapping, Sequence, ValuesView
from typing import Any

from torch import nn
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ..cluster.collectives import Handle
from ..cluster.errors import raise_errors
from .bucket import Bucket, round_masters


class Publisher:
    """All-gathers the parameters of all ranks' masters, in the order of the buckets.

    Args:
        buckets: of the parameters.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = list(buckets)
        self._arrivals: dict[Bucket, Arrival] = {}

    def overlap_with_forward(self, model: nn.Module) -> None:
        """From now on only begin to gather, in the order of the model; its modules wait when they look at a parameter.

        Raises:
            ValueError: something in the model refers to a parameter besides the module that has it, or is compiled.
        """
        arrivals = {bucket: Arrival(bucket) for bucket in self._buckets if bucket.partition.num_slices > 1}
        awaited = {slot.parameter: arrival for bucket, arrival in arrivals.items() for slot in bucket.slots}
        raise_errors([*_reference_errors(model, awaited), *_compile_errors(model)])
        order = {parameter: index for index, parameter in enumerate(model.parameters())}
        self._buckets.sort(key=lambda bucket: min(order[slot.parameter] for slot in bucket.slots))
        self._arrivals = arrivals
        for module in model.modules():
            own = {name: awaited[each] for name, each in module._parameters.items() if each in awaited}
            if own:
                module.__dict__["_parameters"] = AwaitedParameters(module._parameters, own)

    def publish(self) -> None:
        """Gather the parameters, or begin to. One all-gather per bucket if sliced; after `wait`."""
        in_flight = []
        together = [bucket for bucket in self._buckets if not bucket.is_offloaded]
        round_masters(together)
        for bucket in self._buckets:
            if bucket.is_offloaded:  # the next copy overlaps with this gathering
                round_masters([bucket])
            gathering = bucket.partition.gather_(bucket.parameters)
            if gathering is not None and bucket in self._arrivals:
                self._arrivals[bucket].expect(gathering)
            elif gathering is not None:
                in_flight.append(gathering)
            # So that autograd refuses a graph that was built with the parameters before, as it does in torch.
            increment_version([slot.parameter for slot in bucket.slots])
            bucket.note_versions()
        for gathering in in_flight:
            gathering.wait()

    def wait(self) -> None:
        """Have all parameters."""
        for arrival in self._arrivals.values():
            arrival.wait()


class Arrival:
    """A bucket's parameters, there or in flight; see [Note: parameters in flight]."""

    def __init__(self, bucket: Bucket) -> None:
        self._weights = [(slot.parameter, slot.weight) for slot in bucket.slots]
        self._nothing = bucket.parameters.new_empty(0)
        self._work: Handle | None = None

    def expect(self, work: Handle) -> None:
        """Withhold the parameters until this is done."""
        self._work = work
        for parameter, _ in self._weights:
            parameter.data = self._nothing

    def wait(self) -> None:
        """Have the parameters."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            for parameter, weight in self._weights:
                parameter.data = weight


class AwaitedParameters(dict[str, Parameter | None]):
    """A module's own parameters by name, which have arrived once they are looked at.

    Args:
        parameters: the module's.
        arrivals: of those that may be in flight.
    """

    def __init__(self, parameters: Mapping[str, Parameter | None], arrivals: Mapping[str, Arrival]) -> None:
        super().__init__(parameters)
        self._arrivals = arrivals

    def __getitem__(self, name: str) -> Parameter | None:
        if name in self._arrivals:
            self._arrivals[name].wait()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dictionary."""
        if name in self._arrivals:
            self._arrivals[name].wait()
        return super().get(name, default)

    def values(self) -> ValuesView[Parameter | None]:  # type: ignore[override]
        """As of a dictionary."""
        self._wait()
        return super().values()

    def items(self) -> ItemsView[str, Parameter | None]:  # type: ignore[override]
        """As of a dictionary."""
        self._wait()
        return super().items()

    def copy(self) -> dict[str, Parameter | None]:
        """A plain dictionary."""
        return dict(self.items())

    def __reduce__(self) -> Any:  # a copy of the module has parameters of its own
        return dict, (self.copy(),)

    def _wait(self) -> None:
        for arrival in self._arrivals.values():
            arrival.wait()


def _reference_errors(model: nn.Module, awaited: Container[Parameter]) -> list[str]:
    """Attributes of modules that hold a parameter themselves, and would not wait for it."""
    return [
        f"{path or 'the model'} ({type(module).__name__}) keeps {name}, which refers to parameters themselves, and "
        "would not see that they are still on their way: use overlap_allgather=False"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "_parameters"
        and any(isinstance(each, Parameter) and each in awaited for each in _flattened(value))
    ]


def _compile_errors(model: nn.Module) -> list[str]:
    """Compiled modules: their code reads parameters past every look-up."""
    return [
        f"{path or 'the model'} is compiled, and compiled code does not wait for parameters that are still on their "
        "way: use overlap_allgather=False"
        for path, module in model.named_modules()
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None
    ]


def _flattened(value: object) -> Iterable[object]:
    """The entries of an attribute, one level deep."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else (value,)
