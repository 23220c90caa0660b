"""What the plugin tests run on every rank. Small models, a few steps."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from echelon import Booster, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.models import ModelChoice
from echelon.verify.parity import make_optimizer

BERT = ModelChoice(model_type="bert")
LLAMA = ModelChoice(model_type="llama", tied=True)


def hybrid(**kwargs: Any) -> Booster:
    settings = {"precision": "fp32", "num_microbatches": 2} | kwargs
    return Booster(plugin=HybridParallelPlugin(**settings))


def boosted(booster: Booster, choice: ModelChoice = BERT) -> tuple[Any, Any]:
    model = choice.build()
    wrapped, optimizer, *_ = booster.boost(model, make_optimizer(model), loss_of)
    return wrapped, optimizer


@torch.compiler.set_stance("force_eager")  # what is compiled, and how, is tested in tests/shardformer
def documented_call() -> dict[str, Any]:
    plugin = HybridParallelPlugin(
        tp_size=1,
        pp_size=2,
        num_microbatches=None,
        microbatch_size=1,
        enable_all_optimization=True,
        zero_stage=1,
        precision="fp16",
        initial_scale=1,
    )
    booster = Booster(plugin=plugin)
    model = BERT.build()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    batches = [make_batch(BERT, num_samples=4, seed=0)] * 6
    model, optimizer, criterion, _, scheduler = booster.boost(
        model, optimizer, criterion=lambda outputs, inputs: outputs.loss, lr_scheduler=scheduler
    )
    losses = []
    data = iter(batches)
    for _ in batches:
        outputs = booster.execute_pipeline(data, model, criterion, optimizer, return_loss=True)
        losses.append(float(outputs["loss"]))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {
        "losses": losses,
        "pp_size": booster.plugin.pp_size,
        "last": booster.plugin.stage_manager.is_last_stage(ignore_chunk=True),
        "lr": optimizer.param_groups[0]["lr"],
    }


def train(kind: str, sizes: dict[str, Any], choice: ModelChoice, num_steps: int = 3) -> list[float]:
    """Losses of a run whose global batch of 8 samples does not depend on the layout."""
    booster = {
        "hybrid": lambda: hybrid(**sizes),
        "zero": lambda: Booster(plugin=LowLevelZeroPlugin(**sizes)),
    }[kind]()
    model, optimizer = boosted(booster, choice)
    losses = []
    for step in range(num_steps):
        losses.append(
            float(booster.execute_pipeline(share(booster, choice, step), model, loss_of, optimizer)["loss"])
        )
        optimizer.step()
        optimizer.zero_grad()
    return [mean_over_replicas(loss) for loss in losses]


def share(booster: Any, choice: ModelChoice, step: int) -> Iterator[dict[str, Tensor]]:
    rank, size = booster.plugin.data_rank
    batch = make_batch(choice, num_samples=8, seed=step)
    return iter([{name: tensor.chunk(size)[rank] for name, tensor in batch.items()}])


def mean_over_replicas(loss: float) -> float:
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train_by_calls(plugin: str, num_steps: int = 3) -> list[float]:
    """The same by `model(**batch)` and `booster.backward`, as a plain loop does it."""
    booster = {
        "hybrid": lambda: hybrid(tp_size=2),
        "ddp": lambda: Booster(plugin=TorchDDPPlugin()),
        "ddp_fp16": lambda: Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16"),
    }[plugin]()
    model, optimizer = boosted(booster)
    losses = []
    for step in range(num_steps):
        loss = model(**next(share(booster, BERT, step))).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_replicas(loss.item()))
    return losses


def evaluate_between_steps() -> list[dict[str, Any]]:
    booster = hybrid(tp_size=2, pp_size=2)
    model, optimizer = boosted(booster, LLAMA)
    found = []
    for step, num_samples in enumerate((4, 5, 3)):
        booster.execute_pipeline(share(booster, LLAMA, step), model, loss_of, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        batch = make_batch(LLAMA, num_samples=num_samples, seed=50 + step)
        with torch.no_grad():
            outputs = booster.execute_pipeline(iter([batch]), model, loss_of, return_outputs=True)
        model.train()
        logits = outputs["outputs"].logits if outputs["outputs"] is not None else None
        found.append({"loss": float(outputs["loss"]), "logits": logits})
    return found


def weighted(sizes: dict[str, Any]) -> list[float]:
    """A criterion of (sum, weight): batches of different token counts on every replica."""
    booster = hybrid(**sizes, max_norm=0.5)
    model, optimizer = boosted(booster, LLAMA)

    def criterion(outputs: Any, inputs: Any) -> tuple[Tensor, Tensor]:
        logits = outputs.logits.gather() if hasattr(outputs.logits, "local") else outputs.logits
        labels = inputs["labels"][:, 1:]
        total = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return total, (labels != -100).sum()

    losses = []
    for step in range(3):
        output = booster.execute_pipeline(share(booster, LLAMA, step), model, criterion, optimizer)
        losses.append(float(output["loss"]))
        optimizer.step()
        losses.append(optimizer.get_grad_norm())
        optimizer.zero_grad()
    return losses


def save_then_load(path: Path, saver: dict[str, Any], loader: dict[str, Any], *, safe: bool) -> None:
    booster = hybrid(**saver)
    model, optimizer = boosted(booster, LLAMA)
    booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of, optimizer)
    optimizer.step()
    booster.save_model(model, path, use_safetensors=safe)
    with torch.no_grad():
        batch = make_batch(LLAMA, num_samples=4, seed=9)
        expected = float(booster.execute_pipeline(iter([batch]), model, loss_of)["loss"])
    other = hybrid(**loader)
    reloaded, _ = boosted(other, LLAMA)
    other.load_model(reloaded, path)
    with torch.no_grad():
        assert abs(float(other.execute_pipeline(iter([batch]), reloaded, loss_of)["loss"]) - expected) < 1e-6


def weighted_twice() -> str:
    booster = hybrid(tp_size=2)
    model, optimizer = boosted(booster)

    def criterion(outputs: Any, inputs: Any) -> tuple[Tensor, Tensor]:
        return outputs.loss * 8, torch.tensor(8.0)

    booster.execute_pipeline(share(booster, BERT, 0), model, criterion, optimizer)
    try:
        booster.execute_pipeline(share(booster, BERT, 1), model, criterion, optimizer)
    except ValueError as error:
        return str(error)
    return ""


def weighted_in_training_alone() -> list[float]:
    booster = hybrid(pp_size=2)
    model, optimizer = boosted(booster)

    def criterion(outputs: Any, inputs: Any) -> Any:
        size = len(inputs["labels"])
        return (
            (outputs.loss * size * 4, torch.tensor(size * 4.0)) if torch.is_grad_enabled() else outputs.loss
        )

    with torch.no_grad():
        before = booster.execute_pipeline(share(booster, BERT, 0), model, criterion)["loss"]
    output = booster.execute_pipeline(share(booster, BERT, 0), model, criterion, optimizer)
    return [float(before), float(output["loss"])]


def norm_after_a_dropped_batch() -> list[float]:
    booster = hybrid(tp_size=2)
    model, optimizer = boosted(booster)

    def weighted_by(weight: float) -> Any:
        return lambda outputs, inputs: (outputs.loss * weight, torch.tensor(weight))

    norms = []
    for dropped in (None, 16.0):
        if dropped is not None:
            booster.execute_pipeline(share(booster, BERT, 0), model, weighted_by(dropped), optimizer)
            optimizer.zero_grad()
        booster.execute_pipeline(share(booster, BERT, 0), model, loss_of, optimizer)
        optimizer.reduce_gradients()
        norms.append(sum(float(gradient.square().sum()) for gradient in optimizer.gradients().values()))
        optimizer.zero_grad()
    return norms


def weighted_on_one_replica() -> None:
    booster = hybrid()
    model, optimizer = boosted(booster)

    def criterion(outputs: Any, inputs: Any) -> Any:
        return (outputs.loss, torch.tensor(1.0)) if dist.get_rank() == 0 else outputs.loss

    booster.execute_pipeline(share(booster, BERT, 0), model, criterion, optimizer)


def misuse(kind: str) -> str:
    """What the error says, for a slip in a call."""
    booster = hybrid()
    model, optimizer = boosted(booster)
    batch = make_batch(BERT, num_samples=4, seed=0)
    calls: dict[str, Callable[[], Any]] = {
        "criterion gives logits": lambda: booster.execute_pipeline(
            iter([batch]), model, lambda outputs, inputs: (outputs.loss, outputs.logits), optimizer
        ),
        "criterion gives none": lambda: booster.execute_pipeline(
            iter([batch]), model, lambda *_: None, optimizer
        ),
        "criterion detaches": lambda: booster.execute_pipeline(
            iter([batch]), model, lambda outputs, _: outputs.loss.detach(), optimizer
        ),
        "criterion stops": lambda: booster.execute_pipeline(
            iter([batch]), model, lambda *_: next(iter([])), optimizer
        ),
        "plain optimizer": lambda: booster.execute_pipeline(iter([batch]), model, loss_of, optimizer.inner),
        "no_sync of the plain optimizer": lambda: booster.no_sync(model, optimizer.inner),
        "no_sync of the plain model": lambda: booster.no_sync(model.unwrap(), optimizer),
        "a list of batches": lambda: booster.execute_pipeline([batch], model, loss_of, optimizer),  # type: ignore[arg-type]
        "boost twice": lambda: booster.boost(model, make_optimizer(model)),
        "copy of the model": lambda: copy.deepcopy(model),
        "copy of the optimizer": lambda: copy.deepcopy(optimizer),
        "argument types": lambda: HybridParallelPlugin(tp_size="2", pp_size=1.5, precision="fp32"),  # type: ignore[arg-type]
        "argument values": lambda: HybridParallelPlugin(
            precision="fp32",
            max_norm=float("nan"),
            zero_bucket_size_in_m=float("nan"),
            num_layers_per_stage=[0],
        ),
    }
    try:
        calls[kind]()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def boost_unequal_models(frozen: bool) -> None:
    booster = hybrid(tp_size=2)
    model = BERT.build(seed=dist.get_rank())
    if frozen:
        model.requires_grad_(False)
    booster.boost(model, None if frozen else make_optimizer(model))


def load_misshapen(path: Path) -> bool:
    booster = hybrid(tp_size=2)
    model, _ = boosted(booster)
    booster.save_model(model, path)
    dist.barrier()
    if dist.get_rank() == 0:
        stored = load_file(path)
        stored["classifier.weight"] = torch.zeros(5, 32)
        save_file(stored, path)
    dist.barrier()
    before = {name: tensor.detach().clone() for name, tensor in model.tensors().items()}
    try:
        booster.load_model(model, path)
    except ValueError as error:
        unchanged = all(torch.equal(before[name], tensor) for name, tensor in model.tensors().items())
        return unchanged and "classifier.weight has shape (5, 32)" in str(error)
    return False


def refused(make: Callable[[], Any]) -> str:
    """The error's text, once it is sure that nothing was communicated before it."""
    before = dist.distributed_c10d._world.group_count
    try:
        make()
    except (ValueError, RuntimeError) as error:
        assert dist.distributed_c10d._world.group_count == before, "a group was made before the refusal"
        return str(error)
    raise AssertionError("nothing was refused")


def refuse_sizes() -> str:
    return refused(
        lambda: HybridParallelPlugin(tp_size=3, pp_size=1, precision="fp8", zero_stage=3, pp_style="zigzag")
    )


def refuse_without_microbatches() -> str:
    return refused(lambda: HybridParallelPlugin(pp_size=2, precision="fp32", num_model_chunks=3))


def refuse_sequences_on_two_axes() -> str:
    return refused(
        lambda: HybridParallelPlugin(
            precision="fp32",
            enable_sequence_parallelism=True,
            sequence_parallelism_mode="split_gather",
            sp_size=2,
            inner_ring_size=2,
        )
    )


def refuse_ranks_without_sequences() -> str:
    return refused(
        lambda: HybridParallelPlugin(
            precision="fp32", sp_size=2, enable_sequence_overlap=True, inner_ring_size=3
        )
    )


def refuse_a_mode_that_is_off() -> str:
    return refused(
        lambda: HybridParallelPlugin(
            tp_size=2, precision="fp32", sequence_parallelism_mode="split_gather", wp_size=2
        )
    )


def refuse_a_switch_that_is_none() -> str:
    return refused(
        lambda: HybridParallelPlugin(
            tp_size=2,
            precision="fp32",
            enable_sequence_parallelism="no",  # type: ignore[arg-type]
        )
    )


def refuse_missing_packages() -> str:
    return refused(
        lambda: HybridParallelPlugin(
            precision="fp32", pp_size=2, enable_xformers=True, enable_all_optimization=True
        )
    )


def refuse_attention() -> str:
    booster = hybrid(tp_size=2, enable_flash_attention=True)
    choice = ModelChoice(model_type="bloom", settings=(("slow_but_exact", True),))
    model = choice.build()
    return refused(lambda: booster.boost(model, make_optimizer(model), loss_of))


def refuse_width_and_foreign_optimizer() -> str:
    booster = hybrid(tp_size=2)
    choice = ModelChoice(model_type="llama", settings=(("intermediate_size", 25),))
    model, other = choice.build(), choice.build()
    return refused(lambda: booster.boost(model, make_optimizer(other), loss_of))


def kept_under_two_stages() -> set[str]:
    """The names of those parameters of the model that still exist once it is boosted."""
    booster = hybrid(pp_size=2)
    model = ModelChoice(model_type="bert").build()
    optimizer = make_optimizer(model)
    parameters = {name: weakref.ref(each) for name, each in model.named_parameters()}
    boosted = booster.boost(model, optimizer, loss_of)
    gc.collect()
    assert boosted
    return {name for name, parameter in parameters.items() if parameter() is not None}


def refuse_few_layers() -> str:
    booster = hybrid(pp_size=2)
    model = ModelChoice(model_type="bert", num_layers=1).build()
    return refused(lambda: booster.boost(model, make_optimizer(model), loss_of))


def refuse_unknown_model() -> str:
    booster = hybrid(tp_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    return refused(lambda: booster.boost(model, make_optimizer(model)))


def refuse_sequences_of_an_unknown_model() -> str:
    booster = hybrid(sp_size=2, enable_sequence_parallelism=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    return refused(lambda: booster.boost(model, make_optimizer(model)))


def refuse_call_under_pipeline() -> str:
    booster = hybrid(pp_size=2)
    model, _ = boosted(booster)
    return refused(lambda: model(**make_batch(BERT, num_samples=4, seed=0)))


def feed(fault: str) -> None:
    """One good step, then a fault in the data of one rank."""
    booster = hybrid(tp_size=2, pp_size=2, num_microbatches=3)
    model, optimizer = boosted(booster)
    rank = dist.get_rank()
    batches = [make_batch(BERT, num_samples=6, seed=0), make_batch(BERT, num_samples=6, seed=1)]
    if fault == "small":
        batches[1] = make_batch(BERT, num_samples=2, seed=1)
    elif fault == "ends" and rank == 2:
        batches.pop()
    elif fault == "differs" and rank == 3:
        batches[1] = make_batch(BERT, num_samples=6, seed=2)
    elif fault == "hidden":
        batches[1]["output_hidden_states"] = True  # type: ignore[assignment]
    data = iter(batches)
    for _ in range(2):
        booster.execute_pipeline(data, model, loss_of, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def end_of_data() -> None:
    booster = hybrid(tp_size=2)
    model, optimizer = boosted(booster)
    booster.execute_pipeline(iter([]), model, loss_of, optimizer)


def die_in_a_step(victim: int, how: str, sizes: dict[str, Any]) -> None:
    import os
    import signal

    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, replace(BERT, num_layers=8))

    def criterion(outputs: Any, inputs: Any) -> Tensor:
        return loss_of(outputs, inputs)

    def fail(*_: Any) -> None:
        if how == "raises":
            raise ZeroDivisionError("on purpose")
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(3):
        if step == 2 and dist.get_rank() == victim:
            next(model.module.modules()).register_forward_pre_hook(fail)
        booster.execute_pipeline(share(booster, BERT, step), model, criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return index


def random_collate(samples: list[int]) -> dict[str, Tensor]:
    return {"drawn": torch.tensor(samples) + torch.rand(len(samples))}


def collated() -> list[list[float]]:
    booster = hybrid(tp_size=2)
    torch.manual_seed(dist.get_rank())  # whatever else a rank draws must not matter
    loader = booster.plugin.prepare_dataloader(
        Numbers(), batch_size=4, shuffle=True, collate_fn=random_collate
    )
    return [batch["drawn"].tolist() for batch in loader]
