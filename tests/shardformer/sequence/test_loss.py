"""Models whose sequences stay spread up to the loss, and what is whole or refused around that."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon import Booster, HybridParallelPlugin, ShardConfig, ShardFormer
from echelon.cluster.mesh import ParallelMesh
from echelon.shardformer import policy_for
from echelon.shardformer.sequence.loss import SequenceParallelLogits, stays_spread

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
    model, *_ = Booster(plugin=plugin).boost(model)
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
    asked = model(**batch(), logits_to_keep=LENGTH)  # a forward that cuts positions itself
    torch.testing.assert_close(asked.logits.gather() if tp > 1 else asked.logits, expected.logits)
    as_tuple = model(**batch(), return_dict=False)
    torch.testing.assert_close(as_tuple[0], expected.loss)
    assert isinstance(as_tuple[1], SequenceParallelLogits)
    # Evaluation, with another length and without labels, sees whole logits.
    model.eval(), whole.eval()
    with torch.no_grad():
        for inputs in (batch(7), {"input_ids": batch(5)["input_ids"]}):
            torch.testing.assert_close(model(**inputs).logits, whole(**inputs).logits)
    torch.testing.assert_close(model.train()(**batch()).loss, expected.loss)


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


def test_logits_are_whole_where_that_is_asked_for(pool: Pool) -> None:
    pool.run(2, leave_whole)


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
    assert stays_spread(model, plan, policy.head_path()) is expected
