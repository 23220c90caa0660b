"""The save and load calls of a plugin: models, optimizers, schedulers and full checkpoints."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..cluster.errors import raise_errors
from ..cluster.failures import all_ranks_in
from ..cluster.gathering import AgreedError, on_first_rank, run_or_raise_together
from ..cluster.mesh import ParallelMesh
from .background import Copies, Keep, Save, Saver, wait_for_saves
from .call_checks import lr_scheduler_errors, require_same_call
from .commit import finish_placing, replace_file, write_together
from .full_state import Resume, Resumed, choose_step, load_step, prepare_step, scheduler_errors
from .local_tensors import Adapter, LocalModel
from .model import (
    ADAPTER_FILES,
    ADAPTER_SAFETENSORS,
    ADAPTER_TORCH,
    SAFETENSORS,
    TORCH,
    FileNames,
    describing,
    prepare_model,
    replaced_weights,
    write_model_file,
)
from .optimizer_state import STATES, Trained, fit_trained, prepare_states
from .pretrained import fit, open_pretrained
from .tensor_file import loadable_bytes, read_values

MEBI = 2**20
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
Method = Callable[Concatenate["Checkpoints", Arguments], Returned]


def made_by_all(
    name: str,
) -> Callable[[Method[Arguments, Returned]], Method[Arguments, Returned]]:
    """Decorate a collective method: compare the call between ranks, after the last save and before its work.

    It waits for asynchronous saves to its path by other plugins of the process, too.

    After an error that every rank raises, all of them can continue. The argument `user` may differ between ranks; all
    others are compared, see `require_same_call`.

    Raises:
        RankFailure: another rank died, left, or is in another call; see `all_ranks_in`.
    """

    def checked(method: Method[Arguments, Returned]) -> Method[Arguments, Returned]:
        signature = inspect.signature(method)

        @wraps(method)
        @torch.inference_mode(False)  # inference tensors could not be trained after loading
        def called(self: "Checkpoints", *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            compared = {key: value for key, value in bound.arguments.items() if key not in ("self", "user")}
            with all_ranks_in(name, raised_alike=(OSError, ValueError, AgreedError)):
                self._saver.settle()
                require_same_call(name, compared, self.group)
                wait_for_saves(Path(compared.get("checkpoint") or compared["directory"]))
                return method(self, *args, **kwargs)

        return called

    return checked


class Checkpoints:
    """Save and load calls of one plugin. All ranks make the same calls; a save ends before the next call begins.

    Args:
        mesh: all ranks.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._saver = Saver()
        self._copies = Copies(mesh.device)

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks, on the CPU backend."""
        return self._mesh.side_group()

    @made_by_all("save_model")
    def save_model(
        self,
        model: LocalModel,
        checkpoint: str | Path,
        *,
        shard: bool = False,
        size_per_shard: float = 1024,
        use_safetensors: bool = True,
        use_async: bool = False,
        prefix: str | None = None,
        gather_dtensor: bool = True,
    ) -> Save:
        """See `Booster.save_model`."""
        if prefix is not None and not shard:
            raise ValueError(
                f"prefix={prefix!r} is for the files of a folder: give shard=True, or name the file so"
            )
        group, path = self.group, Path(checkpoint).absolute()  # the script may change its folder meanwhile
        names = (SAFETENSORS if use_safetensors else TORCH).with_prefix(prefix)
        model_names = model.names.of_model()
        with self._keeping(use_async) as keep:
            write = prepare_model(
                {
                    model_names[name]: replace(tensor, name=model_names[name])
                    for name, tensor in model.tensors.items()
                },
                list(model_names.values()),
                names if shard else FileNames(path.name, "", ""),
                max_bytes=size_per_shard * MEBI if shard else float("inf"),
                describe=describing(model.module) if shard else None,
                is_torch=not use_safetensors,
                keep=keep,
                group=group,
            )
        if shard:
            work = partial(write_together, path, write, replaced_weights(prefix), group)
        else:
            work = partial(write_model_file, write, path, group)
        return self._saver.run(work, path, use_async=use_async)

    @made_by_all("save_lora_as_pretrained")
    def save_adapters(self, model: LocalModel, checkpoint: str | Path, *, use_safetensors: bool) -> None:
        """See `Booster.save_lora_as_pretrained`."""
        if not model.adapters:
            raise ValueError(
                "save_lora_as_pretrained takes a boosted model with adapters: give booster.boost what "
                "booster.enable_lora returned"
            )
        for adapter in model.adapters:
            write = prepare_model(
                adapter.local(model.tensors),
                list(adapter.names),
                ADAPTER_SAFETENSORS if use_safetensors else ADAPTER_TORCH,
                max_bytes=float("inf"),
                describe=partial(_write_config, adapter),
                is_torch=not use_safetensors,
                keep=_as_it_is,
                group=self.group,
            )
            write_together(Path(checkpoint) / adapter.folder, write, ADAPTER_FILES, self.group)

    @made_by_all("load_model")
    def load_model(self, model: LocalModel, checkpoint: str | Path, *, strict: bool) -> None:
        """See `Booster.load_model`."""
        group, path = self.group, Path(checkpoint)
        on_first_rank(lambda: finish_placing(path), group)
        stored = run_or_raise_together(lambda: open_pretrained(path, model.module), group)
        load = fit(
            model.tensors, stored=stored, names=model.names, strict=strict, what=str(path), group=group
        )
        load()
        model.loaded()

    @made_by_all("save_optimizer")
    def save_optimizer(
        self,
        optimizer: Trained,
        checkpoint: str | Path,
        *,
        use_async: bool,
        shard: bool = True,
        gather_dtensor: bool = True,
    ) -> Save:
        """See `Booster.save_optimizer`."""
        if shard is not True:
            raise ValueError(
                f"shard={shard!r} is not available: an optimizer is always saved as a folder; leave it out"
            )
        group, path = self.group, Path(checkpoint).absolute()  # the script may change its folder meanwhile
        with self._keeping(use_async) as keep:
            write = prepare_states(optimizer, keep, group)
        work = partial(write_together, path, write, STATES, group)
        return self._saver.run(work, path, use_async=use_async)

    @made_by_all("load_optimizer")
    def load_optimizer(self, optimizer: Trained, checkpoint: str | Path) -> None:
        """See `Booster.load_optimizer`."""
        path = Path(checkpoint)
        on_first_rank(lambda: finish_placing(path), self.group)
        fit_trained(optimizer, path, self.group).load()

    @made_by_all("save_lr_scheduler")
    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """See `Booster.save_lr_scheduler`."""
        raise_errors(lr_scheduler_errors(lr_scheduler))  # None, too
        path = Path(checkpoint)
        on_first_rank(lambda: replace_file(path, loadable_bytes(lr_scheduler.state_dict())), self.group)

    @made_by_all("load_lr_scheduler")
    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """See `Booster.load_lr_scheduler`."""
        raise_errors(lr_scheduler_errors(lr_scheduler))
        path = Path(checkpoint)
        state = on_first_rank(lambda: read_values(path), self.group)
        raise_errors(scheduler_errors(lr_scheduler, state, str(path)))
        lr_scheduler.load_state_dict(state)

    @made_by_all("save_checkpoint")
    def save_step(
        self,
        directory: str | Path,
        step: int,
        *,
        model: LocalModel,
        optimizer: Trained | None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        user: Any = None,
        keep_last: int | None = None,
        size_per_shard: float = 1024,
        use_async: bool = False,
    ) -> Save:
        """See `Booster.save_checkpoint`."""
        path = Path(directory).absolute()  # the script may change its folder meanwhile
        training = {
            "scheduler": None if lr_scheduler is None else lr_scheduler.state_dict(),
            "data": None if dataloader is None else dataloader.state_dict(),
            "user": user,
        }
        with self._keeping(use_async) as keep:
            write = prepare_step(
                step,
                model=model,
                trained=optimizer,
                training=training,
                max_bytes=size_per_shard * MEBI,
                keep=keep,
                mesh=self._mesh,
            )
        return self._saver.run(partial(write, path, keep_last), path, use_async=use_async, is_reporting=True)

    @made_by_all("load_checkpoint")
    def load_step(
        self,
        directory: str | Path,
        *,
        model: LocalModel,
        optimizer: Trained | None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        resume: Resume = "auto",
        strict: bool = True,
    ) -> Resumed | None:
        """See `Booster.load_checkpoint`."""
        path = choose_step(Path(directory), resume, self.group)
        if path is None:
            return None
        return load_step(
            path,
            model=model,
            trained=optimizer,
            lr_scheduler=lr_scheduler,
            dataloader=dataloader,
            strict=strict,
            mesh=self._mesh,
        )

    def _keeping(self, use_async: bool) -> AbstractContextManager[Keep]:
        """Return the memory policy of a save: copies if it is asynchronous, else the tensors themselves."""
        return self._copies.keeping() if use_async else nullcontext(_as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _write_config(adapter: Adapter, _: torch.dtype, folder: Path) -> None:
    adapter.write_config(folder)
