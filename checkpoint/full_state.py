"""Save and load the full state of a run at one step. step_folders.py handles the folders."""

import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..cluster.errors import raise_errors
from ..cluster.forward_random import ForwardRandom, set_torch_state, torch_state
from ..cluster.gathering import on_all_ranks, on_first_rank, run_or_raise_together
from ..cluster.hashes import batch_hash
from ..cluster.layout import AXES
from ..cluster.mesh import ParallelMesh
from .background import Keep
from .commit import written_beside
from .local_tensors import LocalModel
from .model import SAFETENSORS, describing, prepare_model
from .optimizer_state import Trained, fit_trained, prepare_states
from .pretrained import fit, open_pretrained
from .step_folders import (
    MANIFEST,
    begin_step,
    commit_step,
    damage_of,
    keep_newest,
    later_than,
    manifest_of,
    newest_first,
    recover,
    step_path,
    steps_in,
)
from .tensor_file import Records, Write, loadable_bytes, read_values, torch_save_bytes, write_small

MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"
TRAINING = "training.pt"

Resume = int | Literal["auto", "must"] | None

_NEWEST = ("auto", "must")

_LATER = (
    "resuming from %s, although there are later steps: %s. They are kept, unless this run saves a step of the same "
    'number. resume="auto" prefers steps that this run saves; give a number to resume from one of them'
)

_logger = logging.getLogger(__name__)


def prepare_step(
    step: int,
    *,
    model: LocalModel,
    trained: Trained | None,
    training: Mapping[str, Any],
    max_bytes: float,
    keep: Keep,
    mesh: ParallelMesh,
) -> Callable[[Path, int | None], None]:
    """Collect the current state of a run. All-gathers of objects over the world.

    Args:
        step: number of the step.
        model, trained: this rank's parts.
        training: plain values by name. Those of the first rank are saved; "user" must be equal, or None, on the others.
        max_bytes: maximum size of a weights file.
        keep: returns the memory to save for a tensor (a copy for asynchronous saves).
        mesh: all ranks.

    Returns:
        A function of a directory and a count. It writes the step below the directory, then removes all but that many
        of the newest steps (None keeps all). Collective over the world; raises OSError on every rank if any rank could
        not write. Existing steps stay valid.

    Raises:
        ValueError: there are values that cannot be saved, or "user" differs between ranks; on every rank.
    """
    group = mesh.side_group()
    layout = {"sizes": {axis: mesh.size(axis) for axis in AXES}}
    content = _training_bytes({**training, "step": step, "layout": layout}, group)
    writes = {
        MODEL: prepare_model(
            model.tensors,
            model.names.needed,
            SAFETENSORS,
            max_bytes=max_bytes,
            describe=describing(model.module),
            keep=keep,
            group=group,
            by_all=True,
        )
    }
    if trained is not None:
        writes[OPTIMIZER] = prepare_states(trained, keep, group)

    small = {f"{RANDOM}/{random_file(group.rank())}": random_state(mesh, model.random)}
    if group.rank() == 0:
        small[TRAINING] = content
    return partial(_write_step, step, writes, small, group)


def _write_step(
    step: int,
    writes: Mapping[str, Write],
    small: Mapping[str, bytes],
    group: dist.ProcessGroup,
    directory: Path,
    keep_last: int | None,
) -> None:
    """Write the tensors of a step, by kind, each into its own folder, and the small files; see `prepare_step`."""
    with written_beside(lambda: begin_step(directory, step, inside=(*writes, RANDOM)), group) as folder:
        records: Records = {}
        for kind, write in writes.items():
            records |= {f"{kind}/{name}": record for name, record in write(folder / kind).items()}

        def with_small_files() -> Records:
            return records | {name: write_small(folder / name, content) for name, content in small.items()}

        all_records: Records = {}
        for records_of_rank in on_all_ranks(with_small_files, group):
            all_records |= records_of_rank
        on_first_rank(lambda: commit_step(folder, directory, step, all_records), group)
    if keep_last is not None:
        on_first_rank(lambda: keep_newest(directory, keep_last, step), group)


def _training_bytes(values: Mapping[str, Any], group: dist.ProcessGroup) -> bytes:
    """Return the content of `training.pt`. Collective over the group.

    Raises:
        ValueError: there are values that cannot be saved, or "user" differs between ranks; on every rank.
    """

    def checked() -> tuple[bytes, int | None]:
        """Return the content and a hash of "user", None without it; raise ValueError for values that torch refuses."""
        for name, value in values.items():
            try:
                loadable_bytes(value)
            except ValueError as error:
                raise ValueError(f"`{name}` cannot be saved: {error}") from error
        return torch_save_bytes(values), None if values["user"] is None else batch_hash(values["user"])

    content, user_hash = run_or_raise_together(checked, group)
    hashes = on_all_ranks(lambda: user_hash, group)
    if others := [rank for rank, other in enumerate(hashes) if other not in (None, hashes[0])]:
        raise ValueError(
            f"`user` is saved once, and rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} gave other values "
            "than rank 0: give the same on every rank, or None on all but the first"
        )
    return content


class Resumed(NamedTuple):
    """The step from which a run continues.

    Attributes:
        step: the saved step number.
        path: the folder of the step.
        user: the `user` argument of the save.
    """

    step: int
    path: Path
    user: Any


def choose_step(directory: Path, resume: Resume, group: dist.ProcessGroup) -> Path | None:
    """Choose the step to continue from and verify the hash of every file in it. Collective over the group.

    Each rank reads its share of the files. The first rank logs the damage of steps that are skipped, and later steps
    that are left behind.

    Args:
        directory: the folder of all steps; with `resume=None` the folder of one step.
        resume: the number of a step, or "auto" or "must" for the newest undamaged one.

    Returns:
        The folder of the step. None if "auto" found no checkpoint at all; the first rank logs that.

    Raises:
        ValueError: the requested step, or every step, is damaged; names the files and tensors.
        FileNotFoundError: the requested step does not exist, or with "must" no step at all.
        OSError: some rank does not see the folder, or may not read it.
    """
    candidates = on_first_rank(lambda: _candidates(directory, resume), group)
    if not candidates:
        if group.rank() == 0:
            _logger.warning(
                '%s: the run starts from scratch; resume="must" would raise an error', _none_in(directory)
            )
        return None
    passed: list[str] = []
    verb = "passed over" if resume in _NEWEST else "refused"
    for path in candidates:
        damage = damage_of_step(path, group)
        if not damage:
            if group.rank() == 0:
                for reason in passed:
                    _logger.warning("%s: resuming from %s instead", reason, path)
                damaged = candidates[: len(passed)]
                later = [step.name for step in later_than(path) if step not in damaged]
                if later:
                    _logger.warning(_LATER, path, ", ".join(later))
            return path
        passed.append(f"{path} is {verb}, since {'; '.join(damage)}")
    if resume not in _NEWEST:
        raise ValueError("; ".join(passed))
    raise ValueError(
        f"no checkpoint to resume from: {'; '.join(passed)}. Remove the damaged folders to start from scratch"
    )


def damage_of_step(path: Path, group: dist.ProcessGroup) -> list[str]:
    """Return the damage of a step: files whose hashes do not match. Collective; each rank reads a share of the files.

    Raises:
        OSError: some rank does not see the folder, or may not read it, so it may be undamaged; on every rank.
    """

    def share() -> list[str]:
        """Return the damage of every n-th file, by size: this rank's share."""
        if not path.is_dir():
            raise OSError(
                f"{path} is not visible on this rank: load from a file system that all machines share"
            )
        try:
            files = manifest_of(path)["files"]
            order = sorted(files, key=lambda name: (-files[name].bytes, name))
            return [
                error
                for name in order[group.rank() :: group.size()]
                for error in damage_of(path, name, files[name])
            ]
        except PermissionError as error:
            raise OSError(
                f"{error}: this process may not read {path}, which may be intact. Permit it, or give the number of "
                "another step as `resume`"
            ) from error
        except (ValueError, OSError) as error:  # read errors of the disk are damage, too
            return [str(error)]

    damage_by_rank = on_all_ranks(share, group)
    return list(dict.fromkeys(chain.from_iterable(damage_by_rank)))


def load_step(
    path: Path,
    *,
    model: LocalModel,
    trained: Trained | None,
    lr_scheduler: Any,
    dataloader: Any,
    strict: bool,
    mesh: ParallelMesh,
) -> Resumed:
    """Load the state of a step into the given objects. Collective over the world.

    Raises:
        ValueError: the step does not fit; on every rank, before weights or states changed.
    """
    group = mesh.side_group()
    training = on_first_rank(lambda: read_values(path / TRAINING), group)
    errors = _absent(path, training, trained, lr_scheduler, dataloader)
    if lr_scheduler is not None and training["scheduler"] is not None:
        errors += scheduler_errors(
            lr_scheduler, training["scheduler"], f"the scheduler's in {path / TRAINING}"
        )
    raise_errors(errors)
    stored = run_or_raise_together(lambda: open_pretrained(path / MODEL), group)
    fit_weights = partial(fit, stored=stored, names=model.names, what=str(path / MODEL), group=group)
    load_weights = fit_weights(model.tensors, strict=strict)
    states = None if trained is None else fit_trained(trained, path / OPTIMIZER, group)
    if dataloader is not None:
        run_or_raise_together(lambda: dataloader.load_state_dict(training["data"]), group)
    load_weights()
    model.loaded()
    if trained is not None and states is not None:
        if not states.has_masters:  # saved by a float32 run: the weights themselves were stepped
            load_masters = fit_weights(trained.masters, strict=False)
            load_masters()
        states.load()
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(training["scheduler"])
    _restore_random(path, training, mesh, model.random)
    return Resumed(step=training["step"], path=path, user=training["user"])


def _absent(
    path: Path, training: Mapping[str, Any], trained: Trained | None, lr_scheduler: Any, dataloader: Any
) -> list[str]:
    """Return an error for each given object whose state was not saved."""
    wanted = (
        ("an optimizer", trained is not None, (path / OPTIMIZER).is_dir()),
        ("a scheduler", lr_scheduler is not None, training["scheduler"] is not None),
        ("a dataloader", dataloader is not None, training["data"] is not None),
    )
    return [
        f"{path} was saved without {what}: leave it out here, too"
        for what, is_wanted, is_there in wanted
        if is_wanted and not is_there
    ]


def _candidates(directory: Path, resume: Resume) -> list[Path]:
    """Return the folders of steps to try in order: the given one, or all from the newest; see `choose_step`."""
    if resume is not None and (directory / MANIFEST).exists() and not steps_in(directory):
        raise ValueError(
            f"{directory} is the folder of a step: give {directory.parent}, that of all of them, or resume=None"
        )
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: give a folder")
    if resume is None:
        candidates = [directory]
    else:
        recover(directory)
        candidates = newest_first(directory) if resume in _NEWEST else [step_path(directory, int(resume))]
    if not candidates and resume == "must":
        raise FileNotFoundError(
            f'{_none_in(directory)}: give the folder that save_checkpoint was given, or resume="auto" to start from '
            "scratch"
        )
    missing = [path for path in candidates if not path.is_dir()]
    if missing:
        steps = ", ".join(path.name for path in steps_in(missing[0].parent)) or "none"
        raise FileNotFoundError(f"there is no checkpoint {missing[0]}; beside it there are {steps}")
    return candidates


def _none_in(directory: Path) -> str:
    place = directory.absolute()
    return f"no checkpoint in {place}, which {'has no folder step-…' if place.exists() else 'does not exist'}"


def _restore_random(
    path: Path, training: dict[str, Any], mesh: ParallelMesh, forwards: ForwardRandom | None
) -> None:
    """Restore this rank's random states, or those of the nearest rank of the layout that wrote the step. Collective."""

    def restore() -> None:
        rank = nearest_rank(mesh, training["layout"]["sizes"])
        restore_random_state(read_values(path / RANDOM / random_file(rank)), mesh, forwards)

    run_or_raise_together(restore, mesh.side_group())


def scheduler_errors(lr_scheduler: Any, state: Any, what: str) -> list[str]:
    """Return the error of a stored state that is not of this scheduler's kind; torch's own would load any state.

    Args:
        lr_scheduler: any object with `state_dict`.
        state: the stored state.
        what: name of the state in the error.
    """
    current = lr_scheduler.state_dict()
    if not isinstance(current, Mapping):  # a custom scheduler: it checks its state itself
        return []
    stored_names = set(state) if isinstance(state, Mapping) else set()
    # Names with a leading underscore are private to torch and differ between its releases.
    public = [name for name in current if not str(name).startswith("_")]
    missing = [str(name) for name in public if name not in stored_names]
    if isinstance(state, Mapping) and not missing:
        return []
    kind = type(lr_scheduler).__name__
    return [f"{what} is not a state of a {kind}: it lacks {', '.join(missing)}"]


def random_state(mesh: ParallelMesh, forwards: ForwardRandom | None) -> bytes:
    """Return the current states of this rank's random generators and of a model's forwards, in torch's own format."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    keys_tensor = torch.from_numpy(np.asarray(keys).copy())  # reading with weights_only refuses arrays
    cpu, on_device = torch_state(mesh.device)
    state = {
        "coordinates": {axis: mesh.rank(axis) for axis in AXES},  # for inspection.py
        "python": random.getstate(),
        "numpy": (name, keys_tensor, position, has_gauss, gauss),
        "cpu": cpu,
        "cuda": on_device,  # of any device
        "forwards": None if forwards is None else forwards.state(),
    }
    return torch_save_bytes(state)


def restore_random_state(
    state: Mapping[str, Any], mesh: ParallelMesh, forwards: ForwardRandom | None
) -> None:
    """Restore this rank's random generators and those of a model's forwards, which older checkpoints lack."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy(), position, has_gauss, gauss))
    set_torch_state((state["cpu"], state["cuda"]), mesh.device)
    if forwards is not None and state.get("forwards") is not None:
        forwards.load_state(state["forwards"])


def random_file(rank: int) -> str:
    """Return the name of a rank's file of random states."""
    return f"rank-{rank:05}.pt"


def nearest_rank(mesh: ParallelMesh, saved: Mapping[str, int]) -> int:
    """Return the rank of the saved mesh whose random states this rank loads.

    It is the rank with the same coordinates, each limited to the size of the saved axis. Ranks that load the same
    states draw the same numbers afterwards, as all ranks do after the launch.

    Args:
        mesh: the current mesh.
        saved: sizes of the saved mesh by axis.
    """
    rank = 0
    for axis in AXES:
        rank = rank * saved[axis] + min(mesh.rank(axis), saved[axis] - 1)
    return rank
