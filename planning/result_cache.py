"""Results of operations on fake tensors, kept by the forms of their inputs.

This takes the place of torch's own cache of results, which compares 17 properties of every tensor: with it a trace of
Qwen3-MoE took twice as long.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ..cluster.traffic import tensors_of

_GROUPED = torch.ops.aten._grouped_mm.default


class _Form(NamedTuple):
    """The properties of a strided fake tensor on which the forms of results depend."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def make(self, base: FakeTensor, *, is_view: bool) -> FakeTensor:
        """Return a view of another tensor that has this form, or a new tensor in the mode of that one."""
        with unset_fake_temporarily():
            if is_view:
                meta = torch.empty(0, dtype=self.dtype, device="meta")
                meta.set_(base.untyped_storage(), self.offset, self.shape, self.stride)
            else:
                meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(base.fake_mode, meta, self.device)


class _Results(NamedTuple):
    """The results of an operation.

    Args:
        outputs: the form of each, with True for a view of the first input, False for a new tensor.
        container: the class of a list of results; None for one tensor.
    """

    outputs: list[tuple[_Form, bool]]
    container: type | None


class _NoForm(Exception):
    """A value is no strided fake tensor, or has more properties than a form."""


class ResultCache:
    """The results of operations that change no input, and return new tensors or views of their first input."""

    def __init__(self) -> None:
        self._known: dict[Any, _Results | None] = {}  # None: an operation whose results cannot be made again

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, or make results of the forms that it returned for inputs of these forms."""
        inputs = tensors_of(args)
        base = inputs[0] if inputs else None
        if not isinstance(base, FakeTensor) or func.namespace != "aten" or func._schema.is_mutable:
            return func(*args, **kwargs)
        if func is _GROUPED and base.dtype != torch.bfloat16:
            return _grouped_product(args, kwargs)
        try:
            key = (func, torch.get_default_dtype(), _key(args), _key(kwargs.items()))
        except _NoForm:
            return func(*args, **kwargs)
        if (known := self._known.get(key)) is not None:
            made = [form.make(base, is_view=is_view) for form, is_view in known.outputs]
            return made[0] if known.container is None else known.container(made)
        result = func(*args, **kwargs)
        if key not in self._known:
            self._known[key] = _results(result, base, inputs)
        return result


def _grouped_product(args: Any, kwargs: Any) -> Tensor:
    """Return the product of experts' rows in another format than bfloat16: torch computes it, but has no form of it."""
    with unset_fake_temporarily():
        product: Tensor = _GROUPED(*map(_as_bfloat16, args), **{**kwargs, "out_dtype": None})
        form = torch.empty_strided(product.shape, product.stride(), dtype=args[0].dtype, device="meta")
    return FakeTensor(args[0].fake_mode, form, args[0].fake_device)


def _as_bfloat16(value: Any) -> Any:
    """Return a meta tensor of this form, in bfloat16 if it has fractions; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
    return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return a value that is equal for inputs from which results of equal forms follow."""
    key: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            key.append(_form(value))
        elif isinstance(value, list | tuple):
            key.append(_key(value))
        else:
            key += (type(value), value)  # 1, 1.0 and True are equal
    return tuple(key)


def _form(tensor: Any) -> _Form:
    if (
        type(tensor) is not FakeTensor
        or tensor.constant is not None  # its value would be lost
        or tensor.layout is not torch.strided
        or tensor.dtype.is_complex  # may be conjugated
    ):
        raise _NoForm
    offset = int(tensor.storage_offset())
    return _Form(tensor.shape, tensor.stride(), offset, tensor.dtype, tensor.fake_device)


def _results(result: Any, base: FakeTensor, inputs: list[Tensor]) -> _Results | None:
    """Return the results of an operation; None if one is neither new nor a view of `base`."""
    container = type(result) if isinstance(result, list | tuple) else None
    used = {tensor.untyped_storage() for tensor in inputs}
    outputs = []
    for tensor in [result] if container is None else result:
        try:
            form = _form(tensor)
        except _NoForm:
            return None
        storage = tensor.untyped_storage()
        is_view = storage is base.untyped_storage()
        size = form.make(base, is_view=is_view).untyped_storage().nbytes()
        if any(tensor is value for value in inputs) or (
            not is_view and (storage in used or storage.nbytes() != size)
        ):
            return None
        used.add(storage)
        outputs.append((form, is_view))
    return _Results(outputs, container)
