"""Models whose sequences stay sharded up to the loss, and what is whole or refused around that."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon import Booster, HybridParallelPlugin, ShardConfig, ShardFormer
from echelon.cluster.mesh import ParallelMesh
from echelon.shardformer import policy_for
from echelon.shardformer.layers.sequence_axis import axis_of
from echelon.shardformer.sequence.loss import SequenceParallelLogits, stays_sharded

from ...pool import Pool
from ..compare import build

LENGTH = 11  # of which two ranks hold 6 each, with padding


def boosted(
    model: nn.Module, *, sp: int = 2, tp: int = 1, mode: str = "ring_attn", **settings: Any
) -> nn.Module:
    plugin = HybridParallelPlugin(
        tp_size=tp,
        sp_size=sp,
        precision="fp32",
        enable_sequence_parallelism=True,
        sequence_parallelism_mode=mode,
        **settings,
    )
    model, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters()))
    return model


def batch(length: int = LENGTH) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 50, (2, length), generator=drawn)
    labels = ids.clone()
    labels[0, -4:] = -100
    return {"input_ids": ids, "labels": labels}


def train_and_evaluate(tp: int) -> None:
    whole = build("LlamaForCausalLM").train()
    model = boosted(deepcopy(whole), tp=tp).train()
    lengths: list[int] = []
    model.module.lm_head.register_forward_hook(lambda module, args, out: lengths.append(out.shape[1]))
    expected = whole(**batch())
    outputs = model(**batch())
    assert lengths == [(LENGTH + 1) // 2]
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert isinstance(outputs.logits, SequenceParallelLogits)
    for misuse in (lambda: outputs.logits.shape, lambda: outputs.logits[0]):
        with pytest.raises((AttributeError, TypeError), match=r"outputs\.logits\.gather\(\) on every rank"):
            misuse()
    torch.testing.assert_close(outputs.logits.gather(), expected.logits)
    given = {"num_items_in_batch": torch.tensor(5)}
    torch.testing.assert_close(model(**batch(), **given).loss, whole(**batch(), **given).loss)
    shifted = {"shift_labels": batch()["labels"].roll(-2, 1)}
    torch.testing.assert_close(model(**batch(), **shifted).loss, whole(**batch(), **shifted).loss)
    asked = model(**batch(), logits_to_keep=LENGTH)  # a forward that cuts positions itself
    torch.testing.assert_close(asked.logits.gather() if tp > 1 else asked.logits, expected.logits)
    kept = torch.tensor([0, LENGTH - 1])
    assert model(**{**batch(), "labels": None}, logits_to_keep=kept).logits.shape[1] == 2
    as_tuple = model(**batch(), return_dict=False)
    torch.testing.assert_close(as_tuple[0], expected.loss)
    assert isinstance(as_tuple[1], SequenceParallelLogits)
    # Evaluation, with another length and without labels, sees whole logits.
    model.eval(), whole.eval()
    with torch.no_grad():
        for inputs in (batch(7), {"input_ids": batch(5)["input_ids"]}):
            torch.testing.assert_close(model(**inputs).logits, whole(**inputs).logits)
    torch.testing.assert_close(model.train()(**batch()).loss, expected.loss)


def require_same_gradients(model: nn.Module, whole: nn.Module) -> None:
    """Of every parameter: the mean over the sequence axis."""
    for (name, own), expected in zip(model.module.named_parameters(), whole.parameters(), strict=True):
        assert own.grad is not None, name
        mean = own.grad.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(
            mean / dist.get_world_size(), expected.grad, rtol=1e-4, atol=1e-6, msg=name
        )


def judge_gathered_logits() -> None:
    """By a criterion of the user's own, as a penalty on the logits' normalizers."""

    def criterion(loss: Tensor, logits: Tensor) -> Tensor:
        return loss + 0.1 * logits.logsumexp(-1).pow(2).mean()

    whole = build("LlamaForCausalLM").train()
    model = boosted(deepcopy(whole)).train()
    expected, outputs = whole(**batch()), model(**batch())
    criterion(expected.loss, expected.logits).backward()
    criterion(outputs.loss, outputs.logits.gather()).backward()
    require_same_gradients(model, whole)


def forward_between(mode: str, *, use_reentrant: bool) -> None:
    """transformers' own checkpointing, with sequences of another length before the backward."""
    whole = build("BertForSequenceClassification").train()
    model = (
        boosted(deepcopy(whole), mode=mode, sp=1, tp=2)
        if mode == "ring"
        else boosted(deepcopy(whole), mode=mode)
    )
    inputs = {"input_ids": batch()["input_ids"], "labels": torch.tensor([0, 1])}
    for each in (whole, model.unwrap()):
        each.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        each.enable_input_require_grads()
    loss = model.train()(**inputs).loss
    with torch.no_grad():
        model(input_ids=batch(LENGTH + 1)["input_ids"])
    loss.backward()
    whole(**inputs).loss.backward()
    if mode != "ring":
        require_same_gradients(model, whole)
    else:
        expected = whole.bert.embeddings.word_embeddings.weight.grad
        found = model.unwrap().bert.embeddings.word_embeddings.weight.grad
        rows = expected.shape[0] // 2
        first = dist.get_rank() * found.shape[0]
        held = expected[first : first + found.shape[0]]
        assert rows
        torch.testing.assert_close(found[: held.shape[0]], held, rtol=1e-4, atol=1e-6)


def give_other_batches(axis: str) -> None:
    model = boosted(
        build("LlamaForCausalLM"), **({"sp": 2} if axis == "sp" else {"sp": 1, "tp": 2, "mode": "ring"})
    )
    ids = batch()["input_ids"] + dist.get_rank()
    with pytest.raises(ValueError, match=rf"the inputs of rank\(s\) \[1\] of axis {axis} differ"):
        model(input_ids=ids)


def sharded_over_two_rings() -> None:
    model = boosted(build("LlamaForCausalLM"), sp=4, inner_ring_size=2)
    axis = axis_of(model.unwrap().model.layers[0])
    assert axis is not None and axis.rings is not None
    assert [ring.size() for ring in axis.rings] == [2, 2]


def leave_whole() -> None:
    whole = build("LlamaForCausalLM").train()
    model = boosted(deepcopy(whole), parallel_output=False).train()
    outputs = model(**batch())
    torch.testing.assert_close(outputs.logits, whole(**batch()).logits)


def refuse() -> None:
    model = boosted(build("LlamaForCausalLM", num_attention_heads=4), mode="all_to_all")
    ids = batch()["input_ids"]
    with pytest.raises(ValueError, match="keep the keys and values of a part"):
        model.unwrap().generate(ids, max_new_tokens=2)
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"{name}=True in this call"):
            model(input_ids=ids, **{name: True})
    with pytest.raises(ValueError, match="'split_gather' or 'ring'"):
        boosted(build("T5ForConditionalGeneration"), mode="ring_attn")
    mesh = ParallelMesh(sp=2)
    config = ShardConfig(sequence_parallel_process_group=mesh.group("sp"), enable_sequence_parallelism=True)
    assert config.sequence.mode == "all_to_all"
    with pytest.raises(ValueError, match="without a booster"):
        ShardFormer(config).optimize(build("LlamaForCausalLM"))


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_a_part_have_the_loss_of_the_whole(pool: Pool, tp: int) -> None:
    pool.run(2 * tp, train_and_evaluate, tp)


def test_a_double_ring_reaches_attention(pool: Pool) -> None:
    pool.run(4, sharded_over_two_rings)


def test_logits_are_whole_where_that_is_asked_for(pool: Pool) -> None:
    pool.run(2, leave_whole)


def test_gathered_logits_have_gradients(pool: Pool) -> None:
    pool.run(2, judge_gathered_logits)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning"
)  # without gradients, in between
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn", "ring"])
def test_what_is_computed_again_is_as_long_as_before(pool: Pool, mode: str, *, use_reentrant: bool) -> None:
    pool.run(2, forward_between, mode, use_reentrant=use_reentrant)


@pytest.mark.parametrize("axis", ["tp", "sp"])
def test_ranks_of_one_model_with_other_batches_are_told(pool: Pool, axis: str) -> None:
    pool.run(2, give_other_batches, axis)


def test_what_would_be_a_part_is_refused(pool: Pool) -> None:
    pool.run(2, refuse)


@pytest.mark.parametrize(
    ("class_name", "expected"),
    [("LlamaForCausalLM", True), ("GPT2LMHeadModel", False), ("LlamaForSequenceClassification", False)],
)
def test_what_stays_spread_goes_by_position(class_name: str, *, expected: bool) -> None:
    model = build(class_name)
    policy = policy_for(model)
    policy.set_model(model)
    plan = policy.stage_plan()
    assert plan is not None
    assert stays_sharded(model, plan, policy.head_path()) is expected
