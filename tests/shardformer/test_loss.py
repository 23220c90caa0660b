"""Losses and logits of heads sharded over the vocabulary, and generation, compared with the unsharded model."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from echelon.cluster.placement import Shard
from echelon.shardformer.layers import (
    VocabParallelLMHead1D,
    VocabParallelLogits,
    vocab_parallel_cross_entropy,
)
from echelon.shardformer.layers.embedding import vocab_range, vocab_shard
from echelon.shardformer.layers.vocabulary_loss import _causal_lm_loss, _vocab_parallel_sum

from ..pool import Pool
from ..slow import slow
from .compare import (
    VOCABULARY,
    batch_for,
    build,
    integers,
    named,
    numbers,
    require_equal_on_ranks,
    require_same_gradients,
    require_same_training,
    split,
    text,
)

N = 12


def labels_of(entries: int, shard: Shard, ignore_index: int) -> Tensor:
    """Return labels: the first and last entry of every rank, some more, and some ignored."""
    ranges = [vocab_range(shard, rank) for rank in range(shard.size)]
    borders = [entry for held in ranges if held.valid for entry in (held.first, held.first + held.valid - 1)]
    labels = torch.tensor((borders + [0, entries // 2, entries - 1] * N)[:N])
    labels[[2, 7]] = ignore_index
    return labels


def check(
    entries: int,
    multiple: int,
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 3.0,
    reduction: str = "mean",
    ignore_index: int = -100,
    are_ignored: bool = False,
) -> None:
    """The loss of sharded logits and its gradient equal torch's."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shard = vocab_shard(entries, size, multiple)
    settings = dict(ignore_index=ignore_index, reduction=reduction)
    logits = (scale * numbers(N, entries)).to(dtype)
    labels = torch.full((N,), ignore_index) if are_ignored else labels_of(entries, shard, ignore_index)
    full = logits.clone().requires_grad_()
    local = Shard(size=size, dim=1, blocks=shard.blocks, padded=shard.padded).local(logits, rank)
    held = vocab_range(shard, rank)
    local[:, held.valid :] = 1e4  # values in the padding must have no effect
    local.requires_grad_()
    expected = F.cross_entropy(full.float(), labels, **settings)
    before = local.detach().clone()
    loss = vocab_parallel_cross_entropy(local, labels, entries=held, group=dist.group.WORLD, **settings)
    assert torch.equal(local, before), "the logits were written to"
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6 * max(1, scale), equal_nan=True)
    weights = numbers(*expected.shape, seed=3) if expected.dim() else torch.tensor(1.7)
    (expected * weights).sum().backward()
    (loss * weights).sum().backward()
    assert full.grad is not None and local.grad is not None and local.grad.dtype == dtype
    assert not local.grad[:, held.valid :].any(), "padding has a gradient"
    last_bit = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(
        local.grad[:, : held.valid],
        full.grad[:, held.first : held.first + held.valid],
        rtol=last_bit,
        atol=1e-6 * full.grad.abs().max().item(),
    )


def cross_entropies() -> None:
    rows: list[tuple[tuple[int, int], dict[str, Any]]] = [
        *product(
            ((24, 1), (101, 8), (23, 1), (3, 64), (1, 1)),
            ({"reduction": reduction} for reduction in ("mean", "sum", "none")),
        ),
        ((24, 1), {"ignore_index": 5}),  # an entry
        ((101, 8), {"scale": 1e3}),
        *(((101, 8), {"dtype": dtype}) for dtype in (torch.float16, torch.bfloat16)),
        *(((8, 1), {"reduction": reduction, "are_ignored": True}) for reduction in ("mean", "sum", "none")),
    ]
    for sizes, settings in rows:
        with named((sizes, settings)):
            check(*sizes, **settings)
    with pytest.raises(ValueError, match="reduction='avg' must be"):
        check_local(torch.tensor([1, 6]), reduction="avg")
    # One logit of one rank overflowed: the loss is not finite on any rank.
    assert check_local(torch.tensor([1, 6]), overflows=dist.get_rank() == 1)[1].isnan()
    local, loss = check_local(torch.tensor([1, 6]))
    (gradient,) = torch.autograd.grad(loss.square(), local, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def check_local(
    labels: Tensor, *, overflows: bool = False, multiple: int = 1, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Return this rank's logits of 10 entries, and their loss."""
    held = vocab_range(vocab_shard(10, dist.get_world_size(), multiple), dist.get_rank())
    local = numbers(2, held.width)
    if overflows:
        local[0, 0] = torch.inf
    local.requires_grad_()
    return local, vocab_parallel_cross_entropy(
        local, labels, entries=held, group=dist.group.WORLD, **settings
    )


def causal_losses() -> None:
    """The loss equals transformers': with shifted labels, with a count of items, with labels already shifted."""
    torch.manual_seed(0)
    native, hidden = nn.Linear(6, 23), numbers(3, 7, 6)
    logits = native(hidden).detach()
    head = VocabParallelLMHead1D(native, dist.group.WORLD, make_vocab_size_divisible_by=2)
    head.gather_output = False
    local = head(hidden).detach()
    labels = torch.arange(21).view(3, 7)
    labels[1, 4:] = -100
    ours = partial(
        _causal_lm_loss, switch=(head, "gather_output"), total=partial(_vocab_parallel_sum, head=head)
    )
    cases: list[dict[str, Any]] = [
        {},
        {"num_items_in_batch": 40},
        {"num_items_in_batch": torch.tensor(40)},
        {"shift_labels": labels.flip(1)},
        {"ignore_index": 3, "shift_labels": labels.clamp(min=0)},
        {"use_cache": False},  # not an argument of the loss
    ]
    for kwargs in cases:
        expected = ForCausalLMLoss(logits, labels, 23, **kwargs)
        with named(kwargs):
            torch.testing.assert_close(ours(local, labels, 23, **kwargs), expected, rtol=1e-6, atol=1e-6)
    head.gather_output = True  # the model's forward was called without its hooks: logits are not sharded
    expected = ForCausalLMLoss(logits, labels, 23)
    torch.testing.assert_close(ours(head(hidden).detach(), labels, 23), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "function"),
    [(2, cross_entropies), *slow((4, cross_entropies)), (2, causal_losses)],
)
def test_the_loss_of_split_logits_is_that_of_torch_and_of_transformers(
    pool: Pool, ranks: int, function: Any
) -> None:
    pool.run(ranks, function)


# The logits of models.

CLASSES = ("LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "BertLMHeadModel")


def model_of(class_name: str = "LlamaForCausalLM") -> nn.Module:
    settings = {"num_key_value_heads": 2} if class_name.startswith("Llama") else {}
    if class_name == "BertLMHeadModel":
        settings["is_decoder"] = True
    return build(class_name, **settings)


def require_close(tensor: Any, expected: Any) -> None:
    torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)


def labels_and_modes() -> None:
    for class_name in CLASSES:
        model = model_of(class_name)
        copied, with_full_logits = split(deepcopy(model)), split(deepcopy(model), parallel_output=False)
        batch, ids = batch_for(model), text()
        routed = class_name != "BertForMaskedLM"  # its loss is hard-coded
        for training in (True, False):
            for module in (model, copied, with_full_logits):
                module.train(training)
            with named(class_name):
                expected = model(**batch)
                require_close(copied(**ids).logits, expected.logits)
                require_close(with_full_logits(**batch).logits, expected.logits)
                for loss, logits in (copied(**batch, return_dict=False)[:2], copied(**batch).to_tuple()[:2]):
                    require_close(loss, expected.loss)
                    assert isinstance(logits, VocabParallelLogits) == (routed and training)
                    gathered = logits.gather() if isinstance(logits, VocabParallelLogits) else logits
                    require_close(gathered, expected.logits)
                # The previous call does not affect the next one.
                require_close(
                    copied(ids["input_ids"], attention_mask=ids["attention_mask"]).logits, expected.logits
                )


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """Loss function that a user sets on a model."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1)


def losses_of_users() -> None:
    """Test losses of gathered logits, of calls without labels, with the user's count or shift, and a replaced one."""

    def through_gather(outputs: Any) -> Tensor:
        logits = outputs.logits
        logits = logits.gather() if isinstance(logits, VocabParallelLogits) else logits
        return outputs.loss + logits.logsumexp(-1).square().mean()

    batch = batch_for(model_of())
    require_same_training(model_of(), batch, loss=through_gather)
    require_same_training(
        model_of(), text(), loss=lambda outputs: outputs.logits.logsumexp(-1).square().mean()
    )
    require_same_training(model_of(), {**batch, "num_items_in_batch": torch.tensor(50)})
    require_same_training(model_of(), {**batch, "shift_labels": integers(0, VOCABULARY, 3, 13, seed=8)})
    model = model_of()
    model.loss_function = smoothed  # type: ignore[assignment]
    _, outputs, expected = require_same_training(model, batch)
    require_close(outputs.logits, expected.logits)
    model = model_of()
    copied = split(deepcopy(model))
    for module in (model, copied):
        module.forward(**batch).loss.backward()  # runs no hooks
    require_same_gradients(copied, model)


def hidden_states() -> None:
    model = model_of()
    copied = split(deepcopy(model))
    states, expected = (
        module(**text(), output_hidden_states=True).hidden_states for module in (copied, model)
    )
    require_close(states, expected)
    require_equal_on_ranks(states[-1], "hidden states")


def generate() -> None:
    for class_name, attention in (
        ("Qwen3ForCausalLM", "eager"),
        ("GPT2LMHeadModel", "sdpa"),
        ("T5ForConditionalGeneration", "sdpa"),
    ):
        settings: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 2} if "Qwen3" in class_name else {}
        if "T5" in class_name:  # transformers makes a cache with the encoder's number of layers
            settings = {"num_decoder_layers": 2}
        model = build(class_name, attention=attention, seed=1, **settings).eval()
        model.generation_config.eos_token_id = None
        copied = split(deepcopy(model))
        prompt = {"input_ids": integers(3, VOCABULARY, 2, 5), "attention_mask": torch.ones(2, 5).long()}
        for how in ({"do_sample": False, "num_beams": 2}, {"do_sample": True}):
            tokens = []
            for module in (model, copied):
                torch.manual_seed(3)
                tokens.append(module.generate(**prompt, max_new_tokens=6, pad_token_id=0, **how))
            assert tokens[0].shape == (2, 7 if "T5" in class_name else 11)
            assert torch.equal(*tokens), f"{class_name} {attention} {how}: {tokens}"


@pytest.mark.parametrize("function", [labels_and_modes, losses_of_users, hidden_states, generate])
def test_outputs_equal_the_unsharded_ones_or_raise_that_they_are_sharded(
    pool: Pool, function: Callable[[], None]
) -> None:
    pool.run(2, function)
