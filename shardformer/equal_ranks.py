"""Comparison of models before they are split, and of inputs at each call, over the ranks that must have them alike."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..cluster.agree import batch_hash, differing_ranks, gather_integers
from ..cluster.random import torch_state
from ..lazy.replay import fingerprint
from ..lazy.tensor import LazyTensor, content_of

SAMPLE = 64  # values of each tensor that are compared


def require_equal_models(model: nn.Module, *groups: ProcessGroup) -> None:
    """All ranks must give one and the same model: names, shapes and a sample of the values. All-gather over each group.

    Of a lazily built tensor it is compared what was recorded: all that its values follow from.

    Args:
        model: whole, not yet split.
        groups: axes of a grid, whose ranks are compared along one after the other; none is the world.

    Raises:
        ValueError: some rank's differs; on every rank of the grid.
    """
    sample = {name: _sample(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    shapes = {name: torch.tensor(tensor.shape) for name, tensor in model.named_parameters()}
    own, differing = batch_hash([shapes, sample]), list[int]()
    for group in groups or (None,):
        # With what an earlier axis found, or this rank would raise and those of the next axis wait for it.
        found = gather_integers((own, int(bool(differing))), group)
        differing = differing or [
            rank for rank, (code, is_apart) in enumerate(found) if is_apart or code != found[0][0]
        ]
    if differing:
        raise ValueError(
            f"the model of rank(s) {differing} differs from that of rank 0: build it on every rank from the same "
            "config, seed or checkpoint (launch_from_torch(seed=...) seeds all ranks equally)"
        )


_SEED = "launch_from_torch(seed=...) seeds all ranks equally"
# What a call compares, and what to do where it differs.
_OF_A_CALL = (
    (
        "the inputs",
        f"give equal batches (ShardFormer.shard_dataset does), draw tokens from equal random states ({_SEED})",
    ),
    ("the modes (training or evaluation)", "call model.train() and model.eval() on all ranks alike"),
    ("the random states", f"seed them equally ({_SEED}), or set the model's dropout to 0"),
)


def compare_inputs(model: nn.Module, group: ProcessGroup) -> None:
    """Let every call of a split model compare its inputs over the tensor axis, by a hook. All-gather of a number each.

    Ranks with different batches, or that drew different tokens, would each add their own part to sums of the others'.
    In training the random states are compared too, where the model drops at random. A call then raises ValueError, on
    every rank; so it does within a DistributedDataParallel over the axis.
    """
    drops = _drops(model)

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        _refuse_average(group)
        random = _random_hash(module) if module.training and drops else 0
        found = gather_integers(
            (batch_hash(tensors_of_call(args, kwargs)), int(module.training), random), group
        )
        for place, (what, advice) in enumerate(_OF_A_CALL):
            if differing := differing_ranks(found, place):
                raise ValueError(
                    f"{what} of rank(s) {differing} of the tensor axis differ from those of its first rank, and all of "
                    f"them compute one model: {advice}"
                )

    model.register_forward_pre_hook(before, with_kwargs=True)


def require_equal_inputs(
    args: tuple, kwargs: dict[str, Any], group: ProcessGroup, axis: str, *, drawn: int, differs: bool
) -> tuple[int, bool]:
    """Raise ValueError on every rank of a group unless all call a model with the same tensors. All-gather of numbers.

    Args:
        args, kwargs: of the call.
        group: ranks that compute one model.
        axis: what they are, in the words of the mesh.
        drawn: by this rank, for the random numbers of the call.
        differs: whether other ranks of this one's model are known to have drawn another number.

    Returns:
        The number that the first rank of the group drew, and whether any rank drew another one.
    """
    own = batch_hash(tensors_of_call(args, kwargs)), drawn, int(differs)
    found = gather_integers(own, group)
    if differing := differing_ranks(found):
        raise ValueError(
            f"the inputs of rank(s) {differing} of axis {axis} differ from those of its first rank, and all of them "
            "compute one model: give them equal batches (booster.plugin.prepare_dataloader does)"
        )
    return found[0][1], any(flag for _, _, flag in found) or bool(differing_ranks(found, 1))


def _refuse_average(group: ProcessGroup) -> None:
    """Refuse a call through torch's DistributedDataParallel over ranks of the tensor axis, whose shards differ."""
    around = DistributedDataParallel._get_active_ddp_module()
    if around is None:
        return
    axis, averaged = (set(dist.get_process_group_ranks(each)) for each in (group, around.process_group))
    if len(axis & averaged) > 1:
        raise ValueError(
            f"torch's DistributedDataParallel around this model gave the shards of one rank to all of "
            f"{sorted(averaged)}, of which {sorted(axis & averaged)} hold different ones: build and split it anew and "
            "leave it out (ShardConfig(data_parallel_size=...) averages over replicas), or give it the process_group "
            "of ranks that hold equal shards. transformers' Trainer puts it around every model: train in a loop"
        )


def tensors_of_call(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that a model is called with, by name where they have one.

    Tensors alone: a cache or an encoder's output differs in its last bits, and is made of inputs.
    """
    own: list[Any] = [[each for each in args if isinstance(each, Tensor)]]
    return own + [[name, each] for name, each in kwargs.items() if isinstance(each, Tensor)]


def _sample(tensor: Tensor) -> Tensor | int:
    if isinstance(tensor, LazyTensor):
        return fingerprint(content_of(tensor).value)
    return tensor.detach().reshape(-1)[:: max(tensor.numel() // SAMPLE, 1)]


def _drops(model: nn.Module) -> bool:
    """Return True where a model may drop at random in training, by a module or by a number of one or of its config."""
    owners: list[Any] = [model.config, *model.modules()] if hasattr(model, "config") else [*model.modules()]
    return any(isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0 for each in owners) or any(
        "drop" in name and isinstance(value, float) and value > 0
        for owner in owners
        for name, value in vars(owner).items()
    )


def _random_hash(model: nn.Module) -> int:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return batch_hash([state for state in torch_state(device) if state is not None])
