"""`LazyInitContext`, in which models are built and read from files without memory, and `materialize`, which ends that.

[Note: from_pretrained] transformers opens files, renames what it finds, converts it (experts one by one into one
tensor, for example), puts it into the model, initializes what is missing and ties what is tied. All that is left to it,
whatever its version: within the block it finds lazy tensors in files, so conversions are recorded and nothing is read.
Two functions that it looks up in one of its modules are exchanged for that, for the thread that is in the block, and
put back when it leaves, also by an error.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._ops import OpOverload
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten_with_path

from ..cluster.errors import raise_errors
from .files import open_tensors
from .replay import Geometry, make
from .tensor import LazyTensor, allocate, content_of, lazily

_CPU, _META = torch.device("cpu"), torch.device("meta")
_ops = torch.ops.aten
# What allocates memory, as torch's and transformers' constructors do for parameters. Numbers that are computed from
# others, as those of rotary embeddings, are few, and materialized at once.
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
_LOCAL = ("_parameters", "_buffers")


def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
    """Compute every lazily built tensor that a module holds, one after the other, in place; returns the module.

    Each becomes a plain tensor, and stays the same object: optimizers and ties go on holding it. Modules that were not
    built lazily are left as they are. Communicates nothing.

    Args:
        module: a model; parameters, buffers and other tensors of all its modules are found.
        verbose: print how many tensors were materialized, and how large they are together.

    Raises:
        RuntimeError: it is called inside of LazyInitContext.
        ValueError: tensors cannot be materialized; names all of them. None was.
    """
    if isinstance(torch.empty(1), LazyTensor):
        raise RuntimeError(
            "a lazily built model is materialized, or boosted, after the block of LazyInitContext"
        )
    tensors = list(_tensors_of(module))
    lazy = {name: tensor for name, tensor in tensors if isinstance(tensor, LazyTensor)}
    if lazy:
        raise_errors([error for name, tensor in tensors for error in _errors(name, tensor)])
    made: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
    for name, tensor in lazy.items():
        _replace(name, tensor, made)
    if verbose:
        num_bytes = sum(real.nbytes() for _, real in made.values())
        print(f"{len(lazy)} lazily built tensors were materialized: {num_bytes / 2**20:.1f} MiB")
    return module


class LazyInitContext(TorchDispatchMode):
    """Builds models without memory; `booster.boost` then materializes the part of each rank, and nothing else.

    Weights are those of a model that is built on the CPU without it, to the bit, and so is what is drawn next: every
    number is drawn twice, here to be forgotten and once more when it is needed. What `from_pretrained` finds in files
    is read from there, each rank its own slices; see [Note: from_pretrained].

    Example:
        with LazyInitContext():
            model = AutoModelForCausalLM.from_pretrained(folder)
        optimizer = AdamW(model.parameters())
        model, optimizer, *_ = booster.boost(model, optimizer)

    Args:
        default_device: of materialized tensors, if nobody asks for another place; a plugin puts them on its own.
            None is the CPU.

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

    materialize = staticmethod(materialize)


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
    """True for a call that allocates plain floating-point memory on the CPU."""
    if function not in _ALLOCATIONS or kwargs.get("pin_memory"):
        return False
    is_plain = kwargs.get("device") in (None, _CPU) and kwargs.get("layout") in (None, torch.strided)
    on_meta = {"device": _META, **({"generator": None} if "generator" in kwargs else {})}
    return is_plain and bool(function(*args, **{**kwargs, **on_meta}).is_floating_point())


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a module or one below it holds, once, by the first of its names."""
    seen = set()
    for path, each in module.named_modules():
        for keys, leaf in tree_flatten_with_path(vars(each))[0]:
            if isinstance(leaf, Tensor) and id(leaf) not in seen:
                seen.add(id(leaf))
                names = [str(getattr(key, "key", getattr(key, "idx", key))) for key in keys]
                yield ".".join([*filter(None, [path]), *(name for name in names if name not in _LOCAL)]), leaf


def _errors(name: str, tensor: Tensor) -> list[str]:
    """Errors of a tensor of a lazily built model that cannot be materialized."""
    if not isinstance(tensor, LazyTensor):
        return [f"{name} is on the meta device and holds nothing"] if tensor.is_meta else []
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        return [f"{name} has hooks, which would be lost: register them once the model is materialized"]
    return []


def _replace(name: str, tensor: LazyTensor, made: dict[int, tuple[UntypedStorage, UntypedStorage]]) -> None:
    """Replace a lazy tensor by a materialized one in the same object.

    Args:
        name: for errors.
        tensor: the tensor.
        made: the memory that is materialized already, with the lazy one of that content, by the id of the latter.
    """
    lazy, content = tensor.untyped_storage(), content_of(tensor)
    if id(lazy) not in made:
        try:
            made[id(lazy)] = lazy, make(content.value).to(device=content.device)
        except RuntimeError as error:
            raise RuntimeError(f"{name} could not be materialized: {error}") from error
    plain = Geometry.of(tensor).of_memory(made[id(lazy)][1])
    is_parameter = isinstance(tensor, Parameter)
    real = (
        Parameter(plain, tensor.requires_grad) if is_parameter else plain.requires_grad_(tensor.requires_grad)
    )
    vars(real).update({key: value for key, value in vars(tensor).items() if key != "_is_param"})
    try:
        torch.utils.swap_tensors(tensor, real)
    except RuntimeError as error:
        raise RuntimeError(
            f"{name} could not be materialized, since something besides its module refers to it, perhaps a view: "
            f"{error}"
        ) from error


class _LazySlice:
    """A tensor of a safetensors file until transformers reads it, which then gets a lazy tensor."""

    def __init__(self, outline: Any, tensor: Tensor) -> None:
        self._outline = outline
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outline, name)


class _LazyFile:
    """A safetensors file as transformers opens it, of which the tensors are lazy."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def get_slice(self, name: str) -> _LazySlice:
        """See `_LazySlice`."""
        return _LazySlice(self._file.get_slice(name), self.get_tensor(name))

    def get_tensor(self, name: str) -> Tensor:
        """A lazy one."""
        with _disable_current_modes():
            return lazily(self._file.get_tensor(name))

    def __enter__(self) -> "_LazyFile":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def reading_lazily() -> Iterator[None]:
    """Let `from_pretrained` find lazy tensors in files; see [Note: from_pretrained]."""
    from transformers import modeling_utils

    thread = threading.get_ident()
    opened, loaded = modeling_utils.safe_open, modeling_utils.load_state_dict

    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        file = opened(filename, *args, **kwargs)
        if threading.get_ident() != thread:
            return file
        refuse_quantized(Path(filename).parent)
        return _LazyFile(file)

    def load_state_dict(checkpoint_file: Any, map_location: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        path = Path(checkpoint_file)
        if threading.get_ident() != thread or str(map_location) != "cpu" or path.suffix == ".safetensors":
            return loaded(checkpoint_file, map_location, *args, **kwargs)
        refuse_quantized(path.parent)
        return {name: lazily(tensor) for name, tensor in open_tensors(path).items()}

    modeling_utils.safe_open, modeling_utils.load_state_dict = safe_open, load_state_dict
    try:
        yield
    finally:
        modeling_utils.safe_open, modeling_utils.load_state_dict = opened, loaded


def refuse_quantized(folder: Path) -> None:
    """Raise for a folder whose config.json says that its weights are quantized.

    Raises:
        ValueError: they are; says by what.
    """
    path = folder / "config.json"
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if found := config.get("quantization_config"):
        method = found.get("quant_method") or "an unknown method"
        raise ValueError(
            f"the weights in {folder} are quantized ({method}): quantized weights can neither be split nor trained, "
            "so use the folder of the model before it was quantized, or dequantize it with transformers and save it"
        )
