"""Experts distributed over ranks, by the plugin: adapters and lazy models; parity rows are in tests/contract."""

import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from echelon import LazyInitContext
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from .training import boosted, hybrid, sgd, shares, steps

MIXTRAL = ModelChoice(model_type="mixtral", num_layers=2)
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def trained_adapters(folder: Path, ep_size: int) -> list[float]:
    """Train adapters of experts and of attention for two steps, and save them; return losses and norms."""
    config = LoraConfig(r=3, target_modules=["q_proj"], target_parameters=TARGETS, init_lora_weights=False)
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.23 has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(0)
        plain = get_peft_model(MIXTRAL.build(), config)
    booster = hybrid(ep_size=ep_size)
    model, optimizer = boosted(booster, plain, sgd)
    numbers = []
    for loss in steps(booster, model, optimizer, shares(booster, MIXTRAL, 2)):
        numbers += [loss, float(optimizer.get_grad_norm())]
    booster.save_lora_as_pretrained(model, folder)
    return numbers


def test_adapters_of_experts_train_as_in_one_process(pool: Pool, tmp_path: Path) -> None:
    (alone,) = pool.run(1, trained_adapters, tmp_path / "1", 1)
    for numbers in pool.run(2, trained_adapters, tmp_path / "2", 2):
        assert numbers == pytest.approx(alone, rel=1e-5)
    expected, saved = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("1", "2"))
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-4, atol=1e-6)


def losses_of(ep_size: int, lazy: bool) -> list[float]:
    torch.manual_seed(0)
    with LazyInitContext() if lazy else nullcontext():
        plain = MIXTRAL.build()
    booster = hybrid(ep_size=ep_size)
    model, optimizer = boosted(booster, plain, sgd)
    return [*steps(booster, model, optimizer, shares(booster, MIXTRAL, 3))]


def test_experts_of_a_lazy_model_train_as_those_of_another(pool: Pool) -> None:
    expected, _ = pool.run(2, losses_of, 1, False)
    for losses in pool.run(2, losses_of, 2, True):
        assert losses == pytest.approx(expected, rel=1e-6)
