"""A model sharded by ShardFormer trains in a plain loop like one process. Refusals are in tests/refusals."""

import itertools
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from echelon import ParallelMesh, ShardConfig, ShardFormer, clip_grad_norm_, shard_model
from echelon.shardformer.recompute import recomputable_layers
from echelon.shardformer.sharder import StandInGroup

from ..pool import Pool
from ..slow import slow
from .bare_training import departure
from .compare import MULTIPLE, batch_for, build, gradients, numbers

QWEN3 = {"head_dim": 8, "num_key_value_heads": 1}


def formed(**settings: Any) -> ShardFormer:
    """Return a ShardFormer with its groups, over the world."""
    settings = {"tensor_parallel_size": 2, "make_vocab_size_divisible_by": MULTIPLE, **settings}
    shard_former = ShardFormer(ShardConfig(**settings))
    shard_former.init_distributed()
    return shard_former


def with_groups(tp: int, dp: int) -> ShardFormer:
    """Return a ShardFormer with groups that a script has already made."""
    mesh = ParallelMesh(tp=tp, dp=dp)
    groups = {"tensor_parallel_process_group": mesh.group("tp")}
    if dp > 1:
        groups["data_parallel_process_group"] = mesh.group("dp")
    return ShardFormer(ShardConfig(**groups, make_vocab_size_divisible_by=MULTIPLE))


def train(class_name: str, tp: int, dp: int, settings: dict[str, Any], made: str) -> str | None:
    model = build(class_name, **settings)
    if made == "groups":
        shard_former = with_groups(tp, dp)
        split, shared = shard_former.optimize(deepcopy(model))
        assert shared == []
        return departure(model, split, shard_former)
    sequences = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": made}
    asked = {} if made == "sizes" else sequences
    shard_former = formed(tensor_parallel_size=tp, data_parallel_size=dp, **asked)
    return departure(model, shard_former.shard_model(deepcopy(model)), shard_former)


@pytest.mark.parametrize(
    ("class_name", "tp", "dp", "settings", "made"),
    [
        ("LlamaForCausalLM", 2, 1, {"num_key_value_heads": 1}, "sizes"),
        ("Qwen3ForCausalLM", 1, 2, QWEN3, "groups"),
        *slow(("Qwen3ForCausalLM", 2, 2, QWEN3, "groups")),
        ("LlamaForCausalLM", 2, 1, {"num_key_value_heads": 1}, "split_gather"),
        # Key-value heads are replicated over some of the ranks.
        *slow(
            ("Qwen3ForCausalLM", 4, 1, {**QWEN3, "num_key_value_heads": 2}, "sizes"),
            ("Olmo2ForCausalLM", 2, 1, {"num_key_value_heads": 1}, "sizes"),
            ("LlamaForCausalLM", 1, 2, {}, "sizes"),
        ),
    ],
)
def test_a_loop_without_a_booster_trains_as_one_process(
    pool: Pool, class_name: str, tp: int, dp: int, settings: dict[str, Any], made: str
) -> None:
    assert pool.run(tp * dp, train, class_name, tp, dp, settings, made) == [None] * (tp * dp)


def clip_by(norm_type: float) -> None:
    model = build("Qwen3ForCausalLM", **QWEN3)
    split = formed().shard_model(deepcopy(model))
    batch = batch_for(model)
    model(**batch).loss.backward()
    split(**batch).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    torch.testing.assert_close(clip_grad_norm_(split, 0.1, norm_type), expected, rtol=1e-5, atol=0)
    unclipped = clip_grad_norm_(split, float("inf"), norm_type)
    torch.testing.assert_close(unclipped, torch.tensor(0.1), rtol=1e-4, atol=0)
    split.lm_head.weight.grad[0] = torch.inf if dist.get_rank() == 1 else 0.0
    with pytest.raises(RuntimeError, match="of the gradients is"):
        clip_grad_norm_(split, 0.1, norm_type, error_if_nonfinite=True)


def test_the_norm_is_that_of_the_unsharded_model(pool: Pool) -> None:
    pool.run(2, clip_by, 2.0)
    pool.run(2, clip_by, float("inf"))


def freeze_and_thaw() -> None:
    """Parameters that are frozen during sharding get exact gradients when they are trained later."""
    model = build("Qwen3ForCausalLM", **QWEN3)
    model.requires_grad_(False)
    split = formed().shard_model(deepcopy(model))
    assert not any(parameter.requires_grad for parameter in split.parameters())
    for module in (model, split):
        module.requires_grad_(True)
        module(**batch_for(model)).loss.backward()
    gradient, expected = (module.model.layers[0].self_attn.q_norm.weight.grad for module in (split, model))
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


class Choosy(nn.Module):
    """A model whose replicas may use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = (nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: Tensor, use_second: bool, breaks: bool = False) -> Tensor:
        out = self.second(x) if use_second else self.first(x)
        if breaks:
            out.register_hook(_raise)
        return out


def _raise(gradient: Tensor) -> None:
    raise ArithmeticError("a backward that breaks off")


def average_where_some_ranks_have_none() -> None:
    model, x = Choosy(), numbers(4, 3)
    split = formed(tensor_parallel_size=1, data_parallel_size=2).shard_model(deepcopy(model))
    with pytest.raises(ArithmeticError):
        split(x, False, breaks=True).sum().backward()
    for _ in range(2):  # accumulate into averaged gradients
        split(x, dist.get_rank() == 1).square().sum().backward()
        for use_second in (False, True):
            (model(x, use_second).square().sum() / 2).backward()
    assert split.unused.weight.grad is None
    torch.testing.assert_close(gradients(split), gradients(model))


def recompute(tp: int, is_reentrant: bool) -> None:
    """Layers with reentrant checkpoints run a nested backward inside the outer one."""
    model = build("Qwen3ForCausalLM", **QWEN3)
    split = formed(tensor_parallel_size=tp, data_parallel_size=2 // tp).shard_model(deepcopy(model))
    batch = batch_for(model)
    for module in (model, split):
        for layer in recomputable_layers(module):
            layer.gradient_checkpointing = True  # type: ignore[assignment]
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=is_reentrant)  # type: ignore[assignment]
        module.enable_input_require_grads()
        for _ in range(2):
            module(**batch, use_cache=False).loss.backward()
    gradient, expected = (module.model.layers[0].self_attn.q_norm.weight.grad for module in (split, model))
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_recomputed_layers_count_their_gradients_once(pool: Pool, tp: int, is_reentrant: bool) -> None:
    pool.run(2, recompute, tp, is_reentrant)


@pytest.mark.parametrize("function", [freeze_and_thaw, average_where_some_ranks_have_none])
def test_gradients_are_exact_for_frozen_and_unused_parameters(
    pool: Pool, function: Callable[[], None]
) -> None:
    pool.run(2, function)


def in_evaluation_for_good() -> None:
    model = build("Qwen3ForCausalLM", **QWEN3)
    split = formed(inference_only=True).shard_model(deepcopy(model))
    assert not split.training and not any(parameter.requires_grad for parameter in split.parameters())
    outputs = split(**batch_for(model))
    assert not outputs.loss.requires_grad
    torch.testing.assert_close(outputs.logits, model.eval()(**batch_for(model)).logits, rtol=1e-5, atol=1e-5)
    split.requires_grad_(True).train()(**batch_for(model)).loss.backward()  # trained all the same
    model.train()(**batch_for(model)).loss.backward()
    norms = [module.model.layers[0].self_attn.k_norm.weight.grad for module in (split, model)]
    torch.testing.assert_close(*norms, rtol=1e-5, atol=1e-6)


def over_the_world() -> None:
    model = build("LlamaForCausalLM")
    split = shard_model(deepcopy(model))
    batch = batch_for(model)
    loss = split(**batch).loss
    torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-6, atol=1e-6)
    assert split.model.layers[0].mlp.down_proj.weight.shape == (32, 48 // dist.get_world_size())


@pytest.mark.parametrize(
    ("ranks", "function"), [(2, in_evaluation_for_good), (2, over_the_world), (1, over_the_world)]
)
def test_a_model_is_split_over_the_world(pool: Pool, ranks: int, function: Callable[[], None]) -> None:
    pool.run(ranks, function)


def share_out() -> list[list[list[int]]]:
    """Return the batches of this rank, for each way to make a dataloader."""
    shard_former = formed(data_parallel_size=2)
    data = list(range(10))
    loaders = [
        shard_former.shard_dataset(data, batch_size=2),
        shard_former.shard_dataset(data, batch_size=2, shuffle=True, seed=3),
        shard_former.shard_dataset(DataLoader(data, batch_size=3, shuffle=True, drop_last=True)),
        shard_former.shard_dataset(DataLoader(data, batch_size=3), 4, collate_fn=torch.tensor),
    ]
    return [[batch.tolist() for batch in loader] for loader in loaders]


def test_replicas_get_different_samples_and_their_ranks_the_same(pool: Pool) -> None:
    first, second, third, fourth = pool.run(4, share_out)
    assert first == second
    assert third == fourth
    for one, other in zip(first, third, strict=True):
        seen = sorted(itertools.chain.from_iterable(one + other))
        assert seen == list(range(10)) or len(one) == len(other) == 1  # drop_last
        assert len(set(seen)) == len(seen)
    assert first[0] == [[0, 2], [4, 6], [8]]
    assert [len(batch) for batch in first[2]] == [3]
    assert first[2] != [[0, 2, 4]]
    assert first[3] == [[0, 2, 4, 6], [8]]


PAIR = StandInGroup(0, 2)


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
