"""Small runs that are saved under one layout and resumed under another, on the ranks of a pool."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, LlamaConfig

from echelon import Booster, HybridParallelPlugin
from echelon.cluster.gathering import gather_objects
from echelon.verify.parity import make_optimizer


def config_of(**settings: Any) -> LlamaConfig:
    """Return a Llama config whose vocabulary is not divisible by the number of ranks."""
    sizes = dict(vocab_size=101, hidden_size=32, intermediate_size=48, max_position_embeddings=64)
    counts = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    return LlamaConfig(**(sizes | counts | settings))


class Run:
    """A boosted model with all objects of a checkpoint. Collective over the world.

    Args:
        config: the model's config.
        seed: seed of the initial weights; another seed shows that loading changed them.
        plugin: arguments of HybridParallelPlugin.
    """

    def __init__(self, config: LlamaConfig, *, seed: int = 0, **plugin: Any) -> None:
        settings = {"precision": "fp32", "num_microbatches": 2, "initial_scale": 2.0**10, **plugin}
        self.booster = Booster(plugin=HybridParallelPlugin(**settings))
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        optimizer = make_optimizer(model)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        boosted = self.booster.boost(model, optimizer, lr_scheduler=scheduler)
        self.model, self.optimizer, self.scheduler = boosted[0], boosted[1], boosted[4]

    @property
    def everything(self) -> dict[str, Any]:
        """The objects that are saved and loaded."""
        return {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}

    def step(self, number: int) -> float:
        """Train on the batch of this number, eight samples over all replicas, and return the global loss."""
        replica, replicas = self.booster.plugin.data_rank
        drawn = torch.Generator().manual_seed(100 + number)
        batch = torch.randint(0, 101, (8, 12), generator=drawn).chunk(replicas)[replica]
        inputs = {"input_ids": batch, "labels": batch, "attention_mask": torch.ones_like(batch)}
        output = self.booster.execute_pipeline(iter([inputs]), self.model, None, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        loss = output["loss"].clone()
        dist.all_reduce(loss, group=self.booster.plugin.mesh.group("dp"))
        return float(loss) / replicas

    def pieces(self) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]]:
        """Return this rank's boxes of weights, masters and states, with their content."""
        plugin = self.booster.plugin
        trained = plugin.trained(self.optimizer)
        local = dict(plugin.local_model(self.model).tensors)
        local |= {f"master/{name}": master for name, master in trained.masters.items()}
        for piece in trained.pieces:
            for key, value in self.optimizer.inner.state[piece.key].items():
                if value.shape == piece.key.shape:
                    local[f"{key}/{piece.name}"] = piece.local(piece.name, value)
        return {
            name: [(piece.box.offset, piece.box.size, piece.local.clone()) for piece in tensor.boxes]
            for name, tensor in local.items()
        }

    def unsharded(self) -> dict[str, Tensor]:
        """Return all weights, masters and states, unsharded, on every rank."""
        local = self.booster.plugin.local_model(self.model).tensors
        every = gather_objects(({name: tensor.shape for name, tensor in local.items()}, self.pieces()))
        known = {name: shape for shapes, _ in every for name, shape in shapes.items()}
        tensors: dict[str, Tensor] = {}
        for _, pieces in every:
            for name, boxes in pieces.items():
                for offset, size, content in boxes:
                    empty = torch.full(known[name.rpartition("/")[2]], torch.nan, dtype=content.dtype)
                    tensor = tensors.setdefault(name, empty)
                    tensor[tuple(slice(a, a + b) for a, b in zip(offset, size, strict=True))] = content
        assert not any(bool(tensor.isnan().any()) for tensor in tensors.values())
        return tensors


TINY = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16}
SHARD = 0.01  # MiB, so that there are several files, and both ranks write some


def small_run(seed: int = 0) -> Run:
    """Make a run whose ranks shard the optimizer's states."""
    return Run(config_of(**TINY), seed=seed, zero_stage=1)
