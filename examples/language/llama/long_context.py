r"""Train a Llama on long sequences, which ring attention shards over the processes.

    torchrun --standalone --nproc_per_node 4 examples/language/llama/long_context.py --sequence_length 8192
    torchrun --standalone --nproc_per_node 8 examples/language/llama/long_context.py \
        --sequence_parallelism_mode all_to_all --sp_size 4 --zero_stage 1 --gradient_checkpoint_config 1.0

Each process has a slice of every sequence; keys and values travel around a ring of `--sp_size` processes. By default
that is all of them, so a sequence may be as many times longer. Logits stay sharded too. Texts are Python's library.
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_constant_schedule_with_warmup

import echelon
from echelon import Booster, Metrics


def parse_arguments() -> argparse.Namespace:
    parser = echelon.ArgumentParser(description=__doc__)
    parser.add_argument("--sequence_length", type=int, default=4096)
    parser.add_argument("--batch_size", type=int, default=2, help="sequences of a step, over all replicas")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--metrics", help="file of JSON lines")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    ring = {"enable_sequence_parallelism": processes > 1, "sequence_parallelism_mode": "ring_attn"}
    layout = ring | {"sp_size": processes} if processes > 1 else {}
    echelon.add_plugin_arguments(parser, precision="fp32", max_norm=1.0, **layout)
    return parser.parse_args()


def long_sequences(length: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of bytes of Python's library, which begins anew at its end."""
    texts = [path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    tokens = torch.frombuffer(bytearray(b"\0".join(texts)), dtype=torch.uint8).long()
    tokens = tokens.repeat(-(-length * count // len(tokens)))[: length * count].view(count, length)
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    arguments = parse_arguments()
    echelon.launch_from_torch(seed=42)
    plugin = echelon.plugin_from_arguments(arguments)
    booster = Booster(plugin=plugin)
    sequences = long_sequences(arguments.sequence_length, arguments.batch_size * arguments.steps)
    loader = plugin.prepare_dataloader(sequences, arguments.batch_size // plugin.dp_size)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=arguments.sequence_length,
    )
    model = LlamaForCausalLM(config).train()
    flops = echelon.flops_per_token(model, arguments.sequence_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    scheduler = get_constant_schedule_with_warmup(optimizer, 5)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)

    metrics = Metrics(
        booster,
        optimizer,
        num_steps=arguments.steps,
        tokens_per_step=arguments.batch_size * arguments.sequence_length,
        flops_per_token=flops,
        jsonl=arguments.metrics,
    )
    for batch in loader:  # all processes of a ring get the same sequences, and slice them themselves
        loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        metrics.step(loss, lr=scheduler.get_last_lr()[0])
    echelon.DistCoordinator().destroy()


if __name__ == "__main__":
    main()
