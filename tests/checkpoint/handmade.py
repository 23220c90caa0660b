"""Checkpoints written by hand, sharded like those of a layout."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from echelon.checkpoint.step_folders import begin_step, commit_step
from echelon.checkpoint.tensor_file import (
    Entry,
    FileRecord,
    TensorFileWriter,
    dtype_name,
    write_small,
    write_values,
)
from echelon.cluster.box import Box, flat_boxes

Cut = Callable[[Sequence[int], int], list[list[Box]]]


def flat_slices(shape: Sequence[int], ranks: int) -> list[list[Box]]:
    """Shard as ZeRO does: each rank has an equal interval of the flattened tensor."""
    numel = Box.full(shape).numel
    bounds = [numel * rank // ranks for rank in range(ranks + 1)]
    return [list(flat_boxes(bounds[rank], bounds[rank + 1], shape)) for rank in range(ranks)]


def columns(shape: Sequence[int], ranks: int) -> list[list[Box]]:
    """Shard as tensor parallelism does: along the last dimension, with the remainder on the last rank."""
    if not shape:
        return [[Box((), ())], *([] for _ in range(ranks - 1))]
    bounds = [shape[-1] * rank // ranks for rank in range(ranks + 1)]
    front = (0,) * (len(shape) - 1)
    return [
        [Box((*front, bounds[rank]), (*shape[:-1], bounds[rank + 1] - bounds[rank]))]
        for rank in range(ranks)
        if bounds[rank] < bounds[rank + 1]
    ]


def small_config(**changes: Any) -> LlamaConfig:
    """Return the config of a model with about three thousand entries."""
    sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=24, max_position_embeddings=32)
    counts = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    return LlamaConfig(**(sizes | counts | changes))


@dataclass
class Handmade:
    """The content of a checkpoint; tests change it before it is written.

    Args:
        config: config of a LlamaForCausalLM.
        model: the weights by name.
        states: the optimizer's tensors by STATE/PARAMETER.
        cut, ranks: the sharding of the states in files.
        max_bytes: maximum size of a weights file.
    """

    config: LlamaConfig
    model: dict[str, Tensor]
    states: dict[str, Tensor]
    groups: dict[str, Any]
    training: dict[str, Any]
    cut: Cut = flat_slices
    ranks: int = 2
    max_bytes: int = 2500
    has_optimizer: bool = True
    step: int = 100
    layout: dict[str, int] = field(default_factory=lambda: {"pp": 1, "dp": 2, "sp": 1, "tp": 1})

    @staticmethod
    def of(config: LlamaConfig, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> "Handmade":
        """Make the content as after three steps of AdamW."""
        generator = torch.Generator().manual_seed(seed)
        shapes = _shapes(config.to_json_string())
        masters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        names = list(masters)
        averages = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        states = {f"exp_avg/{name}": average for name, average in averages.items()}
        if dtype != torch.float32:
            states |= {f"master/{name}": master for name, master in masters.items()}
        groups = [
            {"options": {"lr": rate, "betas": (0.9, 0.95)}, "parameters": parameters}
            for rate, parameters in ((1e-3, names[:3]), (1e-4, names[3:]))
        ]
        scalars = {name: {"step": torch.tensor(3.0)} for name in names}
        extra = {"scaler": None, "skipped_steps": 0}
        training = {
            "step": 100,
            "scheduler": {"last_epoch": 100, "_last_lr": [1e-3, 1e-4]},
            "data": {"epoch": 1, "samples": 320, "seed": 7, "size": 1000},
            "user": {"note": "by hand", "best": 0.25},
        }
        return Handmade(
            config=config,
            model={name: master.to(dtype) for name, master in masters.items()},
            states=states,
            groups={"optimizer": "AdamW", "groups": groups, "scalars": scalars, "extra": extra},
            training=training,
        )

    def write(self, directory: Path) -> Path:
        """Write the checkpoint into a directory, and return the folder of the step."""
        folder = begin_step(directory, self.step)
        for inner in ("model", "random"):
            (folder / inner).mkdir()
        records = self._write_model(folder, "model")
        if self.has_optimizer:
            records |= self._write_optimizer(folder, "optimizer")
        training = self.training | {"layout": {"sizes": self.layout}}
        records["training.pt"] = write_values(folder / "training.pt", training)
        for rank in range(self.layout["dp"]):
            name = f"random/rank-{rank:05}.pt"
            place = {"pp": 0, "dp": rank, "sp": 0, "tp": 0}
            state = {"coordinates": place, "cpu": torch.Generator().manual_seed(rank).get_state()}
            records[name] = write_values(folder / name, state)
        return commit_step(folder, directory, self.step, records)

    def _write_model(self, folder: Path, inner: str) -> dict[str, FileRecord]:
        self.config.architectures = ["LlamaForCausalLM"]
        self.config.dtype = next(iter(self.model.values())).dtype
        self.config.save_pretrained(folder / inner)
        config = folder / inner / "config.json"
        records = {f"{inner}/config.json": write_small(config, config.read_bytes())}
        files = list(_filled(self.model, self.max_bytes))
        places = {}
        for number, tensors in enumerate(files, start=1):
            name = f"model-{number:05}-of-{len(files):05}.safetensors"
            records[f"{inner}/{name}"] = write_tensors(folder / inner / name, tensors)
            places |= dict.fromkeys(tensors, name)
        size = sum(tensor.nbytes for tensor in self.model.values())
        listing = {"metadata": {"total_size": size}, "weight_map": places}
        index = f"{inner}/model.safetensors.index.json"
        records[index] = write_small(folder / index, json.dumps(listing).encode())
        return records

    def _write_optimizer(self, folder: Path, inner: str) -> dict[str, FileRecord]:
        (folder / inner).mkdir()
        files: list[dict[str, Tensor]] = [{} for _ in range(self.ranks)]
        listing = {}
        for name, tensor in self.states.items():
            boxes = []
            for rank, mine in enumerate(self.cut(tuple(tensor.shape), self.ranks)):
                for box in mine:
                    key = f"{name}@{','.join(map(str, box.offset))}"
                    files[rank][key] = tensor[box.within(Box.full(tensor.shape))]
                    place = {"file": f"rank-{rank:05}.safetensors", "key": key}
                    boxes.append({"offset": list(box.offset), "size": list(box.size), **place})
            listing[name] = {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype), "boxes": boxes}
        names = [f"{inner}/rank-{rank:05}.safetensors" for rank in range(self.ranks)]
        records = {
            name: write_tensors(folder / name, tensors) for name, tensors in zip(names, files, strict=True)
        }
        content = json.dumps({"tensors": listing}).encode()
        records[f"{inner}/index.json"] = write_small(folder / inner / "index.json", content)
        records[f"{inner}/groups.pt"] = write_values(folder / inner / "groups.pt", self.groups)
        return records


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a file of tensors."""
    writer = TensorFileWriter(path, [Entry(name, tuple(x.shape), x.dtype) for name, x in tensors.items()])
    for entry in writer.order:
        writer.write(tensors[entry.name])
    return writer.finish()


def _filled(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(x.nbytes for x in shard.values()) + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


@cache
def _shapes(config: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors, from its config as JSON."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**json.loads(config)))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
