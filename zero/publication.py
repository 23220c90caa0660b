"""Updated parameters, from the ranks that own their slices to all: at once, or while the next forward begins.

[Note: parameters under way] A later publication returns while parameters are still on their way. Until they have
arrived a parameter has no entries (its `data` is withheld), so that no kernel can read old or half of the new ones.
Whoever reaches it through a module waits: modules look their parameters up in `_parameters`, which is replaced by a
dictionary that waits. So it does not matter who uses a weight: the module that has it, one around it
(`self.embedding.weight`), `state_dict` or `parameters()`. A reference that was taken before sees an empty tensor, and
most kernels refuse that.
"""

from collections.abc import Container, ItemsView, Iterable, Mapping, Sequence, ValuesView
from typing import Any

from torch import nn
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ..cluster.exchange import Waitable
from .bucket import Bucket


class Arrival:
    """A bucket's parameters, there or on their way; see [Note: parameters under way]."""

    def __init__(self, bucket: Bucket) -> None:
        self._weights = [(slot.parameter, slot.weight) for slot in bucket.slots]
        self._nothing = bucket.parameters.new_empty(0)
        self._work: Waitable | None = None

    def expect(self, work: Waitable) -> None:
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
        arrivals: of those that may be under way.
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


class Publisher:
    """Brings the masters of all ranks into the parameters of all, in the order of the buckets.

    Args:
        buckets: of the parameters.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = list(buckets)
        self._arrivals: dict[Bucket, Arrival] = {}

    def let_arrive_later(self, model: nn.Module) -> None:
        """From now on only begin to, in the order of the model; its modules wait when they look at a parameter.

        Raises:
            ValueError: something in the model refers to a parameter besides the module that has it, or is compiled.
        """
        arrivals = {bucket: Arrival(bucket) for bucket in self._buckets if bucket.partition.num_slices > 1}
        awaited = {slot.parameter: arrival for bucket, arrival in arrivals.items() for slot in bucket.slots}
        if faults := [*_reference_faults(model, awaited), *_compile_faults(model)]:
            raise ValueError("\n".join(faults))
        order = {parameter: index for index, parameter in enumerate(model.parameters())}
        self._buckets.sort(key=lambda bucket: min(order[slot.parameter] for slot in bucket.slots))
        self._arrivals = arrivals
        for module in model.modules():
            own = {name: awaited[each] for name, each in module._parameters.items() if each in awaited}
            if own:
                module.__dict__["_parameters"] = AwaitedParameters(module._parameters, own)

    def publish(self) -> None:
        """Bring them, or begin to. One all-gather per bucket if sliced; after `finish`."""
        under_way = []
        for bucket in self._buckets:
            bucket.round_masters()
            if bucket in self._arrivals:
                self._arrivals[bucket].expect(bucket.partition.gather_later_(bucket.parameters))
            elif (gathering := bucket.partition.gather_(bucket.parameters)) is not None:
                under_way.append(gathering)
            # So that autograd refuses a graph that was built with the parameters before, as it does in torch.
            increment_version([slot.parameter for slot in bucket.slots])
            bucket.note_versions()
        for gathering in under_way:
            gathering.wait()

    def wait(self) -> None:
        """Have all parameters."""
        for arrival in self._arrivals.values():
            arrival.wait()

    def finish(self) -> None:
        """Have all parameters, and let the other ranks have them: every rank calls it, before masters change."""
        self.wait()
        for bucket in self._arrivals:
            bucket.partition.release()


def _reference_faults(model: nn.Module, awaited: Container[Parameter]) -> list[str]:
    """Attributes of modules that hold a parameter themselves, and would not wait for it."""
    return [
        f"{path or 'the model'} ({type(module).__name__}) keeps {name}, which refers to parameters themselves, and "
        "would not see that they are still on their way: use overlap_allgather=False"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "_parameters" and any(_refers(each, awaited) for each in _flattened(value))
    ]


def _compile_faults(model: nn.Module) -> list[str]:
    """Compiled modules: their code reads parameters past every look-up."""
    return [
        f"{path or 'the model'} is compiled, and compiled code does not wait for parameters that are still on their "
        "way: use overlap_allgather=False"
        for path, module in model.named_modules()
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None
    ]


def _flattened(value: object) -> Iterable[object]:
    """What an attribute holds, one level deep."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else (value,)


def _refers(value: object, awaited: Container[Parameter]) -> bool:
    return isinstance(value, Parameter) and value in awaited
