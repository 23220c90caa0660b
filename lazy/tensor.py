"""Tensors without memory that record the calls on them and are materialized later.

[Note: lazy tensors] A LazyTensor is a meta tensor of a subclass. torch therefore dispatches every call with one to
`record`, inside a LazyInitContext and after it, also through `.data`. The record of the future content is an attribute
of the (empty) storage. So views share it, and `parameter.data = ...` carries it along. Cutting a shard from a lazy
parameter is recorded like any other call; materializing then computes the unsharded tensor and keeps the shard.

A call that needs values (`item()`, `if tensor.any():`) gets them: they are computed and discarded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from ..cluster.device import cuda_device
from .recorded_calls import Geometry, OperatorCall, Read, Value, borrow, make

_CONTENT = "_echelon_content"
_CPU, _META = torch.device("cpu"), torch.device("meta")
_ops = torch.ops.aten
# Calls that overwrite all entries of their tensor, independent of the previous content.
_OVERWRITING = (
    _ops.copy_.default,
    _ops.fill_.Scalar,
    _ops.fill_.Tensor,
    _ops.normal_.default,
    _ops.uniform_.default,
    _ops.zero_.default,
)
# In-place calls that write nothing and only change the shape and strides of the tensor.
_RESHAPING = (
    _ops.squeeze_.default,
    _ops.squeeze_.dim,
    _ops.t_.default,
    _ops.transpose_.default,
    _ops.unsqueeze_.default,
)


@dataclass(frozen=True)
class Content:
    """The future content of a lazy tensor's memory, and its device."""

    value: Value
    device: torch.device


class LazyTensor(Tensor):
    """A tensor without memory that can be materialized; see [Note: lazy tensors]."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return record(function, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which the tensor is materialized."""
        return content_of(self).device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """False, since initializations skip meta tensors."""
        return False

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """True if the tensor will be materialized on the CPU."""
        return self.device == _CPU

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Record `Tensor.to`; for the meta device return a plain tensor without content.

        torch's own method would compare the target with the meta device instead of the future one.
        """
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device == _META:
            return torch.empty_like(self, dtype=dtype, device=_META)
        converted = super().to(dtype or self.dtype, copy=copy, memory_format=memory_format)
        if device in (None, self.device):
            return converted
        assert isinstance(converted, LazyTensor)
        storage = UntypedStorage(converted.untyped_storage().nbytes(), device="meta")
        _set_content(storage, Content(content_of(converted).value, device))
        return _wrapped(Geometry.of(converted).of_memory(storage))

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `to`."""
        return self.to(_CPU)

    def cuda(self, device: torch.device | int | str | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """See `to`."""
        return self.to(cuda_device(device))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Record `Tensor.__setitem__`. torch's own method would lose a number by moving it to the meta device first."""
        super().__setitem__(
            index, value if isinstance(value, Tensor) else torch.tensor(value, dtype=self.dtype)
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a lazily built tensor has no values to save or send: boost its model first, or materialize it by "
            "LazyInitContext.materialize(model)"
        )


def content_of(tensor: LazyTensor) -> Content:
    """Return the record of the future content of a lazy tensor's memory."""
    content: Content = getattr(tensor.untyped_storage(), _CONTENT)
    return content


def allocate(function: OpOverload, args: tuple, kwargs: dict[str, Any], *, device: torch.device) -> Tensor:
    """Return the lazy tensor of a call that allocates a tensor.

    Args:
        function, args, kwargs: the call.
        device: the device on which the tensor is materialized.
    """
    allocated = _returned(function, args, kwargs, device=device)
    assert isinstance(allocated, Tensor)
    return allocated


def lazily(tensor: Tensor) -> Tensor:
    """Return a lazy tensor with the content of an existing one (from a file, for example), which is never written."""
    storage = UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
    _set_content(storage, Content(Value(num_bytes=storage.nbytes(), existing=tensor), _CPU))
    return _wrapped(Geometry.of(tensor).of_memory(storage))


def record(function: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Record a call with lazy tensors and return its results: lazy tensors, or values if it needs values.

    Raises:
        ValueError: the call cannot be recorded.
    """
    written = _written(function, args, kwargs)
    lazy = [tensor for tensor in written if isinstance(tensor, LazyTensor)]
    if not written:
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyTensor))
        return _returned(function, args, kwargs, device=kwargs.get("device") or first.device)
    if not lazy:
        return _computed(function, args, kwargs)
    if function in _RESHAPING:
        with torch._C._DisableTorchDispatch():
            return function(*args, **kwargs)
    writes_one_argument = len(written) == 1 and any(argument is lazy[0] for argument in args)
    changes_geometry = torch.Tag.inplace_view in function.tags
    if not writes_one_argument or changes_geometry:
        raise ValueError(
            f"lazy initialization cannot record {function} on a tensor of shape {tuple(lazy[0].shape)}: build the "
            "model without LazyInitContext, or do this after LazyInitContext.materialize(model)"
        )
    _write(function, args, kwargs, lazy[0])
    return lazy[0] if function._schema.returns else None


def _written(function: OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes to."""
    arguments = function._schema.arguments
    values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    aliases = {argument.name: argument.alias_info for argument in arguments}
    names = [name for name, alias in aliases.items() if alias is not None and alias.is_write]
    leaves = tree_leaves([values[name] for name in names if name in values])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _write(function: OpOverload, args: tuple, kwargs: dict[str, Any], target: LazyTensor) -> None:
    """Record a call that writes to a lazy tensor."""
    storage, content = target.untyped_storage(), content_of(target)
    before = content.value
    call = _call(function, args, kwargs, written=storage)
    is_overwriting = function in _OVERWRITING
    if call.generator_state is not None:
        scratch = UntypedStorage(before.num_bytes, device="cpu") if is_overwriting else make(before)

        def tensor_of(lazy: LazyTensor) -> Tensor:
            is_target = lazy.untyped_storage() is storage
            return Geometry.of(lazy).of_memory(scratch) if is_target else real(lazy)

        _computed(function, args, kwargs, tensor_of)  # advances the generator for the next call
    reads_itself = sum(read.value is None for read in call.reads()) > 1
    covers_storage = target.is_contiguous() and target.numel() * target.itemsize == before.num_bytes
    overwrites_all = is_overwriting and covers_storage and not reads_itself
    value = Value(num_bytes=before.num_bytes, call=call, before=None if overwrites_all else before)
    _set_content(storage, Content(value, content.device))


def _returned(function: OpOverload, args: tuple, kwargs: dict[str, Any], *, device: torch.device) -> Any:
    """Record a call without writes and return its results; some may be views."""
    input_storages: list[UntypedStorage] = []

    def outline(tensor: Tensor) -> Tensor:
        """Return a plain meta tensor of this geometry; a lazy tensor's shares its storage."""
        if isinstance(tensor, LazyTensor):
            return Geometry.of(tensor).of_memory(tensor.untyped_storage())
        shape = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
        input_storages.append(shape.untyped_storage())
        return shape

    outline_args, outline_kwargs = tree_map_only(Tensor, outline, (args, kwargs))
    outline_kwargs |= {name: of_meta for name, of_meta in _ON_META.items() if kwargs.get(name) is not None}
    try:
        returned = function(*outline_args, **outline_kwargs)
    except RuntimeError:  # the call needs values, its shape depends on values, or it is invalid
        return _computed(function, args, kwargs)
    outlines = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
    storages = [outlined.untyped_storage() for outlined in outlines]
    returns_input = any(storage is other for storage in storages for other in input_storages)
    if not outlines or returns_input:  # no tensors, or memory of an input that is not lazy
        return _computed(function, args, kwargs)
    if device == _META:
        return returned
    call = _call(function, args, kwargs)
    if call.generator_state is not None:
        _computed(function, args, kwargs)  # advances the generator for the next call
    for index, (outlined, storage) in enumerate(zip(outlines, storages, strict=True)):
        if not hasattr(storage, _CONTENT):  # else it is a view
            value = Value(num_bytes=storage.nbytes(), call=call, returned=(index, Geometry.of(outlined)))
            _set_content(storage, Content(value, device))
    return tree_map_only(Tensor, _wrapped, returned)


# Replacements of the device and generator arguments when a call runs on the meta device.
_ON_META = {"device": _META, "generator": None}


def real(tensor: LazyTensor) -> Tensor:
    """Compute the values of a lazy tensor, on the CPU. Only for reading: they may be memory of a file."""
    return Geometry.of(tensor).of_memory(borrow(content_of(tensor).value))


def _computed(
    function: OpOverload,
    args: tuple,
    kwargs: dict[str, Any],
    values_of: Callable[[LazyTensor], Tensor] = real,
) -> Any:
    """Run a call with the values of its lazy arguments and return the results."""
    real_args, real_kwargs = tree_map_only(LazyTensor, values_of, (args, kwargs))
    return function(*real_args, **real_kwargs)


def _call(
    function: OpOverload, args: tuple, kwargs: dict[str, Any], written: UntypedStorage | None = None
) -> OperatorCall:
    """Return the record of a call on the CPU; must be called before the call draws random numbers."""

    def recorded(tensor: Tensor) -> Any:
        """Return a reference to the content of a lazy tensor, or a copy of a real one."""
        if isinstance(tensor, LazyTensor):
            storage = tensor.untyped_storage()
            return Read(None if storage is written else content_of(tensor).value, Geometry.of(tensor))
        if tensor.is_meta:
            raise ValueError(
                f"{function} was called with a lazily built tensor and one on the meta device, which has no values: "
                "build all parts of a model inside of LazyInitContext and none by torch.device('meta')"
            )
        return tensor.detach().to(_CPU, copy=True)  # the original may change later

    generator = kwargs.get("generator") or torch.default_generator
    is_random = torch.Tag.nondeterministic_seeded in function.tags
    recorded_args, recorded_kwargs = tree_map_only(Tensor, recorded, (args, dict(kwargs)))
    on_cpu = {"device": _CPU, "generator": None}
    return OperatorCall(
        function=function,
        args=recorded_args,
        kwargs=recorded_kwargs | {name: on_cpu[name] for name in on_cpu if kwargs.get(name) is not None},
        generator_state=generator.get_state() if is_random else None,
    )


def _set_content(storage: UntypedStorage, content: Content) -> None:
    setattr(storage, _CONTENT, content)


def _wrapped(outline: Tensor) -> Tensor:
    """Return a meta tensor as a lazy tensor of the same storage."""
    wrapped: Tensor = Tensor._make_subclass(LazyTensor, outline)
    return wrapped
