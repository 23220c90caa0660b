"""state_dict, save_pretrained and pickles: refused for a sharded model, correct for a replicated one."""

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from transformers import LlamaForCausalLM

from echelon import Booster, TorchDDPPlugin, TorchFSDPPlugin
from echelon.shardformer import shard_model
from echelon.verify.model_choice import ModelChoice

from ..plugins.training import RING, boosted, booster_of, forward_and_backward, hybrid, refused, share
from ..pool import Pool, on_ranks
from . import adapters

LLAMA = ModelChoice(model_type="llama", num_layers=2)
# Plugins and options by layout, and a submodule that is sharded or on another stage.
SPLIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "tensor": ("hybrid", {"tp_size": 2}, "model.layers.0.mlp"),
    "stages": ("hybrid", {"pp_size": 2}, "model"),
    "weights": ("hybrid", {"wp_size": 2}, "model.layers.0.mlp"),
    "fsdp": ("fsdp", {}, "model.layers.0.mlp"),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "zero": ("hybrid", {"zero_stage": 2, "precision": "bf16", "overlap_allgather": True}),
    "sequences": ("hybrid", RING),
    "ddp": ("ddp", {}),
}


def trained(booster: Booster) -> tuple[Any, Any]:
    """Return a boosted model and its optimizer after a step, with all-gathers possibly in flight."""
    model, optimizer = boosted(booster, LLAMA)
    if isinstance(booster.plugin, TorchDDPPlugin | TorchFSDPPlugin):
        forward_and_backward(booster, model, optimizer, LLAMA, 0)
    else:
        booster.execute_pipeline(share(booster, LLAMA, 0), model, None, optimizer)
    optimizer.step()
    return model, optimizer


def refusals(layout: str, folder: Path) -> dict[str, str]:
    """Return the error of each way to write a sharded model, and then save all of it."""
    plugin, sizes, submodule = SPLIT[layout]
    booster = booster_of(plugin, **sizes)
    model, optimizer = trained(booster)
    inner = model.unwrap()
    full_state = LLAMA.build().state_dict()
    errors = {
        "state_dict": refused(model.state_dict),
        "of the inner model": refused(inner.state_dict),
        "of a submodule": refused(inner.get_submodule(submodule).state_dict),
        "save_pretrained": refused(lambda: model.save_pretrained(folder / "never")),
        "of the inner": refused(lambda: inner.save_pretrained(folder / "never")),
        "torch.save": refused(lambda: torch.save(model, io.BytesIO())),
        "torch's checkpoints": refused(lambda: get_model_state_dict(inner)),
        "with the optimizer": refused(lambda: get_state_dict(model, optimizer)),
        "load_state_dict": refused(lambda: inner.load_state_dict(full_state)),
        "not strict": refused(lambda: model.load_state_dict(full_state, strict=False)),
        "the optimizer's state": refused(optimizer.state_dict),
        "the optimizer itself": refused(lambda: torch.save(optimizer, io.BytesIO())),
    }
    if layout != "fsdp":  # torch's own FSDP class does not support pickling
        errors["torch.save of the inner"] = refused(lambda: torch.save(inner, io.BytesIO()))
    if layout == "stages":
        errors["a copy"] = refused(copy.deepcopy(inner).state_dict)
    booster.save_model(model, folder / "saved", shard=True)
    booster.save_checkpoint(folder / "steps", 1, model=model, optimizer=optimizer).wait()
    booster.load_checkpoint(folder / "steps", model=model, optimizer=optimizer)
    return errors


@pytest.mark.parametrize("layout", SPLIT)
def test_a_shard_of_a_model_is_not_written_as_the_model(pool: Pool, tmp_path: Path, layout: str) -> None:
    names = {
        "torch.save": "booster.save_model",
        "load_state_dict": "booster.load_model",
        "not strict": "booster.load_model",
        "the optimizer's state": "booster.save_optimizer",
        "the optimizer itself": "booster.save_optimizer",
    }
    for errors in pool.run(2, refusals, layout, tmp_path):
        for call, text in errors.items():
            assert names.get(call, "booster.save_model") in text, call
    assert not any((tmp_path / "never").glob("*.safetensors"))
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    states = (model.state_dict() for model in (saved, LLAMA.build()))
    shapes, expected = ({name: state[name].shape for name in state} for state in states)
    assert shapes == expected


@pytest.mark.parametrize(
    ("layout", "path", "ranks"),  # those that have it unsharded
    [
        ("tensor", "model.norm", (0, 1)),
        ("stages", "model.layers.0.mlp", (0,)),
        ("stages", "lm_head", (1,)),
        ("weights", "model.norm", (0, 1)),
    ],
)
@on_ranks(2)
def test_a_replicated_submodule_has_a_state(layout: str, path: str, ranks: tuple[int, ...]) -> None:
    plugin, sizes, _ = SPLIT[layout]
    submodule = boosted(booster_of(plugin, **sizes), LLAMA)[0].unwrap().get_submodule(path)
    if dist.get_rank() in ranks:
        expected = LLAMA.build().get_submodule(path).state_dict()
        torch.testing.assert_close(submodule.state_dict(), expected, rtol=0, atol=0)
    else:
        with pytest.raises(RuntimeError):
            submodule.state_dict()


def split_alone(folder: Path) -> dict[str, str]:
    """Return `refusals` for a model that ShardFormer has sharded without a booster."""
    model = shard_model(LLAMA.build())
    return {
        "state_dict": refused(model.state_dict),
        "of a submodule": refused(model.get_submodule("model.layers.0.mlp").state_dict),
        "save_pretrained": refused(lambda: model.save_pretrained(folder)),  # type: ignore[operator]
        "torch.save": refused(lambda: torch.save(model, io.BytesIO())),
        "torch's checkpoints": refused(lambda: get_model_state_dict(model)),
    }


def test_a_shard_of_a_model_without_a_booster_is_not_written_either(pool: Pool, tmp_path: Path) -> None:
    for errors in pool.run(2, split_alone, tmp_path):
        assert {call: text for call, text in errors.items() if "SplitCheckpoints" not in text} == {}


def adapters_written(folder: Path) -> list[str]:
    """Return the error of peft for a sharded model, and that of the booster for a replicated one."""
    errors = []
    for sizes in ({"tp_size": 2}, {"zero_stage": 1}):
        peft_model = adapters.LLAMA.build_peft()
        model, *_ = hybrid(**sizes).boost(peft_model, adapters.optimizer_of(peft_model.parameters()))
        writer = peft_model if "tp_size" in sizes else model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            errors.append(refused(lambda writer=writer: writer.save_pretrained(str(folder))))
    return errors


def test_adapters_are_not_written_under_names_that_are_not_read(pool: Pool, tmp_path: Path) -> None:
    """Layers are named "q_proj.base_layer" then, and from_pretrained would initialize "q_proj" anew."""
    for messages in pool.run(2, adapters_written, tmp_path):
        assert all("booster.save_lora_as_pretrained" in message for message in messages)
    assert not list(tmp_path.rglob("*.safetensors"))


def full_states(layout: str, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return a trained model's state in all available ways, on a rank with the unsharded model."""
    plugin, options = WHOLE[layout]
    booster = booster_of(plugin, **options)
    model, _ = trained(booster)
    states = {"inner": model.unwrap().state_dict()}
    model.save_pretrained(folder / "pretrained")
    booster.save_model(model, folder / "model.safetensors")
    prefixed = model.state_dict()
    states["boosted"] = {name.removeprefix("module."): tensor for name, tensor in prefixed.items()}
    states["torch's"] = get_model_state_dict(model.unwrap())
    model.unwrap().load_state_dict(states["inner"])
    return {kind: {name: tensor.clone() for name, tensor in state.items()} for kind, state in states.items()}


@pytest.mark.parametrize("layout", WHOLE)
def test_a_replicated_model_has_a_state(pool: Pool, tmp_path: Path, layout: str) -> None:
    states = pool.run(2, full_states, layout, tmp_path)[0]
    states["pretrained"] = load_file(tmp_path / "pretrained" / "model.safetensors")
    expected = load_file(tmp_path / "model.safetensors")
    start = LLAMA.build().state_dict()
    assert any(not torch.equal(expected[name], start[name].to(expected[name].dtype)) for name in start)
    for state in states.values():
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
