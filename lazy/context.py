"""LazyInitContext: the block in which models are built without memory. What it builds is tensor.py."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from .materialize import materialize
from .pretrained import reading_lazily
from .tensor import LazyTensor, allocate

_CPU, _META = torch.device("cpu"), torch.device("meta")
_ops = torch.ops.aten
# What allocates memory, as torch's and transformers' constructors do for parameters. Numbers that are computed from
# others, as those of rotary embeddings, are few, and real at once.
_ALLOCATIONS = (
    _ops.empty.memory_format,
    _ops.empty_strided.default,
    _ops.full.default,
    _ops.ones.default,
    _ops.rand.default,
    _ops.rand.generator,
    _ops.randn.default,
    _ops.randn.generator,
    _ops.zeros.default,
)


class LazyInitContext(TorchDispatchMode):
    """Builds models without memory; `booster.boost` then makes real what each rank holds, and nothing else.

    Weights are those of a model that is built on the CPU without it, to the bit, and so is what is drawn next: every
    number is drawn twice, here to be forgotten and once more when it is needed. What `from_pretrained` finds in files
    is read from there, each rank its own slices; see pretrained.py.

    Example:
        with LazyInitContext():
            model = AutoModelForCausalLM.from_pretrained(folder)
        optimizer = AdamW(model.parameters())
        model, optimizer, *_ = booster.boost(model, optimizer)

    Args:
        default_device: where tensors are put once they are real, if nobody asks for another place; a plugin puts
            them on its own. None is the CPU.

    Raises:
        ValueError: when entered, if torch builds on another device than the CPU by default.
    """

    def __init__(self, default_device: torch.device | str | int | None = None) -> None:
        super().__init__()
        self.default_device = _CPU if default_device is None else torch.device(default_device)
        self._left = list[ExitStack]()

    def __enter__(self) -> "LazyInitContext":
        if (device := torch.get_default_device()).type != "cpu":
            raise ValueError(
                f"LazyInitContext draws as a model that is built on the CPU, and torch's default device is "
                f"{device}: leave out torch.set_default_device, and torch.device around it; boosting moves the model"
            )
        with ExitStack() as stack:
            stack.enter_context(reading_lazily())
            super().__enter__()
            self._left.append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        with self._left.pop():
            super().__exit__(*error)

    def __torch_dispatch__(
        self, function: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is _ops.empty_like.default and args[0].is_meta and not isinstance(args[0], LazyTensor):
            function, args, kwargs = _like_outline(args[0], kwargs)
        if _allocates_weights(function, args, kwargs):
            return allocate(function, args, kwargs, device=self.default_device)
        return function(*args, **kwargs)

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Make a lazily built model real, whole, in place, where no booster does it; returns it.

        Args:
            module: the model. Other ones are left as they are.
            verbose: print how many tensors were made and how large they are.
        """
        return materialize(module, verbose=verbose)


def _like_outline(outline: Tensor, kwargs: dict[str, Any]) -> tuple[OpOverload, tuple, dict[str, Any]]:
    """The call that allocates what `empty_like` would, of a tensor that has a shape alone."""
    like = torch.empty_like(outline, **{**kwargs, "device": _META})
    given = {name: kwargs.get(name) for name in ("device", "pin_memory")}
    device = given["device"] or _META
    return (
        _ops.empty_strided.default,
        (like.size(), like.stride()),
        {**given, "device": device, "dtype": like.dtype},
    )


def _allocates_weights(function: OpOverload, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call allocates plain floating-point memory on the CPU."""
    if function not in _ALLOCATIONS or kwargs.get("pin_memory"):
        return False
    is_plain = kwargs.get("device") in (None, _CPU) and kwargs.get("layout") in (None, torch.strided)
    on_meta = {"device": _META, **({"generator": None} if "generator" in kwargs else {})}
    return is_plain and bool(function(*args, **{**kwargs, **on_meta}).is_floating_point())
