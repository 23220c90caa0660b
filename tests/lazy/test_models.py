"""Models that are built or read from files lazily are bitwise equal to eager ones.

BUILDS is the table of builders by name. Rows of FOLDERS are saved first, and read by `from_pretrained`.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    modeling_utils,
)

from echelon import LazyInitContext
from echelon.lazy import materialize
from echelon.lazy.tensor import LazyTensor
from echelon.shardformer import model_types
from echelon.verify.model_choice import HEADS, ModelChoice, heads_of

from ..contract.matrix_rows import DERIVED
from ..models.chatglm import register_chatglm
from ..models.small_timm import VisionTransformer
from .compare import built_in_both_ways, differences

SEVERAL_FILES = 20_000  # bytes in each
WITH_TABLE = (*model_types(), "timm")


def build(model_type: str, head: str | None = None, *, tied: bool = False) -> nn.Module:
    """Build a small model of any type, by default with the type's usual head."""
    if model_type == "timm":
        torch.manual_seed(3)
        return VisionTransformer()
    if model_type == "chatglm":
        register_chatglm()
    return ModelChoice(model_type=model_type, head=head, tied=tied).build(3)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder to read: the model in it, the format, and the arguments of loading."""

    choice: ModelChoice
    head: str | None = None
    dtype: torch.dtype = torch.float32
    is_torch: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        model = self.choice.build(3).to(self.dtype)
        model.save_pretrained(path, max_shard_size=SEVERAL_FILES)
        if self.is_torch:  # the format of older releases: one file with all names
            for file in path.glob("*.safetensors*"):
                file.unlink()
            torch.save(model.state_dict(), path / "pytorch_model.bin")

    def load(self, path: Path) -> nn.Module:
        kind: Any = getattr(transformers, HEADS[self.head or self.choice.head_name] or "")
        model: nn.Module = kind.from_pretrained(path, **self.arguments)
        return model


def of(model_type: str, tied: bool = False, **settings: Any) -> Folder:
    return Folder(choice=ModelChoice(model_type=model_type, tied=tied), **settings)


BERT = ModelChoice(model_type="bert", head="masked")
FOLDERS = {
    "llama": of("llama"),
    "llama without its head": of("llama", head="base"),
    "llama from bf16": of("llama", dtype=torch.bfloat16),
    "llama in bf16": of("llama", tied=True, arguments={"dtype": torch.bfloat16}),
    "llama from bf16 in fp32": of("llama", dtype=torch.bfloat16, arguments={"dtype": "float32"}),
    "gpt2": of("gpt2", tied=True),
    "gpt2 of torch": of("gpt2", tied=True, is_torch=True),
    "bert with a new head": Folder(choice=BERT, head="classification", arguments={"num_labels": 5}),
    "mixtral": of("mixtral"),
    "mixtral in bf16": of("mixtral", arguments={"dtype": torch.bfloat16}),
    "t5": of("t5", tied=True),
    # transformers keeps some of its layers in float32.
    "t5 in fp16": of("t5", tied=True, arguments={"dtype": torch.float16}),
    "vit": of("vit"),
}


def both_tied(path: Path, change: float) -> Callable[[], nn.Module]:
    """Save both copies of a tied weight; releases of transformers differ in tying them."""
    of("llama", tied=True).choice.build(3).save_pretrained(path)
    state = load_file(path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + change
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return lambda: AutoModelForCausalLM.from_pretrained(path)


def of_another_size(path: Path) -> Callable[[], nn.Module]:
    of("llama").choice.build(3).save_pretrained(path)
    config = AutoConfig.from_pretrained(path)
    config.vocab_size += 3
    with pytest.raises(RuntimeError, match="mismatch"), LazyInitContext():
        LlamaForCausalLM.from_pretrained(path, config=config)
    return lambda: LlamaForCausalLM.from_pretrained(path, config=config, ignore_mismatched_sizes=True)


def two_new_heads(path: Path) -> Callable[[], nn.Module]:
    BERT.build(3).save_pretrained(path)
    load = AutoModelForSequenceClassification.from_pretrained
    return lambda: nn.ModuleList([load(path, num_labels=number) for number in (5, 4)])


def folder_of(path: Path, name: str) -> Callable[[], nn.Module]:
    FOLDERS[name].save(path)
    return lambda: FOLDERS[name].load(path)


# A decoder, an encoder-decoder, images with texts, and timm; a slow test builds all types.
BUILT = ("llama", "t5", "blip-2", "timm")
# Builders of models, from a folder for their files.
BUILDS: dict[str, Callable[[Path], Callable[[], nn.Module]]] = {
    **{name: (lambda _, name=name: partial(build, name)) for name in BUILT},  # type: ignore[misc]
    **{f"{name} from files": partial(folder_of, name=name) for name in FOLDERS},
    "both copies of a tied weight": partial(both_tied, change=0.0),
    "both copies, which differ": partial(both_tied, change=1.0),
    "of another size": of_another_size,
    "two new heads": two_new_heads,
}


def require_equal(make: Callable[[], nn.Module]) -> nn.Module:
    """Require equal lazy and eager models, and return the lazy one, materialized."""
    lazy, eager, drawn, expected = built_in_both_ways(make)
    assert torch.equal(drawn, expected)
    assert differences(materialize(lazy), eager) == []
    assert lazy.training == eager.training
    assert repr(getattr(lazy, "config", None)) == repr(getattr(eager, "config", None))
    return lazy


@pytest.mark.parametrize("name", BUILDS)
def test_a_lazily_built_model_is_the_eager_one(tmp_path: Path, name: str) -> None:
    require_equal(BUILDS[name](tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*WITH_TABLE, *DERIVED])
def test_a_lazily_built_model_of_any_head_is_the_eager_one(model_type: str) -> None:
    kinds = heads_of(model_type) if model_type in CONFIG_MAPPING else {}
    for head in {kind: head for head, kind in kinds.items()}.values() or [None]:
        for tied in (False, True):
            require_equal(partial(build, model_type, head, tied=tied))


def test_a_model_is_built_as_its_users_build_it_and_generates() -> None:
    config = ModelChoice(model_type="llama").config()
    lazy, eager, *_ = built_in_both_ways(lambda: AutoModelForCausalLM.from_config(config))
    ids = torch.tensor([[1, 5, 7]])
    tokens, expected = (
        model.eval().generate(ids, max_new_tokens=4, do_sample=False)  # type: ignore[operator]
        for model in (materialize(lazy), eager)
    )
    assert torch.equal(tokens, expected)


def test_the_hubs_own_format_of_experts_is_what_was_read(tmp_path: Path) -> None:
    FOLDERS["mixtral"].save(tmp_path)
    names = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert any(".experts.1.w3." in name for name in names) and not any("gate_up" in name for name in names)


def patched() -> list[str]:
    return [
        name
        for name in ("safe_open", "load_state_dict")
        if getattr(modeling_utils, name).__module__.startswith("echelon")
    ]


def test_replaced_functions_are_restored_and_affect_this_thread_only(tmp_path: Path) -> None:
    of("llama").choice.build(3).save_pretrained(tmp_path)
    loaded: list[Any] = []
    with LazyInitContext():
        with LazyInitContext():
            assert patched() == ["safe_open", "load_state_dict"]
        assert patched() == ["safe_open", "load_state_dict"]
        thread = threading.Thread(
            target=lambda: loaded.append(AutoModelForCausalLM.from_pretrained(tmp_path))
        )
        thread.start()
        thread.join()
    with pytest.raises(OSError, match="nowhere"), LazyInitContext():
        AutoModelForCausalLM.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="default device"), torch.device("meta"), LazyInitContext():
        pass
    assert patched() == []
    for model in (loaded[0], AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert not any(isinstance(parameter, LazyTensor) for parameter in model.parameters())


@pytest.mark.parametrize("is_torch", [False, True])
def test_quantized_folders_are_refused(tmp_path: Path, is_torch: bool) -> None:
    of("llama", is_torch=is_torch).save(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq"}}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"quantized \(awq\)"), LazyInitContext():
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
