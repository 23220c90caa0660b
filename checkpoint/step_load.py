"""Choosing a checkpoint that is sound, and going on from it. What lies in its folder is step_save.py's."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from ..cluster.mesh import ParallelMesh
from .consent import alike, faults_of_all, on_first_rank
from .held_model import HeldModel
from .loading import fit
from .pretrained import open_pretrained
from .random_states import file_name, nearest_rank, restore_random_state
from .schedulers import scheduler_faults
from .step_folder import (
    MANIFEST,
    damage_of,
    later_than,
    manifest_of,
    newest_first,
    recover,
    step_path,
    steps_in,
)
from .step_save import MODEL, OPTIMIZER, RANDOM, TRAINING
from .trained import Trained, fit_trained
from .values import read_values

Resume = int | Literal["auto", "must"] | None

_NEWEST = ("auto", "must")

_logger = logging.getLogger(__name__)


class Resumed(NamedTuple):
    """Where a run goes on.

    Attributes:
        step: the number that was saved.
        path: the folder.
        user: the values that were given to be saved with it.
    """

    step: int
    path: Path
    user: Any


def choose_step(directory: Path, resume: Resume, group: dist.ProcessGroup) -> Path | None:
    """The folder to go on from, every file of which is as it was written. Collective over the group.

    Each rank reads its share of the files. Of damage the first rank tells where an older checkpoint is taken instead,
    and of later steps that stay behind; see [Note: left behind] in step_folder.py.

    Args:
        directory: of the steps; the step itself where `resume` is None.
        resume: the number of a step, or "auto" or "must" for the newest that is sound.

    Returns:
        None where "auto" found no checkpoint at all, which the first rank reports.

    Raises:
        ValueError: what was asked for is damaged, or all there are; which file, and which tensor of it.
        FileNotFoundError: there is no such step, or with "must" none at all.
        OSError: some rank does not see it, or may not read it.
    """
    candidates = on_first_rank(lambda: _candidates(directory, resume), group)
    if not candidates:
        if group.rank() == 0:
            _logger.warning('%s: the run begins anew, and resume="must" would refuse to', _none_in(directory))
        return None
    told: list[str] = []
    for path in candidates:
        damage = damage_of_step(path, group)
        if not damage:
            if group.rank() == 0:
                for each in told:
                    _logger.warning("%s: going on from %s instead", each, path)
                _tell_later(path, resume, passed_over=candidates[: len(told)])
            return path
        told.append(
            f"{path} {'is passed over' if resume in _NEWEST else 'is refused'}, since {'; '.join(damage)}"
        )
    if resume not in _NEWEST:
        raise ValueError("; ".join(told))
    raise ValueError(
        f"no checkpoint to go on from: {'; '.join(told)}. Remove the damaged folders to begin anew"
    )


def _tell_later(path: Path, resume: Resume, *, passed_over: Sequence[Path]) -> None:
    later = [each.name for each in later_than(path) if each not in passed_over]
    if not later:
        return
    if resume in _NEWEST:
        _logger.warning(
            "going on from %s; a run that went on from an earlier step left later ones behind, which stay: %s. Give "
            "the number of a step to go on from one of them",
            path,
            ", ".join(later),
        )
    else:
        _logger.warning(
            "going on from %s, which leaves later steps behind: %s. They stay, unless this run saves a step of the "
            'same number; resume="auto" takes what this run saves before them',
            path,
            ", ".join(later),
        )


def damage_of_step(path: Path, group: dist.ProcessGroup) -> list[str]:
    """All that is not as it was written, each rank having read a share. Collective over the group.

    Raises:
        OSError: some rank does not see it, or may not read it, so that it may be sound; on every rank.
    """

    def share() -> list[str]:
        if not path.is_dir():
            raise OSError(f"{path} is not seen here: load from a file system that all machines share")
        try:
            files = manifest_of(path)["files"]
            order = sorted(files, key=lambda name: (-files[name].bytes, name))
            return [
                fault
                for name in order[group.rank() :: group.size()]
                for fault in damage_of(path, name, files[name])
            ]
        except PermissionError as error:
            raise OSError(
                f"{error}: whoever runs this may not read {path}, which may be sound. Let them read it, or give the "
                "number of another step as `resume`"
            ) from error
        except (ValueError, OSError) as error:  # what a disk cannot read any more is damage, too
            return [str(error)]

    return faults_of_all(share, group)


def load_step(
    path: Path,
    *,
    model: HeldModel,
    trained: Trained | None,
    lr_scheduler: Any,
    dataloader: Any,
    strict: bool,
    mesh: ParallelMesh,
) -> Resumed:
    """Let all that is given go on from a folder. Collective over the world.

    Raises:
        ValueError: it does not fit; on every rank, before weights or states changed.
    """
    group = mesh.side_group()
    training = on_first_rank(lambda: read_values(path / TRAINING), group)
    faults = _absent(path, training, trained, lr_scheduler, dataloader)
    if lr_scheduler is not None and training["scheduler"] is not None:
        faults += scheduler_faults(
            lr_scheduler, training["scheduler"], f"the scheduler's in {path / TRAINING}"
        )
    if faults:
        raise ValueError("; ".join(faults))
    stored = alike(lambda: open_pretrained(path / MODEL), group)
    what = str(path / MODEL)
    weights = fit(model.tensors, stored, names=model.names, strict=strict, what=what, group=group)
    states = None if trained is None else fit_trained(trained, path / OPTIMIZER, group)
    if dataloader is not None:
        alike(lambda: dataloader.load_state_dict(training["data"]), group)
    weights.load()
    model.loaded()
    if states is not None:
        if not states.has_masters:  # saved in float32: then the weights are what was stepped
            masters = states.trained.masters
            fit(masters, stored, names=model.names, strict=False, what=what, group=group).load()
        states.load()
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(training["scheduler"])
    _restore_random(path, training, mesh)
    return Resumed(step=training["step"], path=path, user=training["user"])


def _absent(
    path: Path, training: Mapping[str, Any], trained: Trained | None, lr_scheduler: Any, dataloader: Any
) -> list[str]:
    """What is to go on and was not saved."""
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
            f'{_none_in(directory)}: give the folder that save_checkpoint was given, or resume="auto" to begin anew'
        )
    missing = [path for path in candidates if not path.is_dir()]
    if missing:
        steps = ", ".join(path.name for path in steps_in(missing[0].parent)) or "none"
        raise FileNotFoundError(f"there is no checkpoint {missing[0]}; beside it there are {steps}")
    return candidates


def _none_in(directory: Path) -> str:
    place = directory.absolute()
    return f"no checkpoint in {place}, which {'has no folder step-…' if place.exists() else 'does not exist'}"


def _restore_random(path: Path, training: dict[str, Any], mesh: ParallelMesh) -> None:
    def restore() -> None:
        rank = nearest_rank(mesh, training["layout"]["sizes"])
        restore_random_state(read_values(path / RANDOM / file_name(rank)), mesh)

    alike(restore, mesh.side_group())
