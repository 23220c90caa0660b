"""Peers of Echelon's tensor parallelism: torch's parallel styles on DTensors, and transformers' own plans."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from stepped import OneBatch, gradients_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from transformers.distributed import DistributedConfig
from workload import ADAMW, Workload

Plan = dict[str, ParallelStyle]


class WholeBatch(OneBatch):
    """A contender in which every rank computes the full batch with its shard of the model.

    Args:
        model: the sharded model.
        workload: the computation.
        device: its device.
    """

    def __init__(self, model: nn.Module, workload: Workload, device: torch.device) -> None:
        super().__init__(model, _adamw(model), batch=workload.data(device))

    def gradients(self) -> Mapping[str, Tensor]:
        """Return gradients by name, gathered. Communicates."""
        gradients = gradients_of(self._model)
        return {
            name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            for name, gradient in gradients.items()
        }


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of every contender; its fused kernel refuses groups of DTensors and plain tensors."""
    kinds: dict[bool, list[Tensor]] = {}
    for parameter in model.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW([{"params": parameters} for parameters in kinds.values()], **ADAMW)


class TorchTensor(WholeBatch):
    """`parallelize_module` with a column-wise and a row-wise style for each linear layer of a region.

    Args:
        workload: the computation.
        device: its device.
        kind: "plain" gathers the logits; "loss-parallel" leaves them sharded over the vocabulary; "sequence-parallel"
            does so too, and shards activations between the regions over the sequence.
    """

    names: ClassVar[dict[str, str]] = {
        kind: f"torch DTensor, {kind}" for kind in ("plain", "loss-parallel", "sequence-parallel")
    }

    def __init__(self, workload: Workload, device: torch.device, *, kind: str) -> None:
        self.name = self.names[kind]
        model = workload.model().to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        is_split = kind == "sequence-parallel"
        parallelize_module(model, mesh, _end_plan(splits_loss=kind != "plain", splits_sequence=is_split))
        for layer in model.model.layers:
            parallelize_module(layer, mesh, _layer_plan(splits_sequence=is_split))
        super().__init__(model, workload, device)
        self._splits_loss = kind != "plain"
        self._positions = torch.arange(workload.sequence, device=device)[None]

    def compute(self) -> None:
        """Compute loss and gradients of the batch. Communicates over the world."""
        context: Callable[[], AbstractContextManager[Any]] = (
            loss_parallel if self._splits_loss else nullcontext
        )
        with context():
            # Given positions: by default they are counted within a rank's shard of the sequence.
            logits = self._model(input_ids=self._batch["input_ids"], position_ids=self._positions).logits
            targets = F.pad(self._batch["labels"], (0, 1), value=-100)[:, 1:]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        loss = loss.detach()
        self._loss = loss.full_tensor() if isinstance(loss, DTensor) else loss


def _end_plan(*, splits_loss: bool, splits_sequence: bool) -> Plan:
    between = Shard(1) if splits_sequence else Replicate()
    head = ColwiseParallel(
        input_layouts=between,
        output_layouts=Shard(-1) if splits_loss else Replicate(),
        use_local_output=not splits_loss,
    )
    norm = {"model.norm": SequenceParallel()} if splits_sequence else {}
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    return {"model.embed_tokens": embedding, **norm, "lm_head": head}


def _layer_plan(*, splits_sequence: bool) -> Plan:
    column = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    row = ["self_attn.o_proj", "mlp.down_proj"]
    plan: Plan = {name: ColwiseParallel() for name in column}
    if not splits_sequence:
        return plan | {name: RowwiseParallel() for name in row}
    return {
        **plan,
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in row},
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }


class TransformersTensor(WholeBatch):
    """transformers' own plan for the model, applied as by its `from_pretrained(distributed_config=...)`."""

    name = "transformers DistributedConfig"

    def __init__(self, workload: Workload, device: torch.device) -> None:
        model = workload.model().to(device)
        from transformers.distributed.utils import initialize_distributed_mesh  # not in 5.17

        # Not through from_pretrained, which needs accelerate for it.
        config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
        _, mesh = initialize_distributed_mesh(config)
        super().__init__(type(model).maybe_distribute_model(model, config, mesh), workload, device)
