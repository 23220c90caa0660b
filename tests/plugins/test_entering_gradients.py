"""Gradients of tensors that enter a boosted model with a graph: embeddings, prompts, masks, rotations, other states."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.verify.parity import gather_full

from ..pool import Pool, on_ranks
from ..shardformer.compare import build, numbers
from ..slow import slow_row
from .training import ULYSSES, hybrid, sequence, sgd
from .training import boosted as boosted_by

# Models as the script calls them, and the batch; returns the loss and the leaves outside of the models.
Script = Callable[[Sequence[Any], dict[str, Tensor]], tuple[Tensor, list[Tensor]]]


def batch(replica: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    ids = torch.randint(3, 50, (2, 13), generator=generator)
    return {"ids": ids, "labels": ids.roll(1), "drawn": torch.randn(2, 13, 32, generator=generator)}


def embeddings(models: Sequence[Any], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Leaf in place of the embedding's output, which the loss also uses outside of the model."""
    leaf = batch["drawn"].clone().requires_grad_()
    loss = models[0](inputs_embeds=leaf, labels=batch["labels"]).loss + leaf.square().mean()
    return loss, [leaf]


def prompts(models: Sequence[Any], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Soft prompts before rows that the model's embedding looks up, in a script that trains both."""
    prompt = batch["drawn"][:1, :3].clone().requires_grad_()
    rows = models[0].get_input_embeddings()(batch["ids"])
    entering = torch.cat([prompt.expand(2, -1, -1), rows], 1)
    ignored = torch.full((2, 3), -100)
    return models[0](inputs_embeds=entering, labels=torch.cat([ignored, batch["labels"]], 1)).loss, [prompt]


def looked_up(models: Sequence[Any], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Rows of the model's embedding, unchanged."""
    rows = models[0].get_input_embeddings()(batch["ids"])
    return models[0](inputs_embeds=rows, labels=batch["labels"]).loss, []


def two_models(models: Sequence[Any], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Loss through a generator and a critic."""
    hidden = models[1](input_ids=batch["ids"]).last_hidden_state
    return models[0](inputs_embeds=hidden, labels=batch["labels"]).loss, []


def scores(models: Sequence[Any], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Learned scores as the mask, for all heads together."""
    return _with_scores(models, batch, heads=1)


def scores_of_heads(models: Sequence[Any], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Learned scores as the mask, for each head."""
    return _with_scores(models, batch, heads=4)


def _with_scores(models: Sequence[Any], batch: dict[str, Tensor], heads: int) -> tuple[Tensor, list[Tensor]]:
    leaf = numbers(2, heads, 13, 13).requires_grad_()
    return models[0](input_ids=batch["ids"], attention_mask=leaf, labels=batch["labels"]).loss, [leaf]


def encoder_states(models: Sequence[Any], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """States of another encoder, embeddings of the decoder, and learned scores of both attentions."""
    leaves = [batch["drawn"].clone(), numbers(2, 9, 32), numbers(2, 1, 1, 13), numbers(2, 4, 9, 9)]
    states, rows, mask, decoder_mask = (leaf.requires_grad_() for leaf in leaves)
    labels = batch["labels"][:, :9].contiguous()
    outputs = models[0](
        encoder_outputs=(states,),
        decoder_inputs_embeds=rows,
        attention_mask=mask,
        decoder_attention_mask=decoder_mask,
        labels=labels,
    )
    return outputs.loss, leaves


def further_states(models: Sequence[Any], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """States of another model for the cross attention of a decoder."""
    leaf = numbers(2, 11, 32).requires_grad_()
    outputs = models[0](input_ids=batch["ids"], encoder_hidden_states=leaf, labels=batch["labels"])
    return outputs.loss, [leaf]


class TrainedRotary(nn.Module):
    """Rotary embeddings of frequencies that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(100.0 ** (-torch.arange(4) / 4))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None] * self.frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def with_trained_rotary(class_name: str, **settings: Any) -> nn.Module:
    model = build(class_name, **settings)
    model.get_decoder().rotary_emb = TrainedRotary()
    return model


def tokens(models: Sequence[Any], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Nothing besides the batch."""
    return models[0](input_ids=batch["ids"], labels=batch["labels"]).loss, []


def inner_model(models: Sequence[Any], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Embeddings that enter the module of the layers, without the head; the second call is of the full model."""
    leaves = [batch["drawn"].clone().requires_grad_() for _ in range(2)]
    states = models[0].get_decoder()(inputs_embeds=leaves[0], use_cache=False).last_hidden_state
    weights = numbers(*states.shape)
    loss = (states * weights).mean() + models[0](inputs_embeds=leaves[1], labels=batch["labels"]).loss
    return loss, leaves


def rotations(models: Sequence[Any], batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Hidden states, cosines and sines as arguments of a layer."""
    leaves = [batch["drawn"].clone(), numbers(1, 13, 8), numbers(1, 13, 8)]
    hidden, *pair = (leaf.requires_grad_() for leaf in leaves)
    (layer, *_) = models[0].get_decoder().layers
    return layer(hidden, position_embeddings=tuple(pair)).square().mean(), leaves


class Unwrapped:
    """A boosted model and the embedding of the model in it."""

    def __init__(self, boosted: Any) -> None:
        self.boosted = boosted

    def __call__(self, **kwargs: Any) -> Any:
        return self.boosted(**kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.boosted.unwrap().get_input_embeddings()

    def get_decoder(self) -> nn.Module:
        return self.boosted.unwrap().get_decoder()


LLAMAS: dict[str, dict[str, Any]] = {"LlamaForCausalLM": {}, "LlamaModel": {}}
LLAMA: dict[str, dict[str, Any]] = {"LlamaForCausalLM": {}}
T5: dict[str, dict[str, Any]] = {"T5ForConditionalGeneration": {}}
GPT2: dict[str, dict[str, Any]] = {"GPT2LMHeadModel": {"add_cross_attention": True}}
# Its query, key and value layers are regions of their own.
ALBERT: dict[str, dict[str, Any]] = {
    "AlbertForMaskedLM": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
}


def compare(
    script: Script,
    kinds: dict[str, dict[str, Any]] = LLAMAS,
    make: Callable[..., nn.Module] = build,
    **settings: Any,
) -> None:
    """Compare the loss, and all gradients, with one process, on every rank."""

    def models() -> list[nn.Module]:
        return [make(kind, seed=seed, **kinds[kind]).train() for seed, kind in enumerate(kinds)]

    plain = models()
    expected, expected_leaves = script(plain, batch())
    expected.backward()
    booster = hybrid(**settings)
    pairs = [boosted_by(booster, model, sgd) for model in models()]
    loss, leaves = script([Unwrapped(model) for model, _ in pairs], batch())
    booster.backward(loss, pairs[0][1])
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert leaf.grad is not None and expected_leaf.grad is not None
        require_close(leaf.grad, expected_leaf.grad, f"the leaf of {tuple(expected_leaf.shape)}")
    for (model, optimizer), native in zip(pairs, plain, strict=True):
        optimizer.reduce_gradients()
        gradients = gather_full(optimizer.gradients(), model.local_parameters, model.mesh)
        grads = {name: native.get_parameter(name).grad for name in gradients}
        largest = max([grad.abs().max() for grad in grads.values() if grad is not None], default=0.0)
        for name, gradient in gradients.items():
            if (grad := grads[name]) is None:
                assert not gradient.any(), name
            else:
                require_close(gradient, grad, name, noise=2**-23 * float(largest))


def require_close(gradient: Tensor, expected: Tensor, name: str, noise: float = 0.0) -> None:
    """Require equality within 5e-6 of the largest entry, or the noise: a bias of keys has a gradient of 0."""
    error, allowed = (gradient - expected).abs().max(), max(5e-6 * float(expected.abs().max()), noise)
    assert error <= allowed, f"{name}: {error:.1e}, allowed {allowed:.1e}"


LAYOUTS = {
    "ring_attn": (2, sequence("ring_attn", sp_size=2)),
    "ring_attn of 3": (3, sequence("ring_attn", sp_size=3)),
    "all_to_all": (2, sequence("all_to_all", sp_size=2)),
    "all_to_all, tp": (4, sequence("all_to_all", sp_size=2, tp_size=2)),
    "split_gather": (2, sequence("split_gather", tp_size=2)),
    "tp": (2, {"tp_size": 2}),
    "wp": (2, {"wp_size": 2}),
    "zero 1": (2, {"zero_stage": 1}),
    "zero": (2, {"zero_stage": 2}),
}
# They combine or repeat what the others do.
SLOW = ("ring_attn of 3", "all_to_all, tp", "zero 1")
QUICK = tuple(layout for layout in LAYOUTS if layout not in SLOW)
# Scripts with learned masks are refused by rings, and those of cross attention under every sharded sequence but one.
WITHOUT_RINGS = tuple(layout for layout in LAYOUTS if "ring" not in layout)
ON_FULL_SEQUENCES = ("tp", "wp", "zero 1", "zero")


def rows(
    script: Script,
    kinds: dict[str, dict[str, Any]] = LLAMAS,
    *,
    layouts: Iterable[str] = LAYOUTS,
    quick: tuple[str, ...] = (),
    make: Callable[..., nn.Module] = build,
) -> list[Any]:
    return [
        (pytest.param if layout in quick else slow_row)(
            script, kinds, layout, make, id=f"{script.__name__}-{layout}"
        )
        for layout in layouts
    ]


@pytest.mark.parametrize(
    ("script", "kinds", "layout", "make"),
    [
        *rows(embeddings, quick=QUICK),
        *rows(two_models, quick=("ring_attn", "zero")),
        *rows(prompts),
        *rows(looked_up),
        *rows(inner_model, LLAMA, quick=("split_gather",)),
        *rows(scores, layouts=WITHOUT_RINGS),
        *rows(scores_of_heads, layouts=WITHOUT_RINGS, quick=("all_to_all",)),
        *rows(encoder_states, T5, layouts=("split_gather", *ON_FULL_SEQUENCES), quick=("split_gather", "tp")),
        *rows(further_states, GPT2, layouts=ON_FULL_SEQUENCES, quick=("tp",)),
        *rows(tokens, LLAMA, quick=("ring_attn", "wp"), make=with_trained_rotary),
        *rows(rotations, LLAMA, layouts=("tp", "wp", "zero"), quick=("tp",)),
    ],
)
def test_gradients_are_those_of_one_process(
    pool: Pool,
    script: Script,
    kinds: dict[str, dict[str, Any]],
    layout: str,
    make: Callable[..., nn.Module],
) -> None:
    num_ranks, settings = LAYOUTS[layout]
    pool.run(num_ranks, compare, script, kinds, make, **settings)


FULL_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
ROTARIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "GPTNeoXForCausalLM": FULL_ROTARY | {"hidden_dropout": 0.0},
}


@pytest.mark.parametrize("class_name", ROTARIES)
@on_ranks(2)
def test_stages_sum_the_gradients_of_trained_rotary_embeddings(class_name: str) -> None:
    """Every stage computes them."""
    plain, model = (with_trained_rotary(class_name, **ROTARIES[class_name]) for _ in range(2))
    name = next(name for name, _ in plain.named_parameters() if name.endswith("frequencies"))
    before = plain.get_parameter(name).detach().clone()
    rate = 1e4  # large, for steps of the size of the values
    expected, _ = tokens([plain], batch())
    expected.backward()
    booster = hybrid(pp_size=2)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=rate))
    entering = {"input_ids": batch()["ids"], "labels": batch()["labels"]}
    output = booster.execute_pipeline(iter([entering]), model, optimizer=optimizer)
    assert output["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    optimizer.step()
    gradient = (before - model.unwrap().get_parameter(name).detach()) / rate
    require_close(gradient, plain.get_parameter(name).grad, name, noise=2**-23 / rate)


def test_gradients_of_masks_sum_where_a_region_has_several_entries(pool: Pool) -> None:
    pool.run(2, compare, scores, ALBERT, tp_size=2)


def train_with_gradients_of_batches(**settings: Any) -> list[str]:
    """Return the errors of batches that require gradients; the same batches evaluate, and train without gradients."""
    booster = hybrid(**settings)
    model, optimizer = boosted_by(booster, build("LlamaForCausalLM", num_hidden_layers=4), sgd)
    drawn, words = batch(), []
    labels, text = {"labels": drawn["labels"]}, {"input_ids": drawn["ids"], "labels": drawn["labels"]}
    for name, inputs, others in (
        ("inputs_embeds", drawn["drawn"], labels),
        ("attention_mask", numbers(2, 1, 13, 13), text),
    ):
        for entering in (inputs.requires_grad_(), inputs * 1):  # a leaf, and what is computed from one
            with pytest.raises(ValueError, match=r"requires gradients \(" + name) as error:
                booster.execute_pipeline(iter([{**others, name: entering}]), model, None, optimizer)
            words.append(str(error.value))
        with torch.no_grad():
            booster.execute_pipeline(iter([{**others, name: inputs}]), model)
        booster.execute_pipeline(iter([{**others, name: inputs.detach()}]), model, None, optimizer)
        optimizer.step()
    return words


@pytest.mark.parametrize(("num_ranks", "settings"), [(1, {}), (2, {"pp_size": 2}), (2, ULYSSES)])
def test_execute_pipeline_refuses_batches_with_gradients_on_every_rank(
    pool: Pool, num_ranks: int, settings: dict[str, Any]
) -> None:
    words = pool.run(num_ranks, train_with_gradients_of_batches, **settings)
    assert all("detach() it" in message for message in words[0])
    assert words == [words[0]] * num_ranks


@on_ranks(2)
def test_a_loss_through_two_models_is_refused_under_a_pipeline_on_every_rank() -> None:
    booster = hybrid(pp_size=2)
    models = [boosted_by(booster, build(kind), sgd)[0] for kind in LLAMAS]
    with pytest.raises(RuntimeError, match=r"model\(\*\*batch\) under a pipeline \(pp_size=2\)"):
        two_models(models, batch())


@on_ranks(4)
def test_leaves_are_not_averaged_over_replicas() -> None:
    """Every replica has its own batch: leaves have the gradient of its loss, parameters the mean over replicas."""
    booster = hybrid(tp_size=2, zero_stage=1)
    plain = build("LlamaForCausalLM")
    model, optimizer = boosted_by(booster, build("LlamaForCausalLM"), sgd)
    replica, num_replicas = booster.plugin.data_rank
    leaves = []
    for index in range(num_replicas):
        expected, (leaf,) = prompts([plain], batch(index))
        (expected / num_replicas).backward()
        leaves.append(leaf.grad * num_replicas)
    loss, (prompt,) = prompts([Unwrapped(model)], batch(replica))
    booster.backward(loss, optimizer)
    require_close(prompt.grad, leaves[replica], "the prompt")
    optimizer.reduce_gradients()
    for name, gradient in gather_full(optimizer.gradients(), model.local_parameters, model.mesh).items():
        require_close(gradient, plain.get_parameter(name).grad, name)
