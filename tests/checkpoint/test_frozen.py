"""A run with frozen parameters resumes under every plugin, from a checkpoint of any plugin."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from echelon import Booster, HybridParallelPlugin, ShardConfig, ShardFormer, TorchDDPPlugin, TorchFSDPPlugin
from echelon.checkpoint.dcp import StateFiles
from echelon.cluster.box import Box
from echelon.cluster.mesh import ParallelMesh
from echelon.plugins.state import SplitCheckpoints

from ..pool import Pool
from .runs import config_of

PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": lambda: TorchFSDPPlugin(precision="fp32"),
    "tensor": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
    "pipeline": lambda: HybridParallelPlugin(pp_size=2, precision="fp32", num_microbatches=1),
    "zero": lambda: HybridParallelPlugin(zero_stage=1, precision="fp32"),
}
KINDS = (*PLUGINS, "split")
TOKENS = torch.arange(24).view(2, 12)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


class Frozen:
    """A model whose first layer and embedding (a separate parameter group) are frozen."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(num_hidden_layers=2))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".layers.1." in name or "head" in name)
        self._of_split(model) if kind == "split" else self._of_booster(model, kind)

    def _of_split(self, model: nn.Module) -> None:
        mesh = ParallelMesh(tp=2)
        config = ShardConfig(
            tensor_parallel_process_group=mesh.group("tp"),
            data_parallel_process_group=mesh.group("dp"),
            gather_output=True,
        )
        self.model, _ = ShardFormer(config).optimize(model)
        self.optimizer = optimizer_of(self.model)
        checkpoints = SplitCheckpoints(self.model, self.optimizer, mesh)
        self.save, self.load = checkpoints.save_checkpoint, checkpoints.load_checkpoint

    def _of_booster(self, model: nn.Module, kind: str) -> None:
        booster = Booster(plugin=PLUGINS[kind]())
        self.booster = booster
        self.model, self.optimizer, *_ = booster.boost(model, optimizer_of(model))
        parts = {"model": self.model, "optimizer": self.optimizer}
        self.save = lambda path, step: booster.save_checkpoint(path, step, **parts)
        self.load = lambda path: booster.load_checkpoint(path, **parts)

    def step(self, kind: str) -> None:
        if kind in ("tensor", "pipeline", "zero"):
            self.booster.execute_pipeline(iter([BATCH]), self.model, None, self.optimizer)
        else:
            loss = self.model(**BATCH).loss
            self.booster.backward(loss, self.optimizer) if kind != "split" else loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def optimizer_of(model: nn.Module) -> AdamW:
    """Make an optimizer of all parameters, including frozen ones."""
    parameters = list(model.parameters())
    return AdamW([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 1e-2}])


def contents(folder: Path, step: int) -> dict[str, torch.Tensor]:
    stored = StateFiles(folder / f"step-{step:08}" / "optimizer")
    return {name: stored.read(name, Box.full(stored.shape(name))) for name in stored.names}


def hand_round(folder: Path, kinds: Sequence[str]) -> None:
    for kind in kinds:
        run = Frozen(kind, 0)
        run.step(kind)
        run.save(folder / kind, 1)
    expected = {kind: contents(folder / kind, 1) for kind in kinds}
    assert all("exp_avg/model.layers.1.mlp.up_proj.weight" in tensors for tensors in expected.values())
    names = {name for tensors in expected.values() for name in tensors}
    assert not any(".layers.0." in name or "embed" in name for name in names)
    for kind in kinds:
        run = Frozen(kind, 7)
        for other in kinds:
            run.load(folder / other)
            run.save(folder / f"{other}-{kind}", 2)
            stored = contents(folder / f"{other}-{kind}", 2)
            assert stored.keys() == expected[other].keys(), (other, kind)
            differing = [name for name in stored if not torch.equal(stored[name], expected[other][name])]
            assert differing == [], (other, kind)
        run.step(kind)
    dist.barrier()


@pytest.mark.parametrize(
    "kinds", [("zero", "split"), pytest.param(KINDS, marks=pytest.mark.slow)], ids=" ".join
)
def test_frozen_parameters_are_in_no_group_of_any_plugin(
    pool: Pool, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    pool.run(2, hand_round, tmp_path, kinds)
