"""A DataLoader of the user's, dealt out over the data axis by `boost`."""

import copy
import logging
import zlib
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from .dataloader import WORKER_SETTINGS, SharedLoader
from .dataloader_faults import loader_faults
from .equal_settings import require_equal_settings
from .given_sampler import GivenSampler
from .streams import Streams

_LOG = logging.getLogger("echelon")
_LEAVE = "leave it out of boost if it gives each replica its own samples, or build it with plugin.prepare_dataloader"
_MOST_COMPARED = 4096


def sharded_loader(loader: Any, *, rank: int, size: int) -> Any:
    """A loader that gives this replica its share of a plain DataLoader's samples, or the loader where there is no need.

    `batch_size` is that of each replica. All ranks draw the order from the generators of rank 0 as they are now, which
    draws of training do not move; one process alone draws from the global ones, as a plain loop does.

    Collective over the world.

    Args:
        loader: a plain DataLoader; or None, one of `shared_loader` or with a DistributedSampler, which are left as
            they are; and so is, for one replica, what cannot be dealt out.
        rank, size: of the data axis.

    Raises:
        ValueError: it cannot be dealt out, or differs between ranks; on every rank.
    """
    faults = [] if _is_sharded(loader) else loader_faults(loader)
    is_left = _is_sharded(loader) or (size == 1 and bool(faults))
    _require_equal({"kind": type(loader).__name__, "is sharded": is_left, "why not": "; ".join(faults)})
    if is_left:
        return loader
    if faults:
        raise ValueError(f"boost cannot shard the dataloader: {faults[0]}; {_LEAVE}")
    streams = Streams(_generators(loader), apart=dist.get_world_size() > 1)
    seed = _follow_first_rank(streams)
    if dist.get_world_size() > 1:
        _require_equal(_description(loader, streams))
    if size > 1 and dist.get_rank() == 0:
        _LOG.warning(
            "boost shards the dataloader over %d replicas: batch_size=%d is that of each, %d samples a step",
            size,
            loader.batch_sampler.batch_size,
            loader.batch_sampler.batch_size * size,
        )
    return dealt_out(loader, streams, seed=seed, rank=rank, size=size)


def dealt_out(loader: DataLoader, streams: Streams, *, seed: int, rank: int, size: int) -> SharedLoader:
    """One rank's share of a DataLoader without faults.

    Args:
        streams: that its sampler draws from, equal on all ranks.
        seed: for what a dataset or `worker_init_fn` keeps generators for.
        rank, size: of the data axis.
    """
    batches = loader.batch_sampler
    assert isinstance(batches, BatchSampler)
    sampler = GivenSampler(
        batches.sampler,  # type: ignore[arg-type]
        size=len(loader.dataset),  # type: ignore[arg-type]
        streams=streams,
        generator=loader.generator,
        num_replicas=size,
        rank=rank,
        drop_last=batches.drop_last,
        workers_last=loader.persistent_workers,
    )
    return SharedLoader(
        loader.dataset,
        dealer=sampler,
        seed=(seed, rank),
        batch_size=batches.batch_size,
        sampler=sampler,
        drop_last=batches.drop_last,
        collate_fn=loader.collate_fn,
        generator=loader.generator,
        worker_init_fn=loader.worker_init_fn,
        **{name: getattr(loader, name) for name in WORKER_SETTINGS},
    )


def _is_sharded(loader: Any) -> bool:
    """Whether there is nothing to deal out: no loader, or one that gives each replica its own samples."""
    if loader is None or isinstance(loader, SharedLoader):
        return True
    if not isinstance(loader, DataLoader):
        return False
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    # Of Hugging Face's streams, those of split_dataset_by_node know their rank.
    is_split = getattr(loader.dataset, "_distributed", None) is not None
    return is_split or any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _generators(loader: DataLoader) -> list[torch.Generator]:
    """Those that were given to the loader or its sampler, each once."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    given = (loader.generator, getattr(sampler, "generator", None))
    return [*dict.fromkeys(each for each in given if isinstance(each, torch.Generator))]


def _follow_first_rank(streams: Streams) -> int:
    """Let the streams stand where those of rank 0 do; returns a seed that is equal on all ranks. One broadcast."""
    found: list[Any] = [(streams.state_dict(), torch.initial_seed() % 2**63)]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(found)
    state, seed = found[0]
    streams.load_state_dict(state)
    return int(seed)


def _description(loader: DataLoader, streams: Streams) -> dict[str, Any]:
    """What must be equal on all ranks, so that replicas can share it."""
    dataset, batches = loader.dataset, loader.batch_sampler
    assert isinstance(batches, BatchSampler)
    told = f"a {type(dataset).__name__} of {len(dataset)}"  # type: ignore[arg-type]
    if isinstance(dataset, Subset):
        told += f" from {_shown(dataset.indices)}"
    if (fingerprint := getattr(dataset, "_fingerprint", None)) is not None:  # of Hugging Face's data sets
        told += f", fingerprint {fingerprint}"
    return {
        "dataset": told,
        "batch_size": batches.batch_size,
        "drop_last": batches.drop_last,
        "sampler": f"a {type(batches.sampler).__name__} of {_shown(_first_samples(loader, streams))}",
    }


def _first_samples(loader: DataLoader, streams: Streams) -> list[Any]:
    """The beginning of the order, from a copy of the sampler, which may be one that shards by itself."""
    state = streams.state_dict()
    given: Any = loader.batch_sampler.sampler  # type: ignore[union-attr]
    try:
        sampler = copy.deepcopy(given, {id(loader.dataset): loader.dataset})
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"boost cannot shard the dataloader: its sampler, a {type(given).__name__}, cannot be copied to compare "
            f"its order between ranks ({error}); {_LEAVE}"
        ) from error
    try:
        with streams.drawing():
            return [*islice(sampler, _MOST_COMPARED)]
    finally:
        streams.load_state_dict(state)


def _shown(samples: Any) -> str:
    first = [*islice(samples, 4)]
    return f"{', '.join(map(str, first))}, … ({zlib.crc32(repr([*samples]).encode()):08x})"


def _require_equal(settings: dict[str, Any]) -> None:
    try:
        require_equal_settings(settings, of="the dataloader")
    except ValueError as error:
        raise ValueError(f"{error}; {_LEAVE}") from None
