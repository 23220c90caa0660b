"""Saving and loading by a plugin: models, optimizers, schedulers, and all of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from ..cluster.errors import raise_errors
from ..cluster.mesh import ParallelMesh
from .background import Copies, Save, Saver
from .calls import lr_scheduler_errors, require_same_call
from .commit import finish_placing, replace_file, write_together
from .consent import alike, exchanged, failing_alike, on_all_ranks, on_first_rank
from .exchange import Offer, offers_of
from .local import Adapter, LocalModel, LocalTensor
from .model import (
    ADAPTER_FILES,
    ADAPTER_SAFETENSORS,
    ADAPTER_TORCH,
    SAFETENSORS,
    TORCH,
    FileNames,
    ModelFiles,
    describing,
    plan_model,
    write_model_file,
    write_model_folder,
)
from .optimizer import STATES, SavedStates, Trained, fit_trained, local_states, states_to_save
from .pretrained import fit, open_pretrained
from .step import (
    Resume,
    Resumed,
    StepToSave,
    choose_step,
    gather_step,
    load_step,
    scheduler_errors,
)
from .tensor_file import read_values, saved_bytes

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
        model: LocalModel,
        checkpoint: str | Path,
        *,
        shard: bool,
        size_per_shard: float,
        use_safetensors: bool,
        use_async: bool,
        prefix: str | None = None,
        gather_dtensor: bool = True,
    ) -> Save:
        """See `Booster.save_model`."""
        errors = []
        if prefix is not None and not shard:
            errors = [f"prefix={prefix!r} is for the files of a folder: give shard=True, or name the file so"]
        with self._called(
            "save_model",
            errors,
            model=model,
            checkpoint=checkpoint,
            shard=shard,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            use_async=use_async,
            prefix=prefix,
            gather_dtensor=gather_dtensor,
        ) as group:
            path = Path(checkpoint).absolute()  # the run may go elsewhere meanwhile
            names = (SAFETENSORS if use_safetensors else TORCH).with_prefix(prefix)
            own = model.names.of_model()
            tensors = {own[name]: replace(each, name=own[name]) for name, each in model.tensors.items()}
            files = plan_model(
                tensors,
                self._every_offer(tensors),
                list(own.values()),
                names if shard else FileNames(path.name, "", ""),
                max_bytes=size_per_shard * MEBI if shard else float("inf"),
                describe=describing(model.module) if shard else None,
                is_torch=not use_safetensors,
                group=group,
            )
            if use_async:
                files = self._copied(files)

            def write() -> None:
                if shard:
                    write_model_folder(files, path, group, prefix=prefix)
                else:
                    write_model_file(files, path, group)

            return self._run(write, path, use_async=use_async)

    def save_adapters(self, model: LocalModel, checkpoint: str | Path, *, use_safetensors: bool) -> None:
        """See `Booster.save_lora_as_pretrained`."""
        if not model.adapters:
            raise ValueError(
                "save_lora_as_pretrained takes a boosted model with adapters: give booster.boost what "
                "booster.enable_lora returned"
            )
        arguments = {"model": model, "checkpoint": checkpoint, "use_safetensors": use_safetensors}
        with self._called("save_lora_as_pretrained", **arguments) as group:
            path = Path(checkpoint)
            for adapter in model.adapters:
                tensors = adapter.local(model.tensors)
                files = plan_model(
                    tensors,
                    self._every_offer(tensors),
                    list(adapter.names),
                    ADAPTER_SAFETENSORS if use_safetensors else ADAPTER_TORCH,
                    max_bytes=float("inf"),
                    describe=partial(_write_config, adapter),
                    is_torch=not use_safetensors,
                    group=group,
                )
                write_together(path / adapter.folder, files.write, ADAPTER_FILES, group)

    @torch.inference_mode(False)  # else training could not change what is loaded
    def load_model(self, model: LocalModel, checkpoint: str | Path, *, strict: bool) -> None:
        """See `Booster.load_model`."""
        with self._called("load_model", model=model, checkpoint=checkpoint, strict=strict) as group:
            path = Path(checkpoint)
            on_first_rank(lambda: finish_placing(path), group)
            stored = alike(lambda: open_pretrained(path, model.module), group)
            fit(model.tensors, stored, names=model.names, strict=strict, what=str(path), group=group).load()
            model.loaded()

    def save_optimizer(
        self,
        trained: Trained,
        checkpoint: str | Path,
        *,
        use_async: bool,
        shard: bool = True,
        gather_dtensor: bool = True,
    ) -> Save:
        """See `Booster.save_optimizer`."""
        errors = []
        if shard is not True:
            errors = [
                f"shard={shard!r}: an optimizer is saved as a folder, to which each rank adds; leave it out"
            ]
        with self._called(
            "save_optimizer",
            errors,
            optimizer=trained,
            checkpoint=checkpoint,
            use_async=use_async,
            gather_dtensor=gather_dtensor,
        ) as group:
            path = Path(checkpoint).absolute()  # the run may go elsewhere meanwhile
            tensors, every = exchanged(lambda: local_states(trained), group)
            states = states_to_save(trained, tensors, every)
            if use_async:
                states = self._copied(states)

            def write() -> None:
                write_together(path, lambda folder: states.write(folder, group), STATES, group)

            return self._run(write, path, use_async=use_async)

    @torch.inference_mode(False)  # else training could not change what is loaded
    def load_optimizer(self, trained: Trained, checkpoint: str | Path) -> None:
        """See `Booster.load_optimizer`."""
        with self._called("load_optimizer", optimizer=trained, checkpoint=checkpoint) as group:
            path = Path(checkpoint)
            on_first_rank(lambda: finish_placing(path), group)
            fit_trained(trained, path, group).load()

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """See `Booster.save_lr_scheduler`."""
        with self._called_with_scheduler("save_lr_scheduler", lr_scheduler, checkpoint) as group:
            path = Path(checkpoint)
            on_first_rank(lambda: replace_file(path, saved_bytes(lr_scheduler.state_dict())), group)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """See `Booster.load_lr_scheduler`."""
        with self._called_with_scheduler("load_lr_scheduler", lr_scheduler, checkpoint) as group:
            path = Path(checkpoint)
            state = on_first_rank(lambda: read_values(path), group)
            raise_errors(scheduler_errors(lr_scheduler, state, str(path)))
            lr_scheduler.load_state_dict(state)

    def save_step(
        self,
        directory: str | Path,
        step: int,
        *,
        model: LocalModel,
        trained: Trained | None,
        lr_scheduler: Any,
        dataloader: Any,
        user: Any,
        keep_last: int | None,
        size_per_shard: float,
        use_async: bool,
    ) -> Save:
        """See `Booster.save_checkpoint`."""
        with self._called(
            "save_checkpoint",
            directory=directory,
            step=step,
            keep_last=keep_last,
            model=model,
            optimizer=trained,
            lr_scheduler=lr_scheduler,
            dataloader=dataloader,
            size_per_shard=size_per_shard,
            use_async=use_async,
        ):
            path = Path(directory).absolute()  # the run may go elsewhere meanwhile
            training = {
                "scheduler": None if lr_scheduler is None else lr_scheduler.state_dict(),
                "data": None if dataloader is None else dataloader.state_dict(),
                "user": user,
            }
            gathered = gather_step(
                step,
                model=model,
                trained=trained,
                training=training,
                size_per_shard=size_per_shard,
                mesh=self._mesh,
            )
            if use_async:
                copied = self._copied(gathered)
                return self._saver.begin(lambda: copied.write(path, keep_last), path)
            return self._saver.run_reporting(lambda: gathered.write(path, keep_last), path)

    @torch.inference_mode(False)  # else training could not change what is loaded
    def load_step(
        self,
        directory: str | Path,
        *,
        model: LocalModel,
        trained: Trained | None,
        lr_scheduler: Any,
        dataloader: Any,
        resume: Resume,
        strict: bool,
    ) -> Resumed | None:
        """See `Booster.load_checkpoint`."""
        with self._called(
            "load_checkpoint",
            directory=directory,
            model=model,
            optimizer=trained,
            lr_scheduler=lr_scheduler,
            dataloader=dataloader,
            resume=resume,
            strict=strict,
        ) as group:
            path = choose_step(Path(directory), resume, group)
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

    @contextmanager
    def _called(
        self, name: str, errors: Sequence[str] = (), /, **arguments: Any
    ) -> Iterator[dist.ProcessGroup]:
        """Do a call once the last save has ended and all ranks make this call; see `require_same_call`."""
        with failing_alike(name):
            self._saver.settle()
            group = self._mesh.side_group()
            require_same_call(name, arguments, errors, group)
            yield group

    @contextmanager
    def _called_with_scheduler(
        self, name: str, lr_scheduler: Any, checkpoint: str | Path
    ) -> Iterator[dist.ProcessGroup]:
        errors = lr_scheduler_errors("lr_scheduler", lr_scheduler) if lr_scheduler is None else []
        with self._called(name, errors, checkpoint=checkpoint, lr_scheduler=lr_scheduler) as group:
            yield group

    def _every_offer(self, tensors: Mapping[str, LocalTensor]) -> list[dict[str, Offer]]:
        """The boxes that every rank can send. One all-gather of objects over the world."""
        return on_all_ranks(lambda: offers_of(tensors), self._mesh.side_group())

    def _copied(self, saved: Saved) -> Saved:
        """The same as it is now, for a save that goes on beside training; the one before has ended."""
        self._copies.forget()
        copied = saved.copied(self._copies)
        self._copies.finish()
        return copied

    def _run(self, work: Callable[[], None], path: Path, *, use_async: bool) -> Save:
        return (self._saver.begin if use_async else self._saver.run)(work, path)


def _write_config(adapter: Adapter, _: torch.dtype, folder: Path) -> None:
    adapter.write_config(folder)
