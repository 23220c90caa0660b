"""Loss and gradients of `execute_pipeline` are those of the whole global batch, whatever its microbatches count.

One process computes 27 samples in one call; here they are cut into replicas and four microbatches of unequal size.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from echelon.verify.batch import make_batch
from echelon.verify.model_choice import LENGTH, ModelChoice

from ..log_lines import logged
from ..pool import Pool, on_ranks
from ..slow import slow_except, slow_row
from .training import REGIONS, RING, ULYSSES, boosted, hybrid, norm_of_gradients, parts

SAMPLES, RATE = 27, 0.1
Batch = dict[str, Any]
CAUSAL = ModelChoice(model_type="llama")
HEADS = {
    "causal": CAUSAL,
    "masked": ModelChoice(model_type="bert", head="masked"),
    "token": ModelChoice(model_type="bert", head="token"),
    "sequence": ModelChoice(model_type="bert", head="classification"),
    "question": ModelChoice(model_type="bert", head="question"),
    "several terms": ModelChoice(model_type="bert", head="pretraining"),
    "auxiliary": ModelChoice(model_type="mixtral", settings=(("output_router_logits", True),)),
    "seq2seq": ModelChoice(model_type="t5", num_layers=2),
    "image": ModelChoice(model_type="vit", head="image_classification"),
}


class Heads(nn.Module):
    """A small classifier with an inline loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.loss = nn.Linear(6, 4), loss

    def forward(self, x: Tensor, labels: Tensor) -> Batch:
        scores = self.body(x).tanh()
        return {"loss": self.loss(scores, labels), "logits": scores}


INLINE = {
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 2.0, 5.0])),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.2),
    "ignored": nn.CrossEntropyLoss(ignore_index=0),
    "regression": nn.MSELoss(),
    "absolute": nn.L1Loss(),
    "several labels": nn.BCEWithLogitsLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
}
OF_ENTRIES = ("regression", "absolute", "several labels")
CTC = {"ctc sum": "sum", "ctc mean": "mean"}


def built(name: str) -> nn.Module:
    if name in INLINE:
        return Heads(INLINE[name])
    if name in CTC:
        torch.manual_seed(0)
        sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
        front = dict(conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2)
        rest = dict(num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, vocab_size=12, layerdrop=0.0)
        config = Wav2Vec2Config(
            **sizes, **front, **rest, ctc_loss_reduction=CTC[name], apply_spec_augment=False
        )
        return Wav2Vec2ForCTC(config).eval()
    return HEADS[name].build()


def batch_of(name: str, seed: int = 3, *, empty: int = 7) -> Batch:
    """Return 27 samples; the first `empty` and single later ones have no counted labels, and prompts are masked."""
    drawn = torch.Generator().manual_seed(seed)
    if name in INLINE:
        x = torch.randn(SAMPLES, 6, generator=drawn)
        if name in OF_ENTRIES:
            return {"x": x, "labels": torch.rand(SAMPLES, 4, generator=drawn)}
        labels = torch.randint(0, 4, (SAMPLES,), generator=drawn)
        return {"x": x, "labels": labels.index_fill(0, torch.arange(empty), 0)}
    if name in CTC:
        labels = torch.randint(1, 12, (SAMPLES, 5), generator=drawn)
        return {"input_values": torch.randn(SAMPLES, 400, generator=drawn), "labels": labels}
    batch = make_batch(HEADS[name], num_samples=SAMPLES, seed=seed)
    if name == "question":  # positions behind the text are ignored; all of the first replica's last samples
        batch["start_positions"][:empty] = LENGTH
        batch["end_positions"][5:20] = LENGTH + 2
    if name == "several terms":
        batch["next_sentence_label"][5:15] = -100
    if name in ("causal", "masked", "token", "seq2seq", "several terms", "auxiliary"):
        lengths = torch.randint(0, 6, (SAMPLES, 1), generator=drawn)
        prompt = torch.arange(batch["labels"].shape[1]) < lengths
        batch["labels"] = batch["labels"].masked_fill(prompt, -100)
        batch["labels"][:empty] = -100
    return batch


def global_loss(plain: nn.Module, batch: Batch, microbatches: list[Batch]) -> Tensor:
    """Return the loss of a batch at once, but for an auxiliary loss: the mean over its microbatches."""
    outputs = plain(**batch)
    loss: Tensor = outputs["loss"]
    if outputs.get("aux_loss") is None:
        return loss
    mean = torch.stack([plain(**microbatch).aux_loss for microbatch in microbatches]).mean()
    return loss + plain.config.router_aux_loss_coef * (mean - outputs.aux_loss)


def parts_of(batch: Batch, plugin: Any) -> list[Batch]:
    """Return the microbatches, each with the samples of all replicas."""
    by_replica = [parts(of_replica, 4) for of_replica in parts(batch, plugin.data_rank[1])]
    return [
        {key: torch.cat([microbatch[key] for microbatch in of_all]) for key in batch}
        for of_all in zip(*by_replica, strict=True)
    ]


def share(batch: Batch, plugin: Any) -> Batch:
    rank, size = plugin.data_rank
    return parts(batch, size)[rank]


def made(name: str, **settings: Any) -> tuple[Any, Any, Any]:
    """Return a booster of four microbatches, the boosted model and its optimizer."""
    booster = hybrid(**{"num_microbatches": 4} | settings)
    return booster, *boosted(booster, built(name), lambda model: torch.optim.SGD(model.parameters(), lr=RATE))


def run(booster: Any, model: Any, batch: Batch, criterion: Any = None, optimizer: Any = None) -> float:
    """Return the loss of this replica's part of a batch; without an optimizer, of an evaluation."""
    batches = iter([share(batch, booster.plugin)])
    return float(booster.execute_pipeline(batches, model, criterion, optimizer)["loss"])


def departures(
    name: str, sizes: dict[str, Any], criterion: Any = None, calls: int = 1, empty: int = 7
) -> dict[str, float]:
    """Return the relative distances of loss and gradients from one process that computes all at once."""
    plain, batches = built(name), [batch_of(name, seed=3 + call, empty=empty) for call in range(calls)]
    booster, model, optimizer = made(name, **sizes)
    batches_at_once = batches
    if sizes.get("gradient_accumulation_steps"):
        batches_at_once = [{key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}]
    for batch in batches_at_once:
        wanted = global_loss(plain, batch, parts_of(batch, booster.plugin))
        wanted.backward()
    if calls == 1:
        with torch.no_grad():
            evaluated = run(booster, model, batches[0], criterion)
    for batch in batches:
        loss = run(booster, model, batch, criterion, optimizer)
    optimizer.reduce_gradients()
    gradients = {
        key: parameter.grad for key, parameter in plain.named_parameters() if parameter.grad is not None
    }
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    far = {
        key: float((gradient - gradients[key]).abs().max() / gradients[key].abs().max())
        for key, gradient in optimizer.gradients().items()
        if gradient.shape == gradients[key].shape  # not padded vocabularies
        and gradients[key].abs().max() > 1e-5 * largest  # others are almost 0: biases of queries and keys
    }
    if calls == 1:
        far["loss"] = abs(loss / wanted.item() - 1) / 0.2  # 1e-6
        far["evaluated"] = abs(evaluated / wanted.item() - 1) / 0.2
    return {key: value for key, value in far.items() if not value <= 5e-6}


def departure(name: str = "causal") -> str | None:
    """Return the largest distances of a model, for planted faults."""
    return str(far) if (far := departures(name, {})) else None


LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"zero_stage": 1}, {"zero_stage": 2})
ZBV: dict[str, Any] = {"pp_size": 2, "pp_style": "zbv"}
TENSOR: dict[str, Any] = {"tp_size": 2}
FUSED: dict[str, Any] = {"enable_fused_loss": True, "zero_stage": 2}
PARALLEL: tuple[dict[str, Any], ...] = (
    {"pp_size": 2},
    {"pp_size": 2, "pp_style": "gpipe"},
    {"pp_size": 2, "pp_style": "zbh1"},
    ZBV,
    {"pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2},
    TENSOR,
    {"tp_size": 2, "parallel_output": False},
    FUSED,
    RING,
    ULYSSES,
    REGIONS,
)


# The layouts in which other code counts: stages, shards of a vocabulary, positions.
QUICK: tuple[dict[str, Any], ...] = (ZBV, TENSOR, RING)
# Losses of other kinds, and the means over classes and entries.
QUICK_NAMES = (
    "causal",
    "question",
    "several terms",
    "auxiliary",
    "seq2seq",
    "class weights",
    "several labels",
    "sum",
    "ctc mean",
)


@pytest.mark.parametrize("name", slow_except(QUICK_NAMES, (*HEADS, *INLINE, *CTC)))
def test_a_loss_is_that_of_the_whole_batch(pool: Pool, name: str) -> None:
    """Two replicas of 14 and 13 samples; the first microbatch of the first has no labels, or all of them."""
    for far in pool.run(2, departures, name, {"zero_stage": 1}):
        assert far == {}


@pytest.mark.parametrize("name", ["causal", slow_row("question"), "several terms", slow_row("auxiliary")])
def test_a_replica_may_have_no_labels(pool: Pool, name: str) -> None:
    for far in pool.run(2, departures, name, {"zero_stage": 2}, empty=14):
        assert far == {}


def test_routers_learn_from_a_batch_without_labels(pool: Pool) -> None:
    """As in one process: the loss is NaN, and the gradients are those of the auxiliary loss."""
    for far in pool.run(2, departures, "auxiliary", {"zero_stage": 2}, empty=SAMPLES):
        assert far.keys() == {"loss", "evaluated"}
        assert all(map(math.isnan, far.values()))


@pytest.mark.parametrize("sizes", slow_except((*QUICK, FUSED), (*LAYOUTS, *PARALLEL)), ids=str)
def test_every_layout_computes_the_whole_batch(pool: Pool, sizes: dict[str, Any]) -> None:
    for far in pool.run(2, departures, "causal", sizes):
        assert far == {}


@pytest.mark.parametrize(
    "sizes",
    slow_except((ZBV,), [sizes for sizes in (*LAYOUTS, *PARALLEL) if sizes is not FUSED]),
    ids=str,
)
@pytest.mark.parametrize("name", [slow_row("question"), "several terms"])
def test_every_layout_weighs_each_term(pool: Pool, name: str, sizes: dict[str, Any]) -> None:
    for far in pool.run(2, departures, name, sizes):
        assert far == {}


@pytest.mark.parametrize("sizes", slow_except((TENSOR,), PARALLEL), ids=str)
def test_an_auxiliary_loss_is_the_mean_over_microbatches(pool: Pool, sizes: dict[str, Any]) -> None:
    for far in pool.run(2, departures, "auxiliary", sizes):
        assert far == {}


ONE_BATCH = {"gradient_accumulation_steps": 3}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("causal", {"zero_stage": 0} | ONE_BATCH),
        slow_row("causal", {"zero_stage": 2}),
        slow_row("causal", {"zero_stage": 0}),
        slow_row("causal", {"zero_stage": 2} | ONE_BATCH),
        ("several terms", {"zero_stage": 2}),
    ],
    ids=str,
)
def test_several_calls_add_up_or_are_one_batch(pool: Pool, name: str, sizes: dict[str, Any]) -> None:
    for far in pool.run(2, departures, name, sizes, calls=3):
        assert far == {}


@on_ranks(2)
def test_accumulated_calls_weigh_by_the_first_term() -> None:
    """Gradients of three accumulated calls are their mean, weighed by the labels of the first term."""
    plain, batches = built("several terms"), [batch_of("several terms", 3 + call) for call in range(3)]
    counts = [(batch["labels"] != -100).sum() for batch in batches]
    for batch, count in zip(batches, counts, strict=True):
        (plain(**batch).loss * count / sum(counts)).backward()
    booster, model, optimizer = made("several terms", **ONE_BATCH)
    for batch in batches:
        run(booster, model, batch, optimizer=optimizer)
    optimizer.reduce_gradients()
    gradients, head = optimizer.gradients(), "cls.seq_relationship.weight"
    wanted = plain.get_parameter(head).grad
    assert (gradients[head] - wanted).abs().max() <= 5e-6 * wanted.abs().max()


def identity(outputs: Any, inputs: Any) -> Tensor:
    return outputs.loss


def test_a_criterion_that_returns_the_very_loss_is_the_models_own(pool: Pool) -> None:
    for far in pool.run(2, departures, "causal", {"pp_size": 2}, identity):
        assert far == {}


def summed(kind: Any, outputs: Any, inputs: Any) -> tuple[Tensor, Any]:
    """Return the sum of the losses of all tokens, and their number as a kind of number."""
    count = (inputs["labels"][:, 1:] != -100).sum()
    return outputs.loss * count, kind(count)


@pytest.mark.parametrize(
    "kind",
    [Tensor.double, *(slow_row(kind) for kind in (int, float, np.float32, np.int64))],
    ids=lambda kind: kind.__name__,
)
def test_a_weight_is_any_kind_of_number(pool: Pool, kind: Any) -> None:
    for far in pool.run(2, departures, "causal", {}, partial(summed, kind)):
        assert far == {}


def weighed_by_samples() -> tuple[bool, list[str]]:
    """Return True if a criterion's mean is weighed by samples, and the logged lines."""
    with logged() as lines:
        far = departures("causal", {}, lambda outputs, inputs: outputs.loss * 1)
    return "loss" in far, lines


def test_another_mean_is_weighed_by_samples_and_says_so(pool: Pool) -> None:
    (is_other, lines), _ = pool.run(2, weighed_by_samples)
    assert is_other
    assert sum("return (loss_sum, weight)" in line for line in lines) == 1


@on_ranks(1)
def test_the_mean_of_means_is_an_option() -> None:
    batch, plain = batch_of("sequence"), built("sequence")
    booster, model, optimizer = made("sequence", loss_reduction="microbatch_mean")
    loss = run(booster, model, batch, optimizer=optimizer)
    means = [plain(**microbatch).loss for microbatch in parts_of(batch, booster.plugin)]
    assert loss == pytest.approx(torch.stack(means).mean().item(), rel=1e-6)


@on_ranks(2)
def test_a_global_batch_without_labels_is_as_in_one_process() -> None:
    """Torch's mean over no labels is NaN, with gradients of zeros."""
    batch = batch_of("causal")
    batch["labels"] = torch.full_like(batch["labels"], -100)
    booster, model, optimizer = made("causal")
    loss = run(booster, model, batch, optimizer=optimizer)
    optimizer.step()
    assert math.isnan(loss) and optimizer.last_norm == 0 and optimizer.skipped_steps == 0


@on_ranks(2)
def test_scaled_gradients_have_the_magnitude_of_a_mean() -> None:
    """No step overflows."""
    booster, model, optimizer = made("causal", precision="fp16", initial_scale=2**12)
    for step in range(2):
        run(booster, model, batch_of("causal", step), optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert (optimizer.loss_scale, optimizer.skipped_steps) == (2**12, 0)


def by_the_guides_lines(is_exact: bool) -> float:
    """Return the norm of a step by `booster.backward`, with the lines of docs/coming-from-colossalai.md or without."""
    booster, model, optimizer = made("causal", num_microbatches=None)
    batch = share(batch_of("causal"), booster.plugin)
    loss = model(**batch).loss
    if is_exact:
        count = (batch["labels"][:, 1:] != -100).sum()
        total = count.clone()
        torch.distributed.all_reduce(total)
        loss = loss * count * torch.distributed.get_world_size() / total
    booster.backward(loss, optimizer)
    optimizer.step()
    return optimizer.last_norm


def test_backward_averages_replicas_and_the_guides_lines_are_exact(pool: Pool) -> None:
    norms, batch = [], batch_of("causal")
    for replicas in (1, 2):
        plain = built("causal")
        torch.stack([plain(**of_replica).loss for of_replica in parts(batch, replicas)]).mean().backward()
        norms.append(norm_of_gradients(plain))
    at_once, averaged = norms
    assert at_once != pytest.approx(averaged, rel=1e-2)
    assert pool.run(2, by_the_guides_lines, True) == pytest.approx([at_once] * 2, rel=1e-5)
    assert pool.run(2, by_the_guides_lines, False) == pytest.approx([averaged] * 2, rel=1e-5)
