r"""Train a model of your own, outside of transformers: a table of its layers' names is all that sharding needs.

    torchrun --standalone --nproc_per_node 4 examples/custom/pretrain.py --tp_size 2 --pp_size 2 --num_microbatches 4
    torchrun --standalone --nproc_per_node 2 examples/custom/pretrain.py --plugin low_level_zero --zero_stage 2

It learns to continue arithmetic progressions modulo 64: the first two numbers are chance, the others follow.
docs/policies.md explains every entry of the table; data parallelism and ZeRO need none.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon import Booster, Metrics
from echelon.pipeline.stage_plan import StagePlan
from echelon.shardformer import Table, register_class

MODULUS, LENGTH = 64, 16


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        projections = [projection(hidden) for projection in (self.query, self.key, self.value)]
        # By the local number of heads: a shard of the projections has fewer features.
        heads = [projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for projected in projections]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, num_heads), MLP(width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Decoder(nn.Module):
    def __init__(self, width: int = 64, num_heads: int = 4, num_blocks: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(MODULUS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, MODULUS, bias=False)

    def forward(self, numbers: Tensor) -> Tensor:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        hidden = self.tokens(numbers) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


DECODER = Table(
    stage=StagePlan(layers="blocks", entry=("tokens", "positions")),  # of a pipeline
    regions=("attention", "mlp"),  # modules with sharded activations, from the column to the row
    column=("attention.query", "attention.key", "attention.value", "mlp.up"),  # sharded by outputs
    row=("attention.out", "mlp.down"),  # sharded by inputs, results summed
    divide=("attention.num_heads",),
    divisible=(),
    embedding="tokens",  # sharded by its entries
    heads=("head",),
)
register_class(DECODER, f"{__name__}.Decoder")


def progressions(count: int) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    starts, strides = (torch.randint(MODULUS, (count, 1), generator=drawn) for _ in range(2))
    return [{"numbers": row} for row in (starts + strides * torch.arange(LENGTH)) % MODULUS]


def next_number_loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1).float(), inputs["numbers"][:, 1:].flatten())


def main() -> None:
    parser: argparse.ArgumentParser = echelon.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--num_samples", type=int, default=3072)
    parser.add_argument("--batch_size", type=int, default=64, help="over all replicas")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--metrics", help="file of JSON lines")
    echelon.add_plugin_arguments(parser, precision="fp32", max_norm=1.0)
    arguments = parser.parse_args()
    echelon.launch_from_torch(seed=42)
    plugin = echelon.plugin_from_arguments(arguments)
    booster = Booster(plugin=plugin)

    samples, per_replica = progressions(arguments.num_samples), arguments.batch_size // plugin.dp_size
    loader = plugin.prepare_dataloader(samples, per_replica, shuffle=True, drop_last=True)
    model = Decoder().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, next_number_loss, loader)
    num_steps = arguments.epochs * len(loader)
    metrics = Metrics(booster, optimizer, num_steps=num_steps, jsonl=arguments.metrics)
    for _ in range(arguments.epochs):
        for batch in loader:
            loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"]
            optimizer.step()
            optimizer.zero_grad()
            metrics.step(loss)
    echelon.DistCoordinator().destroy()


if __name__ == "__main__":
    main()
