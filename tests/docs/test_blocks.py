"""Every Python block of the user guides runs: as a layout, as a part of a script, or in a test of its own."""

import json
import os
import re
import warnings
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import echelon
from echelon.plugins.hybrid_config import HybridConfig

from ..pool import Pool
from .scripts import DOCS, ROOT, losses, printed

Block = tuple[str, int]  # a page, and the number of a block in it
DEVELOPERS = {"benchmarks", "coverage", "design", "releases"}
SIZES = dict(vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)

FROM_TRANSFORMERS = ("AutoModelForCausalLM", "get_linear_schedule_with_warmup")


def blocks(page: str) -> list[str]:
    """Return the blocks of Python in a page."""
    return re.findall(r"^```(?:py|python)\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), flags=re.M | re.S)


# Scripts that other tests run, and those of other frameworks.
ELSEWHERE = {
    "test_the_script_of_the_checkpoints_resumes_under_another_layout": [("checkpoints", 0)],
    "test_the_script_moved_from_accelerate_trains_equally_on_one_process_and_on_two": [
        ("coming-from-accelerate", 1)
    ],
    "test_the_script_moved_from_colossalai_runs": [("coming-from-colossalai", 1)],
    "test_scripts_of_shardformer_alone_start_their_process_groups": [
        ("coming-from-colossalai", 4),
        ("coming-from-colossalai", 5),
    ],
    "test_the_script_for_internevo_trains_on_four_ranks": [
        ("coming-from-internevo", 0),
        ("coming-from-internevo", 1),
    ],
    "test_the_script_of_lora_trains_adapters_that_peft_finds": [("lora", 0)],
    "test_the_schedule_of_the_pipelines_guide_trains_equally_on_one_process_and_on_two": [("pipeline", 2)],
    "test_the_pipelines_guide_is_right_about_a_custom_schedule": [("pipeline", 3)],
    "test_the_guides_loop_prints_the_same_on_one_process_and_on_two": [
        ("policies", number) for number in range(7)
    ],
    "test_the_script_of_scripts_measures_and_takes_flags": [("scripts", 0)],
    "test_five_minutes_print_the_same_on_one_process_and_on_four": [("five-minutes", 0)],
    "test_the_trainer_of_the_guide_is_constructed_on_four_ranks": [("coming-from-trainer", 0)],
}
OF_OTHERS = [("coming-from-accelerate", 0), ("coming-from-colossalai", 0)]

# Blocks that make a plugin, by the number of processes that it is for.
LAYOUTS: dict[Block, int] = {
    ("choosing", 0): 4,
    ("fused", 0): 2,
    ("fused", 2): 2,
    ("pipeline", 0): 4,
    ("precision", 0): 1,
    ("sequence", 0): 8,
    ("tensor", 0): 2,
    ("weights", 0): 4,
    ("zero", 0): 16,
}
# Blocks that are refused without a GPU or a package, by words of the error.
REFUSED: dict[Block, str] = {("fused", 1): "flash_attention_3"}


def layout_errors(block: Block, num_processes: int) -> list[str]:
    """Run a block that makes a plugin; return the errors of its options for this number of processes."""
    made: list[HybridConfig] = []
    names: dict[str, Any] = {"HybridParallelPlugin": lambda **options: made.append(HybridConfig(**options))}
    source = blocks(block[0])[block[1]].replace("HybridParallelPlugin, ", "")  # of an import
    exec(source, names)
    return [error for config in made for error in config.errors(num_processes)]


@pytest.mark.parametrize(("block", "num_processes"), LAYOUTS.items(), ids=str)
def test_a_layout_of_the_guides_is_valid(block: Block, num_processes: int) -> None:
    assert layout_errors(block, num_processes) == []


@pytest.mark.parametrize(("block", "word"), REFUSED.items(), ids=str)
def test_a_layout_that_needs_a_gpu_is_refused_by_name(block: Block, word: str) -> None:
    assert any(word in error for error in layout_errors(block, 2))


def script(model: Any = None, **options: Any) -> dict[str, Any]:
    """Return the names of a script after boost, as the guides' parts of scripts use them."""
    torch.manual_seed(0)
    names: dict[str, Any] = {name: getattr(echelon, name) for name in echelon.__all__}
    names |= {"torch": torch, "F": F, "AdamW": torch.optim.AdamW}
    names |= {name: getattr(transformers, name) for name in FROM_TRANSFORMERS}
    plugin = echelon.HybridParallelPlugin(precision="fp32", **options)
    booster = echelon.Booster(plugin=plugin)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    texts = (torch.arange(8).unsqueeze(1) + torch.arange(16)) % 100
    data = [{"input_ids": text, "labels": text} for text in texts]
    loader = plugin.prepare_dataloader(data, batch_size=4)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    batch = {"input_ids": texts, "labels": texts}
    names |= dict(plugin=plugin, booster=booster, model=model, optimizer=optimizer, scheduler=scheduler)
    names |= dict(dataloader=loader, loader=loader, batches=iter(loader), batch=batch, criterion=None)
    return names | dict(num_epochs=1, step=1, num_steps=10, coordinator=echelon.DistCoordinator())


def backward(names: dict[str, Any]) -> None:
    names["booster"].execute_pipeline(iter([names["batch"]]), names["model"], optimizer=names["optimizer"])


def of_shardformer() -> dict[str, Any]:
    """A model that ShardFormer sharded without a booster."""
    names = script()
    names["mesh"] = echelon.ParallelMesh(tp=1)
    names["model"] = echelon.shard_model(LlamaForCausalLM(LlamaConfig(**SIZES)))
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])
    return names


def before_boost() -> dict[str, Any]:
    return script() | {"model": LlamaForCausalLM(LlamaConfig(**SIZES))}


def with_a_folder() -> dict[str, Any]:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained("pretrained")
    return before_boost() | {"folder": "pretrained"}


def with_a_deepspeed_file() -> dict[str, Any]:
    settings = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}, "train_batch_size": "auto"}
    Path("ds_config.json").write_text(json.dumps(settings))
    return before_boost()


def with_experts() -> dict[str, Any]:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=4)
    return script(transformers.MixtralForCausalLM(config))


def with_adapters() -> dict[str, Any]:
    import peft

    base = LlamaForCausalLM(LlamaConfig(**SIZES))
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained("adapters")
    models = {name: LlamaForCausalLM(LlamaConfig(**SIZES)) for name in ("base", "plain")}
    return script() | {"PeftModel": peft.PeftModel} | models


def after_backward() -> dict[str, Any]:
    names = script()
    backward(names)
    return names


# Parts of scripts, by what stands before them.
PARTS: dict[Block, Callable[[], dict[str, Any]]] = {
    ("checkpoints", 1): script,
    ("checkpoints", 2): of_shardformer,
    ("checkpoints_data", 0): script,
    ("checkpoints_data", 1): script,
    ("checkpoints_pretrained", 0): with_a_folder,
    ("coming-from-colossalai", 2): script,
    ("coming-from-colossalai", 3): script,
    ("coming-from-deepspeed", 0): with_a_deepspeed_file,
    ("cuda", 0): script,
    ("experts", 0): with_experts,
    ("lora", 1): with_adapters,
    ("pipeline", 1): script,
    ("pipeline", 4): partial(script, pp_size=2, num_microbatches=4),
    ("precision", 1): after_backward,
    ("zero", 1): before_boost,
    ("zero", 2): script,
    ("zero", 3): after_backward,
}


def run_leg(block: Block, folder: Path) -> None:
    """Run a part of a script on the ranks of this run. An ellipsis in it stands for boost."""
    with chdir(folder), warnings.catch_warnings():
        # Of peft, about transformers' names.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        names = PARTS[block]()
        first, *rest = blocks(block[0])[block[1]].split("\n...\n")
        exec(first, names)
        if rest:
            model = LlamaForCausalLM(LlamaConfig(**SIZES))
            optimizer = torch.optim.AdamW(model.parameters())
            names["model"], names["optimizer"], *_ = names["booster"].boost(model, optimizer)
            exec(rest[0], names)


@pytest.mark.parametrize("block", PARTS, ids=str)
def test_a_part_of_a_script_runs(pool: Pool, tmp_path: Path, block: Block) -> None:
    pool.run(2 if "pp_size=2" in blocks(block[0])[block[1]] else 1, run_leg, block, tmp_path)


def test_five_minutes_print_the_same_on_one_process_and_on_four(pool: Pool, tmp_path: Path) -> None:
    (source,) = blocks("five-minutes")
    source = source.replace("in range(5)", "in range(2)")
    (alone,), together = (pool.run(number, printed, source, tmp_path) for number in (1, 4))
    assert len(losses(alone)) == 2
    assert losses(together[0]) == pytest.approx(losses(alone), abs=1e-4)  # as for the script of the README
    assert LlamaForCausalLM.from_pretrained(tmp_path / "trained").config.num_hidden_layers == 4


def construct_trainer(folder: Path) -> int:
    names = dict(model=LlamaForCausalLM(LlamaConfig(**SIZES)), train=[], evaluation=[], compute_metrics=None)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # accelerate warns where it is not set
        names["args"] = transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    exec(blocks("coming-from-trainer")[0], names)
    trainer: Any = names["trainer"]
    return trainer.plugin.dp_size


@pytest.mark.slow
def test_the_trainer_of_the_guide_is_constructed_on_four_ranks(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(4, construct_trainer, tmp_path) == [1] * 4


def test_every_block_of_the_guides_runs() -> None:
    pages = sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in DEVELOPERS)
    every = [(page, number) for page in pages for number in range(len(blocks(page)))]
    run = [*LAYOUTS, *REFUSED, *PARTS, *OF_OTHERS, *chain.from_iterable(ELSEWHERE.values())]
    assert sorted(run) == every
    files = [*ROOT.glob("tests/docs/*.py"), ROOT / "tests/test_readme.py"]
    tests = "\n".join(path.read_text() for path in files)
    assert [name for name in ELSEWHERE if f"def {name}(" not in tests] == []
