"""Gradients of tensors that enter a boosted model with a graph: embeddings, prompts, masks, rotations, other states."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.verify.parity import gather_full

from ..pool import Pool
from ..shardformer.compare import build, numbers
from .training import hybrid

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
    pairs = [booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2] for model in models()]
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


def sequence(mode: str, **sizes: Any) -> dict[str, Any]:
    return {**sizes, "enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}


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
RINGS, ON_SEQUENCES = (
    ("ring_attn", "ring_attn of 3"),
    ("ring_attn", "ring_attn of 3", "all_to_all", "all_to_all, tp"),
)
# They combine or repeat what the others do.
SLOW = ("ring_attn of 3", "all_to_all, tp", "zero 1")


QUICK = tuple(layout for layout in LAYOUTS if layout not in SLOW)


def layouts(*refused: str, quick: tuple[str, ...] = QUICK) -> list[Any]:
    """Return the names of the layouts but for those that refuse a script."""
    return [
        layout if layout in quick else pytest.param(layout, marks=pytest.mark.slow)
        for layout in LAYOUTS
        if layout not in refused
    ]


@pytest.mark.parametrize("layout", layouts())
def test_gradients_of_embeddings_are_those_of_one_process(pool: Pool, layout: str) -> None:
    num_ranks, settings = LAYOUTS[layout]
    pool.run(num_ranks, compare, embeddings, **settings)


@pytest.mark.parametrize(
    "script",
    [two_models, *(pytest.param(script, marks=pytest.mark.slow) for script in (prompts, looked_up))],
)
@pytest.mark.parametrize("layout", layouts(quick=("ring_attn", "tp", "zero")))
def test_gradients_are_those_of_one_process(pool: Pool, layout: str, script: Script) -> None:
    num_ranks, settings = LAYOUTS[layout]
    pool.run(num_ranks, compare, script, **settings)


@pytest.mark.parametrize("layout", layouts(quick=("all_to_all", "split_gather")))
def test_gradients_of_an_inner_model_are_those_of_one_process(pool: Pool, layout: str) -> None:
    num_ranks, settings = LAYOUTS[layout]
    pool.run(num_ranks, compare, inner_model, LLAMA, **settings)


@pytest.mark.parametrize("script", [pytest.param(scores, marks=pytest.mark.slow), scores_of_heads])
@pytest.mark.parametrize("layout", layouts(*RINGS, quick=("all_to_all", "tp")))
def test_gradients_of_learned_masks_are_those_of_one_process(pool: Pool, layout: str, script: Script) -> None:
    num_ranks, settings = LAYOUTS[layout]
    pool.run(num_ranks, compare, script, **settings)


@pytest.mark.parametrize("layout", layouts(*ON_SEQUENCES, quick=("split_gather", "tp")))
def test_gradients_of_encoder_states_are_those_of_one_process(pool: Pool, layout: str) -> None:
    num_ranks, settings = LAYOUTS[layout]
    pool.run(num_ranks, compare, encoder_states, T5, **settings)
    if layout != "split_gather":  # refused for GPT-2's cross attention
        pool.run(num_ranks, compare, further_states, GPT2, **settings)


@pytest.mark.parametrize("layout", layouts(quick=("ring_attn", "tp", "wp")))
def test_gradients_of_trained_rotary_embeddings_are_those_of_one_process(pool: Pool, layout: str) -> None:
    num_ranks, settings = LAYOUTS[layout]
    pool.run(num_ranks, compare, tokens, LLAMA, with_trained_rotary, **settings)


FULL_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
ROTARIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "GPTNeoXForCausalLM": FULL_ROTARY | {"hidden_dropout": 0.0},
}


def compare_stages(class_name: str, settings: dict[str, Any]) -> None:
    """Compare a step of trained rotary embeddings, which every stage computes, with one process, on every rank."""
    plain, model = (with_trained_rotary(class_name, **settings) for _ in range(2))
    name = next(name for name, _ in plain.named_parameters() if name.endswith("frequencies"))
    before, rate = (
        plain.get_parameter(name).detach().clone(),
        1e4,
    )  # large, for steps of the size of the values
    expected, _ = tokens([plain], batch())
    expected.backward()
    booster = hybrid(pp_size=2)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=rate))
    entering = {"input_ids": batch()["ids"], "labels": batch()["labels"]}
    output = booster.execute_pipeline(iter([entering]), model, optimizer=optimizer)
    assert output["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    optimizer.step()
    gradient = (before - model.unwrap().get_parameter(name).detach()) / rate
    grad = plain.get_parameter(name).grad
    assert grad is not None
    require_close(gradient, grad, name, noise=2**-23 / rate)


@pytest.mark.parametrize("class_name", ROTARIES)
def test_stages_sum_the_gradients_of_trained_rotary_embeddings(pool: Pool, class_name: str) -> None:
    pool.run(2, compare_stages, class_name, ROTARIES[class_name])


@pytest.mark.parametrize(
    "layout", ["tp", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("wp", "zero"))]
)
def test_gradients_of_a_layers_arguments_are_those_of_one_process(pool: Pool, layout: str) -> None:
    num_ranks, settings = LAYOUTS[layout]
    pool.run(num_ranks, compare, rotations, LLAMA, **settings)


def test_gradients_of_masks_sum_where_a_region_has_several_entries(pool: Pool) -> None:
    pool.run(2, compare, scores, ALBERT, tp_size=2)


def train_with_gradients_of_batches(**settings: Any) -> list[str]:
    """Return the errors of batches that require gradients; the same batches evaluate, and train without gradients."""
    booster = hybrid(**settings)
    model = build("LlamaForCausalLM", num_hidden_layers=4)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    drawn = batch()
    ids, labels, rows = drawn["ids"], drawn["labels"], drawn["drawn"]
    mask = numbers(2, 1, 13, 13)
    words = []
    for name, inputs in {"inputs_embeds": rows, "attention_mask": mask}.items():
        others = {"labels": labels} if name == "inputs_embeds" else {"labels": labels, "input_ids": ids}
        for entering in (inputs.requires_grad_(), inputs * 1):  # a leaf, and what is computed from one
            with pytest.raises(ValueError, match=r"requires gradients \(" + name) as error:
                booster.execute_pipeline(iter([{**others, name: entering}]), model, None, optimizer)
            words.append(str(error.value))
        with torch.no_grad():
            booster.execute_pipeline(iter([{**others, name: inputs}]), model)
        booster.execute_pipeline(iter([{**others, name: inputs.detach()}]), model, None, optimizer)
        optimizer.step()
    return words


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (1, {}),
        (2, {"pp_size": 2}),
        (2, sequence("all_to_all", sp_size=2)),
    ],
)
def test_execute_pipeline_refuses_batches_with_gradients_on_every_rank(
    pool: Pool, num_ranks: int, settings: dict[str, Any]
) -> None:
    words = pool.run(num_ranks, train_with_gradients_of_batches, **settings)
    assert all("detach() it" in message for message in words[0])
    assert words == [words[0]] * num_ranks


def call_two_models_of_a_pipeline() -> None:
    booster = hybrid(pp_size=2)
    pairs = [
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]
        for model in map(build, ("LlamaForCausalLM", "LlamaModel"))
    ]
    with pytest.raises(RuntimeError, match=r"model\(\*\*batch\) under a pipeline \(pp_size=2\)"):
        two_models([model for model, _ in pairs], batch())


def test_a_loss_through_two_models_is_refused_under_a_pipeline_on_every_rank(pool: Pool) -> None:
    pool.run(2, call_two_models_of_a_pipeline)


def compare_replicas() -> None:
    """Every replica has its own batch: leaves have the gradient of its loss, parameters the mean over replicas."""
    booster = hybrid(tp_size=2, zero_stage=1)
    plain, model = (build("LlamaForCausalLM") for _ in range(2))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
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


def test_leaves_are_not_averaged_over_replicas(pool: Pool) -> None:
    pool.run(4, compare_replicas)
