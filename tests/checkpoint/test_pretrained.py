"""Any Hugging Face folder is read by the model's names and by boxes, as `from_pretrained` would have it."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from echelon.checkpoint.box import Box, Stored
from echelon.checkpoint.pretrained import open_pretrained
from echelon.verify.models import ModelChoice

LLAMA = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LARGEST_FILE = 8000  # bytes, so that there are several files


def small(model_type: str = "llama", **settings: object) -> PreTrainedModel:
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **LLAMA, **settings))


def random_box(shape: tuple[int, ...], numbers: random.Random) -> Box:
    starts = tuple(numbers.randrange(length) for length in shape)
    return Box(
        starts,
        tuple(numbers.randint(1, length - start) for start, length in zip(starts, shape, strict=True)),
    )


def differences(stored: Stored, expected: dict[str, Tensor]) -> list[str]:
    """In which names, shapes, formats or boxes what is stored departs from a state_dict."""
    faults = [f"names {stored.names ^ expected.keys()}"] if stored.names != expected.keys() else []  # type: ignore[operator]
    numbers = random.Random(0)
    for name in stored.names & expected.keys():  # type: ignore[operator]
        tensor = expected[name]
        if (stored.shape(name), stored.dtype(name)) != (tuple(tensor.shape), tensor.dtype):
            faults.append(f"{name}: {stored.shape(name)} {stored.dtype(name)}")
            continue
        whole = Box.whole(tensor.shape)
        for box in (whole, random_box(whole.size, numbers), random_box(whole.size, numbers)):
            found = stored.read(name, box)
            if found.dtype != tensor.dtype or not torch.equal(found, tensor[box.within(whole)]):
                faults.append(f"{name} in {box}")
    return faults


def as_safetensors(state: dict[str, Tensor], folder: Path) -> Path:
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_several(state: dict[str, Tensor], folder: Path) -> Path:
    names = list(state)
    for number in (1, 2):
        save_file(
            {name: state[name] for name in names[number - 1 :: 2]},
            folder / f"model-0000{number}-of-00002.safetensors",
        )
    return folder


def as_several_with_an_index(state: dict[str, Tensor], folder: Path) -> Path:
    as_several(state, folder)
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(state)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def as_torch(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def as_several_of_torch(state: dict[str, Tensor], folder: Path) -> Path:
    files = {name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin" for number, name in enumerate(state)}
    for file in set(files.values()):
        torch.save({name: state[name] for name in state if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def as_old_torch(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return folder


def as_parts_of_larger_tensors(state: dict[str, Tensor], folder: Path) -> Path:
    """Views, which torch saves with all that they are views of."""
    torch.save(
        {name: torch.stack([-each, each], -1)[..., 1] for name, each in state.items()}, folder / "w.pt"
    )
    return folder / "w.pt"


def as_a_file_of_any_name(state: dict[str, Tensor], folder: Path) -> Path:
    save_file(state, folder / "weights.of-my-model")
    return folder / "weights.of-my-model"


def as_an_older_file_with_tensors_at_odd_bytes(state: dict[str, Tensor], folder: Path) -> Path:
    path = as_a_file_of_any_name(state, folder)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes(
        (length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :]
    )
    return path


@pytest.mark.parametrize(
    "write",
    [
        as_safetensors,
        as_several,
        as_several_with_an_index,
        as_torch,
        as_several_of_torch,
        as_old_torch,
        as_parts_of_larger_tensors,
        as_a_file_of_any_name,
        as_an_older_file_with_tensors_at_odd_bytes,
    ],
)
def test_boxes_are_read_from_every_kind_of_file(
    tmp_path: Path, write: Callable[[dict[str, Tensor], Path], Path]
) -> None:
    state = {
        "a": torch.randn(5, 7),
        "b": torch.randn(3, 4, 2).bfloat16(),
        "c": torch.tensor(2.5),
        "d": torch.arange(11),
    }
    assert differences(open_pretrained(write(state, tmp_path)), state) == []


def test_an_index_may_be_given_itself(tmp_path: Path) -> None:
    state = {"a": torch.randn(5, 7), "b": torch.randn(3)}
    as_several_with_an_index(state, tmp_path)
    assert differences(open_pretrained(tmp_path / "model.safetensors.index.json"), state) == []


def renamed(state: dict[str, Tensor], change: Callable[[str], str]) -> dict[str, Tensor]:
    return {change(name): tensor.contiguous() for name, tensor in state.items()}


def test_the_prefix_of_the_base_model_may_be_missing_or_too_much(tmp_path: Path) -> None:
    whole = small()
    base = whole.model.state_dict()
    headless = open_pretrained(as_safetensors(base, tmp_path), whole)
    assert differences(headless, renamed(base, lambda name: f"model.{name}")) == []
    found = open_pretrained(as_safetensors(whole.state_dict(), tmp_path), whole.model)
    assert differences(found, base | {"lm_head.weight": whole.lm_head.weight}) == []


def test_older_names_are_known(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "bert", vocab_size=20, hidden_size=8, intermediate_size=12, num_attention_heads=2
    )
    config.num_hidden_layers = 1
    model = AutoModel.from_config(config)
    state = model.state_dict()

    def older(name: str) -> str:
        return "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )

    further = {"bert.embeddings.position_ids": torch.arange(4), "cls.seq_relationship.bias": torch.ones(2)}
    stored = open_pretrained(as_torch(renamed(state, older) | further, tmp_path), model)
    assert differences(stored, state | {"cls.seq_relationship.bias": torch.ones(2)}) == []


def test_experts_stored_one_by_one_are_read_as_one_tensor(tmp_path: Path) -> None:
    model = small("mixtral", num_local_experts=11)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any("experts.10.w1" in name for name in names) and not any(
        "gate_up_proj" in name for name in names
    )
    assert differences(open_pretrained(tmp_path, model), model.state_dict()) == []


@pytest.mark.parametrize(
    "stored_names", [["lm_head.weight", "model.embed_tokens.weight"], ["lm_head.weight"], []]
)
@pytest.mark.parametrize("write", [as_safetensors, as_torch])
def test_a_tied_weight_is_found_under_every_name(
    tmp_path: Path, stored_names: list[str], write: Callable[[dict[str, Tensor], Path], Path]
) -> None:
    model = small(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state = model.state_dict()
    kept = {
        name: each.clone() for name, each in state.items() if name not in ("lm_head.weight", *stored_names)
    }
    kept |= {name: state[name].clone() for name in stored_names}
    if not stored_names:
        kept["model.embed_tokens.weight"] = state["lm_head.weight"]
    assert differences(open_pretrained(write(kept, tmp_path), model), state) == []


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    model = small(tie_word_embeddings=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"][3, 3] += 1
    with pytest.raises(
        ValueError, match=r"ties weights that differ .*embed_tokens.weight and lm_head.weight"
    ):
        open_pretrained(as_safetensors(state, tmp_path), model)


def test_what_nothing_explains_keeps_its_name(tmp_path: Path) -> None:
    model = small()
    state = model.state_dict()
    further = {"model.layers.9.mlp.up_proj.weight": torch.ones(2), "rotary": torch.ones(3)}
    passed_over = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    stored = open_pretrained(as_torch(state | further | passed_over, tmp_path), model)
    assert differences(stored, state | further) == []


def test_a_model_that_is_not_of_transformers_has_the_names_of_the_file(tmp_path: Path) -> None:
    model = nn.ModuleDict({"one": nn.Linear(3, 2), "two": nn.Linear(3, 2)})
    model["two"].weight = model["one"].weight
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "two.weight"}
    assert differences(open_pretrained(as_torch(state, tmp_path), model), model.state_dict()) == []


def test_a_model_draws_nothing_to_tell_its_names(tmp_path: Path) -> None:
    model = small()
    before = torch.get_rng_state()
    open_pretrained(as_torch(model.state_dict(), tmp_path), model)
    assert torch.equal(before, torch.get_rng_state())


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def without_a_shard(folder: Path) -> None:
    as_several(load_file(folder / "model.safetensors"), folder)
    (folder / "model.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()


def with_an_index_of_more(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    weight_map = {"a": "model-00001-of-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def twice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    save_file({"a": torch.ones(2), "z": torch.ones(1)}, folder / "other.safetensors")


def quantized(folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )


def of_text(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")


def of_objects(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"epoch": 3, "model": {"a": torch.ones(2)}}, folder / "pytorch_model.bin")


def of_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": random.Random(0)}, folder / "pytorch_model.bin")


def of_an_adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def empty(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (truncated, ValueError, "is damaged, or no safetensors file: .* not fully covered"),
        (without_a_shard, FileNotFoundError, "missing: model-00002-of-00002.safetensors"),
        (with_an_index_of_more, FileNotFoundError, "missing: model-00001-of-00001.safetensors"),
        (twice, ValueError, r"another file .* holds too: \['a'\]"),
        (quantized, ValueError, r"quantized \(gptq\)"),
        (of_text, ValueError, "neither a safetensors nor a torch file"),
        (of_objects, ValueError, r"something else than tensors by name \(\['epoch', 'model'\]\)"),
        (of_code, ValueError, "torch cannot load"),
        (of_an_adapter, ValueError, "holds an adapter"),
        (empty, FileNotFoundError, "holds no model: expected one of model.safetensors"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], kind: type[Exception], message: str
) -> None:
    as_safetensors({"a": torch.ones(2), "b": torch.ones(3, 3)}, tmp_path)
    spoil(tmp_path)
    with pytest.raises(kind, match=message):
        open_pretrained(tmp_path)


MODELS = [
    *(
        ModelChoice(model_type=name)
        for name in ("gpt2", "bert", "mixtral", "qwen2_moe", "falcon", "phi3", "vit")
    ),
    *(
        ModelChoice(model_type=name, tied=True)
        for name in ("t5", "bart", "whisper", "opt", "gemma3", "deepseek_v3")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("choice", MODELS, ids=str)
def test_models_of_all_kinds_are_read_as_they_were_saved(tmp_path: Path, choice: ModelChoice) -> None:
    model = choice.build(3)
    model.save_pretrained(tmp_path, max_shard_size=LARGEST_FILE)
    assert differences(open_pretrained(tmp_path, model), model.state_dict()) == []
