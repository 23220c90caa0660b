r"""Pre-train a Llama, a GPT-2 or another causal model on texts, and resume it under any layout.

    torchrun --standalone --nproc_per_node 4 examples/language/llama/pretrain.py --tp_size 2 --zero_stage 1
    torchrun --standalone --nproc_per_node 4 examples/language/llama/pretrain.py --model_type gpt2 \
        --pp_size 2 --num_microbatches 4 --data book.txt --checkpoints checkpoints

Tokens are bytes, or those of `--tokenizer`. Without `--data` the texts are modules of Python's own library.
The same command goes on after SIGTERM, also with other sizes: the run is saved at the end of the step.
"""

import argparse
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

import echelon
from echelon import Booster, Interruption, Metrics

LIBRARY = sorted(Path(os.__file__).parent.glob("*.py"))


def parse_arguments() -> argparse.Namespace:
    parser = echelon.ArgumentParser(description=__doc__)
    parser.add_argument("--model_type", default="llama", help="llama, gpt2, qwen3, … of a small size")
    parser.add_argument(
        "--config", help="folder of a config.json or a name on the hub, instead of --model_type"
    )
    parser.add_argument("--data", type=Path, nargs="+", default=LIBRARY, help="texts in UTF-8")
    parser.add_argument("--tokenizer", help="folder or name on the hub")
    parser.add_argument("--sequence_length", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=16, help="sequences of a step, over all replicas")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoints", help="folder: saves there, and goes on from the newest checkpoint")
    parser.add_argument("--save_every", type=int, default=100, help="steps")
    parser.add_argument("--log_every", type=int, default=10, help="steps between two lines of metrics")
    parser.add_argument("--metrics", help="file of JSON lines")
    parser.add_argument("--tensorboard", help="folder")
    parser.add_argument("--curve", help="file of a picture: .svg, .png or .pdf")
    echelon.add_plugin_arguments(parser, precision="bf16", max_norm=1.0)
    return parser.parse_args()


def packed_sequences(arguments: argparse.Namespace) -> tuple[torch.Tensor, int]:
    """Return all texts as rows of tokens without padding, (sequences, length), and the vocabulary's size."""
    texts = [path.read_text(encoding="utf-8") for path in arguments.data]
    if arguments.tokenizer is None:  # a byte of 0 ends a text
        tokens, vocabulary = torch.tensor(list("\0".join(texts).encode())), 256
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        ends, rows = [tokenizer.eos_token_id], tokenizer(texts)["input_ids"]
        tokens, vocabulary = torch.tensor([token for ids in rows for token in ids + ends]), len(tokenizer)
    count = len(tokens) // arguments.sequence_length
    return tokens[: count * arguments.sequence_length].view(count, -1), vocabulary


def make_model(arguments: argparse.Namespace, vocabulary: int) -> torch.nn.Module:
    """Return a model with random weights, without dropout."""
    if arguments.config is not None:
        config = AutoConfig.from_pretrained(arguments.config, vocab_size=vocabulary)
    else:
        sizes = {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 384,
        }
        sizes |= {"vocab_size": vocabulary, "max_position_embeddings": arguments.sequence_length}
        config = AutoConfig.for_model(arguments.model_type, **sizes, bos_token_id=0, eos_token_id=0)
    for name in [name for name in vars(config) if name.endswith(("dropout", "pdrop"))]:
        setattr(config, name, 0.0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def make_optimizer(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW with weight decay of matrices alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


@torch.no_grad()
def evaluate(booster: Booster, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the loss of a token of held-out sequences, on every rank."""
    model.eval()
    losses = [booster.execute_pipeline(iter([batch]), model)["loss"].item() for batch in loader]
    model.train()
    return sum(losses) / len(losses)


def main() -> None:
    arguments = parse_arguments()
    echelon.launch_from_torch(seed=42)
    plugin = echelon.plugin_from_arguments(arguments)
    booster = Booster(plugin=plugin)
    sequences, vocabulary = packed_sequences(arguments)
    samples = [{"input_ids": row, "labels": row} for row in sequences]
    num_held_out, per_replica = 4 * arguments.batch_size, arguments.batch_size // plugin.dp_size
    loader = plugin.prepare_dataloader(samples[num_held_out:], per_replica, shuffle=True, drop_last=True)
    held_out = plugin.prepare_dataloader(samples[:num_held_out], per_replica)

    model = make_model(arguments, vocabulary)
    flops = echelon.flops_per_token(model, arguments.sequence_length)
    booster.print(
        f"{model.config.model_type}: {sum(map(torch.numel, model.parameters())) / 1e6:.1f}M parameters"
    )
    optimizer = make_optimizer(model, arguments.lr)
    scheduler = get_cosine_schedule_with_warmup(optimizer, arguments.steps // 10, arguments.steps)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)

    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}
    folder, step, ends = arguments.checkpoints, 0, False
    if folder and (resumed := booster.load_checkpoint(folder, **parts)):
        step = resumed.step
    step_size = {
        "tokens_per_step": arguments.batch_size * arguments.sequence_length,
        "flops_per_token": flops,
    }
    files = {"jsonl": arguments.metrics, "tensorboard": arguments.tensorboard, "every": arguments.log_every}
    metrics = Metrics(booster, optimizer, num_steps=arguments.steps, first_step=step, **step_size, **files)
    with Interruption() as interruption:
        while step < arguments.steps and not ends:
            for batch in loader:  # an epoch, or what a resumed run has left of it
                loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step += 1
                metrics.step(loss, lr=scheduler.get_last_lr()[0])
                ends = step == arguments.steps or bool(interruption.requested())
                if folder and (ends or step % arguments.save_every == 0):
                    save = booster.save_checkpoint(folder, step, **parts, keep_last=2, use_async=True)
                if ends:
                    break
    if folder and ends:
        save.wait()
    metrics.write(eval_loss=evaluate(booster, model, held_out))
    if arguments.curve:
        metrics.draw(arguments.curve, "loss", "eval_loss")
    echelon.DistCoordinator().destroy()


if __name__ == "__main__":
    main()
