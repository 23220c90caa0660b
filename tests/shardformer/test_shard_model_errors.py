"""Refusals of ShardFormer without a booster, equal on every rank, and the arguments of its config."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from echelon import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    ShardConfig,
    ShardFormer,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

from ..pool import Pool
from .bare_training import causal_batch
from .compare import build, named
from .test_shard_model import Choosy, formed


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


def refuse_data() -> None:
    shard_former = formed()
    with pytest.raises(ValueError, match=r"Stream\) is iterable-style or has no length"):
        shard_former.shard_dataset(Stream(), batch_size=1)
    loader = DataLoader([1, 2], sampler=SubsetRandomSampler([0]))
    with pytest.raises(
        ValueError, match="cannot be sharded, since its samples are chosen by a SubsetRandomSampler"
    ):
        shard_former.shard_dataset(loader)


def refuse_a_world_of_another_size() -> None:
    with pytest.raises(
        ValueError,
        match=r"dp_size=1 = 3 is not the world size 2: start 3 processes",
    ):
        formed(tensor_parallel_size=3)


def refuse_without_groups() -> None:
    shard_former = ShardFormer(ShardConfig(tensor_parallel_size=2))
    for call in (shard_former.shard_model, shard_former.optimize, shard_former.shard_dataset):
        with pytest.raises(ValueError, match=r"call ShardFormer\.init_distributed\(\) first"):
            call(build("LlamaForCausalLM"))  # type: ignore[operator]


def refuse_what_is_split() -> None:
    shard_former = formed()
    split = shard_former.shard_model(build("LlamaForCausalLM"))
    with pytest.raises(ValueError, match="already boosted, or sharded by ShardFormer: give the plain"):
        shard_former.shard_model(split)
    plugins = [
        HybridParallelPlugin(tp_size=2, precision="fp32", num_microbatches=1),
        LowLevelZeroPlugin(precision="fp32"),
        TorchDDPPlugin(),
        TorchFSDPPlugin(),
    ]
    averaged = formed(tensor_parallel_size=1, data_parallel_size=2).shard_model(Choosy())
    for plugin in plugins:
        for model in (split, averaged):
            with (
                named(type(plugin)),
                pytest.raises(ValueError, match="sharded by ShardFormer: give"),
            ):
                Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def refuse_different_models() -> None:
    model = build("LlamaForCausalLM", seed=dist.get_rank())
    with pytest.raises(ValueError, match=r"the model of rank\(s\) \[1\] differs from that of rank 0"):
        formed().shard_model(model)


def refuse_different_replicas() -> None:
    """The error is raised on all ranks, even if their own tensor axis has equal models."""
    model = build("LlamaForCausalLM", seed=int(dist.get_rank() == 3))
    with pytest.raises(ValueError, match=r"the model of rank\(s\) \[1\] differs from that of rank 0"):
        formed(data_parallel_size=2).shard_model(model)


def test_different_models_of_one_replica_are_reported_on_the_others_too(pool: Pool) -> None:
    pool.run(4, refuse_different_replicas)


def refuse_different_inputs() -> None:
    model = build("LlamaForCausalLM", attention_dropout=0.1)
    split = formed().shard_model(model)
    with pytest.raises(ValueError, match=r"the inputs of rank\(s\) \[1\] of the tensor axis differ"):
        split(**causal_batch(2, seed=dist.get_rank()))
    split(**causal_batch(2, seed=0))
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match=r"the random states of rank\(s\) \[1\] of the tensor axis differ"):
        split(**causal_batch(2, seed=0))
    split.eval()(**causal_batch(2, seed=0))
    split.train(dist.get_rank() == 0)
    with pytest.raises(
        ValueError, match=r"the modes \(training or evaluation\) of rank\(s\) \[1\] of the tensor axis"
    ):
        split(**causal_batch(2, seed=0))
    with pytest.raises(RuntimeError, match="this rank has only a part of this LlamaForCausalLM"):
        split.state_dict()


def refuse_an_average_over_pieces() -> None:
    """It would broadcast the shards of the first rank, and the loss would look plausible."""
    wrapped = DistributedDataParallel(formed().shard_model(build("LlamaForCausalLM")))
    with pytest.raises(ValueError, match=r"the shards of \[0, 1\] by one rank's, though \[0, 1\] have"):
        wrapped(**causal_batch(2, seed=0))


def refuse_one_group_as_two_axes() -> None:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=r"have the ranks \[0, 1\] in common"):
        ShardConfig(tensor_parallel_process_group=group, data_parallel_process_group=group)


def refuse_what_one_rank_alone_has_wrong() -> None:
    settings = {"intermediate_size": 25} if dist.get_rank() == 1 else {}
    with pytest.raises(ValueError, match=r"25 entries .* \(rank 1\)"):
        formed().shard_model(build("LlamaForCausalLM", **settings))


@pytest.mark.parametrize(
    "function",
    [
        refuse_data,
        refuse_a_world_of_another_size,
        refuse_without_groups,
        refuse_what_is_split,
        refuse_different_models,
        refuse_different_inputs,
        refuse_an_average_over_pieces,
        refuse_one_group_as_two_axes,
        refuse_what_one_rank_alone_has_wrong,
    ],
)
def test_errors_are_raised_on_every_rank(pool: Pool, function: Callable[[], None]) -> None:
    pool.run(2, function)


class Group:
    """Stand-in for a process group; a config reads only its size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


PAIR: Any = Group(2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1"),
        ({"make_vocab_size_divisible_by": 0}, "make_vocab_size_divisible_by=0 must be at least 1"),
        ({"data_parallel_size": "2"}, "data_parallel_size='2' must be an integer"),
        (
            {"tensor_parallel_process_group": PAIR, "tensor_parallel_size": 4},
            "tensor_parallel_size=4 is not the size of tensor_parallel_process_group, which has 2 ranks",
        ),
        (
            {"tensor_parallel_process_group": PAIR, "data_parallel_size": 2},
            "data_parallel_size=2 needs a group beside the tensor_parallel_process_group",
        ),
        (
            {"data_parallel_process_group": PAIR, "tensor_parallel_size": 2},
            "tensor_parallel_size=2 needs a group beside the data_parallel_process_group",
        ),
        (
            {"tensor_parallel_size": 2, "enable_tensor_parallelism": False},
            "tensor_parallel_size=2 needs tensor parallelism, which enable_tensor_parallelism=False turns off",
        ),
        (
            {"gather_output": True, "parallel_output": True},
            "parallel_output=True and gather_output=True contradict each other",
        ),
        (
            {"gather_output": False, "parallel_output": False},
            "parallel_output=False and gather_output=False contradict each other",
        ),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        ShardConfig(**settings)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "resolved"),
    [
        ({}, (1, 1, True, False)),
        ({"gather_output": True}, (1, 1, False, True)),
        ({"parallel_output": False}, (1, 1, False, True)),
        ({"tensor_parallel_size": 4, "data_parallel_size": 2}, (4, 2, True, False)),
        ({"tensor_parallel_process_group": PAIR, "gather_output": False}, (2, 1, True, False)),
        ({"tensor_parallel_process_group": PAIR, "enable_tensor_parallelism": False}, (1, 1, True, False)),
    ],
)
def test_sizes_and_outputs_of_a_config_follow_from_what_is_given(
    settings: dict[str, Any], resolved: tuple[object, ...]
) -> None:
    config = ShardConfig(**settings)
    sizes = config.tensor_parallel_size, config.data_parallel_size
    assert (*sizes, config.parallel_output, config.gather_output) == resolved
