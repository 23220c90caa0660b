"""Any Hugging Face folder is read by the model's names and by boxes, with the results of `from_pretrained`."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from echelon.checkpoint.pretrained import open_pretrained
from echelon.cluster.box import Box, Stored
from echelon.verify.model_choice import ModelChoice

from .failures import cut

State = dict[str, Tensor]
LARGEST_FILE = 8000  # bytes, so that there are several files


def small(model_type: str = "llama", **settings: object) -> PreTrainedModel:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **heads, **settings))


def random_box(shape: tuple[int, ...], numbers: random.Random) -> Box:
    starts = tuple(numbers.randrange(length) for length in shape)
    sizes = (numbers.randint(1, length - start) for start, length in zip(starts, shape, strict=True))
    return Box(starts, tuple(sizes))


def differences(stored: Stored, expected: State) -> list[str]:
    """Return differences in names, shapes, dtypes or boxes between stored tensors and a state_dict."""
    errors = [f"names {stored.names ^ expected.keys()}"] if stored.names != expected.keys() else []  # type: ignore[operator]
    numbers = random.Random(0)
    for name in stored.names & expected.keys():  # type: ignore[operator]
        tensor = expected[name]
        if (stored.shape(name), stored.dtype(name)) != (tuple(tensor.shape), tensor.dtype):
            errors.append(f"{name}: {stored.shape(name)} {stored.dtype(name)}")
            continue
        full = Box.full(tensor.shape)
        for box in (full, random_box(full.size, numbers), random_box(full.size, numbers)):
            content = stored.read(name, box)
            if content.dtype != tensor.dtype or not torch.equal(content, tensor[box.within(full)]):
                errors.append(f"{name} in {box}")
    return errors


def as_one(state: State, folder: Path, name: str = "model.safetensors") -> Path:
    save_file(state, folder / name, metadata={"format": "pt"})
    return folder if name == "model.safetensors" else folder / name


def as_torch(state: State, folder: Path, *, is_old: bool = False) -> Path:
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not is_old)
    return folder


def as_several(
    state: State, folder: Path, *, name: str = "model.safetensors", has_index: bool = True
) -> Path:
    start, end = name.split(".")
    files = {key: f"{start}-0000{1 + number % 2}-of-00002.{end}" for number, key in enumerate(state)}
    for file in set(files.values()):
        tensors = {key: state[key] for key in state if files[key] == file}
        save_file(tensors, folder / file) if end == "safetensors" else torch.save(tensors, folder / file)
    if has_index:
        (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def as_parts_of_larger_tensors(state: State, folder: Path) -> Path:
    """Make views, which torch saves with their full storage."""
    views = {name: torch.stack([-tensor, tensor], -1)[..., 1] for name, tensor in state.items()}
    torch.save(views, folder / "w.pt")
    return folder / "w.pt"


def as_an_older_file_with_tensors_at_odd_bytes(state: State, folder: Path) -> Path:
    path = as_one(state, folder, "weights.of-my-model")
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes((end - 7).to_bytes(8, "little") + content[8:end] + b" " + content[end:])
    return path


KINDS: dict[str, Callable[[State, Path], Path]] = {
    "safetensors": as_one,
    "of any name": lambda state, folder: as_one(state, folder, "weights.of-my-model"),
    "several without an index": lambda state, folder: as_several(state, folder, has_index=False),
    "several": as_several,
    "an index": lambda state, folder: as_several(state, folder) / "model.safetensors.index.json",
    "torch": as_torch,
    "several of torch": lambda state, folder: as_several(state, folder, name="pytorch_model.bin"),
    "torch before 1.6": lambda state, folder: as_torch(state, folder, is_old=True),
    "parts of larger tensors": as_parts_of_larger_tensors,
    "at odd bytes": as_an_older_file_with_tensors_at_odd_bytes,
}


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_are_read_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    state = {
        "a": torch.randn(5, 7),
        "b": torch.randn(3, 4, 2).bfloat16(),
        "c": torch.tensor(2.5),
        "d": torch.arange(11),
    }
    assert differences(open_pretrained(KINDS[kind](state, tmp_path)), state) == []


def renamed(state: State, change: Callable[[str], str]) -> State:
    return {change(name): tensor.contiguous() for name, tensor in state.items()}


# A model, a stored state, and the same state by the names of the model.
Known = tuple[nn.Module, State, State]


def headless() -> Known:
    model = small()
    base = model.model.state_dict()
    return model, base, renamed(base, lambda name: f"model.{name}")


def with_too_much() -> Known:
    model = small()
    known = model.model.state_dict() | {"lm_head.weight": model.lm_head.weight}
    return model.model, model.state_dict(), known


def of_older_names() -> Known:
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    config = AutoConfig.for_model("bert", **sizes)
    config.num_hidden_layers = 1
    model = AutoModel.from_config(config)
    state, further = model.state_dict(), {"cls.seq_relationship.bias": torch.ones(2)}

    def older(name: str) -> str:
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return f"bert.{name}"

    passed_over = {"bert.embeddings.position_ids": torch.arange(4)}
    return model, renamed(state, older) | passed_over | further, state | further


def unexplained() -> Known:
    model = small()
    state = model.state_dict()
    further = {"model.layers.9.mlp.up_proj.weight": torch.ones(2), "rotary": torch.ones(3)}
    passed_over = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    return model, state | further | passed_over, state | further


def not_of_transformers() -> Known:
    model = nn.ModuleDict({"one": nn.Linear(3, 2), "two": nn.Linear(3, 2)})
    model["two"].weight = model["one"].weight
    state = model.state_dict()
    return model, {name: tensor for name, tensor in state.items() if name != "two.weight"}, state


def tied_under(*names: str) -> Callable[[], Known]:
    def known() -> Known:
        model = small(tie_word_embeddings=True)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        state = model.state_dict()
        both = ("lm_head.weight", "model.embed_tokens.weight")
        kept = {name: tensor.clone() for name, tensor in state.items() if name not in both or name in names}
        return model, kept, state

    return known


@pytest.mark.parametrize(
    "known",
    [
        headless,
        with_too_much,
        of_older_names,
        unexplained,
        not_of_transformers,
        tied_under("lm_head.weight", "model.embed_tokens.weight"),
        tied_under("lm_head.weight"),
        tied_under("model.embed_tokens.weight"),
    ],
)
def test_tensors_have_the_names_of_the_model_and_nothing_is_drawn(
    tmp_path: Path, known: Callable[[], Known]
) -> None:
    model, state, expected = known()
    before = torch.get_rng_state()
    stored = open_pretrained(as_torch(state, tmp_path), model)
    assert torch.equal(before, torch.get_rng_state())
    assert differences(stored, expected) == []


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    model = small(tie_word_embeddings=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"][3, 3] += 1
    expected = r"ties weights that differ .*embed_tokens.weight and lm_head.weight"
    with pytest.raises(ValueError, match=expected):
        open_pretrained(as_one(state, tmp_path), model)


def test_experts_stored_one_by_one_are_read_as_one_tensor(tmp_path: Path) -> None:
    model = small("mixtral", num_local_experts=11)
    model.save_pretrained(tmp_path)
    names = " ".join(load_file(tmp_path / "model.safetensors"))
    assert "experts.10.w1" in names and "gate_up_proj" not in names
    assert differences(open_pretrained(tmp_path, model), model.state_dict()) == []


def truncated(folder: Path) -> None:
    cut(folder / "model.safetensors")


def without_a_shard(folder: Path) -> None:
    as_several(load_file(folder / "model.safetensors"), folder, has_index=False)
    (folder / "model.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()


def with_file(name: str, text: str) -> Callable[[Path], None]:
    """Write a file; an index is written in the place of the weights."""

    def spoil(folder: Path) -> None:
        if name == INDEX:
            (folder / "model.safetensors").unlink()
        (folder / name).write_text(text)

    return spoil


INDEX = "model.safetensors.index.json"
HALF = '{"model_type": "lla'
LFS = "version https://git-lfs.github.com/spec/v1"
MORE = json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}})
QUANTIZED = json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4}})


def twice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    save_file({"a": torch.ones(2), "z": torch.ones(1)}, folder / "other.safetensors")


def of(content: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        if content is not None:
            torch.save(content, folder / "pytorch_model.bin")

    return spoil


def of_an_adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (with_file("config.json", HALF), ValueError, "config.json is not JSON, so it is damaged"),
        (with_file(INDEX, "[]"), ValueError, "index.json has a list, not named values"),
        (truncated, ValueError, "is damaged, or not a safetensors file: .* not fully covered"),
        (without_a_shard, FileNotFoundError, "missing: model-00002-of-00002.safetensors"),
        (with_file(INDEX, MORE), FileNotFoundError, "missing: model-00001-of-00001.safetensors"),
        (twice, ValueError, r"another file .* contains too: \['a'\]"),
        (with_file("config.json", QUANTIZED), ValueError, r"quantized \(gptq\)"),
        (with_file("model.safetensors", LFS), ValueError, "neither a safetensors nor a torch file"),
        (of({"epoch": 3, "model": {}}), ValueError, r"values than named tensors \(\['epoch', 'model'\]"),
        (of({"a": random.Random(0)}), ValueError, "torch cannot load"),
        (of_an_adapter, ValueError, "contains an adapter"),
        (of(None), FileNotFoundError, "contains no model: expected one of model.safetensors"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], kind: type[Exception], message: str
) -> None:
    as_one({"a": torch.ones(2), "b": torch.ones(3, 3)}, tmp_path)
    spoil(tmp_path)
    with pytest.raises(kind, match=message):
        open_pretrained(tmp_path)


MODELS = {
    **dict.fromkeys(("gpt2", "bert", "mixtral", "qwen2_moe", "falcon", "phi3", "vit"), False),
    **dict.fromkeys(("t5", "bart", "whisper", "opt", "gemma3", "deepseek_v3"), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_models_of_all_kinds_are_read_as_they_were_saved(tmp_path: Path, model_type: str) -> None:
    model = ModelChoice(model_type=model_type, tied=MODELS[model_type]).build(3)
    model.save_pretrained(tmp_path, max_shard_size=LARGEST_FILE)
    assert differences(open_pretrained(tmp_path, model), model.state_dict()) == []
