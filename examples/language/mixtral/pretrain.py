r"""Pre-train a mixture of experts, distributed over the processes, and plot how evenly its experts are chosen.

    torchrun --standalone --nproc_per_node 2 examples/language/mixtral/pretrain.py --ep_size 2 \
        --imbalance imbalance.svg
    torchrun --standalone --nproc_per_node 8 examples/language/mixtral/pretrain.py --ep_size 4 --pp_size 2 \
        --num_microbatches 4 --router_loss 0.02

Tokens are bytes of Python's own library. The plot has a line for each layer: the tokens of its fullest expert over the
mean of all. 1 is even. Without `--router_loss`, the weight of the auxiliary loss, it may reach 4: the same two of
eight experts for every token.
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM, get_cosine_schedule_with_warmup

import echelon
from echelon import Booster, Metrics


def parse_arguments() -> argparse.Namespace:
    parser = echelon.ArgumentParser(description=__doc__)
    parser.add_argument("--router_loss", type=float, default=0.0, help="weight of the auxiliary loss")
    parser.add_argument("--sequence_length", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=16, help="sequences of a step, over all replicas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--metrics", help="file of JSON lines")
    parser.add_argument("--imbalance", help="file of a picture: .svg, .png or .pdf")
    echelon.add_plugin_arguments(parser, precision="fp32", max_norm=1.0)
    return parser.parse_args()


def library(length: int) -> list[dict[str, torch.Tensor]]:
    """Return Python's library as sequences of bytes."""
    texts = [path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    tokens = torch.frombuffer(bytearray(b"\0".join(texts)), dtype=torch.uint8).long()
    return [
        {"input_ids": row, "labels": row} for row in tokens[: len(tokens) // length * length].view(-1, length)
    ]


def make_model(arguments: argparse.Namespace) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=arguments.sequence_length,
        output_router_logits=arguments.router_loss > 0,  # adds the auxiliary loss
        router_aux_loss_coef=arguments.router_loss,
    )
    return MixtralForCausalLM(config).train()


def main() -> None:
    arguments = parse_arguments()
    echelon.launch_from_torch(seed=42)
    plugin = echelon.plugin_from_arguments(arguments)
    booster = Booster(plugin=plugin)
    per_replica = arguments.batch_size // plugin.dp_size
    samples = library(arguments.sequence_length)
    loader = plugin.prepare_dataloader(samples, per_replica, shuffle=True, drop_last=True)
    model = make_model(arguments)
    flops = echelon.flops_per_token(model, arguments.sequence_length)  # of the experts that a token chooses
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    scheduler = get_cosine_schedule_with_warmup(optimizer, arguments.steps // 10, arguments.steps)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)

    metrics = Metrics(
        booster,
        optimizer,
        every=5,
        num_steps=arguments.steps,
        tokens_per_step=arguments.batch_size * arguments.sequence_length,
        flops_per_token=flops,
        mixture=model,
        jsonl=arguments.metrics,
    )
    step = 0
    while step < arguments.steps:
        for batch in loader:
            loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            metrics.step(loss, lr=scheduler.get_last_lr()[0])
            if step == arguments.steps:
                break
    if arguments.imbalance:
        metrics.draw(arguments.imbalance, "imbalance")
    echelon.DistCoordinator().destroy()


if __name__ == "__main__":
    main()
