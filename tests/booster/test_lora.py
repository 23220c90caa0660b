"""LoRA by the booster: trained and frozen parameters, and files that peft reads."""

import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from echelon import LazyInitContext
from echelon.plugins.adapters import enable_lora
from echelon.verify.batch import loss_of, make_batch

from ..plugins.training import boosted, booster_of, hybrid, parts, refused, share, shares, steps
from ..pool import Pool
from ..slow import slow_row
from .adapters import BERT, GPT2, LLAMA, NUM_STEPS, Adapted, load, optimizer_of, train_and_save

# Sums over ranks are in another order, and three steps of AdamW amplify that; measured: 4e-6.
TOLERANCE = 1e-4


def in_one_process(choice: Adapted, num_microbatches: int) -> dict[str, Tensor]:
    """Return the adapters after the same steps of a plain loop, by peft's names in a file."""
    model = choice.build_peft()
    optimizer = optimizer_of(parameter for parameter in model.parameters() if parameter.requires_grad)
    for step in range(NUM_STEPS):
        for batch in parts(make_batch(choice, num_samples=8, seed=step), num_microbatches):
            (model(**batch).loss / num_microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
    internal = re.compile(r"\.default|modules_to_save\.|\.modules_to_save")
    return {internal.sub("", name): tensor for name, tensor in model.state_dict().items()}


def read_by_peft(choice: Adapted, folder: Path) -> Tensor:
    """Return the logits of peft's own model with the saved adapters, in a plain process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        model = PeftModel.from_pretrained(choice.build_plain(), str(folder)).eval()
    with torch.no_grad():
        return model(**make_batch(choice, num_samples=8, seed=NUM_STEPS)).logits


def save_and_load_model(folder: Path) -> None:
    first, second = hybrid(tp_size=2), hybrid(pp_size=2)
    model = first.boost(LLAMA.build_peft())[0]
    first.save_model(model, folder / "saved", shard=True)
    other = second.boost(LLAMA.build_peft(seed=5))[0]
    second.load_model(other, folder / "saved")
    second.save_model(other, folder / "again", shard=True)


def test_a_model_with_adapters_is_saved_under_its_own_names_and_loads_again(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(2, save_and_load_model, tmp_path)
    saved, again = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "again"))
    torch.testing.assert_close(saved, again, rtol=0, atol=0)
    plain = LLAMA.build_plain().state_dict()
    assert all("lora_" in name for name in saved.keys() - plain.keys())
    assert any("lora_B" in name for name in saved)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in plain.items())


@pytest.mark.parametrize(
    ("choice", "world", "settings", "selection", "elsewhere"),
    [
        (LLAMA, 2, {"tp_size": 2}, "trainable", {"pp_size": 2}),
        slow_row(LLAMA, 4, {"tp_size": 2, "pp_size": 2}, "all", {"tp_size": 4}),
        slow_row(GPT2, 4, {"tp_size": 2, "zero_stage": 2}, "all", {"pp_size": 2, "tp_size": 2}),
        slow_row(BERT, 4, {"pp_size": 2, "zero_stage": 1}, "trainable", {"tp_size": 2, "pp_size": 2}),
        slow_row(BERT, 2, {"tp_size": 2}, "all", {"pp_size": 2}),
    ],
    ids=str,
)
def test_saved_adapters_are_those_of_one_process(
    pool: Pool,
    tmp_path: Path,
    choice: Adapted,
    world: int,
    settings: dict[str, Any],
    selection: str,
    elsewhere: dict[str, Any],
) -> None:
    reports = pool.run(world, train_and_save, choice, tmp_path, settings, selection=selection, timeout=120.0)
    assert [report["moved"] for report in reports] == [[]] * world
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert any("lora_A" in name for name in stored)
    require_adapters(stored, in_one_process(choice, 1))
    logits = read_by_peft(choice, tmp_path)
    require_same_logits([report["logits"] for report in reports], logits)
    require_same_logits(pool.run(world, load, choice, tmp_path, elsewhere, timeout=120.0), logits)


def require_adapters(stored: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    expected = {name: expected[name] for name in stored}
    torch.testing.assert_close(stored, expected, atol=TOLERANCE, rtol=TOLERANCE)


def require_same_logits(by_rank: list[Tensor | None], logits: Tensor) -> None:
    """Check that the logits of the last stage's ranks equal those of all samples, or of their replica's."""
    held = [rank_logits for rank_logits in by_rank if rank_logits is not None]
    assert held
    for rank_logits in held:
        shares = logits.chunk(len(logits) // len(rank_logits))
        assert any(torch.allclose(rank_logits, share, atol=TOLERANCE, rtol=TOLERANCE) for share in shares)


def train_by_calls(folder: Path, plugin: str) -> None:
    """Take the same steps by torch's own data parallelism, and save in torch's format."""
    booster = booster_of(plugin)
    model, optimizer = boosted(booster, LLAMA.build_peft(), lambda model: optimizer_of(model.parameters()))
    assert [*steps(booster, model, optimizer, shares(booster, LLAMA, NUM_STEPS), by_calls=True)]
    booster.save_lora_as_pretrained(model, folder, use_safetensors=False)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_torchs_own_data_parallelism_saves_the_same(pool: Pool, tmp_path: Path, plugin: str) -> None:
    pool.run(2, train_by_calls, tmp_path, plugin)
    stored = torch.load(tmp_path / "adapter_model.bin", weights_only=True)
    require_adapters(stored, in_one_process(LLAMA, 2))
    assert read_by_peft(LLAMA, tmp_path).isfinite().all()


def save_two(folder: Path) -> None:
    """Save a model with two adapters, and compare the second one's file."""
    booster = hybrid(tp_size=2)
    model = LLAMA.build_peft()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj", "o_proj"], init_lora_weights=False))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    booster.save_lora_as_pretrained(booster.boost(model)[0], folder)
    stored = load_file(folder / "second" / "adapter_model.safetensors")
    expected = {name.replace(".second", ""): state[name] for name in state if ".second" in name}
    torch.testing.assert_close(stored, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_each_adapter_is_saved_where_peft_saves_it(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_two, tmp_path)
    assert not any("second" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def boost_lazily(where: str) -> list[float]:
    """Return the losses of an eagerly and of a lazily built model, with a B that is not peft's initial zero."""
    losses = []
    for is_lazy in (False, True):
        booster = hybrid(tp_size=2)
        torch.manual_seed(5)
        model = build_adapted(where, is_lazy)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.default.weight"):
                parameter.data.fill_(0.1)
        model, *_ = booster.boost(model)
        with torch.no_grad():
            outputs = booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of)
        losses.append(float(outputs["loss"]))
    return losses


def build_adapted(where: str, is_lazy: bool) -> Any:
    config = LoraConfig(r=3, target_modules=["q_proj", "o_proj"], init_lora_weights="gaussian")
    with LazyInitContext() if is_lazy else nullcontext():
        model = LLAMA.build_plain()
        if where == "inside":
            return enable_lora(model, None, config, None, False)
    return enable_lora(model, None, config, None, False)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "behind"])
def test_a_lazily_built_model_takes_adapters(pool: Pool, where: str) -> None:
    eager, lazy = pool.run(2, boost_lazily, where)[0]
    assert eager == lazy


def refuse_boosted(folder: Path) -> list[str]:
    """Return the errors for a boosted model, one without adapters, and peft's other types."""
    booster = hybrid()
    model, *_ = booster.boost(LLAMA.build_plain())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        other = get_peft_model(
            LLAMA.build_plain(), IA3Config(target_modules=["q_proj"], feedforward_modules=[])
        )
    assert booster.plugin.checkpoints.group  # created at its first use
    config = LoraConfig(r=2, target_modules=["q_proj"])
    return [
        refused(lambda: booster.enable_lora(model, lora_config=config)),
        refused(lambda: booster.enable_lora(model.unwrap(), lora_config=config)),
        refused(lambda: booster.save_lora_as_pretrained(model, folder)),
        refused(lambda: booster.boost(other)),
    ]


def test_unsupported_models_are_refused(pool: Pool, tmp_path: Path) -> None:
    twice, inside, without, other = pool.run(1, refuse_boosted, tmp_path)[0]
    assert "already boosted" in twice and "already boosted" in inside
    assert "booster.enable_lora returned" in without
    assert "type IA3" in other


def save_and_break(folder: Path) -> list[str]:
    """Return the errors for a folder with a missing tensor, and for a path that is no folder."""
    booster = hybrid()
    model, *_ = booster.boost(LLAMA.build_peft())
    booster.save_lora_as_pretrained(model, folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    taken = next(iter(tensors))
    tensors["base_model.model.other.lora_A.weight"] = tensors.pop(taken)
    save_file(tensors, path, metadata={"format": "pt"})
    incomplete = refused(lambda: booster.enable_lora(LLAMA.build_plain(), pretrained_dir=folder))
    with pytest.raises(OSError) as error:
        booster.save_lora_as_pretrained(model, path)
    return [taken, incomplete, str(error.value), *sorted(file.name for file in folder.iterdir())]


def test_a_folder_that_does_not_fit_is_reported(pool: Pool, tmp_path: Path) -> None:
    taken, incomplete, no_folder, *files = pool.run(1, save_and_break, tmp_path)[0]
    assert f"{taken} is missing" in incomplete
    assert "other.lora_A.weight is not in the model" in incomplete
    assert "Not a directory" in no_folder and "(rank 0)" in no_folder
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
