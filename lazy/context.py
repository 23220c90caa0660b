"""`LazyInitContext` builds models, or reads them from files, without memory; `materialize` then allocates it.

[Note: from_pretrained] transformers opens files, renames and converts their tensors (several experts into one tensor,
for example), puts them into the model, initializes missing weights and ties weights. Its own code does all of this, in
every version. Within the block it gets lazy tensors from files, so conversions are recorded and nothing is read. For
this, two functions that it looks up in one of its modules are replaced, with an effect only in the thread of the block.
They are restored at the end of the block, also after an error.
"""

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

from ..cluster.errors import naming_arguments, raise_errors
from ..cluster.transformers_api import file_readers, reading_files
from .files import open_tensors, read_json
from .recorded_calls import Geometry, make
from .tensor import LazyTensor, allocate, content_of, lazily

_CPU, _META = torch.device("cpu"), torch.device("meta")
_ops = torch.ops.aten
# Calls by which the constructors of torch and transformers allocate parameters. Tensors that are computed from others,
# such as those of rotary embeddings, are small and computed at once.
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
    """Materialize all lazy tensors of a module, one by one, in place, and return the module.

    Each becomes a plain tensor but remains the same object, so references from optimizers and tied modules stay valid.
    Modules that were not built lazily are unchanged. Communicates nothing.

    Args:
        module: a model; parameters, buffers and other tensor attributes of all its modules are materialized.
        verbose: print the number of materialized tensors and their total size.

    Raises:
        RuntimeError: the call is inside a LazyInitContext, or a tensor cannot be computed or replaced.
        ValueError: tensors cannot be materialized; names all of them, before any is materialized.
    """
    if isinstance(torch.empty(1), LazyTensor):
        raise RuntimeError(
            "a lazily built model is materialized, or boosted, after the block of LazyInitContext"
        )
    tensors = list(_tensors_of(module))
    lazy = {name: tensor for name, tensor in tensors if isinstance(tensor, LazyTensor)}
    if lazy:
        raise_errors([error for name, tensor in tensors for error in _errors(name, tensor)])
    materialized: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
    for name, tensor in lazy.items():
        _replace(name, tensor, materialized)
    if verbose:
        num_bytes = sum(real.nbytes() for _, real in materialized.values())
        print(f"{len(lazy)} lazily built tensors were materialized: {num_bytes / 2**20:.1f} MiB")
    return module


class LazyInitContext(TorchDispatchMode):
    """Build models without memory; `booster.boost` then materializes only the local shards of each rank.

    Weights are bitwise equal to those of a model built on the CPU without this context, and so are later random
    numbers: every number is drawn twice, once in the context, where it is discarded, and again when it is needed.
    Weights of `from_pretrained` are read from the files when needed, on each rank only its own slices; see
    [Note: from_pretrained].

        with LazyInitContext():
            model = AutoModelForCausalLM.from_pretrained(folder)
        optimizer = AdamW(model.parameters())
        model, optimizer, *_ = booster.boost(model, optimizer)

    Args:
        default_device: device of materialized tensors, unless they are moved by `to`; None is the CPU. A plugin moves
            them to its own device.

    Raises:
        ValueError: on entry, if torch's default device is not the CPU.
    """

    @naming_arguments
    def __init__(self, default_device: torch.device | str | int | None = None) -> None:
        super().__init__()
        self.default_device = _CPU if default_device is None else torch.device(default_device)
        self._left = list[ExitStack]()

    def __enter__(self) -> "LazyInitContext":
        device = torch.get_default_device()
        if device.type != "cpu":
            raise ValueError(
                f"torch's default device is {device}, but LazyInitContext draws values as on the CPU: leave out "
                "torch.set_default_device, and torch.device around it; boosting moves the model"
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
    """Return the allocating call that is equivalent to `empty_like` of a meta tensor."""
    like = torch.empty_like(outline, **{**kwargs, "device": _META})
    options = {name: kwargs.get(name) for name in ("device", "pin_memory")}
    device = options["device"] or _META
    return (
        _ops.empty_strided.default,
        (like.size(), like.stride()),
        {**options, "device": device, "dtype": like.dtype},
    )


def _allocates_weights(function: OpOverload, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return True if a call allocates a dense floating-point tensor on the CPU."""
    if function not in _ALLOCATIONS or kwargs.get("pin_memory"):
        return False
    is_plain = kwargs.get("device") in (None, _CPU) and kwargs.get("layout") in (None, torch.strided)
    on_meta = {"device": _META, **({"generator": None} if "generator" in kwargs else {})}
    return is_plain and bool(function(*args, **{**kwargs, **on_meta}).is_floating_point())


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a module and its submodules once, with its first name."""
    seen = set()
    for path, submodule in module.named_modules():
        for keys, leaf in tree_flatten_with_path(vars(submodule))[0]:
            if isinstance(leaf, Tensor) and id(leaf) not in seen:
                seen.add(id(leaf))
                names = [path] if path else []
                names += [str(getattr(key, "key", getattr(key, "idx", key))) for key in keys]
                yield ".".join(name for name in names if name not in _LOCAL), leaf


def _errors(name: str, tensor: Tensor) -> list[str]:
    """Return errors if a tensor of a lazily built model cannot be materialized."""
    if not isinstance(tensor, LazyTensor):
        return [f"{name} is on the meta device and has no values"] if tensor.is_meta else []
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        return [f"{name} has hooks, which would be lost: register them once the model is materialized"]
    return []


def _replace(
    name: str, tensor: LazyTensor, materialized: dict[int, tuple[UntypedStorage, UntypedStorage]]
) -> None:
    """Replace a lazy tensor by a materialized one in the same object.

    Args:
        name: name of the tensor, for errors.
        tensor: the tensor.
        materialized: pairs of a lazy storage and its materialized one, by the id of the lazy storage; extended here.
    """
    lazy, content = tensor.untyped_storage(), content_of(tensor)
    if id(lazy) not in materialized:
        try:
            materialized[id(lazy)] = lazy, make(content.value).to(device=content.device)
        except RuntimeError as error:
            raise RuntimeError(f"{name} could not be materialized: {error}") from error
    plain = Geometry.of(tensor).of_memory(materialized[id(lazy)][1])
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
    """A slice object of safetensors that yields a lazy tensor when transformers reads it."""

    def __init__(self, outline: Any, tensor: Tensor) -> None:
        self._outline = outline
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outline, name)


class _LazyFile:
    """An open safetensors file whose tensors are lazy."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def get_slice(self, name: str) -> _LazySlice:
        """See `_LazySlice`."""
        return _LazySlice(self._file.get_slice(name), self.get_tensor(name))

    def get_tensor(self, name: str) -> Tensor:
        """Return a lazy tensor."""
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
    """Make `from_pretrained` get lazy tensors from files within the block; see [Note: from_pretrained]."""
    thread = threading.get_ident()
    opened, loaded = file_readers()

    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        """Open a safetensors file, in this thread with lazy tensors."""
        file = opened(filename, *args, **kwargs)
        if threading.get_ident() != thread:
            return file
        refuse_quantized(Path(filename).parent)
        return _LazyFile(file)

    def load_state_dict(checkpoint_file: Any, map_location: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        """Load a file of torch's, in this thread and to the CPU with lazy tensors."""
        path = Path(checkpoint_file)
        if threading.get_ident() != thread or str(map_location) != "cpu" or path.suffix == ".safetensors":
            return loaded(checkpoint_file, map_location, *args, **kwargs)
        refuse_quantized(path.parent)
        return {name: lazily(tensor) for name, tensor in open_tensors(path).items()}

    with reading_files(safe_open, load_state_dict):
        yield


def refuse_quantized(folder: Path) -> None:
    """Refuse a folder whose config.json declares quantized weights.

    Raises:
        ValueError: the weights are quantized; names the method. Or the file is damaged.
    """
    path = folder / "config.json"
    if not path.is_file():
        return
    if quantization := read_json(path).get("quantization_config"):
        method = quantization.get("quant_method") or "an unknown method"
        raise ValueError(
            f"the weights in {folder} are quantized ({method}) and can be neither sharded nor trained: use the folder "
            "of the model before it was quantized, or dequantize it with transformers and save it"
        )
