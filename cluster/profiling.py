"""Names in torch's profiler while one records.

Without a profiler a name costs one question to torch.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from .hooks import mark_internal
from .whereabouts import described_group

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def is_profiled() -> bool:
    """Return True while a profiler of torch records this thread."""
    return torch.autograd._profiler_enabled()


def named(name: str) -> AbstractContextManager[Any]:
    """Return a block with a name in the profile."""
    return record_function(name) if is_profiled() else nullcontext()


def named_in(group: dist.ProcessGroup | None, name: str) -> AbstractContextManager[Any]:
    """Return a block with the name of a collective and its group; for use while `is_profiled`."""
    return record_function(f"{name} {described_group(group)}")


def named_collective(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function that communicates in a group: a profile shows its name and the group. Not compiled."""

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.autograd._profiler_enabled():
            return function(*args, **kwargs)
        values = (*args, *kwargs.values())
        group = next((value for value in values if isinstance(value, dist.ProcessGroup)), None)
        with named_in(group, function.__name__.removeprefix("begin").lstrip("_")):
            return function(*args, **kwargs)

    return run


@contextmanager
def named_modules(model: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    """Show the forwards of some modules of a model in the profile, by their paths, while one records."""
    if not is_profiled():
        yield
        return
    paths = {module: path for path, module in model.named_modules()}
    with ExitStack() as stack:
        for module in modules:
            open_records: list[Any] = []

            def begin(
                module: nn.Module, args: Any, path: str = paths[module], records: list[Any] = open_records
            ) -> None:
                records.append(record_function(path))
                records[-1].__enter__()

            def end(module: nn.Module, args: Any, output: Any, records: list[Any] = open_records) -> None:
                records.pop().__exit__(None, None, None)

            for handle in (
                module.register_forward_pre_hook(mark_internal(begin), prepend=True),
                module.register_forward_hook(mark_internal(end), always_call=True),
            ):
                stack.callback(handle.remove)
        yield
