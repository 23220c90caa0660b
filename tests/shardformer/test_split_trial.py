"""Splits that are tried on threads: right ones agree with the whole copy, wrong ones depart or are refused."""

from time import perf_counter
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import BioGptConfig, BioGptForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from echelon.cluster.collectives import all_gather, all_reduce, exchange_rows, exchange_slices, sum_slice
from echelon.cluster.placement import Replicated
from echelon.cluster.threads import ThreadGroup, run_threads, thread_groups
from echelon.shardformer import layer_split, policy_for, split_trial
from echelon.shardformer.derived_policy import DerivedPolicy
from echelon.shardformer.layers import linear
from echelon.shardformer.sequence.config import SequenceParallelism
from echelon.shardformer.sharder import split_errors, stand_in_config
from echelon.shardformer.split_trial import split_departure
from echelon.shardformer.transforms import ModelPlan, TransformOptions

from ..derive.copies import double_copy_of
from ..slow import slow


@pytest.mark.parametrize("size", [2, *slow(4)])
@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "t5", "mixtral", "olmo2"),
        *slow("bert", "bloom", "deepseek_v3", "albert", "swinv2"),
    ],
)
def test_tables_and_plans_give_the_numbers_of_the_whole(model_type: str, size: int) -> None:
    assert split_departure(double_copy_of(model_type), policy_for, size) is None


def test_a_layer_that_does_not_sum_departs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "reduce_from", lambda x, group: x)
    error = split_departure(double_copy_of("llama"), policy_for, 2)
    assert error is not None and error.startswith("the loss on 2 ranks is ")


def test_what_departs_is_not_split_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = double_copy_of("exaone4").make(0)
    assert split_errors(model, DerivedPolicy(model), tp_size=2) == []
    monkeypatch.setattr(layer_split, "PartialGrad", Replicated)
    policy = DerivedPolicy(model)
    assert split_errors(model, policy, tp_size=2) == []
    assert policy.table.row == ("mlp.down_proj",)  # of what is proposed instead, attention departs
    monkeypatch.setattr(linear, "reduce_from", lambda x, group: x)
    plan, none = split_errors(model, DerivedPolicy(model), tp_size=2)
    departs = "transformers' plan of a Exaone4ForCausalLM departs from one process: the loss on 2 ranks is "
    assert departs in plan
    assert "no split of a Exaone4ForCausalLM gives the numbers of one process: " in none
    assert "tp_size at 1" in none


class SoftmaxMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x).softmax(-1) * self.up_proj(x))  # over a rank's own features


class SoftmaxLlama(LlamaForCausalLM):
    mlp: type[nn.Module] = SoftmaxMLP

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = self.mlp(config)


class OwnLlama(SoftmaxLlama):
    mlp = LlamaMLP


def llama_on_meta(kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> LlamaForCausalLM:
    with torch.device("meta"):
        return kind(LlamaConfig(num_hidden_layers=2))


def planned_on_two_ranks(model: nn.Module) -> ModelPlan:
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "shards": True}
    return ModelPlan(model, TransformOptions(shard_config=stand_in_config(tp_size=2), **options), [])


@pytest.mark.parametrize("kind", [SoftmaxLlama, OwnLlama])
def test_the_table_of_a_type_is_tried_with_a_class_of_ones_own(kind: type[LlamaForCausalLM]) -> None:
    model = llama_on_meta(kind)
    if kind is OwnLlama:
        trial = patch.object(split_trial, "split_departure", wraps=split_departure)
        with patch.dict(split_trial.RESULTS, clear=True), trial as tried:
            planned_on_two_ranks(model)
            planned_on_two_ranks(model)
        assert tried.call_count == 1
        return
    with pytest.raises(ValueError, match="table of a SoftmaxLlama's type departs: the loss on 2 ranks is"):
        planned_on_two_ranks(model)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "ArceeForCausalLM"])  # by a table, and derived
def test_modules_that_a_script_puts_into_regions_are_refused(kind: str) -> None:
    model_class = getattr(transformers, kind)
    with torch.device("meta"):
        model = model_class(model_class.config_class(num_hidden_layers=2))
        native = type(model.model.layers[0].mlp)
        replacement = type("SoftmaxMLP", (native,), {"forward": SoftmaxMLP.forward})
        for layer in model.model.layers:
            layer.mlp = replacement(model.config)
            layer.post_attention_layernorm = nn.LayerNorm(model.config.hidden_size)
    with pytest.raises(ValueError, match="whose layers have no SoftmaxMLP: give a table for this class"):
        planned_on_two_ranks(model)


def test_the_table_of_a_type_is_tried_with_a_forward_that_a_script_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", SoftmaxMLP.forward)
    with pytest.raises(
        ValueError, match="table of a LlamaForCausalLM's type departs: the loss on 2 ranks is"
    ):
        planned_on_two_ranks(llama_on_meta())


def test_forwards_that_a_script_replaces_in_single_modules_are_refused() -> None:
    model = llama_on_meta()
    mlp: Any = model.model.layers[1].mlp
    mlp.forward = MethodType(SoftmaxMLP.forward, mlp)
    with pytest.raises(
        ValueError, match="whose layers have no LlamaMLP with a replaced forward: give a table"
    ):
        planned_on_two_ranks(model)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 2}, "no split of a Broken gives the numbers of one process: "),
        ({"num_stages": 2}, "no pipeline stages of a Broken are known: "),
        (
            {"sp_size": 2, "sequence": SequenceParallelism(mode="all_to_all")},
            "sequence_parallelism_mode='all_to_all': no layers of a Broken are known: ",
        ),
    ],
)
def test_a_model_without_a_small_copy_is_refused_once_with_the_reason(
    sizes: dict[str, Any], words: str
) -> None:
    class Broken(BioGptForCausalLM):
        def forward(self, input_ids: Any) -> Any:
            raise KeyError("its code")

    with torch.device("meta"):
        model = Broken(BioGptConfig(num_hidden_layers=2))
    (error,) = split_errors(model, DerivedPolicy(model), **sizes)
    assert error.startswith(f"{words}no small copy of its config trains (KeyError: 'its code')")


@pytest.mark.parametrize(
    "plan",
    [
        {"self_attn": "colwise", "self_attn.q_proj": "colwise", "self_attn.o_proj": "rowwise"},
        {"mlp.down_proj": "rowwise"},
        *slow({"mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}),
        {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise"},
    ],
)
def test_a_plan_whose_regions_do_not_end_or_do_not_begin_is_not_used(plan: dict[str, str]) -> None:
    model: Any = double_copy_of("llama").make(0)
    model.config.base_model_tp_plan = {f"layers.*.{path}": style for path, style in plan.items()}
    policy = DerivedPolicy(model)
    assert split_errors(model, policy, tp_size=2) == []
    assert policy.table.row == ("self_attn.o_proj", "mlp.down_proj")  # as proposed instead


def collectives(group: Any) -> list[torch.Tensor]:
    """Call every kind of collective, with values that depend on the rank."""
    tensor = torch.arange(4.0) + 10 * group.rank()
    return [
        all_reduce(tensor, group),
        all_gather(tensor, group, 0),
        sum_slice(tensor, group, 0),
        exchange_slices(tensor, group, 0, 0),
        exchange_rows(tensor, *(([1, 3], [1, 2]) if group.rank() == 0 else ([2, 2], [3, 2])), group),
    ]


def test_collectives_of_threads_are_those_of_a_group() -> None:
    first, second = run_threads(thread_groups(2), collectives)
    assert [tensor.tolist() for tensor in first] == [
        [10.0, 12.0, 14.0, 16.0],
        [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0],
        [10.0, 12.0],
        [0.0, 1.0, 10.0, 11.0],
        [0.0, 10.0, 11.0],
    ]
    assert [tensor.tolist() for tensor in second[2:]] == [
        [14.0, 16.0],
        [2.0, 3.0, 12.0, 13.0],
        [1.0, 2.0, 3.0, 12.0, 13.0],
    ]


def test_threads_exchange_slices_without_rows() -> None:
    def exchange(group: Any) -> torch.Tensor:
        return exchange_slices(torch.ones(0, 3), group, 0, 0)

    results = run_threads(thread_groups(2), exchange)
    assert [tuple(result.shape) for result in results] == [(0, 3), (0, 3)]


def test_every_thread_draws_random_numbers_as_a_process_does() -> None:
    def draw(group: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        numbers = [torch.rand(3)]
        for _ in range(4):
            all_reduce(torch.ones(1), group)
            numbers.append(torch.rand(3))
        return numbers

    first, second = run_threads(thread_groups(2), draw)
    torch.manual_seed(1)
    expected = torch.rand(5, 3)
    assert torch.equal(torch.stack(first), expected) and torch.equal(torch.stack(second), expected)


@pytest.mark.parametrize("has_world", [False, True])
def test_threads_that_call_different_collectives_are_named(
    has_world: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a default group, as at boost, torch looks the group of threads up in order to log the error."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: has_world)

    def uneven(group: ThreadGroup) -> None:
        if group.rank() == 0:
            torch.distributed.all_reduce(torch.ones(1), group=group)  # type: ignore[arg-type]  # its stand-in

    start = perf_counter()
    with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] of 2 made fewer collective calls"):
        run_threads(thread_groups(2), uneven)
    assert perf_counter() - start < 30  # the timeout of a barrier is 60


def test_the_error_of_a_collective_is_raised_in_a_process_with_a_default_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    def of_other_shapes(group: ThreadGroup) -> None:
        torch.distributed.all_reduce(torch.ones(1 + group.rank()), group=group)  # type: ignore[arg-type]  # its stand-in

    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        run_threads(thread_groups(2), of_other_shapes)


def test_the_first_error_of_a_thread_is_raised() -> None:
    def fail(group: ThreadGroup) -> None:
        if group.rank() == 1:
            raise KeyError("on rank 1")
        torch.distributed.all_reduce(torch.ones(1), group=group)  # type: ignore[arg-type]  # its stand-in

    with pytest.raises(KeyError, match="on rank 1"):
        run_threads(thread_groups(2), fail)
