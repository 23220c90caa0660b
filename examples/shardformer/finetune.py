r"""Train a model that ShardFormer alone has sharded, in a plain loop: no booster and no plugin.

    python examples/shardformer/finetune.py
    torchrun --standalone --nproc_per_node 4 examples/shardformer/finetune.py --tp_size 2 --model_type qwen3

It learns to encrypt words by a Caesar cipher, and answers by `generate()`.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import echelon
from echelon import DistCoordinator, ParallelMesh, ShardConfig, ShardFormer, clip_grad_norm_

END, PAD, IGNORED = 26, 27, -100  # after the tokens of 26 letters
LENGTH, SHIFT = 6, 3


def parse_arguments() -> argparse.Namespace:
    parser = echelon.ArgumentParser(description=__doc__)
    parser.add_argument("--model_type", choices=("llama", "qwen3", "mistral"), default="llama")
    parser.add_argument("--tp_size", type=int, help="ranks that shard each layer: all; others are replicas")
    parser.add_argument(
        "--key_value_heads", type=int, default=1, help="of 4 heads; fewer than ranks are copied"
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch_size", type=int, default=64, help="words, over all replicas")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--target_accuracy", type=float, default=0.0, help="exit with status 1 below it")
    parser.add_argument("--metrics", help="file of JSON lines")
    return parser.parse_args()


def make_model(model_type: str, key_value_heads: int) -> nn.Module:
    config = AutoConfig.for_model(
        model_type,
        vocab_size=PAD + 1,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
        head_dim=32,
        intermediate_size=256,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def ended(words: Tensor) -> Tensor:
    """Return words, (N, LENGTH), with their end tokens."""
    return torch.cat([words, torch.full_like(words[:, :1], END)], dim=1)


def samples_of(words: Tensor) -> list[dict[str, Tensor]]:
    """Return words with their encryptions, which alone have labels."""
    ids = torch.cat([ended(words), ended((words + SHIFT) % END)], dim=1)
    labels = ids.clone()
    labels[:, : LENGTH + 1] = IGNORED
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(len(ids))]


@torch.no_grad()
def accuracy_of(model: nn.Module, words: Tensor, mesh: ParallelMesh) -> float:
    """Return the share of right answers, on every rank; each replica answers for its share of the words."""
    model.eval()
    local = words[mesh.rank("dp") :: mesh.size("dp")]
    asked = ended(local).to(mesh.device)
    settings = {"attention_mask": torch.ones_like(asked), "max_new_tokens": LENGTH, "do_sample": False}
    answers = model.generate(asked, **settings)[:, LENGTH + 1 :].cpu()
    answers = nn.functional.pad(answers, (0, LENGTH - answers.shape[1]), value=END)
    right = (answers == (local + SHIFT) % END).all(1).sum().to(mesh.device)
    dist.all_reduce(right, group=mesh.group("dp"))
    return right.item() / len(words)


def main() -> int:
    arguments = parse_arguments()
    echelon.launch_from_torch(seed=42)
    world = DistCoordinator()
    mesh = ParallelMesh(tp=arguments.tp_size or world.world_size)
    groups = {
        f"{name}_parallel_process_group": mesh.group(axis)
        for name, axis in (("tensor", "tp"), ("data", "dp"))
    }
    shard_former = ShardFormer(ShardConfig(**groups, gather_output=True))
    model, _ = shard_former.optimize(
        make_model(arguments.model_type, arguments.key_value_heads).to(mesh.device)
    )

    words = torch.randint(END, (20500, LENGTH), generator=torch.Generator().manual_seed(0))
    loader = shard_former.shard_dataset(
        samples_of(words[500:]),
        batch_size=arguments.batch_size // mesh.size("dp"),
        shuffle=True,
        drop_last=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=arguments.steps)
    records: list[dict] = []
    while len(records) < arguments.steps:
        for batch in loader:
            loss = model(**{name: tensor.to(mesh.device) for name, tensor in batch.items()}).loss
            loss.backward()  # sums partial gradients over the tensor axis and averages over the replicas
            norm = clip_grad_norm_(model, 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total = loss.detach().clone()
            dist.all_reduce(total, group=mesh.group("dp"))
            records.append(
                {"step": len(records) + 1, "loss": total.item() / mesh.size("dp"), "grad_norm": norm}
            )
            if len(records) % 10 == 0:
                world.print_on_master(f"step {len(records)}, loss {records[-1]['loss']:.4f}, norm {norm:.3f}")
            if len(records) == arguments.steps:
                break
    accuracy = accuracy_of(model, words[:500], mesh)
    if arguments.metrics and world.is_master():
        Path(arguments.metrics).write_text("".join(json.dumps(record) + "\n" for record in records))
    world.print_on_master(f"accuracy={accuracy:.4f}")
    world.destroy()
    return int(accuracy < arguments.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
