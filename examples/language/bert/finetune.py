r"""Fine-tune BERT on paraphrases under any plugin, and report F1.

    torchrun --standalone --nproc_per_node 4 examples/language/bert/finetune.py \
        --target_f1 0.86 --plugin hybrid_parallel --model_type bert

Pairs are generated: an active and a passive sentence about two people, who are swapped in half of the pairs.
"""

import argparse
import csv
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertTokenizer

import echelon
from echelon import Booster, HybridParallelPlugin, Metrics

PEOPLE = ("young old tall kind", "doctor captain judge coach", "ann bob carl dora emma frank grace henry")
VERBS = "praised helped called blamed thanked hired painted admired rescued followed invited warned"
Pair = tuple[str, str, int]  # two sentences, and 1 for a paraphrase


def parse_arguments() -> argparse.Namespace:
    parser = echelon.ArgumentParser(description=__doc__)
    parser.add_argument("--model_type", choices=["bert"], default="bert")
    parser.add_argument("--model", help="a pretrained model: a folder, or a name on the hub")
    parser.add_argument("--data_dir", type=Path, help="folder with MRPC's train.tsv and test.tsv")
    parser.add_argument("--num_pairs", type=int, default=6000, help="generated, 512 of them for the test")
    parser.add_argument("--target_f1", type=float, default=0.0, help="exit with status 1 below it")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="over all replicas")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--metrics", help="file of JSON lines")
    parser.add_argument("--save_model", help="folder for the trained model")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    tp_size, pp_size = 2 if processes % 4 == 0 else 1, 2 if processes % 2 == 0 else 1
    defaults = {"precision": "bf16", "num_microbatches": 4, "max_norm": 1.0}
    echelon.add_plugin_arguments(parser, tp_size=tp_size, pp_size=pp_size, **defaults)
    return parser.parse_args()


def paraphrases(num_pairs: int) -> list[Pair]:
    """Generate pairs. Both classes have the same words, so the model must read their order."""
    drawn, labels = random.Random(0), {}
    while len(labels) < num_pairs:
        people = zip(*(drawn.sample(words.split(), 2) for words in PEOPLE), strict=True)
        (actor, other), verb = map(" ".join, people), drawn.choice(VERBS.split())
        first, second = (actor, other) if len(labels) % 2 else (other, actor)
        sentences = [f"{actor} {verb} {other}", f"{second} was {verb} by {first}"]
        drawn.shuffle(sentences)
        labels[tuple(sentences)] = int(first == actor)
    return [(*sentences, label) for sentences, label in labels.items()]


def read_mrpc(path: Path) -> list[Pair]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row[3], row[4], int(row[0])) for row in list(rows)[1:]]


def make_model(pretrained: str | None, pairs: list[Pair]) -> tuple[torch.nn.Module, Any]:
    """Return a model with its tokenizer: pretrained ones, or new ones for the words of the pairs."""
    if pretrained:
        model = BertForSequenceClassification.from_pretrained(pretrained, num_labels=2, dtype=torch.float32)
        return model.train(), AutoTokenizer.from_pretrained(pretrained)
    words = sorted({word for *texts, _ in pairs for text in texts for word in text.lower().split()})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    # A new model learns to compare sentences from a weak signal: weights above BERT's 0.02 strengthen it.
    config = BertConfig(vocab_size=len(words), num_labels=2, initializer_range=0.1)
    config.update(dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512))
    config.update(dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    return BertForSequenceClassification(config).train(), tokenizer


def encode(pairs: list[Pair], tokenizer: Any) -> list[dict[str, torch.Tensor]]:
    first, second, labels = map(list, zip(*pairs, strict=True))
    padded = dict(padding=True, truncation=True, max_length=128, return_tensors="pt")
    columns = {**tokenizer(first, second, **padded), "labels": torch.tensor(labels)}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@torch.no_grad()
def evaluate(booster: Booster, model: torch.nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return F1 and accuracy on every rank; each replica predicts its share of the samples."""
    model.eval()
    results, wanted = [], dict(return_loss=False, return_outputs="all_ranks")
    for batch in loader:
        if isinstance(booster.plugin, HybridParallelPlugin):
            outputs = booster.execute_pipeline(iter([batch]), model, **wanted)["outputs"]
        else:
            outputs = model(**batch)
        results.append(booster.gather_for_metrics((outputs.logits.argmax(-1).cpu(), batch["labels"])))
    predicted, actual = (torch.cat(values) == 1 for values in zip(*results, strict=True))
    hits, errors = (predicted & actual).sum().item(), (predicted != actual).sum().item()
    return 2 * hits / max(2 * hits + errors, 1), 1 - errors / len(actual)


def main() -> int:
    arguments = parse_arguments()
    echelon.launch_from_torch(seed=42)
    plugin = echelon.plugin_from_arguments(arguments)
    booster = Booster(plugin=plugin)
    if folder := arguments.data_dir:
        train_pairs, test_pairs = read_mrpc(folder / "train.tsv"), read_mrpc(folder / "test.tsv")
    else:
        pairs = paraphrases(arguments.num_pairs)
        train_pairs, test_pairs = pairs[512:], pairs[:512]
    model, tokenizer = make_model(arguments.model, train_pairs)
    size, train_set = arguments.batch_size // plugin.dp_size, encode(train_pairs, tokenizer)
    loader = plugin.prepare_dataloader(train_set, size, shuffle=True, drop_last=True)
    test_loader = plugin.prepare_dataloader(encode(test_pairs, tokenizer), size)
    num_steps = arguments.epochs * len(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)

    metrics = Metrics(booster, optimizer, num_steps=num_steps, jsonl=arguments.metrics)
    for _ in range(arguments.epochs):
        model.train()
        for batch in loader:
            if isinstance(plugin, HybridParallelPlugin):
                loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
            else:  # torch's own wrappers
                loss = model(**batch).loss
                booster.backward(loss, optimizer)
                optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            metrics.step(loss, lr=scheduler.get_last_lr()[0])
        f1, accuracy = evaluate(booster, model, test_loader)
        metrics.write(f1=f1, accuracy=accuracy)
    if arguments.save_model:
        booster.save_model(model, arguments.save_model, shard=True)
        tokenizer.save_pretrained(arguments.save_model)
    booster.print(f"f1={f1:.4f} accuracy={accuracy:.4f}")
    echelon.DistCoordinator().destroy()
    return int(f1 < arguments.target_f1)


if __name__ == "__main__":
    sys.exit(main())
