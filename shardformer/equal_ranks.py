"""Checks that ranks have equal models before sharding, and equal inputs at each call."""

import inspect
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..cluster.agreement import MODES, MODES_ADVICE, require_equal_call
from ..cluster.forward_random import torch_state
from ..cluster.gathering import gather_integers
from ..cluster.hashes import batch_hash
from ..lazy.recorded_calls import fingerprint
from ..lazy.tensor import LazyTensor, content_of

SAMPLE = 64  # about as many values of each tensor are compared


def require_equal_models(model: nn.Module, *groups: ProcessGroup) -> None:
    """Require equal models on all ranks: code, names, shapes and a sample of values. One all-gather over each group.

    For a lazy tensor the recorded initialization is compared, which determines its values.

    Args:
        model: the full model, not yet sharded.
        groups: axes of a grid, compared one after the other; without any, the world.

    Raises:
        ValueError: the model of a rank differs; raised on every rank of the grid.
    """
    sample = {name: _sample(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    shapes = {name: torch.tensor(tensor.shape) for name, tensor in model.named_parameters()}
    local_codes = batch_hash(_code_of_classes(model)), batch_hash([shapes, sample])
    differing: list[list[int]] = [[] for _ in local_codes]  # ranks
    for group in groups or (None,):
        # Includes the result of the previous axis: otherwise this rank would raise while the next axis waits for it.
        flags = (int(bool(ranks)) for ranks in differing)
        columns = [*zip(*gather_integers((*local_codes, *flags), group), strict=True)]
        differing = [
            ranks or [rank for rank, code in enumerate(codes) if has_differing[rank] or code != codes[0]]
            for ranks, codes, has_differing in zip(differing, columns[:2], columns[2:], strict=True)
        ]
    other_code, other_values = differing
    if other_code:
        raise ValueError(
            f"the code of the model's classes on rank(s) {other_code} differs from that of rank 0: install the same "
            "releases on every node, give every node the same files of a model with code of its own "
            "(trust_remote_code), and replace methods on all ranks alike"
        )
    if other_values:
        raise ValueError(
            f"the model of rank(s) {other_values} differs from that of rank 0: build it on every rank from the same "
            "config, seed or checkpoint (launch_from_torch(seed=...) seeds all ranks equally)"
        )


_SEED = "launch_from_torch(seed=...) seeds all ranks equally"
_EQUAL_INPUTS = (
    f"give equal batches (ShardFormer.shard_dataset does), draw tokens from equal random states ({_SEED})"
)
_EQUAL_RANDOM_STATES = f"seed them equally ({_SEED}), or set the model's dropout to 0"


def compare_inputs(model: nn.Module, group: ProcessGroup) -> None:
    """Add a hook that compares the inputs of every call over the tensor axis. All-gather of three integers per call.

    With different batches or sampled tokens, all-reduces would mix results of different inputs. In training the
    random states are compared too, if the model has dropout. A call with differences raises ValueError on every rank;
    so does a call inside a DistributedDataParallel over the axis.
    """
    has_dropout = _has_dropout(model)

    def compare_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: compare inputs, mode and random states over the tensor axis."""
        _refuse_average(group)
        random = _random_hash(module) if module.training and has_dropout else 0
        codes = {
            "the inputs": (batch_hash(tensors_of_call(args, kwargs)), _EQUAL_INPUTS),
            MODES: (int(module.training), MODES_ADVICE),
            "the random states": (random, _EQUAL_RANDOM_STATES),
        }
        require_equal_call(codes, group, "the tensor axis")

    model.register_forward_pre_hook(compare_call, with_kwargs=True)


def _refuse_average(group: ProcessGroup) -> None:
    """Raise ValueError if torch's DistributedDataParallel calls the model over ranks of the tensor axis.

    It has overwritten the shards of all its ranks by those of one.
    """
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None:
        return
    axis = set(dist.get_process_group_ranks(group))
    averaged = set(dist.get_process_group_ranks(ddp.process_group))
    if len(axis & averaged) > 1:
        raise ValueError(
            f"torch's DistributedDataParallel overwrote the shards of {sorted(averaged)} by one rank's, "
            f"though {sorted(axis & averaged)} have different ones: build and shard the model anew without "
            "it (ShardConfig(data_parallel_size=...) averages over replicas), or give it a process_group of "
            "ranks with equal shards. transformers' Trainer wraps every model in it: train in a loop of your "
            "own"
        )


def tensors_of_call(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensor arguments of a call, keyword arguments with their names.

    Other objects are left out: a cache or an encoder's output is computed, and may differ in its last bits.
    """
    by_position: list[Any] = [[value for value in args if isinstance(value, Tensor)]]
    return by_position + [[name, value] for name, value in kwargs.items() if isinstance(value, Tensor)]


def has_replaced_forward(module: nn.Module) -> bool:
    """Return True if this one module has another forward than its class."""
    return "forward" in vars(module)


def _code_of_classes(model: nn.Module) -> list[Any]:
    """Return names and hashes of the bytecode of all methods that the modules of a model have from others than torch.

    Also the paths of modules whose forward a script has replaced.
    """
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    methods = [
        (kind.__qualname__, name, method)
        for kind in kinds
        if not kind.__module__.startswith(("torch.", "builtins"))
        for name, method in sorted(vars(kind).items())
        if inspect.isfunction(method)
    ]
    replaced = [path for path, module in model.named_modules() if has_replaced_forward(module)]
    return [replaced, *([*names, *map(_code_hash, _codes(method))] for *names, method in methods)]


def _codes(method: FunctionType) -> list[CodeType]:
    """Return the code of a method and, if it is another one, of what it wraps."""
    functions = dict.fromkeys((method, inspect.unwrap(method)))
    return [function.__code__ for function in functions if inspect.isfunction(function)]


@cache  # code is immutable
def _code_hash(code: CodeType) -> int:
    constants = [_code_hash(value) if isinstance(value, CodeType) else value for value in code.co_consts]
    return batch_hash([code.co_code, code.co_names, constants])


def _sample(tensor: Tensor) -> Tensor | int:
    """Return about `SAMPLE` evenly spaced values of a tensor; of a lazy one the hash of its initialization."""
    if isinstance(tensor, LazyTensor):
        return fingerprint(content_of(tensor).value)
    return tensor.detach().reshape(-1)[:: max(tensor.numel() // SAMPLE, 1)]


def _has_dropout(model: nn.Module) -> bool:
    """Return True if a model has dropout: a module, or a positive number with "drop" in its name."""
    owners: list[Any] = [model.config, *model.modules()] if hasattr(model, "config") else [*model.modules()]
    if any(isinstance(owner, nn.modules.dropout._DropoutNd) and owner.p > 0 for owner in owners):
        return True
    settings = (setting for owner in owners for setting in vars(owner).items())
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in settings)


def _random_hash(model: nn.Module) -> int:
    """Return a hash of torch's random states on the CPU and on the model's device."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return batch_hash([state for state in torch_state(device) if state is not None])
