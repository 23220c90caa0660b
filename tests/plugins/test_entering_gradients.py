"""Gradients of tensors that enter a boosted model with a graph: embeddings, soft prompts, outputs of another model."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.verify.parity import gather_whole

from ..pool import Pool
from ..shardformer.compare import build
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


class Unwrapped:
    """A boosted model and the embedding of the model in it."""

    def __init__(self, boosted: Any) -> None:
        self.boosted = boosted

    def __call__(self, **kwargs: Any) -> Any:
        return self.boosted(**kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.boosted.unwrap().get_input_embeddings()


def require_close(own: Tensor, expected: Tensor, name: str) -> None:
    error = (own - expected).abs().max() / expected.abs().max()
    assert error < 5e-6, f"{name}: {error:.1e} of the largest entry"


def compare(script: Script, **settings: Any) -> None:
    """Compare the loss, and all gradients, with one process, on every rank."""
    kinds = ("LlamaForCausalLM", "LlamaModel")
    plain = [build(kind, seed=seed).train() for seed, kind in enumerate(kinds)]
    expected, expected_leaves = script(plain, batch())
    expected.backward()
    booster = hybrid(**settings)
    pairs = [
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]
        for model in (build(kind, seed=seed).train() for seed, kind in enumerate(kinds))
    ]
    loss, leaves = script([Unwrapped(model) for model, _ in pairs], batch())
    booster.backward(loss, pairs[0][1])
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for own, leaf in zip(leaves, expected_leaves, strict=True):
        assert own.grad is not None and leaf.grad is not None
        require_close(own.grad, leaf.grad, "the leaf")
    for (model, optimizer), native in zip(pairs, plain, strict=True):
        optimizer.reduce_gradients()
        found = gather_whole(optimizer.gradients(), model.local_parameters, model.mesh)
        for name, gradient in found.items():
            require_close(gradient, native.get_parameter(name).grad, name)


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
    "zero": (2, {"zero_stage": 2}),
}


@pytest.mark.parametrize("script", [embeddings, prompts, looked_up, two_models])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_one_process(pool: Pool, layout: str, script: Script) -> None:
    num_ranks, settings = LAYOUTS[layout]
    pool.run(num_ranks, compare, script, **settings)
