"""What the tests of TorchFSDPPlugin run on every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon import Booster, PipelineGradientCheckpointConfig, TorchDDPPlugin, TorchFSDPPlugin
from echelon.shardformer.recompute import checkpoint_layers, recomputable_layers
from echelon.verify.batch import make_batch
from echelon.verify.models import ModelChoice
from echelon.verify.parity import make_optimizer
from echelon.verify.reference import StepRecord, train

from .training import mean_over_replicas, refused

LLAMA = ModelChoice(model_type="llama", num_layers=2)
GPT2 = ModelChoice(model_type="gpt2", tied=True, num_layers=2)
NUM_STEPS = 3
SCALE = 2.0**16  # torch's own first loss scale


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor, with the pieces of all ranks."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def prepared(choice: ModelChoice, change: str = "") -> nn.Module:
    """A model in which half is frozen, parameters are never used, or layers are computed again in backward."""
    model = choice.build()
    if change == "recomputed":
        first = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1])
        checkpoint_layers({0: recomputable_layers(model)}, first)
    if change == "frozen":
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
    elif change == "unused":
        model.idle = nn.Linear(3, 5)
        next(each for each in model.modules() if isinstance(each, nn.ModuleList))[0].idle = nn.Linear(1, 1)
    return model


def microbatches(
    choice: ModelChoice, step: int, rank: int, replicas: int, count: int
) -> list[dict[str, Tensor]]:
    """One rank's microbatches of a global batch of 8 samples."""
    batch = make_batch(choice, num_samples=8, seed=step)
    own = {name: tensor.chunk(replicas)[rank] for name, tensor in batch.items()}
    return [{name: tensor.chunk(count)[index] for name, tensor in own.items()} for index in range(count)]


def reference(
    choice: ModelChoice,
    replicas: int,
    *,
    change: str = "",
    count: int = 1,
    max_norm: float = 0.0,
    precision: str = "fp32",
) -> list[StepRecord]:
    """The same steps in one process by a plain torch loop."""
    return train(
        prepared(choice, change),
        [
            [microbatches(choice, step, rank, replicas, count) for rank in range(replicas)]
            for step in range(NUM_STEPS)
        ],
        make_optimizer=make_optimizer,
        criterion=lambda outputs, _: outputs.loss,  # type: ignore[attr-defined]
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision],
        max_norm=max_norm,
        loss_scale=SCALE if precision == "fp16" else 1.0,
    )


def boosted(choice: ModelChoice, change: str = "", **settings: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=TorchFSDPPlugin(**settings))
    model = prepared(choice, change)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    return booster, model, optimizer


def steps(
    choice: ModelChoice, settings: dict[str, Any], *, change: str = "", count: int = 1, max_norm: float = 0.0
) -> list[StepRecord]:
    """A training loop as with any plugin; what each step gave, whole."""
    booster, model, optimizer = boosted(choice, change, **settings)
    rank, size = booster.plugin.data_rank
    records = []
    for step in range(NUM_STEPS):
        *first, last = microbatches(choice, step, rank, size, count)
        losses = []
        with booster.no_sync(model, optimizer):
            for batch in first:
                losses.append(model(**batch).loss)
                booster.backward(losses[-1] / count, optimizer)
        losses.append(model(**last).loss)
        booster.backward(losses[-1] / count, optimizer)
        norm = optimizer.clip_grad_by_norm(max_norm or float("inf"))
        named = dict(model.unwrap().named_parameters())
        # Clipping has scaled the gradients: what it took out is put back to compare them.
        factor = max(float(norm) / max_norm, 1.0) if max_norm else 1.0
        gradients = {name: whole(each.grad) * factor for name, each in named.items() if each.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        records.append(
            StepRecord(
                loss=mean_over_replicas(sum(loss.item() for loss in losses) / count),
                norm=float(norm),
                gradients=gradients,
                weights={name: whole(each) for name, each in named.items()},
            )
        )
    return records


def held(settings: dict[str, Any]) -> dict[str, Any]:
    """What one rank holds of a Llama after a step: rows by parameter, states, gradients and devices."""
    booster, model, optimizer = boosted(LLAMA, **settings)
    rank, size = booster.plugin.data_rank
    booster.backward(model(**microbatches(LLAMA, 0, rank, size, 1)[0]).loss, optimizer)
    named = dict(model.unwrap().named_parameters())
    gradients = sum(each.grad.to_local().numel() for each in named.values())
    optimizer.step()
    states = [state for each in named.values() for state in optimizer.state[each].values() if state.ndim]
    sharded = [type(each).__name__ for each in model.unwrap().modules() if hasattr(each, "unshard")]
    return {
        "whole": sum(each.numel() for each in named.values()),
        "parameters": sum(each.to_local().numel() for each in named.values()),
        "rows": named["model.layers.0.mlp.up_proj.weight"].to_local().shape[0],
        "gradients": gradients,
        "states": sum(state.to_local().numel() for state in states),
        "sharded": sharded,
        "groups": [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups],
        "on_cpu": {each.device.type for each in named.values()} == {"cpu"},
    }


def evaluate_before_a_step() -> tuple[float, float]:
    """The loss after a step with an evaluation between backward and step, and without one."""
    losses = []
    for evaluates in (True, False):
        booster, model, optimizer = boosted(GPT2)
        batch = make_batch(GPT2, num_samples=2, seed=0)
        booster.backward(model(**batch).loss, optimizer)
        if evaluates:
            with torch.no_grad():
                model(**batch)
        optimizer.step()
        losses.append(model(**batch).loss.item())
    return losses[0], losses[1]


def drop_accumulated() -> tuple[str, float, float]:
    """What step() says of gradients never reduced, and norms with and without such gradients dropped before."""
    booster, model, optimizer = boosted(GPT2)
    first, second = (make_batch(GPT2, num_samples=2, seed=seed) for seed in (0, 1))
    norms, told = [], ""
    for batch in (first, second, second):
        if batch is first:
            with booster.no_sync(model, optimizer):
                booster.backward(model(**batch).loss, optimizer)
            try:
                optimizer.step()
            except RuntimeError as error:
                told = str(error)
        else:
            booster.backward(model(**batch).loss, optimizer)
            norms.append(float(optimizer.clip_grad_by_norm(float("inf"))))
        optimizer.zero_grad()
    return told, norms[0], norms[1]


def overflow_on_one_rank(settings: dict[str, Any]) -> tuple[bool, bool, float, int]:
    """Whether a step with an infinite loss on the last rank changed a weight, and a later step; scale and skips."""
    booster, model, optimizer = boosted(LLAMA, precision="fp16", **settings)
    parameter = next(model.unwrap().parameters())
    batch = make_batch(LLAMA, num_samples=2, seed=0)
    changes = []
    for step in range(2):
        before = whole(parameter)
        loss = model(**batch).loss
        if step == 0 and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * float("inf")
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_value(1.0)  # hides no overflow
        optimizer.step()
        optimizer.zero_grad()
        changes.append(not torch.equal(before, whole(parameter)))
    return changes[0], changes[1], optimizer.scaler.get_scale(), optimizer.skipped_steps


def save_then_load(path: Path) -> bool:
    """A changed model saved, loaded into a fresh one under other settings: equal, bit for bit."""
    booster, model, optimizer = boosted(GPT2)
    booster.backward(model(**make_batch(GPT2, num_samples=2, seed=0)).loss, optimizer)
    optimizer.step()
    with torch.no_grad():
        model(**make_batch(GPT2, num_samples=2, seed=0))  # leaves parameters whole
    booster.save_model(model, path)
    other, loaded, _ = boosted(GPT2, cpu_offload=True)
    other.load_model(loaded, path)
    expected, found = (
        {name: whole(each) for name, each in each.unwrap().named_parameters()} for each in (model, loaded)
    )
    return expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in found)


def refuse_to_load(path: Path) -> tuple[str, bool]:
    """What loading a Llama's file into a GPT-2 says, and whether the weights stayed."""
    booster, model, _ = boosted(LLAMA)
    booster.save_model(model, path)
    other, unlike, _ = boosted(GPT2)
    before = [whole(each) for each in unlike.parameters()]
    try:
        other.load_model(unlike, path)
    except ValueError as error:
        return str(error), all(map(torch.equal, before, map(whole, unlike.parameters())))
    return "", False


def refuse_arguments() -> str:
    return refused(
        lambda: TorchFSDPPlugin(
            precision="fp8",
            shard_size=3,
            cpu_offload="yes",  # type: ignore[arg-type]
            reshard_after_forward=2,
            initial_scale=0,
            growth_factor=1,
            backoff_factor=1,
            growth_interval=0,
            hysteresis=2,
            min_scale=1,
            max_scale=4,
        )
    )


def refuse_models(kind: str) -> str:
    booster = Booster(plugin=TorchFSDPPlugin())
    model = GPT2.build()
    optimizer = make_optimizer(model)
    if kind == "stepped":
        model(**make_batch(GPT2, num_samples=2, seed=0)).loss.backward()
        optimizer.step()
    elif kind == "foreign":
        optimizer = make_optimizer(GPT2.build())
    elif kind == "adafactor":
        optimizer = torch.optim.Adafactor(model.parameters())
    elif kind == "muon":
        optimizer = torch.optim.Muon(each for each in model.parameters() if each.ndim == 2)
    elif kind == "adagrad":
        optimizer = torch.optim.Adagrad(model.parameters())
    elif kind == "scalar and hook":
        model.scale = nn.Parameter(torch.tensor(1.0))
        model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)
    wrapped = (
        booster.boost(model, optimizer)[1] if kind == "boosted optimizer" else None
    )  # which makes a group
    calls: dict[str, Callable[[], Any]] = {
        "boosted model": lambda: booster.boost(booster.boost(model)[0]),
        "boosted inside": lambda: booster.boost(booster.boost(model)[0].unwrap()),
        "boosted optimizer": lambda: booster.boost(GPT2.build(), wrapped),
        "plain model": lambda: booster.save_model(model, "never"),
        "no_sync of another": lambda: booster.no_sync(booster.boost(model)[0], optimizer),
        "backward by another": lambda: booster.backward(torch.ones(()), optimizer),
        "pipeline": lambda: booster.execute_pipeline(iter([]), model),
        "mixed_precision": lambda: Booster(plugin=booster.plugin, mixed_precision="bf16"),
    }
    return refused(calls.get(kind, lambda: booster.boost(model, optimizer)))


def refuse_pipeline_under_ddp() -> str:
    return refused(lambda: Booster(plugin=TorchDDPPlugin()).execute_pipeline(iter([]), nn.Linear(1, 1)))


def refuse_no_sync_under_ddp() -> str:
    model = nn.Linear(1, 1)
    booster = Booster(plugin=TorchDDPPlugin())
    boosted, *_ = booster.boost(model)
    return refused(lambda: booster.no_sync(boosted, torch.optim.SGD(model.parameters())))


def step_without_scaled_gradients() -> tuple[dict[str, str], bool]:
    """What calls say before a backward and after one past the booster; whether a whole step then changes a weight."""
    booster, model, optimizer = boosted(GPT2, precision="fp16")
    batch = make_batch(GPT2, num_samples=2, seed=0)
    calls: dict[str, Callable[[], Any]] = {
        "step()": optimizer.step,
        "clip_grad_by_norm()": lambda: optimizer.clip_grad_by_norm(1.0),
        "clip_grad_by_value()": lambda: optimizer.clip_grad_by_value(1.0),
    }
    told = {name: refused(call) for name, call in calls.items()}
    model(**batch).loss.backward()
    assert told == {name: refused(call) for name, call in calls.items()}
    optimizer.zero_grad()
    before = whole(next(model.unwrap().parameters()))
    booster.backward(model(**batch).loss, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    return told, not torch.equal(before, whole(next(model.unwrap().parameters())))


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def dealt() -> list[int]:
    loader = TorchFSDPPlugin(shard_size=2).prepare_dataloader(Numbers(), batch_size=2)
    return [int(number) for batch in loader for number in batch]
