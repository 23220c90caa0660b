"""A data set dealt out over the data axis, with equal batches on all ranks of a replica, and the place in it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from .batches import BatchDataset, Dealt, Draw, WorkerStart, derived_seed, unchanged
from .dataloader_faults import argument_faults, dataset_faults
from .foreign_sampler import ForeignSampler
from .given_sampler import GivenSampler
from .sampler import ResumableSampler


def shared_loader(
    dataset: Dataset,
    batch_size: int,
    *,
    rank: int,
    size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    collate_fn: Callable,
    sampler_class: type[DistributedSampler] | None = None,
    **kwargs: Any,
) -> "SharedLoader":
    """A dataloader of one rank's share of a data set. Whatever it draws follows from the seed and the place of a batch.

    Args:
        dataset: a map-style dataset.
        batch_size: samples of this rank in a batch.
        rank, size: of the data axis.
        shuffle: in an order that depends on `seed` and on the epoch.
        drop_last: leave out samples that do not fill a batch on every rank.
        sampler_class: in the place of ResumableSampler, called as torch's DistributedSampler is.
        kwargs: further arguments for the DataLoader.

    Raises:
        ValueError: something cannot be dealt out; all faults are told.
    """
    if faults := [*dataset_faults(dataset), *argument_faults(batch_size, kwargs)]:
        raise ValueError("\n".join(faults))
    sampler = (sampler_class or ResumableSampler)(
        dataset, num_replicas=size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    dealer = (
        sampler
        if isinstance(sampler, ResumableSampler)
        else ForeignSampler(sampler, seed=seed, rank=rank, drop_last=drop_last)
    )
    return SharedLoader(
        dataset,
        dealer=dealer,
        seed=(seed, rank),
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        collate_fn=collate_fn,
        **kwargs,
    )


class SharedLoader(DataLoader[Any]):
    """A DataLoader that knows how much of the data was taken from it, by all replicas together.

    Its length is that of a whole epoch. `iter` of it has the length of what that pass gives, which is less where the
    pass goes on within an epoch.

    Args:
        dealer: begins passes over the samples of `sampler`.
        seed: what worker processes are seeded from, besides the epoch.
        settings: of the DataLoader.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        dealer: ResumableSampler | ForeignSampler | GivenSampler,
        seed: tuple[int, ...],
        batch_size: int,
        sampler: Sampler[int],
        **settings: Any,
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **settings)
        self.dealer = dealer
        self.num_passes = 0
        self._num_samples = batch_size
        self._seed = seed
        self._current = _Current()
        self._maker: DataLoader[Any] | None = None

    def __iter__(self) -> "Pass":  # type: ignore[override]
        """Begin a pass; see `ResumableSampler` for its epoch and where in it."""
        dealt = self.dealer.begin(self._num_samples)
        self.num_passes += 1
        if self._maker is None or not self.persistent_workers:
            self._maker = self._new_maker(dealt.epoch)
        return Pass(self, dealt, self._maker, self._current)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data: what the training loop has taken, not what workers hold ready.

        Returns:
            "epoch", "samples" of it that all replicas have taken, and "seed", "size" and "shuffle" of the data, equal
            on all ranks. After a whole epoch "samples" is "size". With a sampler class of the user's instead: its
            "sampler" state, "epoch" and "batches".

        Raises:
            ValueError: a sampler class of the user's has no state.
        """
        return self.dealer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where another run stood, and the one after it be a whole next epoch.

        The run may have had another number of replicas or another batch size.

        Raises:
            ValueError: the position is one in other data or another order; all faults are told.
        """
        self.dealer.load_state_dict(state)

    def _new_maker(self, epoch: int) -> DataLoader[Any]:
        """The DataLoader that makes batches of draws, here or in workers."""
        return DataLoader(
            BatchDataset(self.dataset, self.collate_fn),
            batch_size=None,
            sampler=self._current,
            collate_fn=unchanged,
            worker_init_fn=WorkerStart(self.worker_init_fn),
            # Of what a data set or `worker_init_fn` keeps generators for; a batch's own numbers follow from its draw.
            generator=torch.Generator().manual_seed(derived_seed(*self._seed, epoch)),
            **{name: getattr(self, name) for name in WORKER_SETTINGS},
        )


WORKER_SETTINGS = (
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class _Current:
    """The draws of the pass that began last: what torch's DataLoader takes for its sampler."""

    def __init__(self) -> None:
        self.draws: Iterator[Draw] = iter(())

    def __iter__(self) -> Iterator[Draw]:
        return self.draws


class Pass(Iterator[Any]):
    """The batches from where a pass begins to the end of its epoch. Its loader's position follows what is taken.

    Its length is the number of batches that it gives from its beginning.
    """

    def __init__(self, loader: SharedLoader, dealt: Dealt, maker: DataLoader[Any], current: _Current) -> None:
        self._loader = loader
        self._number = loader.num_passes
        self._num_batches = dealt.num_batches
        self._positions: dict[int, Any] = {}  # after each batch that was drawn and not yet taken
        current.draws = _noted(dealt.draws, self._positions)
        self._batches = iter(maker)

    def __next__(self) -> Any:
        if self._loader.persistent_workers and self._number != self._loader.num_passes:
            raise RuntimeError(
                "a later pass over this dataloader has begun, and with persistent_workers=True it took the workers "
                "of this one: finish one pass before the next, or leave out persistent_workers"
            )
        number, batch = next(self._batches)
        self._loader.dealer.reached(self._positions.pop(number))
        return batch

    def __len__(self) -> int:
        return len(self._loader) if self._num_batches is None else self._num_batches


# Not a method: a generator that held its pass would keep abandoned workers alive until the garbage is collected.
def _noted(draws: Iterator[tuple[Draw, Any]], positions: dict[int, Any]) -> Iterator[Draw]:
    """The draws, the position after each written down."""
    for draw, position in draws:
        positions[draw.number] = position
        yield draw
