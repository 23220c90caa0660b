"""All of a run at one step: gathered and written, a sound one chosen, and gone on from. Folders are steps.py's."""

import logging
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..cluster.errors import raise_errors
from ..cluster.mesh import AXES, ParallelMesh
from .background import Copies
from .commit import written_beside
from .consent import alike, errors_of_all, exchanged, on_all_ranks, on_first_rank
from .exchange import Offer, offers_of
from .local import LocalModel, LocalTensor
from .model import SAFETENSORS, ModelFiles, Records, describing, plan_model
from .optimizer import ReportedStates, SavedStates, Trained, fit_trained, local_states, states_to_save
from .pretrained import fit, open_pretrained
from .steps import (
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
from .tensor_file import digest_of, read_values, saved_bytes, torch_bytes, write_small

MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"
TRAINING = "training.pt"
# The least that a file of weights is worth: below, a rank writes more than its share.
_LEAST_BYTES = 2**25

Resume = int | Literal["auto", "must"] | None

_NEWEST = ("auto", "must")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepToSave:
    """A step about to be written.

    Args:
        step: its number.
        model: its weights.
        states: the optimizer's, None where there is none.
        training: the content of `training.pt`.
        random: that of this rank's file of random states.
        group: all ranks, over the CPU.
    """

    step: int
    model: ModelFiles
    states: SavedStates | None
    training: bytes
    random: bytes
    group: dist.ProcessGroup

    def copied(self, copies: Copies) -> "StepToSave":
        """The same, with the memory of weights and states as it is now, once the copies are finished."""
        states = None if self.states is None else self.states.copied(copies)
        return replace(self, model=self.model.copied(copies), states=states)

    def write(self, directory: Path, keep_last: int | None) -> None:
        """Write it, and then remove all but the newest. Collective over the group.

        Raises:
            OSError: some rank could not write; on every rank. The steps that are there stand.
        """
        group = self.group
        with written_beside(lambda: self._begin(directory), group) as folder:
            own = self._written(folder)
            records = on_all_ranks(lambda: own | self._write_small(folder), group)
            together = {name: record for each in records for name, record in each.items()}
            on_first_rank(lambda: commit_step(folder, directory, self.step, together), group)
        if keep_last is not None:
            on_first_rank(lambda: keep_newest(directory, keep_last, self.step), group)

    def _begin(self, directory: Path) -> Path:
        folder = begin_step(directory, self.step)
        try:
            for name in (MODEL, RANDOM) if self.states is None else (MODEL, OPTIMIZER, RANDOM):
                (folder / name).mkdir()
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _written(self, folder: Path) -> Records:
        """This rank's files of tensors and what describes them, by their place in the folder."""
        records = below(MODEL, self.model.write(folder / MODEL))
        if self.states is not None:
            records |= below(OPTIMIZER, self.states.write(folder / OPTIMIZER, self.group))
        return records

    def _write_small(self, folder: Path) -> Records:
        name = f"{RANDOM}/{random_file(self.group.rank())}"
        records = {name: write_small(folder / name, self.random)}
        if self.group.rank() == 0:
            records[TRAINING] = write_small(folder / TRAINING, self.training)
        return records


def gather_step(
    step: int,
    *,
    model: LocalModel,
    trained: Trained | None,
    training: Mapping[str, Any],
    size_per_shard: float,
    mesh: ParallelMesh,
) -> StepToSave:
    """Gather the content of a step, as it is now. One all-gather of objects over the world.

    Args:
        step: its number.
        model, trained: this rank's parts.
        training: plain values by name, those of the first rank; its "user" is None or the same on the others.
        size_per_shard: the largest file of weights, in MiB.
        mesh: all ranks.

    Raises:
        ValueError: there are values that cannot be saved, or "user" differs between ranks; on every rank.
    """
    group = mesh.side_group()
    values = {**training, "step": step, "layout": {"sizes": {axis: mesh.size(axis) for axis in AXES}}}

    def prepare() -> tuple[_Prepared, _Report]:
        tensors, states = ({}, None) if trained is None else local_states(trained)
        prepared = _Prepared(tensors, training=_training_bytes(values), random=random_state(mesh))
        user = None if values["user"] is None else digest_of(values["user"])
        return prepared, _Report(user, _share(model, mesh), offers_of(model.tensors), states)

    own, every = exchanged(prepare, group)
    _refuse_different([report.user for report in every])
    files = plan_model(
        model.tensors,
        [report.offers for report in every],
        model.names.needed,
        SAFETENSORS,
        max_bytes=min(every[0].share, size_per_shard * 2**20),
        describe=describing(model.module),
        group=group,
    )
    reported = [report.states for report in every if report.states is not None]
    return StepToSave(
        step=step,
        model=files,
        states=None if trained is None else states_to_save(trained, own.states, reported),
        training=own.training,
        random=own.random,
        group=group,
    )


class _Prepared(NamedTuple):
    """This rank's part of a step."""

    states: Mapping[str, LocalTensor]
    training: bytes
    random: bytes


class _Report(NamedTuple):
    """A rank's report of its part to the others. The share of bytes that each writes is that of the first rank."""

    user: str | None
    share: float
    offers: Mapping[str, Offer]
    states: ReportedStates | None


def _training_bytes(values: Mapping[str, Any]) -> bytes:
    """The content of `training.pt`.

    Raises:
        ValueError: there are values that cannot be saved; which of them.
    """
    try:
        return saved_bytes(values)
    except ValueError:
        for name, value in values.items():
            try:
                saved_bytes(value)
            except ValueError as error:
                raise ValueError(f"`{name}` cannot be saved: {error}") from error
        raise


def _refuse_different(users: Sequence[str | None]) -> None:
    """Refuse values that would be lost: those of the first rank are saved."""
    others = [rank for rank, user in enumerate(users) if user not in (None, users[0])]
    if others:
        raise ValueError(
            f"`user` is saved once, and rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} gave other values "
            "than rank 0: give the same on every rank, or None on all but the first"
        )


def _share(model: LocalModel, mesh: ParallelMesh) -> float:
    """A rank's share of the weights, in bytes: of a stage's, where the ranks are fewer, too."""
    everything = sum(each.nbytes for each in model.tensors.values())
    return max(everything * mesh.size("pp") / mesh.world_size, _LEAST_BYTES)


def below(folder: str, records: Records) -> Records:
    """Files of a folder by their place in that of the step."""
    return {f"{folder}/{name}": record for name, record in records.items()}


class Resumed(NamedTuple):
    """The step that a run goes on from.

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

    Each rank reads its share of the files. The first rank logs the damage where an older checkpoint is taken instead,
    and later steps that stay behind.

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
    passed: list[str] = []
    for path in candidates:
        damage = damage_of_step(path, group)
        if not damage:
            if group.rank() == 0:
                for each in passed:
                    _logger.warning("%s: going on from %s instead", each, path)
                _log_later(path, resume, passed_over=candidates[: len(passed)])
            return path
        passed.append(
            f"{path} {'is passed over' if resume in _NEWEST else 'is refused'}, since {'; '.join(damage)}"
        )
    if resume not in _NEWEST:
        raise ValueError("; ".join(passed))
    raise ValueError(
        f"no checkpoint to go on from: {'; '.join(passed)}. Remove the damaged folders to begin anew"
    )


def _log_later(path: Path, resume: Resume, *, passed_over: Sequence[Path]) -> None:
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
                error
                for name in order[group.rank() :: group.size()]
                for error in damage_of(path, name, files[name])
            ]
        except PermissionError as error:
            raise OSError(
                f"{error}: whoever runs this may not read {path}, which may be sound. Let them read it, or give the "
                "number of another step as `resume`"
            ) from error
        except (ValueError, OSError) as error:  # what a disk cannot read any more is damage, too
            return [str(error)]

    return errors_of_all(share, group)


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
    """Let all that is given go on from a folder. Collective over the world.

    Raises:
        ValueError: it does not fit; on every rank, before weights or states changed.
    """
    group = mesh.side_group()
    training = on_first_rank(lambda: read_values(path / TRAINING), group)
    errors = _absent(path, training, trained, lr_scheduler, dataloader)
    if lr_scheduler is not None and training["scheduler"] is not None:
        errors += scheduler_errors(
            lr_scheduler, training["scheduler"], f"the scheduler's in {path / TRAINING}"
        )
    raise_errors(errors)
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
    """Errors of parts that are to go on and were not saved."""
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
        restore_random_state(read_values(path / RANDOM / random_file(rank)), mesh)

    alike(restore, mesh.side_group())


def scheduler_errors(lr_scheduler: Any, state: Any, what: str) -> list[str]:
    """The error of a scheduler that cannot go on from a state, if there is one; torch's would take any.

    Args:
        lr_scheduler: with `state_dict`.
        state: the stored one.
        what: its name in the error.
    """
    own = lr_scheduler.state_dict()
    if not isinstance(own, Mapping):  # of one's own: it knows best
        return []
    there = set(state) if isinstance(state, Mapping) else set()
    # Names with an underscore are torch's inner ones, which come and go with its releases.
    missing = [str(name) for name in own if name not in there and not str(name).startswith("_")]
    if isinstance(state, Mapping) and not missing:
        return []
    kind = type(lr_scheduler).__name__
    return [f"{what} is no state of a {kind}: it lacks {', '.join(missing)}"]


def random_state(mesh: ParallelMesh) -> bytes:
    """This rank's generators, as they are now, in torch's own format."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "coordinates": {axis: mesh.rank(axis) for axis in AXES},
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).copy()), position, has_gauss, gauss),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(mesh.device) if mesh.device.type == "cuda" else None,
    }
    return torch_bytes(state)


def restore_random_state(state: Mapping[str, Any], mesh: ParallelMesh) -> None:
    """Let this rank's generators go on from a state."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy(), position, has_gauss, gauss))
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and mesh.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], mesh.device)


def random_file(rank: int) -> str:
    """The name of a rank's file of random states."""
    return f"rank-{rank:05}.pt"


def nearest_rank(mesh: ParallelMesh, saved: Mapping[str, int]) -> int:
    """The rank of the saved mesh whose generators this one goes on from: that of its coordinates, or of the last ones.

    Ranks that stood at one place of the saved mesh draw alike from then on, as all do from the launch.

    Args:
        saved: sizes of the mesh by axis.
    """
    rank = 0
    for axis in AXES:
        rank = rank * saved[axis] + min(mesh.rank(axis), saved[axis] - 1)
    return rank
