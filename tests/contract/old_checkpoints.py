"""Checkpoints written by an earlier Echelon, in `written/`, and the code that writes such checkpoints and resumes them.

    python -m tests.contract.old_checkpoints FOLDER

writes them with the current code. Those in `written/` are of commit dd525cd (November 2026).
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from echelon import Booster, HybridParallelPlugin, launch_from_torch

from ..pool import Pool

WRITTEN = Path(__file__).with_name("written")
STEPS_BEFORE, STEPS_AFTER = 3, 3


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run that wrote a checkpoint.

    Args:
        world_size: number of processes.
        arguments: arguments of the plugin.
        lora: the model has adapters.
        use_async: the checkpoint was written during training.
    """

    world_size: int
    arguments: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    use_async: bool = False


ALL = dict(tp_size=2, pp_size=2, zero_stage=1, num_microbatches=2, precision="fp32")
OFFLOAD = dict(ALL, pp_size=1, zero_stage=2, precision="bf16", cpu_offload=True)
RUNS = {
    "fp16": Run(world_size=8, arguments=dict(ALL, precision="fp16", initial_scale=2**8)),
    "lora": Run(world_size=4, arguments=ALL, lora=True),
    "async": Run(world_size=8, arguments=dict(ALL, pp_style="zbh1", max_norm=0.5), use_async=True),
    "offload": Run(world_size=4, arguments=OFFLOAD),
}


def build(booster: Booster, *, lora: bool) -> nn.Module:
    """Build a small Llama with tied weights; no power of two divides its vocabulary and hidden sizes."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=24, intermediate_size=36, max_position_embeddings=32)
    counts = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **counts, tie_word_embeddings=not lora))
    if not lora:
        return model
    from peft import LoraConfig

    return booster.enable_lora(model, lora_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def losses_of(run: Run, folder: Path, *, goes_on: bool) -> list[float]:
    """Train up to the checkpoint and save it, or resume from it, and return the losses of the steps after it.

    Collective over the world, which may have any size that the arguments allow.
    """
    launch_from_torch(seed=0)
    plugin = HybridParallelPlugin(**run.arguments)
    booster = Booster(plugin=plugin)
    model = build(booster, lora=run.lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    texts = (torch.arange(48).unsqueeze(1) * 7 + torch.arange(11)) % 50
    data = plugin.prepare_dataloader(
        [dict(input_ids=text, labels=text) for text in texts], 8 // plugin.dp_size, shuffle=True, seed=3
    )
    model, optimizer, _, data, scheduler = booster.boost(model, optimizer, None, data, scheduler)
    parts = dict(model=model, optimizer=optimizer, lr_scheduler=scheduler, dataloader=data)
    if goes_on:
        resumed = booster.load_checkpoint(folder, **parts)
        assert resumed is not None and resumed.step == STEPS_BEFORE and resumed.user == {"name": "kept"}
    losses = []
    for step, batch in enumerate(data, STEPS_BEFORE if goes_on else 0):
        loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if step + 1 == STEPS_BEFORE:
            options = dict(user={"name": "kept"}, use_async=run.use_async)
            save = booster.save_checkpoint(folder, step + 1, **parts, **options)
        if step + 1 == STEPS_BEFORE + STEPS_AFTER:
            break
    if not goes_on:
        save.wait()
    return losses[-STEPS_AFTER:]


def mean_over_ranks(losses: list[list[float]]) -> list[float]:
    """Return the loss of each step: ranks of a replica have equal losses, and all replicas are equally large."""
    return [sum(of_step) / len(of_step) for of_step in zip(*losses, strict=True)]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    with Pool() as pool:
        losses = {
            name: mean_over_ranks(pool.run(run.world_size, losses_of, run, target / name, goes_on=False))
            for name, run in RUNS.items()
        }
    (target / "losses.json").write_text(json.dumps(losses, indent=2) + "\n")
