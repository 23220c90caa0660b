"""Small models with LoRA, and helpers to train them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.cluster.placement import shards_of
from echelon.plugins.adapters import enable_lora
from echelon.verify.batch import loss_of
from echelon.verify.model_choice import ModelChoice

from ..plugins.training import hybrid, share, shares, steps

LLAMA_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Adapted(ModelChoice):
    """A model with LoRA in some of its linear layers.

    Args:
        targets: names of the layers.
        lora: further settings of peft's config, as (name, value).
    """

    targets: tuple[str, ...] = LLAMA_LINEAR
    lora: tuple[tuple[str, Any], ...] = ()

    def build(self, seed: int = 0) -> nn.Module:
        """Build the transformers model with adapters."""
        return self.build_peft(seed).get_base_model()

    def build_peft(self, seed: int = 0) -> Any:
        """Build the model in peft's wrapper, with no adapter zero: initially B is zero, and so is A's gradient."""
        from peft import LoraConfig

        config = LoraConfig(r=3, target_modules=list(self.targets), **dict(self.lora))
        model = enable_lora(super().build(seed), None, config, None, False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        return model

    def build_plain(self, seed: int = 0) -> nn.Module:
        """Build the model without adapters."""
        return super().build(seed)


LLAMA = Adapted(model_type="llama", num_layers=2)
GPT2 = Adapted(
    model_type="gpt2",
    targets=("c_attn", "c_fc", "c_proj"),
    lora=(("fan_in_fan_out", True), ("lora_bias", True)),
)
BERT = Adapted(
    model_type="bert",
    head="classification",
    targets=("query", "value", "dense"),  # also the pooler's, which is not sharded
    lora=(("task_type", "SEQ_CLS"),),  # trains the classifier, too
)


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer whose weight decay would change frozen weights."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-5)


def train_and_save(
    choice: Adapted, folder: Path, settings: dict[str, Any], *, selection: str
) -> dict[str, Any]:
    """Take three steps and save; return the frozen parameters that changed, and the model's outputs afterwards.

    Args:
        selection: "all" or "trainable", the parameters given to the optimizer.
    """
    booster = hybrid(**settings)
    model = choice.build_peft()
    full_weights = {
        name: parameter.detach().clone() for name, parameter in model.get_base_model().named_parameters()
    }
    optimizer = optimizer_of(
        parameter for parameter in model.parameters() if selection == "all" or parameter.requires_grad
    )
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    assert [*steps(booster, boosted, optimizer, shares(booster, choice, NUM_STEPS))]
    booster.save_lora_as_pretrained(boosted, folder)
    return {"moved": moved(boosted, full_weights), "logits": answer(booster, boosted, choice)}


def load(choice: Adapted, folder: Path, settings: dict[str, Any]) -> Tensor | None:
    """Return the logits of a model with saved adapters, on the last stage."""
    booster = hybrid(**settings)
    model = booster.enable_lora(choice.build_plain(), pretrained_dir=folder)
    return answer(booster, booster.boost(model)[0], choice)


def answer(booster: Any, boosted: Any, choice: Adapted) -> Tensor | None:
    """Return the logits of this replica's shard of a batch, on the last stage."""
    boosted.eval()
    with torch.no_grad():
        data = share(booster, choice, NUM_STEPS)
        outputs = booster.execute_pipeline(data, boosted, loss_of, return_outputs=True)["outputs"]
    return None if outputs is None else outputs.logits


def moved(boosted: Any, full_weights: dict[str, Tensor]) -> list[str]:
    """Return the frozen parameters of this rank whose bits have changed."""
    names = []
    for name, parameter in boosted.local_parameters.items():
        original = full_weights[name]
        for shard, rank in shards_of(parameter, boosted.mesh.layout):
            original = shard.local(original, rank)
        if not parameter.requires_grad and not torch.equal(parameter, original):
            names.append(name)
    return names
