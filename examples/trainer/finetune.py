r"""transformers' Trainer under a plugin: every flag of TrainingArguments, and every option of the plugin as another.

    torchrun --standalone --nproc_per_node 4 examples/trainer/finetune.py --output_dir runs --use_cpu True \
        --tp_size 2 --pp_size 2 --num_microbatches 4 --num_train_epochs 2 --eval_strategy epoch

A script with a Trainer of its own changes two lines: the import, and `plugin=`. Needs accelerate.
"""

import os
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

import echelon
from echelon import Trainer  # instead of transformers'


def library(length: int) -> list[dict[str, torch.Tensor]]:
    """Return a part of Python's library as sequences of bytes."""
    texts = [path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("a*.py"))]
    tokens = torch.frombuffer(bytearray(b"\0".join(texts)), dtype=torch.uint8).long()
    return [
        {"input_ids": row, "labels": row} for row in tokens[: len(tokens) // length * length].view(-1, length)
    ]


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    both = ["gradient_accumulation_steps"]  # Trainer's
    echelon.add_plugin_arguments(parser, without=both, precision="fp32", num_microbatches=4)
    training, others = parser.parse_args_into_dataclasses()
    echelon.launch_from_torch(seed=training.seed)
    plugin = echelon.plugin_from_arguments(others)

    set_seed(training.seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    samples = library(64)
    trainer = Trainer(
        LlamaForCausalLM(config),
        training,
        train_dataset=samples[256:],
        eval_dataset=samples[:256],
        plugin=plugin,  # new
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    figures = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"eval_loss={figures['eval_loss']:.4f}")
    echelon.DistCoordinator().destroy()


if __name__ == "__main__":
    main()
