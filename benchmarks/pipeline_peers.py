"""Peers of Echelon's pipeline: torch.distributed.pipelining, set up as an expert would.

torch's schedules run a stage of transformers' own modules (embedding, rotary, layers, norm, head), do not
merge the logits, and divide the loss by the microbatches instead of scaling all gradients at the end.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from stepped import Stepped, gradients_of
from torch import Tensor, nn
from torch.distributed import pipelining
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from workload import Workload, adamw

SINGLE = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
LOOPED = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
STYLES = (*SINGLE, *LOOPED)


class LlamaStage(nn.Module):
    """Some layers of a Llama, with the embedding on the first stage and the head on the last.

    Parameters keep their names in the model. Attention is causal by the fused kernel's own flag,
    so that no mask is built.

    Args:
        model: a full model, whose modules are used.
        layers: the range of its layers.
    """

    def __init__(self, model: LlamaForCausalLM, layers: range) -> None:
        super().__init__()
        self.model = nn.Module()
        if layers.start == 0:
            self.model.embed_tokens = model.model.embed_tokens
        self.model.rotary_emb = model.model.rotary_emb
        self.model.layers = nn.ModuleDict({str(index): model.model.layers[index] for index in layers})
        if layers.stop == len(model.model.layers):
            self.model.norm = model.model.norm
            self.lm_head = model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids (B, S) on the first stage, else (B, S, H), to logits (B, S, V) on the last, else (B, S, H)."""
        hidden = self.model.embed_tokens(x) if hasattr(self.model, "embed_tokens") else x
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = self.model.rotary_emb(hidden, positions)
        for layer in self.model.layers.values():
            hidden = layer(hidden, position_embeddings=rotary)
        return self.lm_head(self.model.norm(hidden)) if hasattr(self, "lm_head") else hidden


class TorchPipeline(Stepped):
    """A schedule of torch.distributed.pipelining over all ranks of the run.

    Args:
        style: one of `STYLES`.
        workload: the computation.
        device: its device.
        rank, num_ranks: this rank of the pipeline, and the number of ranks.
        counts: layers of each stage; a style of `LOOPED` has two stages on each rank.
    """

    def __init__(
        self,
        style: str,
        workload: Workload,
        device: torch.device,
        *,
        rank: int,
        num_ranks: int,
        counts: Sequence[int],
    ) -> None:
        self.name = f"torch {style}"
        self._workload = workload
        self._data = workload.data(device)
        self._losses: list[Tensor] = []
        model = workload.model()
        starts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
        held = stages_of(style, rank, num_ranks)
        modules = {stage: LlamaStage(model, range(starts[stage], starts[stage + 1])) for stage in held}
        self._model = nn.ModuleList(modules.values()).to(device)
        self._is_first, self._is_last = 0 in held, len(counts) - 1 in held
        super().__init__(adamw(self._model), clip=self._clip_stages if workload.max_norm else None)
        stages = [
            pipelining.PipelineStage(module, stage, len(counts), device) for stage, module in modules.items()
        ]
        self._schedule = make_schedule(style, stages, workload.microbatches, self._judge)

    def compute(self) -> None:
        """Compute loss and gradients of the batch. Communicates with the neighbouring stages."""
        inputs = (self._data["input_ids"],) if self._is_first else ()
        target = self._data["labels"] if self._is_last else None
        self._losses.clear()
        self._schedule.step(*inputs, target=target, losses=self._losses, return_outputs=False)

    def loss(self) -> Tensor | None:
        """Return the mean loss, on the rank of the last stage."""
        return torch.stack(self._losses).detach().sum() if self._is_last else None

    def gradients(self) -> Mapping[str, Tensor]:
        """Return this rank's gradients by name."""
        gradients: dict[str, Tensor] = {}
        for module in self._model:
            gradients |= gradients_of(module)
        return gradients

    def _clip_stages(self) -> None:
        """Clip to the norm over all stages, as torchtitan does. One all-reduce over the stages."""
        parameters = list(self._model.parameters())
        total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) ** 2
        dist.all_reduce(total)
        nn.utils.clip_grads_with_norm_(parameters, self._workload.max_norm, total**0.5)

    def _judge(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = ForCausalLMLoss(logits, labels, vocab_size=self._workload.vocabulary)
        return loss / self._workload.microbatches


def stages_of(style: str, rank: int, num_ranks: int) -> list[int]:
    """Return the stages of a rank under a style: round-robin, or for zbv in order and back."""
    if style in SINGLE:
        return [rank]
    return [rank, 2 * num_ranks - 1 - rank if style == "zbv" else num_ranks + rank]


def make_schedule(style: str, stages: Sequence[Any], num_microbatches: int, loss: Any) -> Any:
    """Make one of torch's schedules; the loss is already divided by the microbatches."""
    if style in SINGLE:
        return SINGLE[style](stages[0], num_microbatches, loss_fn=loss, scale_grads=False)
    return LOOPED[style](list(stages), num_microbatches, loss_fn=loss, scale_grads=False)
