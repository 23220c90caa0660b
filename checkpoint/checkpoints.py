"""What a plugin saves and loads: models, optimizers, and all of a run. How is told by the other files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..cluster.mesh import ParallelMesh
from . import lora
from .consent import alike, exchanged, failing_alike, on_all_ranks, on_first_rank
from .copies import Copies
from .held import HeldTensor
from .held_model import HeldModel
from .loading import fit
from .model_files import SAFETENSORS, TORCH, FileNames, ModelFiles, describing, plan_model
from .model_save import write_model_file, write_model_folder
from .placing import finish_placing, replace_file, write_together
from .plan import Holding, holdings_of
from .pretrained import open_pretrained
from .saving import Save, Saver
from .schedulers import scheduler_faults
from .step_load import Resume, Resumed, choose_step, load_step
from .step_save import StepToSave, gather_step
from .trained import STATES, SavedStates, Trained, fit_trained, kept_states, states_to_save
from .values import read_values, saved_bytes

MEBI = 2**20
Saved = TypeVar("Saved", ModelFiles, SavedStates, StepToSave)


class Checkpoints:
    """The savers and loaders of one plugin. Every rank calls them alike; a save ends before the next one begins.

    Args:
        mesh: all ranks.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._saver = Saver()
        self._copies = Copies(mesh.device)

    def save_model(
        self,
        model: HeldModel,
        path: Path,
        *,
        shard: bool,
        size_per_shard: float,
        use_safetensors: bool,
        use_async: bool,
    ) -> Save:
        """See `Booster.save_model`."""
        if faults := _size_faults(size_per_shard):
            raise ValueError("; ".join(faults))
        with failing_alike("save_model"):
            self._saver.settle()
            group = self._mesh.side_group()
            names = SAFETENSORS if use_safetensors else TORCH
            files = plan_model(
                model.tensors,
                self._every_holding(model.tensors),
                model.names.needed,
                names if shard else FileNames(path.name, "", ""),
                max_bytes=size_per_shard * MEBI if shard else float("inf"),
                describe=describing(model.module) if shard else None,
                is_torch=not use_safetensors,
                group=group,
            )
            if use_async:
                files = self._copied(files)
            write = write_model_folder if shard else write_model_file
            return self._run(lambda: write(files, path, group), path, use_async=use_async)

    def save_adapters(self, model: HeldModel, path: Path, *, use_safetensors: bool) -> None:
        """See `Booster.save_lora_as_pretrained`."""
        if not model.adapters:
            raise ValueError(
                "save_lora_as_pretrained takes a boosted model with adapters: give booster.boost what "
                "booster.enable_lora returned"
            )
        with failing_alike("save_lora_as_pretrained"):
            self._saver.settle()
            group = self._mesh.side_group()
            for adapter in model.adapters:
                held = adapter.held(model.tensors)
                files = plan_model(
                    held,
                    self._every_holding(held),
                    list(adapter.names),
                    lora.SAFETENSORS if use_safetensors else lora.TORCH,
                    max_bytes=float("inf"),
                    describe=adapter.describe,
                    is_torch=not use_safetensors,
                    group=group,
                )
                write_together(path / adapter.folder, files.write, lora.REPLACED, group)

    @torch.inference_mode(False)  # else training could not change what is loaded
    def load_model(self, model: HeldModel, path: Path, *, strict: bool) -> None:
        """See `Booster.load_model`."""
        with failing_alike("load_model"):
            self._saver.settle()
            group = self._mesh.side_group()
            on_first_rank(lambda: finish_placing(path), group)
            stored = alike(lambda: open_pretrained(path, model.module), group)
            fit(model.tensors, stored, names=model.names, strict=strict, what=str(path), group=group).load()
            model.loaded()

    def save_optimizer(self, trained: Trained, path: Path, *, use_async: bool) -> Save:
        """See `Booster.save_optimizer`."""
        with failing_alike("save_optimizer"):
            self._saver.settle()
            group = self._mesh.side_group()
            held, every = exchanged(lambda: kept_states(trained), group)
            states = states_to_save(trained, held, every)
            if use_async:
                states = self._copied(states)

            def write() -> None:
                write_together(path, lambda folder: states.write(folder, group), STATES, group)

            return self._run(write, path, use_async=use_async)

    @torch.inference_mode(False)  # else training could not change what is loaded
    def load_optimizer(self, trained: Trained, path: Path) -> None:
        """See `Booster.load_optimizer`."""
        with failing_alike("load_optimizer"):
            self._saver.settle()
            group = self._mesh.side_group()
            on_first_rank(lambda: finish_placing(path), group)
            fit_trained(trained, path, group).load()

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, path: Path) -> None:
        """See `Booster.save_lr_scheduler`."""
        with failing_alike("save_lr_scheduler"):
            self._saver.settle()
            group = self._mesh.side_group()
            on_first_rank(lambda: replace_file(path, saved_bytes(lr_scheduler.state_dict())), group)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, path: Path) -> None:
        """See `Booster.load_lr_scheduler`."""
        with failing_alike("load_lr_scheduler"):
            self._saver.settle()
            state = on_first_rank(lambda: read_values(path), self._mesh.side_group())
            if faults := scheduler_faults(lr_scheduler, state, str(path)):
                raise ValueError(faults[0])
            lr_scheduler.load_state_dict(state)

    def save_step(
        self,
        directory: Path,
        step: int,
        *,
        model: HeldModel,
        trained: Trained | None,
        lr_scheduler: Any,
        dataloader: Any,
        user: Any,
        keep_last: int | None,
        size_per_shard: float,
        use_async: bool,
    ) -> Save:
        """See `Booster.save_checkpoint`."""
        if faults := _step_faults(step, keep_last, size_per_shard, dataloader):
            raise ValueError("; ".join(faults))
        with failing_alike("save_checkpoint"):
            self._saver.settle()
            training = {
                "scheduler": None if lr_scheduler is None else lr_scheduler.state_dict(),
                "data": None if dataloader is None else dataloader.state_dict(),
                "user": user,
            }
            gathered = gather_step(
                directory,
                step,
                model=model,
                trained=trained,
                training=training,
                size_per_shard=size_per_shard,
                mesh=self._mesh,
            )
            if use_async:
                copied = self._copied(gathered)
                return self._saver.begin(lambda: copied.write(directory, keep_last), directory)
            return self._saver.run_and_tell(lambda: gathered.write(directory, keep_last), directory)

    @torch.inference_mode(False)  # else training could not change what is loaded
    def load_step(
        self,
        directory: Path,
        *,
        model: HeldModel,
        trained: Trained | None,
        lr_scheduler: Any,
        dataloader: Any,
        resume: Resume,
        strict: bool,
    ) -> Resumed | None:
        """See `Booster.load_checkpoint`."""
        if not (resume is None or resume == "auto" or _is_count(resume, least=0)):
            raise ValueError(f'resume={resume!r} must be "auto", the number of a step, or None')
        with failing_alike("load_checkpoint"):
            self._saver.settle()
            path = choose_step(directory, resume, self._mesh.side_group())
            if path is None:
                return None
            return load_step(
                path,
                model=model,
                trained=trained,
                lr_scheduler=lr_scheduler,
                dataloader=dataloader,
                strict=strict,
                mesh=self._mesh,
            )

    def _every_holding(self, held: Mapping[str, HeldTensor]) -> list[dict[str, Holding]]:
        """What every rank can send. One all-gather of objects over the world."""
        return on_all_ranks(lambda: holdings_of(held), self._mesh.side_group())

    def _copied(self, saved: Saved) -> Saved:
        """The same as it is now, for a save that goes on beside training; the one before has ended."""
        self._copies.forget()
        copied = saved.copied(self._copies)
        self._copies.finish()
        return copied

    def _run(self, work: Callable[[], None], path: Path, *, use_async: bool) -> Save:
        return (self._saver.begin if use_async else self._saver.run)(work, path)


def _step_faults(step: Any, keep_last: Any, size_per_shard: float, dataloader: Any) -> list[str]:
    faults = []
    if not _is_count(step, least=0):
        faults.append(f"step={step!r} must be a whole number, at least 0")
    if keep_last is not None and not _is_count(keep_last, least=1):
        faults.append(f"keep_last={keep_last!r} must be a whole number, at least 1, or None to keep all")
    faults += _size_faults(size_per_shard)
    if dataloader is not None and not hasattr(dataloader, "state_dict"):
        faults.append(
            f"dataloader is a {type(dataloader).__name__}, which does not know its position: give one of "
            "booster.plugin.prepare_dataloader, or leave it out and keep the position in `user`"
        )
    return faults


def _size_faults(size_per_shard: Any) -> list[str]:
    is_number = isinstance(size_per_shard, int | float) and not isinstance(size_per_shard, bool)
    if is_number and size_per_shard > 0:
        return []
    return [f"size_per_shard={size_per_shard!r} must be a number of MiB, above 0"]


def _is_count(number: Any, *, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least
