"""All of a run at one step, gathered from what every rank holds and written. Folders and names are step_folder.py's."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ..cluster.mesh import ParallelMesh
from .consent import exchanged, on_all_ranks, on_first_rank
from .copies import Copies
from .held import HeldTensor
from .held_model import HeldModel
from .model_files import SAFETENSORS, ModelFiles, Records, describing, plan_model
from .placing import written_beside
from .plan import Holding, holdings_of
from .random_states import file_name, random_state, sizes
from .step_folder import begin_step, commit_step, keep_newest
from .tensor_file import write_small
from .trained import SavedStates, ToldStates, Trained, kept_states, states_to_save
from .values import digest_of, saved_bytes

MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"
TRAINING = "training.pt"
# The least that a file of weights is worth: below, a rank writes more than its share.
_LEAST_BYTES = 2**25


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
        name = f"{RANDOM}/{file_name(self.group.rank())}"
        records = {name: write_small(folder / name, self.random)}
        if self.group.rank() == 0:
            records[TRAINING] = write_small(folder / TRAINING, self.training)
        return records


def gather_step(
    step: int,
    *,
    model: HeldModel,
    trained: Trained | None,
    training: Mapping[str, Any],
    size_per_shard: float,
    mesh: ParallelMesh,
) -> StepToSave:
    """What is to be written of a step, as it is now. One all-gather of objects over the world.

    Args:
        step: its number.
        model, trained: what this rank holds.
        training: plain values by name, those of the first rank; its "user" is None or the same on the others.
        size_per_shard: the largest file of weights, in MiB.
        mesh: all ranks.

    Raises:
        ValueError: there are values that cannot be saved, or "user" differs between ranks; on every rank.
    """
    group = mesh.side_group()
    values = {**training, "step": step, "layout": {"sizes": sizes(mesh)}}

    def prepare() -> tuple[_Prepared, _Told]:
        held, told = ({}, None) if trained is None else kept_states(trained)
        prepared = _Prepared(held, training=_training_bytes(values), random=random_state(mesh))
        user = None if values["user"] is None else digest_of(values["user"])
        return prepared, _Told(user, _share(model, mesh), holdings_of(model.tensors), told)

    own, every = exchanged(prepare, group)
    _refuse_different([told.user for told in every])
    files = plan_model(
        model.tensors,
        [told.holdings for told in every],
        model.names.needed,
        SAFETENSORS,
        max_bytes=min(every[0].share, size_per_shard * 2**20),
        describe=describing(model.module),
        group=group,
    )
    told_states = [told.states for told in every if told.states is not None]
    return StepToSave(
        step=step,
        model=files,
        states=None if trained is None else states_to_save(trained, own.states, told_states),
        training=own.training,
        random=own.random,
        group=group,
    )


class _Prepared(NamedTuple):
    """This rank's part of a step."""

    states: Mapping[str, HeldTensor]
    training: bytes
    random: bytes


class _Told(NamedTuple):
    """What a rank tells the others of its part; the bytes that each is to write are those that the first one tells."""

    user: str | None
    share: float
    holdings: Mapping[str, Holding]
    states: ToldStates | None


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


def _share(model: HeldModel, mesh: ParallelMesh) -> float:
    """A rank's share of the weights, in bytes: of a stage's, where the ranks are fewer, too."""
    everything = sum(each.nbytes for each in model.tensors.values())
    return max(everything * mesh.size("pp") / mesh.world_size, _LEAST_BYTES)


def below(folder: str, records: Records) -> Records:
    """Files of a folder by their place in that of the step."""
    return {f"{folder}/{name}": record for name, record in records.items()}
