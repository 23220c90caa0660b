"""A model, its data, and how plain torch trains it: what the optimizer is compared with. Nothing of echelon.

One process goes through the microbatches of all data-parallel ranks. In 16 bits it keeps float32 masters.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 2.0**10
LR = 1e-2


class Model(nn.Module):
    """Odd sizes, a layer that some microbatches leave out, and a head that may be tied."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 13)
        self.norm = nn.LayerNorm(13)
        self.extra = nn.Linear(13, 13)
        self.outer = nn.Linear(13, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.temperature = nn.Parameter(torch.ones(1))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, with_extra: bool) -> Tensor:
        x = self.norm(self.inner(self.embedding(tokens)).tanh())
        if with_extra:
            x = x + self.extra(x)
        return self.head(self.outer(x)) * self.temperature


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train the model. `extra_used` says at which steps which ranks use the layer `extra`."""

    optimizer: Literal["adamw", "fused", "sgd", "adagrad"] = "adamw"
    grouped: bool = False
    frozen: bool = False
    tied: bool = False
    extra_used: tuple[Literal["all", "first", "none"], ...] = ("all",) * 4
    microbatches: int = 1
    max_norm: float = 0.0
    norm_type: float = 2.0
    overflow_step: int | None = None
    scheduled: bool = False
    bucket_size: int = 10**6

    @property
    def steps(self) -> int:
        return len(self.extra_used)

    def uses_extra(self, step: int, rank: int) -> bool:
        return self.extra_used[step] == "all" or (self.extra_used[step] == "first" and rank == 0)


CASES = {
    "adamw": Case(),
    "fused adamw": Case(optimizer="fused", tied=True),
    "sgd with momentum": Case(optimizer="sgd"),
    "adagrad": Case(optimizer="adagrad"),
    "two groups": Case(grouped=True, tied=True),
    "frozen half": Case(frozen=True),
    "no gradient": Case(extra_used=("all", "none", "first", "none"), grouped=True),
    "never a gradient": Case(extra_used=("none",) * 3),
    "accumulation": Case(microbatches=3, tied=True, extra_used=("all", "first", "all", "all")),
    "clipping": Case(max_norm=0.05, tied=True, microbatches=2),
    "clipping by the largest": Case(max_norm=0.01, norm_type=float("inf")),
    "overflow": Case(overflow_step=1, max_norm=0.05, extra_used=("all",) * 5),
    "schedule": Case(scheduled=True, grouped=True),
    "small buckets, accumulation": Case(
        bucket_size=5, microbatches=3, extra_used=("all", "first", "all", "all"), overflow_step=1
    ),
    "small buckets": Case(bucket_size=50, tied=True, grouped=True, max_norm=0.05),
}


@dataclass(kw_only=True)
class Record:
    """What came out: per step gradients before clipping (None: no gradient) and their norm; weights at the end."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    skipped: int = 0


def build_model(case: Case) -> Model:
    """The same weights in every process."""
    torch.manual_seed(1)
    model = Model(tied=case.tied)
    if case.frozen:
        model.embedding.requires_grad_(False)
        model.inner.bias.requires_grad_(False)
    return model


def build_optimizer(case: Case, named: dict[str, nn.Parameter]) -> Optimizer:
    """An optimizer over parameters by name; `grouped` exempts vectors from weight decay and slows them down."""
    groups = [{"params": list(named.values())}]
    if case.grouped:
        vectors = {name for name in named if "bias" in name or "norm" in name}
        groups = [
            {"params": [named[name] for name in named if name not in vectors], "weight_decay": 0.1},
            {"params": [named[name] for name in named if name in vectors], "weight_decay": 0.0, "lr": LR / 3},
        ]
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=LR, momentum=0.9, weight_decay=0.01)
    if case.optimizer == "adagrad":
        return torch.optim.Adagrad(groups, lr=LR, initial_accumulator_value=0.1)
    return torch.optim.AdamW(groups, lr=LR, eps=1e-5, fused=case.optimizer == "fused")


def build_schedule(optimizer: Optimizer) -> LambdaLR:
    """A learning rate that changes at every step."""
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def loss_of(model: Model, case: Case, *, step: int, rank: int, microbatch: int) -> Tensor:
    """The loss of one microbatch; microbatches differ in size. It is infinite where the case overflows."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + microbatch)
    tokens = torch.randint(11, (2 + microbatch, 5), generator=generator)
    logits = model(tokens, with_extra=case.uses_extra(step, rank))
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())
    return loss / case.microbatches


def train(case: Case, *, world_size: int, precision: str, overflowing_rank: int) -> Record:
    """Train as `world_size` data-parallel ranks would."""
    model = build_model(case)
    masters = {
        name: nn.Parameter(each.detach().clone(), requires_grad=each.requires_grad)
        for name, each in model.named_parameters()
    }
    trained = {name: master for name, master in masters.items() if master.requires_grad}
    optimizer = build_optimizer(case, masters)
    schedule = build_schedule(optimizer) if case.scheduled else None
    model.to(DTYPES[precision])
    record, scale = Record(), SCALE if precision == "fp16" else 1.0
    for step in range(case.steps):
        gradients = _gradients(
            model, case, step=step, world_size=world_size, overflowing_rank=overflowing_rank, scale=scale
        )
        for name, master in trained.items():
            master.grad = gradients.get(name)
        record.gradients.append({name: gradient.clone() for name, gradient in gradients.items()})
        norm = nn.utils.clip_grad_norm_(trained.values(), case.max_norm or float("inf"), case.norm_type)
        record.norms.append(norm.item())
        if norm.isfinite():
            optimizer.step()
        else:
            record.skipped += 1
            scale /= 2
        if schedule is not None:
            schedule.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    record.weights = {name: master.detach() for name, master in masters.items()}
    return record


def _gradients(
    model: Model, case: Case, *, step: int, world_size: int, overflowing_rank: int, scale: float
) -> dict[str, Tensor]:
    """The mean over ranks of what each accumulates in float32, by name; without those nobody has."""
    sums: dict[str, Tensor] = {}
    for rank in range(world_size):
        for microbatch in range(case.microbatches):
            model.zero_grad()
            loss = loss_of(model, case, step=step, rank=rank, microbatch=microbatch)
            if step == case.overflow_step and rank == overflowing_rank:
                loss = loss * float("inf")
            (loss * scale).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.float() / (scale * world_size)
                    sums[name] = sums[name] + gradient if name in sums else gradient
    return sums
