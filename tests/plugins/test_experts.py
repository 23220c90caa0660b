"""Experts distributed over ranks, by the plugin: adapters, refusals; parity rows are in tests/contract."""

import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from echelon import LazyInitContext
from echelon.verify.batch import loss_of
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from .training import hybrid, refused, sgd, share

MIXTRAL, LLAMA = (ModelChoice(model_type=each, num_layers=2) for each in ("mixtral", "llama"))
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
    model, optimizer, *_ = booster.boost(plain, sgd(plain), loss_of)
    numbers = []
    for step in range(2):
        batches = share(booster, MIXTRAL, step)
        numbers.append(float(booster.execute_pipeline(batches, model, loss_of, optimizer)["loss"]))
        optimizer.step()
        numbers.append(float(optimizer.get_grad_norm()))
        optimizer.zero_grad()
    booster.save_lora_as_pretrained(model, folder)
    return numbers


def test_adapters_of_experts_train_as_in_one_process(pool: Pool, tmp_path: Path) -> None:
    (alone,) = pool.run(1, trained_adapters, tmp_path / "1", 1)
    for numbers in pool.run(2, trained_adapters, tmp_path / "2", 2):
        assert numbers == pytest.approx(alone, rel=1e-5)
    expected, saved = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("1", "2"))
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-4, atol=1e-6)


def losses_of(ep_size: int, lazy: bool) -> list[float]:
    torch.manual_seed(0)
    with LazyInitContext() if lazy else nullcontext():
        plain = MIXTRAL.build()
    booster = hybrid(ep_size=ep_size)
    model, optimizer, *_ = booster.boost(plain, sgd(plain), loss_of)
    losses = []
    for step in range(3):
        batches = share(booster, MIXTRAL, step)
        losses.append(float(booster.execute_pipeline(batches, model, loss_of, optimizer)["loss"]))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_experts_of_a_lazy_model_train_as_those_of_another(pool: Pool) -> None:
    expected, _ = pool.run(2, losses_of, 1, False)
    for losses in pool.run(2, losses_of, 2, True):
        assert losses == pytest.approx(expected, rel=1e-6)


def refused_model(choice: ModelChoice) -> str:
    booster, model = hybrid(ep_size=2), choice.build()
    return refused(lambda: booster.boost(model, sgd(model)))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (LLAMA, "ep_size=2 distributes the experts of a mixture, but a LlamaForCausalLM has none"),
        (
            ModelChoice(model_type="mixtral", settings=(("num_local_experts", 3),)),
            "ep_size=2 does not divide the 3 experts of model.layers.0.mlp.experts: use a divisor",
        ),
    ],
)
def test_what_cannot_be_distributed_is_refused(pool: Pool, choice: ModelChoice, message: str) -> None:
    for error in pool.run(2, refused_model, choice):
        assert message in error


def refused_optimizer() -> str:
    booster, model = hybrid(ep_size=2), ModelChoice(model_type="switch_transformers").build()
    return refused(lambda: booster.boost(model, torch.optim.Adafactor(model.parameters())))


def test_optimizers_of_full_parameters_do_not_step_experts_of_one_rank(pool: Pool) -> None:
    for error in pool.run(2, refused_optimizer):
        assert "where an optimizer of full parameters (Muon, Adafactor) cannot step it" in error


def refused_size() -> str:
    return refused(lambda: hybrid(ep_size=3))


def test_a_size_that_does_not_divide_the_data_axis_is_refused(pool: Pool) -> None:
    for error in pool.run(2, refused_size):
        assert "ep_size=3 does not divide the 2 ranks whose gradients are averaged" in error
