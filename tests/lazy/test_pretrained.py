"""`from_pretrained` in a LazyInitContext: the same model to the bit, of which a rank reads what it holds."""

import gc
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    modeling_utils,
)

from echelon import (
    Booster,
    HybridParallelPlugin,
    LazyInitContext,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from echelon.lazy import materialize
from echelon.lazy.tensor import LazyTensor
from echelon.verify.models import HEADS, ModelChoice

from ..pool import Pool
from .compare import built_in_both_ways, differences

SEVERAL_FILES = 20_000  # bytes in each


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that is read: which model is saved there, how, and as what it is loaded."""

    choice: ModelChoice
    head: str | None = None
    dtype: torch.dtype = torch.float32
    is_torch: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        model = self.choice.build(3).to(self.dtype)
        model.save_pretrained(path, max_shard_size=SEVERAL_FILES)
        if self.is_torch:  # as older releases saved them: one file with all names
            for file in path.glob("*.safetensors*"):
                file.unlink()
            torch.save(model.state_dict(), path / "pytorch_model.bin")

    def load(self, path: Path) -> nn.Module:
        kind: Any = getattr(transformers, HEADS[self.head or self.choice.head_name] or "")
        model: nn.Module = kind.from_pretrained(path, **self.arguments)
        return model


def of(model_type: str, tied: bool = False, **settings: Any) -> Folder:
    return Folder(choice=ModelChoice(model_type=model_type, tied=tied), **settings)


FOLDERS = {
    "llama": of("llama"),
    "llama without its head": of("llama", head="base"),
    "llama from bf16": of("llama", dtype=torch.bfloat16),
    "llama in bf16": of("llama", tied=True, arguments={"dtype": torch.bfloat16}),
    "llama from bf16 in fp32": of("llama", dtype=torch.bfloat16, arguments={"dtype": "float32"}),
    "gpt2": of("gpt2", tied=True),
    "gpt2 of torch": of("gpt2", tied=True, is_torch=True),
    "bert with a new head": Folder(
        choice=ModelChoice(model_type="bert", head="masked"),
        head="classification",
        arguments={"num_labels": 5},
    ),
    "mixtral": of("mixtral"),
    "mixtral in bf16": of("mixtral", arguments={"dtype": torch.bfloat16}),
    "t5": of("t5", tied=True),
    "t5 in fp16": of(
        "t5", tied=True, arguments={"dtype": torch.float16}
    ),  # some of its layers stay in float32
    "vit": of("vit"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_model_is_that_of_from_pretrained_to_the_bit(tmp_path: Path, name: str) -> None:
    folder = FOLDERS[name]
    folder.save(tmp_path)
    lazy, eager, drawn, expected = built_in_both_ways(lambda: folder.load(tmp_path))
    assert torch.equal(drawn, expected)
    assert differences(materialize(lazy), eager) == []
    assert lazy.training == eager.training and repr(lazy.config) == repr(eager.config)


def test_the_hubs_own_format_of_experts_is_what_was_read(tmp_path: Path) -> None:
    FOLDERS["mixtral"].save(tmp_path)
    names = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert any(".experts.1.w3." in name for name in names) and not any("gate_up" in name for name in names)


def test_both_copies_of_a_tied_weight_may_be_there(tmp_path: Path) -> None:
    for change in (0.0, 1.0):  # which are tied then is for the release of transformers to say
        of("llama", tied=True).choice.build(3).save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        state["lm_head.weight"] = state["model.embed_tokens.weight"] + change
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        lazy, eager, *_ = built_in_both_ways(lambda: AutoModelForCausalLM.from_pretrained(tmp_path))
        assert differences(materialize(lazy), eager) == []


def test_a_config_may_be_given_and_sizes_may_differ(tmp_path: Path) -> None:
    of("llama").choice.build(3).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.vocab_size += 3

    def load() -> nn.Module:
        return LlamaForCausalLM.from_pretrained(tmp_path, config=config, ignore_mismatched_sizes=True)

    lazy, eager, drawn, expected = built_in_both_ways(load)
    assert differences(materialize(lazy), eager) == [] and torch.equal(drawn, expected)
    assert len(lazy.lm_head.weight) == config.vocab_size
    config.ignore = True
    with pytest.raises(RuntimeError, match="mismatch"), LazyInitContext():
        LlamaForCausalLM.from_pretrained(tmp_path, config=config)


def test_what_is_drawn_after_a_new_head_is_what_would_be_drawn(tmp_path: Path) -> None:
    ModelChoice(model_type="bert", head="masked").build(3).save_pretrained(tmp_path)

    def load() -> nn.Module:
        first = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
        return nn.ModuleList(
            [first, AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)]
        )

    lazy, eager, drawn, expected = built_in_both_ways(load)
    assert differences(materialize(lazy), eager) == [] and torch.equal(drawn, expected)
    assert lazy[0].classifier.weight.std() > 0


def patched() -> list[str]:
    return [
        name
        for name in ("safe_open", "load_state_dict")
        if getattr(modeling_utils, name).__module__.startswith("echelon")
    ]


def test_what_is_exchanged_is_put_back(tmp_path: Path) -> None:
    of("llama").choice.build(3).save_pretrained(tmp_path)
    assert patched() == []
    with LazyInitContext():
        assert patched() == ["safe_open", "load_state_dict"]
        with LazyInitContext():
            pass
        assert patched() == ["safe_open", "load_state_dict"]
    with pytest.raises(OSError, match="nowhere"), LazyInitContext():
        AutoModelForCausalLM.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="default device"), torch.device("meta"), LazyInitContext():
        pass
    assert patched() == []
    assert not isinstance(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, LazyTensor)


def test_another_thread_reads_as_ever(tmp_path: Path) -> None:
    of("llama").choice.build(3).save_pretrained(tmp_path)
    found = []
    with LazyInitContext():
        thread = threading.Thread(target=lambda: found.append(AutoModelForCausalLM.from_pretrained(tmp_path)))
        thread.start()
        thread.join()
    assert [type(each) for each in found[0].parameters()] == [nn.Parameter] * len(list(found[0].parameters()))


@pytest.mark.parametrize("is_torch", [False, True])
def test_quantized_folders_are_refused(tmp_path: Path, is_torch: bool) -> None:
    Folder(choice=ModelChoice(model_type="llama"), is_torch=is_torch).save(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq"}})
    )
    with pytest.raises(ValueError, match=r"quantized \(awq\)"), LazyInitContext():
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config)


PLUGINS: dict[str, Callable[[], Any]] = {
    "tp": lambda: HybridParallelPlugin(tp_size=2, precision="bf16"),
    "pp": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp16"),
    "zero": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
}


def boosted(folder: Folder, path: Path, plugin: str) -> nn.Module:
    model = folder.load(path)
    optimizer = torch.optim.AdamW(model.parameters())
    model, *_ = Booster(plugin=PLUGINS[plugin]()).boost(model, optimizer)
    inner: nn.Module = model.unwrap()
    for module in inner.modules():  # DTensors have no bits of their own
        for name, parameter in module._parameters.items():
            if hasattr(parameter, "to_local"):
                module._parameters[name] = nn.Parameter(parameter.to_local())
    return inner


def boosted_in_both_ways(name: str, path: Path, plugin: str) -> list[str]:
    torch.manual_seed(2)
    eager = boosted(FOLDERS[name], path, plugin)
    torch.manual_seed(2)
    with LazyInitContext():
        lazy = FOLDERS[name].load(path)
    found = [isinstance(each, LazyTensor) for each in lazy.parameters()]
    model, *_ = Booster(plugin=PLUGINS[plugin]()).boost(lazy, torch.optim.AdamW(lazy.parameters()))
    del lazy
    inner = model.unwrap()
    for module in inner.modules():
        for key, parameter in module._parameters.items():
            if hasattr(parameter, "to_local"):
                module._parameters[key] = nn.Parameter(parameter.to_local())
    return differences(inner, eager) + ([] if all(found) else ["not all was lazy"])


@pytest.mark.parametrize(
    ("name", "plugin"),
    [
        ("llama", "tp"),
        pytest.param("llama in bf16", "pp", marks=pytest.mark.slow),
        pytest.param("llama", "zero", marks=pytest.mark.slow),
        pytest.param("llama", "ddp", marks=pytest.mark.slow),
        pytest.param("llama from bf16", "fsdp", marks=pytest.mark.slow),
        pytest.param("gpt2", "tp", marks=pytest.mark.slow),
        pytest.param("gpt2 of torch", "pp", marks=pytest.mark.slow),
        pytest.param("bert with a new head", "tp", marks=pytest.mark.slow),
        pytest.param("mixtral", "tp", marks=pytest.mark.slow),
        pytest.param("mixtral in bf16", "pp", marks=pytest.mark.slow),
        pytest.param("t5", "tp", marks=pytest.mark.slow),
        pytest.param("t5", "pp", marks=pytest.mark.slow),
    ],
)
def test_a_boosted_model_is_that_of_from_pretrained_to_the_bit(
    pool: Pool, tmp_path: Path, name: str, plugin: str
) -> None:
    FOLDERS[name].save(tmp_path)
    assert pool.run(2, boosted_in_both_ways, name, tmp_path, plugin) == [[], []]


def boost_what_differs(paths: list[Path]) -> None:
    with LazyInitContext():
        model = AutoModelForCausalLM.from_pretrained(paths[dist.get_rank()])
    Booster(plugin=PLUGINS["tp"]()).boost(model, torch.optim.AdamW(model.parameters()))


def test_ranks_may_read_copies_and_are_told_of_other_weights(pool: Pool, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "copy", "other")]
    for path, seed in zip(paths, (3, 3, 4), strict=True):
        ModelChoice(model_type="llama").build(seed).save_pretrained(path)
    pool.run(2, boost_what_differs, paths[:2])
    errors = pool.run_failing(2, boost_what_differs, paths[1:])
    assert all("the model of rank(s) [1] differs from that of rank 0" in str(error) for error in errors)


def resident(key: str) -> int:
    """Bytes of this process in memory, files that are mapped included: now (VmRSS), or at most (VmHWM)."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measured(action: Callable[[], Any]) -> tuple[int, int, Any]:
    """By how much an action raises what is resident at most, and in the end; and what it returns."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is that of now
    before = resident("VmRSS")
    result = action()
    return resident("VmHWM") - before, resident("VmRSS") - before, result


def memory_of_reading(path: Path, small: Path, plugin: str) -> list[str]:
    """What is not kept of the promise, for a model that is read and made real within boost."""
    import echelon.plugins.hybrid_model as hybrid_boost

    most = dict[str, tuple[int, int]]()
    make_real = hybrid_boost.materialize

    def counted(model: nn.Module) -> nn.Module:
        *most["real"], made = measured(lambda: make_real(model))
        return made

    def run(folder: Path) -> nn.Module:
        def load() -> nn.Module:
            with LazyInitContext():
                model: nn.Module = AutoModelForCausalLM.from_pretrained(folder)
            return model

        *most["read"], model = measured(load)
        optimizer = torch.optim.AdamW(model.parameters())
        return Booster(plugin=PLUGINS[plugin]()).boost(model, optimizer)[0]

    hybrid_boost.materialize = counted
    try:
        run(small)  # what is imported at first use
        model = run(path)
    finally:
        hybrid_boost.materialize = make_real
    share = sum(each.numel() * 4 for each in model.parameters())
    whole = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    largest, spare = 8 * 2**20, 4 * 2**20
    bounds = {
        f"{most['read'][0]} in reading": most["read"][0] < spare,
        f"{most['real']} in making {share} of {whole} real": most["real"][0] < share + largest + spare,
    }
    return [told for told, is_kept in bounds.items() if not is_kept]


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["tp of fp32", "pp", "zero of the hybrid plugin"])
def test_no_rank_holds_more_than_its_slices_and_one_tensor(pool: Pool, tmp_path: Path, plugin: str) -> None:
    for name, width, layers in (("large", 512, 6), ("small", 64, 2)):
        config = AutoConfig.for_model(
            "llama",
            vocab_size=8 * width,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    assert pool.run(2, memory_of_reading, tmp_path / "large", tmp_path / "small", plugin) == [[], []]


PLUGINS |= {
    "tp of fp32": lambda: HybridParallelPlugin(tp_size=2, precision="fp16"),
    "zero of the hybrid plugin": lambda: HybridParallelPlugin(tp_size=1, zero_stage=1, precision="fp16"),
}
