"""States that cannot be saved or resumed are refused before anything changes; later failures do not end a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Sampler
from transformers import GPT2Config, GPT2DoubleHeadsModel

from echelon import Booster, HybridParallelPlugin, TorchDDPPlugin, TorchFSDPPlugin
from echelon.checkpoint.dcp import _Writer
from echelon.checkpoint.full_state import scheduler_errors
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer

from ..log_lines import logged
from ..plugins.training import Numbers, hybrid, share
from ..pool import Pool
from .runs import small_run

LLAMA = ModelChoice(model_type="llama", num_layers=2)
PLUGINS: dict[str, Callable[[], Any]] = {
    "hybrid": lambda: HybridParallelPlugin(precision="fp32"),
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
}
SCHEDULERS: dict[str, Any] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=4),
    "step": lambda optimizer: StepLR(optimizer, 2),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
    "plateau": ReduceLROnPlateau,
}


def test_a_scheduler_loads_only_states_of_its_own_kind() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    states = {name: make(optimizer).state_dict() for name, make in SCHEDULERS.items()}
    states |= {"weights": {"a.weight": torch.zeros(2)}, "a tensor": torch.zeros(2)}
    for name, make in SCHEDULERS.items():
        for kind, state in states.items():
            errors = scheduler_errors(make(optimizer), state, "FILE")
            assert bool(errors) == (kind != name)
            assert all(error.startswith("FILE is not a state of a ") for error in errors)


def double_heads() -> GPT2DoubleHeadsModel:
    """Make a model whose class changes its config into one that its own constructor refuses."""
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 101, "eos_token_id": 1, "bos_token_id": 1}
    return GPT2DoubleHeadsModel(GPT2Config(**sizes, problem_type="single_label_classification"))


def save_a_config_as_it_is(folder: Path, kind: str) -> None:
    booster = Booster(plugin=PLUGINS[kind]())
    model = double_heads()
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))  # type: ignore[assignment]
    booster.save_model(model, folder / "model", shard=True)
    booster.save_checkpoint(folder, 1, model=model, optimizer=optimizer).wait()
    resumed = booster.load_checkpoint(folder, model=model, optimizer=optimizer)
    assert resumed is not None and resumed.step == 1


@pytest.mark.parametrize("kind", PLUGINS)
def test_a_config_is_written_unchanged(pool: Pool, tmp_path: Path, kind: str) -> None:
    double_heads().save_pretrained(tmp_path / "plain")
    pool.run(2, save_a_config_as_it_is, tmp_path, kind)
    for folder in (tmp_path / "model", tmp_path / "step-00000001" / "model"):
        for name in ("config.json", "generation_config.json"):
            saved, plain = ((place / name).read_text() for place in (folder, tmp_path / "plain"))
            assert json.loads(saved) == json.loads(plain), name


class Remembering(nn.Module):
    def get_extra_state(self) -> Any:
        return {"calls": 3}


class Stubborn(LambdaLR):
    def state_dict(self) -> dict[str, Any]:
        return {"rule": self.lr_lambdas[0]}


def refusals(kind: str) -> list[str]:
    """Return the errors of boosting models, optimizers and schedulers that cannot be saved."""
    errors = []
    for memory in (Remembering(), nn.Module()):
        model: Any = LLAMA.build()
        model.config.table = torch.zeros(2)
        model.generation_config.rule = print
        model.model.memory = memory
        model.model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
        optimizer = torch.optim.SGD([{"params": model.parameters(), "rule": lambda: 1}], lr=0.1)
        scheduler = Stubborn(optimizer, lambda step: 1)
        with pytest.raises(ValueError) as error:
            Booster(plugin=PLUGINS[kind]()).boost(model, optimizer, lr_scheduler=scheduler)
        errors.append(str(error.value))
    return errors


@pytest.mark.parametrize("kind", PLUGINS)
def test_what_no_checkpoint_can_hold_is_refused_at_boost(pool: Pool, kind: str) -> None:
    ((first, second),) = pool.run(1, refusals, kind)
    for needle in (
        *(f"the model's {name} cannot be written as JSON" for name in ("config", "generation_config")),
        "model.memory._extra_state cannot be saved or loaded: a model's files contain only parameters and buffers",
        "the option 'rule' of a parameter group cannot be saved",
        "the state of the Stubborn cannot be saved",
    ):
        assert needle in first
    assert "phases is torch.complex128, which safetensors files cannot store" in second


def spoil_a_config(folder: Path) -> tuple[str, list[str], int]:
    """Change a config during training so that it cannot be written; the run continues, and the older step loads."""
    booster = hybrid()
    model: Any
    plain: Any = LLAMA.build()
    model, optimizer, *_ = booster.boost(plain, make_optimizer(plain))
    parts = {"model": model, "optimizer": optimizer}
    booster.save_checkpoint(folder, 1, **parts).wait()
    model.unwrap().config.table = torch.zeros(2)
    with logged("echelon.checkpoint.background") as lines:
        save = booster.save_checkpoint(folder, 2, **parts)
    del model.unwrap().config.table
    resumed = booster.load_checkpoint(folder, **parts, resume="must")
    assert resumed is not None
    with pytest.raises(OSError, match="is a folder: give the name of a file, or shard=True"):
        booster.save_model(model, folder)
    return str(save.failure), lines, resumed.step


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, spoil_a_config, tmp_path)
    assert "Tensor is not JSON serializable" in first[0] and first[0] == second[0]
    assert "saving to" in first[1][0] and second[1] == []
    assert first[2] == second[2] == 1


class Backwards(Sampler[int]):
    """A sampler without a state."""

    def __init__(self, dataset: Any, *_: Any, **__: Any) -> None:
        self._indices = range(len(dataset))

    def __iter__(self) -> Any:
        return reversed(self._indices)


def begin_with_a_loader_without_a_position(folder: Path) -> None:
    booster = hybrid()
    boosted, *_ = booster.boost(LLAMA.build())
    loader = booster.plugin.prepare_dataloader(Numbers(), 4, distributed_sampler_cls=Backwards)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the position in the data of a Backwards is not known"):
        booster.load_checkpoint(folder, model=boosted, dataloader=loader)


def write_an_index_alone(folder: Path) -> None:
    group = dist.group.WORLD
    assert group is not None
    folder.mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="the process group was destroyed before"):
        _Writer(folder, group).finish(Metadata({}), [[]])  # the results of this rank only
    _Writer(folder, group).finish(Metadata({}), [[], []])


def load_with_a_hole(folder: Path) -> None:
    """Load an index that lacks a box of each state: missing states are errors, not zeros."""
    run = small_run()
    run.step(0)
    run.booster.save_optimizer(run.optimizer, folder)
    run.step(1)
    before = run.unsharded()
    if dist.get_rank() == 0:
        index = json.loads((folder / "index.json").read_text())
        for entry in index["tensors"].values():
            entry["boxes"].pop()
        (folder / "index.json").write_text(json.dumps(index))
    dist.barrier()
    with pytest.raises(ValueError, match=r"exp_avg/\S+: \d+ of its \d+ entries are missing"):
        run.booster.load_optimizer(run.optimizer, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.unsharded().items())


def go_on_with_factored_states(folder: Path) -> None:
    """Resume with states that do not have their parameter's shape, which every rank has unsharded."""
    states: list[list[dict[str, Any]]] = []
    for resumes in (False, True):
        booster = Booster(plugin=TorchDDPPlugin())
        plain = LLAMA.build()
        model: Any
        model, optimizer, *_ = booster.boost(plain, torch.optim.Adafactor(plain.parameters(), lr=0.1))
        assert optimizer is not None
        parts = {"model": model, "optimizer": optimizer}
        for step in range(2 if resumes else 0, 3):
            if step == 2 and resumes:
                booster.load_checkpoint(folder, **parts, resume="must")
            elif step == 2:
                booster.save_checkpoint(folder, 2, **parts).wait()
            booster.backward(model(**next(share(booster, LLAMA, step))).loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        states.append(
            [dict(optimizer.state[parameter], weight=parameter) for parameter in model.parameters()]
        )
    assert {"row_var", "col_var"} <= states[0][0].keys()
    for one, other in zip(*states, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "check",
    [
        begin_with_a_loader_without_a_position,
        write_an_index_alone,
        load_with_a_hole,
        go_on_with_factored_states,
    ],
    ids=lambda check: check.__name__,
)
def test_incomplete_states_are_refused_and_unsharded_ones_resume(
    pool: Pool, tmp_path: Path, check: Callable[[Path], None]
) -> None:
    pool.run(2, check, tmp_path / "folder")
