"""ShardFormer: shard a model and its data in a plain loop. For pipelines, ZeRO or 16 bits see booster/."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, default_collate

from ..cluster.device import default_device
from ..cluster.errors import raise_errors
from ..cluster.gathering import run_or_raise_together
from ..cluster.launch import launch_from_torch
from ..cluster.mesh import ParallelMesh
from ..cluster.transformers_api import ROUTER_LOGITS, adds_router_loss, router_loss_file
from ..data.loader import WORKER_SETTINGS, loader_errors, sharded_loader
from .equal_ranks import compare_inputs, require_equal_models
from .gradients import add_gradient_hooks
from .layers.parallel_module import is_of_peft
from .policy import Policy
from .refusals import mark_all_parallelized, refuse_partial_state, unfit_model_errors
from .shard_config import ShardConfig
from .tables.table import Table
from .transforms import ModelPlan, TransformOptions


class ShardFormer:
    """Shard transformers models by a config, for training and inference without a booster.

    A sharded model trains in a plain loop: after `loss.backward()` each rank has its shard of the exact gradients,
    averaged over the data axis, for elementwise optimizers (AdamW, SGD, …). Clip with `clip_grad_norm_` of this
    package, not with torch's. Every call compares its inputs over the tensor axis, so that different batches raise an
    error.

        shard_former = ShardFormer(ShardConfig(tensor_parallel_size=2, gather_output=True))
        shard_former.init_distributed()
        model = shard_former.shard_model(model)
        loader = shard_former.shard_dataset(dataset, batch_size=8)

    Attributes:
        shard_config: the config; it has process groups after `init_distributed`.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        if not isinstance(shard_config, ShardConfig):
            raise ValueError(
                f"ShardFormer takes a ShardConfig and got a {type(shard_config).__name__}: give "
                "ShardConfig(tensor_parallel_size=2), for example"
            )
        self.shard_config = shard_config

    def init_distributed(self) -> None:
        """Initialize torch.distributed if necessary (`launch_from_torch()`), and make the groups of the axes.

        The ranks of a tensor axis are neighbours. Collective over the world. If the config has groups, it makes none.

        Raises:
            ValueError: the sizes do not multiply to the world size.
        """
        config = self.shard_config
        if not dist.is_initialized():
            launch_from_torch()
        if config.tensor_parallel_process_group is not None or config.data_parallel_process_group is not None:
            return
        if config.num_stages > 1:
            raise ValueError(
                "init_distributed makes no groups for a pipeline: give ShardConfig the groups of its mesh, or use "
                "HybridParallelPlugin"
            )
        mesh = ParallelMesh(tp=config.tensor_parallel_size, dp=config.data_parallel_size)
        self.shard_config = replace(
            config,
            tensor_parallel_process_group=mesh.group("tp"),
            data_parallel_process_group=mesh.group("dp"),
        )

    def shard_model(self, model: nn.Module, policy: Policy | Table | None = None) -> nn.Module:
        """Call `optimize` and move the local model to this rank's device; return only the model."""
        raise_errors(unfit_model_errors(model))
        return self._optimize(model, policy, default_device())[0]

    def optimize(
        self, model: nn.Module, policy: Policy | Table | None = None
    ) -> tuple[nn.Module, list[dict[int, Tensor]]]:
        """Cut the model to this rank's stage and shard it over the tensor axis, in place.

        Parameter objects and names stay; a sharded one contains the local shard (`cluster.placement`). One all-gather
        over each axis compares the models. Of a lazily built model only local parameters are materialized. Move the
        model to its device before or afterwards; afterwards takes less device memory.

        Args:
            model: the full model, not yet sharded, equal on all ranks.
            policy: a policy or a table; None takes the table of the model type.

        Returns:
            The model, and the parameters shared by several stages: for each, its tensor by stage.

        Raises:
            ValueError: no policy is known, it does not support the config, or models differ; on every rank.
        """
        return self._optimize(model, policy)

    def _optimize(
        self, model: nn.Module, policy: Policy | Table | None, device: torch.device | None = None
    ) -> tuple[nn.Module, list[dict[int, Tensor]]]:
        """Run `optimize`; then move the local model to `device`, or leave it where it is if that is None."""
        config = self.shard_config
        raise_errors(_split_errors(model, config))
        model_device, dtype = _device_and_dtype(model)
        options = TransformOptions(
            shard_config=config,
            device=device or model_device,
            dtype=dtype,
            policy=policy,
            shards=policy is not None or config.tensor_parallel_size * config.num_stages > 1,
            moves=device is not None,
        )
        groups = [group for group in (config.split_group, config.replica_group) if group is not None]
        make_plan = partial(ModelPlan, model, options, config.fused.errors(options.device, dtype))
        plan = run_or_raise_together(make_plan, *groups) if groups else make_plan()
        if groups:
            require_equal_models(model, *groups)
        if options.shards:
            mark_all_parallelized(model)
        model = plan.apply()
        refuse_partial_state(model)
        if config.inference_only:
            model.requires_grad_(False).eval()
        # Also for inference only: the model might be trained later.
        add_gradient_hooks(model, tensor=config.split_group, data=config.replica_group)
        if config.split_group is not None:
            compare_inputs(model, config.split_group)
        return model, plan.ties

    def shard_dataset(
        self,
        dataset: Dataset | DataLoader,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        *,
        seed: int = 1024,
        drop_last: bool | None = None,
        collate_fn: Callable | None = None,
        **kwargs: Any,
    ) -> DataLoader:
        """Return a dataloader that shards a dataset over the data axis, with equal batches on all tensor ranks.

        Args:
            dataset: a map-style dataset; or a DataLoader of one, whose settings are the defaults.
            batch_size: samples per step and rank of the data axis; by default 1, or the DataLoader's.
            shuffle: shuffle by `seed` and the epoch; by default False, or as the DataLoader.
            seed: seed of the order, and of the collator's random numbers.
            drop_last: leave out samples that do not fill a batch on every rank; by default False, or the DataLoader's.
                With False, the first samples are repeated if the ranks do not divide the dataset.
            collate_fn, kwargs: further arguments for the DataLoader.

        Raises:
            ValueError: the dataset has no length or a custom order, or there are no groups yet.
        """
        config = self.shard_config
        if not config.has_groups:
            raise ValueError(_NO_GROUPS)
        arguments = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "collate_fn": collate_fn,
        }
        chosen = {name: value for name, value in arguments.items() if value is not None}
        group = config.replica_group
        return sharded_loader(
            rank=0 if group is None else group.rank(),
            size=1 if group is None else group.size(),
            seed=seed,
            **{**loader_settings(dataset), **chosen, **kwargs},
        )


_NO_GROUPS = (
    "sizes were given, but there are no process groups yet: call ShardFormer.init_distributed() first, or "
    "give ShardConfig the groups"
)


def _split_errors(model: nn.Module, config: ShardConfig) -> list[str]:
    """List reasons why a model cannot be sharded by a config, with any policy."""
    if not config.has_groups:
        return [_NO_GROUPS]
    if config.sequence.is_on_sequence_axis:
        return [
            f"sequence_parallelism_mode={config.sequence.mode!r} needs a booster, which averages gradients "
            "over the sequence axis: use HybridParallelPlugin, or 'split_gather' or 'ring'"
        ]
    if config.axis_groups:
        return [
            f"axis_groups of {', '.join(config.axis_groups)} need a booster, which averages gradients over the other "
            "data-parallel ranks: use HybridParallelPlugin"
        ]
    if errors := unfit_model_errors(model):
        return errors
    if config.num_stages > 1 and router_loss_file(model) is not None and adds_router_loss(model):
        return [
            f"{ROUTER_LOGITS}=True in the model's config needs a booster under a pipeline, which adds up the auxiliary "
            "loss over the stages: use HybridParallelPlugin, or set it to False"
        ]
    if is_of_peft(model):
        return [
            f"the model is wrapped in peft's {type(model).__name__}, which renames its layers: give the "
            "transformers model in it, get_base_model(), with its adapters"
        ]
    return []


def _device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of a model's first parameter; of a meta model the device it would be moved to."""
    first = next(model.parameters(), torch.empty(0))
    return default_device() if first.is_meta else first.device, first.dtype


def shard_model(model: nn.Module, policy: Policy | Table | None = None) -> nn.Module:
    """Shard a model over all processes of torchrun, in place: the world is the tensor axis.

    Calls `launch_from_torch()` if torch.distributed is not initialized; it seeds all ranks equally, and also works
    for one process without torchrun. Moves the model to this rank's device. Collective over the world.

    Args:
        model: equal on all ranks, not yet sharded.
        policy: a policy or a table; None takes the table of the model type.

    Raises:
        ValueError: no policy is known, it does not support tensor parallelism, or models differ; on every rank.
    """
    if not dist.is_initialized():
        launch_from_torch()
    shard_former = ShardFormer(ShardConfig(tensor_parallel_size=dist.get_world_size()))
    shard_former.init_distributed()
    return shard_former.shard_model(model, policy)


def loader_settings(source: Dataset | DataLoader) -> dict[str, Any]:
    """Return the arguments that `sharded_loader` takes for a dataset, or for the dataset and settings of a DataLoader.

    Raises:
        ValueError: it has a custom order of samples, which cannot be sharded.
    """
    if not isinstance(source, DataLoader):
        defaults = {"batch_size": 1, "shuffle": False, "drop_last": False, "collate_fn": default_collate}
        return {"dataset": source, **defaults}
    sampler: Any = source.sampler
    errors = loader_errors(source)
    is_plain = type(sampler) in (SequentialSampler, RandomSampler) and sampler.data_source is source.dataset
    if not is_plain or getattr(sampler, "replacement", False) or getattr(sampler, "_num_samples", None):
        errors.append(f"its samples are chosen by a {type(sampler).__name__}")
    if errors:
        raise ValueError(
            f"this DataLoader cannot be sharded, since {errors[0]}: give one with shuffle=True or False and a "
            "batch_size, or the data set itself"
        )
    names = (
        *WORKER_SETTINGS,
        "worker_init_fn",
        "in_order",
        "dataset",
        "batch_size",
        "drop_last",
        "collate_fn",
    )
    settings = {name: getattr(source, name) for name in names}
    return {**settings, "shuffle": isinstance(sampler, RandomSampler)}
