"""All that depends on the inside of transformers' Trainer (5.24) and of accelerate (1.15), with the reasons.

Trainer reaches processes through its `accelerator` alone, and model and optimizer through `_wrap_model`. So a
`ReplicaAccelerator` shows it one process with the global batch, and `_wrap_model` boosts. Saving and loading have no
documented hook below `_save_checkpoint`, so their parts are replaced here.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoint.full_state import nearest_rank, random_file, random_state, restore_random_state
from ..checkpoint.local_tensors import TensorNames
from ..checkpoint.model import ADAPTER_SAFETENSORS
from ..checkpoint.tensor_file import read_values
from ..cluster.collectives import all_gather
from ..cluster.errors import RankFailure, raise_errors
from ..cluster.failures import naming_failures
from ..cluster.gathering import gather_integers, run_or_raise_together
from ..cluster.mesh import ParallelMesh
from ..cluster.objects import broadcast_object
from ..data.loader import argument_errors
from ..lazy.files import read_json
from .batches import (
    SAMPLES,
    BatchSamples,
    CompletedBatch,
    ReplicaStream,
    completed,
    loader_of_replica,
    replica_batches,
)
from .boosted import BoostedTraining

_LOG = logging.getLogger("echelon")

_OPTIMIZER, _SCHEDULER, _RANDOM, _LAYOUT = "optimizer", "scheduler.pt", "random", "layout.json"
_REQUESTS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


def checkpoint_of(resume_from: str | bool | None, folder: str) -> str | bool | None:
    """Return the folder to resume from, as Trainer's `train` takes it.

    Args:
        resume_from: a folder, which must be complete; True for the last checkpoint in `folder` that was written to its
            end: its state is written last. All else is returned as it is.
        folder: of all checkpoints.

    Raises:
        ValueError: there is none, or it is incomplete.
    """
    if resume_from is True:
        steps = {
            int(step): str(path)
            for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            if (step := path.name.rpartition("-")[2]).isdecimal() and _is_written(path)
        }
        if not steps:
            raise ValueError(
                f"resume_from_checkpoint=True, but {folder} has no complete checkpoint: leave it out"
            )
        return steps[max(steps)]
    if resume_from and not _is_written(Path(resume_from)):
        raise ValueError(
            f"resume_from_checkpoint={str(resume_from)!r} is no complete checkpoint, since it has no readable "
            f"{TRAINER_STATE_NAME}: give another one, or True for the last complete one in output_dir"
        )
    return resume_from


def _is_written(checkpoint: Path) -> bool:
    """Return True if a checkpoint has its state, in full."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def reporting(action: str) -> Iterator[None]:
    """Report this rank's error to the ranks that wait for it, also one of the user's own code."""
    try:
        yield
    except RankFailure:  # reported already
        raise
    except Exception:
        with naming_failures(action, ()):
            raise


class ReplicaAccelerator(Accelerator):
    """An Accelerator whose processes are the replicas: it shards batches over them, and gathers from them.

    Args:
        accelerator: the one that Trainer made, whose settings it takes over.
        mesh: all ranks.
        least: samples that a replica needs.
    """

    def __init__(self, accelerator: Accelerator, mesh: ParallelMesh, least: int = 1) -> None:
        self.__dict__.update(vars(accelerator))
        self.mesh, self.least = mesh, least
        self.boosted: BoostedTraining | None = None
        self.of_stream: BatchSamples | None = None  # of the last batch of a stream

    @property
    def num_processes(self) -> int:
        """1: losses are those of the global batch, which a subclass must not scale by the number of processes."""
        return 1

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Shard dataloaders over the replicas. Return all else as it is, since `_wrap_model` has boosted it."""
        prepared = [self.prepare_data_loader(arg) if isinstance(arg, DataLoader) else arg for arg in args]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Move another model than the trained one, as a reference model, to the device."""
        return model if hasattr(model, "stands_for") else model.to(self.device)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a dataloader of this replica's rows of the batches that one process would have."""
        return self.of_replica(data_loader, use_seedable_sampler=self.use_seedable_sampler)

    def of_replica(self, data_loader: Any, *, use_seedable_sampler: bool) -> Any:
        """Return a dataloader of this replica's rows of the batches that one process would have.

        Args:
            data_loader: of one process; one that was prepared is returned.
            use_seedable_sampler: draw the order as accelerate does.

        Raises:
            ValueError: it is no dataloader, or workers of it may return batches in any order.
        """
        if not isinstance(data_loader, DataLoader):
            raise ValueError(
                f"a {type(data_loader).__name__} takes the place of Trainer's dataloader, and its batches cannot be "
                "sharded over replicas: return a torch.utils.data.DataLoader"
            )
        if isinstance(data_loader, DataLoaderShard):
            return data_loader
        rank, size = self.mesh.rank("dp"), self.mesh.size("dp")
        raise_errors(argument_errors({"in_order": data_loader.in_order}))
        worker_init = data_loader.worker_init_fn
        if isinstance(worker_init, partial) and "rank" in worker_init.keywords:  # equal in a replica
            data_loader.worker_init_fn = partial(worker_init.func, **{**worker_init.keywords, "rank": rank})
        if isinstance(data_loader.sampler, LengthGroupedSampler):
            data_loader.sampler.batch_size *= size
        return prepare_data_loader(
            loader_of_replica(data_loader, rank=rank, size=size, least=self.least),
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement,
            rng_types=None,  # the ranks draw the same numbers, since they have the same seed
            dispatch_batches=False,
            non_blocking=self.non_blocking,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
        )

    def samples_of_last(self) -> BatchSamples | None:
        """Return the samples of the batch that the loader has yielded if it is the last one; None for all others."""
        loader = self.gradient_state.active_dataloader
        if loader is None:
            return None
        if isinstance(loader.dataset, ReplicaStream):
            return self.of_stream
        sampler = replica_batches(loader) if loader.end_of_dataloader else None
        return None if sampler is None else sampler.last

    @property
    def samples_of_computed(self) -> BatchSamples | None:
        """The samples of the batch that is computed if it is the last one; None for all others."""
        return None if self.boosted is None else self.boosted.samples

    @naming_failures("Trainer's gather")
    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors of the replicas along dim 0, without copies. Collective over dp."""
        samples = self.samples_of_computed

        def gathered(x: Tensor) -> Tensor:
            if x.dim() == 0:
                x = x.reshape(1)
            elif samples is not None and samples.counted < samples.taken == len(x):
                x = x[: samples.counted]
            return self._gather_rows(x)

        return recursively_apply(gathered, tensor, error_on_other_type=self.mesh.size("dp") > 1)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Concatenate tensors of the replicas; a loss for each sample, as for the samples. Collective over dp."""
        samples = self.samples_of_computed

        def of_samples(x: Tensor) -> Tensor:
            return x if samples is None or x.dim() == 0 or len(x) != samples.full else x[: samples.counted]

        return self.gather(recursively_apply(of_samples, input_data))

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        """Concatenate tensors along dim 0. In the last batch they may have different lengths. Collective over dp."""
        if self.mesh.size("dp") == 1:
            return tensor
        group = self.mesh.group("dp")
        if self.samples_of_last() is None:
            return all_gather(tensor.contiguous(), group, 0)
        lengths = all_gather(torch.tensor([len(tensor)], device=tensor.device), group, 0).tolist()
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        pieces = all_gather(padded, group, 0).split(max(lengths))
        return torch.cat([piece[:length] for piece, length in zip(pieces, lengths, strict=True)])

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors along a dim to the longest of the replicas. Collective over dp."""
        if self.mesh.size("dp") == 1:
            return tensor

        def padded(x: Tensor) -> Tensor:
            if dim >= x.dim():
                return x
            sizes = self.gather(torch.tensor([x.shape[dim]], device=self.device))
            missing = int(sizes.max()) - x.shape[dim]
            filling = x.new_full((*x.shape[:dim], missing, *x.shape[dim + 1 :]), pad_index)
            return torch.cat([filling, x] if pad_first else [x, filling], dim)

        return recursively_apply(padded, tensor, error_on_other_type=True)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Nothing: gradients of several calls are added when they are reduced."""
        return nullcontext()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the gradients that the pipeline has computed by what was done to its loss since."""
        assert self.boosted is not None
        self.boosted.scale_gradients(loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients of all ranks to a norm. Collective over the world."""
        assert self.boosted is not None
        return self.boosted.optimizer.clip_grad_by_norm(max_norm, norm_type)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last step was skipped for gradients that overflowed."""
        assert self.boosted is not None
        return self.boosted.was_skipped()

    def unwrap_model(
        self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the transformers model that a boosted one, or a stand-in, stands for."""
        return getattr(model, "stands_for", model)


class TrainerInternals(Trainer):
    """Overrides of Trainer's internal methods; see the head of this file. `EchelonTrainerMixin` has the others."""

    boosted: BoostedTraining | None = None
    plugin: Any
    accelerator: Any
    optimizer: Any

    def boost(self) -> BoostedTraining:
        raise NotImplementedError

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # Otherwise accelerate makes a GradScaler, which CPUs refuse, and autocasts.
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and have it see replicas."""
        super().create_accelerator_and_postprocess()
        least = self.plugin.config.num_microbatches or 1
        self.accelerator = ReplicaAccelerator(self.accelerator, self.plugin.mesh, least)
        self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Nothing: boost moves this rank's shard alone."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        # Called with the optimizer made, in training and before an evaluation: the only place for both.
        return self.boost()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the number of labels in these batches of all replicas."""
        real = [batch.real() if isinstance(batch, CompletedBatch) else batch for batch in batch_samples]
        count = super()._get_num_items_in_batch(real, device)
        if count is None or (self.args.world_size > 1 and self.args.average_tokens_across_devices):
            return count  # Trainer has gathered it already
        return self.accelerator.gather(torch.as_tensor(count)).sum()

    def label_count(self, inputs: Any) -> Tensor | int:
        """Return the labels that a loss counts in these inputs, or their rows if there are none."""
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return next(len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim())
        if self._loss_shifts_labels and "shift_labels" not in inputs:
            labels = labels[..., 1:]
        return labels.ne(-100).sum()

    def divides_loss(self, count: Any) -> bool:
        """Return True if Trainer's `training_step` divides the loss by the number of accumulated batches."""
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = (
                self.model_accepts_loss_kwargs and count is not None
            ) or self.compute_loss_func is not None
        return not is_scaled and getattr(self, "current_gradient_accumulation_steps", 1) > 1

    def completed(self, batch: Any) -> Any:
        """Return the batch that a loader has just yielded; the last one with its numbers of samples."""
        accelerator = self.accelerator
        if isinstance(accelerator.gradient_state.active_dataloader.dataset, ReplicaStream):
            accelerator.of_stream = batch.pop(SAMPLES, None)
        samples = accelerator.samples_of_last()
        return batch if samples is None else completed(batch, samples, self.label_names)

    def loader_of_class(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the class's `get_train_dataloader` or the like, which may return a plain dataloader; shard that one."""
        loader = getattr(type(self), name)(self, *args, **kwargs)
        return self.accelerator.of_replica(loader, use_seedable_sampler=False)

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        if isinstance(inputs, CompletedBatch) and isinstance(prepared, CompletedBatch):
            prepared.samples = inputs.samples
        return prepared

    # What callbacks and metrics decide, equal on all ranks.

    @naming_failures("the start of Trainer.train")
    def _look_for_callbacks_of_users(self) -> None:
        """Find out if a rank has callbacks that may ask for other things than on other ranks. Collective."""
        has_others = any(
            not type(callback).__module__.startswith("transformers.")  # these ask for the same on all ranks
            for callback in self.callback_handler.callbacks
        )
        of_ranks = gather_integers([has_others], self.plugin.mesh.side_group())
        self._asks_other_ranks = any(value for (value,) in of_ranks)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, save and evaluate if a callback of any rank asks for it. Collective over the world."""
        if not self._asks_other_ranks:
            return super()._maybe_log_save_evaluate(*args, **kwargs)
        calls_callbacks = self._has_agreed_requests()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if calls_callbacks:
            self._has_agreed_requests()

    @naming_failures("the end of Trainer's step")
    def _has_agreed_requests(self) -> bool:
        """Take over what the callbacks of any rank request; return True for more than to stop."""
        requests = [getattr(self.control, name) for name in _REQUESTS]
        of_ranks = gather_integers(requests, self.plugin.mesh.side_group())
        for name, values in zip(_REQUESTS, zip(*of_ranks, strict=True), strict=True):
            setattr(self.control, name, any(values))
        control = self.control
        return control.should_log or control.should_evaluate or control.should_save

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, with the metrics of the first rank on all ranks. Collective over the world."""
        output = super().evaluation_loop(*args, **kwargs)
        self.boost().samples = None
        with naming_failures("Trainer's metrics"):
            metrics = broadcast_object(output.metrics, 0, self.plugin.mesh.side_group())
        return output._replace(metrics=metrics)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        super()._track_num_input_tokens(inputs.real() if isinstance(inputs, CompletedBatch) else inputs)

    # Checkpoints: the folder has Trainer's names for model, scheduler and trainer_state.json, and folders of Echelon.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # The state of an earlier run, written last, would make a folder with parts of both runs complete.
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        boosted = self.boost()
        boosted.booster.save_optimizer(boosted.optimizer, Path(output_dir) / _OPTIMIZER)
        boosted.booster.save_lr_scheduler(self.lr_scheduler, Path(output_dir) / _SCHEDULER)

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: the loss scale is in the optimizer's folder."""

    def _save_rng_state(self, output_dir: str) -> None:
        mesh, folder = self.plugin.mesh, Path(output_dir) / _RANDOM

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / random_file(mesh.global_rank)).write_bytes(
                random_state(mesh, self.boost().model.random)
            )
            if mesh.global_rank == 0:
                (folder / _LAYOUT).write_text(json.dumps(mesh.layout.sizes))

        run_or_raise_together(write, mesh.side_group())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _RANDOM / _LAYOUT).is_file():
            return
        folder, mesh = Path(checkpoint) / _RANDOM, self.plugin.mesh

        def restore() -> None:
            rank = nearest_rank(mesh, read_json(folder / _LAYOUT))
            restore_random_state(read_values(folder / random_file(rank)), mesh, self.boost().model.random)

        run_or_raise_together(restore, mesh.side_group())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: weights are loaded behind boost, each rank its own, by `_load_optimizer_and_scheduler`."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        boosted = self.boost()
        self.load_weights(checkpoint)
        if not (Path(checkpoint) / _OPTIMIZER).is_dir():
            if self.is_world_process_zero():
                _LOG.warning(
                    "%s has no %s, as those that save_only_model=True writes: training goes on from its weights, "
                    "with a new optimizer and schedule",
                    checkpoint,
                    _OPTIMIZER,
                )
            return
        boosted.booster.load_optimizer(boosted.optimizer, Path(checkpoint) / _OPTIMIZER)
        boosted.booster.load_lr_scheduler(self.lr_scheduler, Path(checkpoint) / _SCHEDULER)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: the loss scale is in the optimizer's folder."""

    def _load_best_model(self) -> None:
        self.load_weights(self.state.best_model_checkpoint)

    def load_weights(self, folder: str) -> None:
        """Load weights, or the adapters of a model with adapters. Collective over the world."""
        boosted = self.boost()
        local = boosted.booster.plugin.local_model(boosted.model)
        if not local.adapters:
            boosted.booster.load_model(boosted.model, folder)
            return
        for adapter in local.adapters:
            tensors = adapter.local(local.tensors)
            names = TensorNames(needed=tuple(adapter.names), first={name: name for name in adapter.names})
            of_adapter = replace(local, tensors=tensors, names=names, adapters=())
            file = Path(folder) / adapter.folder / ADAPTER_SAFETENSORS.single
            boosted.booster.plugin.checkpoints.load_model(of_adapter, file, strict=True)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write what belongs to a saved model: weights by all ranks, all else as Trainer does on the first."""
        folder = self.args.output_dir if output_dir is None else output_dir
        boosted = self.boost()
        if boosted.model.adapters:
            boosted.booster.save_lora_as_pretrained(boosted.model, folder)
        else:
            boosted.booster.save_model(boosted.model, folder, shard=True, size_per_shard=5 * 1024)
        if not self.args.should_save:
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, Path(folder) / "training_args.bin")
