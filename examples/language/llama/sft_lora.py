r"""Supervised fine-tuning of a Llama with LoRA: only adapters are trained, on answers alone, and saved for peft.

    torchrun --standalone --nproc_per_node 4 examples/language/llama/sft_lora.py --tp_size 2 --pp_size 2
    torchrun --standalone --nproc_per_node 8 examples/language/llama/sft_lora.py --model /models/Llama-3.2-1B \
        --data chats.jsonl --precision bf16 --tp_size 2 --zero_stage 1 --gradient_checkpoint_config 1.0

`--data` has lines of {"question": …, "answer": …}. Without it, questions about sums are generated; without `--model`
a small Llama with random weights reads bytes, which shows that it runs, and no more. Needs peft.
"""

import argparse
import json
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, get_cosine_schedule_with_warmup

import echelon
from echelon import Booster, Metrics

IGNORED = -100  # labels that count in no loss


def parse_arguments() -> argparse.Namespace:
    parser = echelon.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", help="a pretrained model with its tokenizer: a folder, or a name on the hub"
    )
    parser.add_argument("--data", type=Path, help="file of JSON lines")
    parser.add_argument("--max_length", type=int, default=512, help="tokens; longer chats are cut")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=16, help="over all replicas")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--metrics", help="file of JSON lines")
    parser.add_argument("--save_adapters", help="folder, for PeftModel.from_pretrained")
    echelon.add_plugin_arguments(parser, precision="fp32", num_microbatches=4, max_norm=1.0)
    return parser.parse_args()


def read_chats(path: Path | None) -> list[tuple[str, str]]:
    """Return questions and answers."""
    if path is not None:
        chats = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(chat["question"], chat["answer"]) for chat in chats]
    pairs = [(first, second) for first in range(40) for second in range(16)]
    return [(f"What is {first} plus {second}?", str(first + second)) for first, second in pairs]


def encode(chats: list[tuple[str, str]], tokenizer: object | None, max_length: int) -> list[dict]:
    """Return padded samples, in which the tokens of questions and padding have no labels."""

    def tokens_of(text: str) -> list[int]:
        return list(text.encode()) if tokenizer is None else tokenizer.encode(text, add_special_tokens=False)

    end = 0 if tokenizer is None else tokenizer.eos_token_id
    samples = []
    for question, answer in chats:
        asked, answered = tokens_of(f"{question}\n"), [*tokens_of(answer), end]
        ids, labels = asked + answered, [IGNORED] * len(asked) + answered
        samples.append((ids[:max_length], labels[:max_length]))
    longest = max(len(ids) for ids, _ in samples)
    return [
        {
            "input_ids": torch.tensor(ids + [end] * (longest - len(ids))),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * (longest - len(ids))),
            "labels": torch.tensor(labels + [IGNORED] * (longest - len(ids))),
        }
        for ids, labels in samples
    ]


def make_model(pretrained: str | None) -> torch.nn.Module:
    if pretrained is not None:
        return AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def main() -> None:
    arguments = parse_arguments()
    echelon.launch_from_torch(seed=42)
    plugin = echelon.plugin_from_arguments(arguments)
    booster = Booster(plugin=plugin)
    tokenizer = None if arguments.model is None else AutoTokenizer.from_pretrained(arguments.model)
    samples = encode(read_chats(arguments.data), tokenizer, arguments.max_length)
    per_replica = arguments.batch_size // plugin.dp_size
    loader = plugin.prepare_dataloader(samples, per_replica, shuffle=True, drop_last=True)

    config = LoraConfig(r=arguments.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = booster.enable_lora(make_model(arguments.model).train(), lora_config=config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    booster.print(f"{sum(map(torch.numel, trained)) / 1e6:.2f}M parameters are trained")
    optimizer = torch.optim.AdamW(trained, lr=arguments.lr)
    num_steps = arguments.epochs * len(loader)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)

    metrics = Metrics(booster, optimizer, num_steps=num_steps, jsonl=arguments.metrics)
    for _ in range(arguments.epochs):
        for batch in loader:
            # The loss is the mean over all answers' tokens of the global batch, as in one process.
            loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            metrics.step(loss, lr=scheduler.get_last_lr()[0])
    if arguments.save_adapters:
        booster.save_lora_as_pretrained(model, arguments.save_adapters)
    echelon.DistCoordinator().destroy()


if __name__ == "__main__":
    main()
