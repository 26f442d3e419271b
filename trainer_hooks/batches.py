"""Batches with a position: times the wait, owns epochs, and moves past a poisoned window."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainvitals.clock import Clock


class Rng(NamedTuple):
    """What an epoch's order was drawn from."""

    state: torch.Tensor
    own: torch.Tensor | None
    """State of the loader's own generator, where it has one."""
    seeds_workers: bool
    """Whether the iterator draws its workers' base seed before the sampler draws its order."""


class Position(NamedTuple):
    """A batch: its epoch and its index there, both from 0."""

    epoch: int
    batch: int


class Batches:
    """Iterates ``loader`` for ``epochs`` epochs and can be told to go on elsewhere.

    Over a map-style ``DataLoader`` a move is by index: nothing that is passed over is loaded, and
    the epoch keeps the order it was drawn in, whatever the random state has become since. Over any
    other iterable the passed batches are drawn and dropped, and only forward within an epoch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        epochs: int,
        clock: Clock,
        waited: Callable[[int], None],
        start: Position,
    ) -> None:
        self._loader = loader
        self._epochs = epochs
        self._clock = clock
        self._waited = waited
        self._go_to: Position | None = start
        self._samples: int | None = 0
        self._rng_at_open: OrderedDict[int, Rng] = OrderedDict()
        self.position: Position | None = None
        """The batch that was last handed out."""
        self.ended = False
        """Whether nobody iterates any more."""

    @property
    def seekable(self) -> bool:
        """Whether a move costs no loading."""
        loader = self._loader
        return (
            type(loader) is DataLoader  # what a subclass adds would be lost in the rest of an epoch
            and not isinstance(loader.dataset, IterableDataset)
            and loader.batch_sampler is not None
        )

    def move_to(self, target: Position) -> Position:
        """Go on at ``target`` after this batch; an index past the epoch goes on in the next."""
        try:
            length = len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            length = 0
        while length and target.batch >= length:
            target = Position(target.epoch + 1, target.batch - length)
        self._go_to = target
        return target

    def take_samples(self) -> int | None:
        """Return the samples of the batches handed out since the last call; None if not known."""
        taken, self._samples = self._samples, 0
        return taken

    def __iter__(self) -> Iterator[Any]:
        """Yield batches; after each, look whether a move was asked for."""
        try:
            while self._go_to is not None and self._go_to.epoch < self._epochs:
                (epoch, start), self._go_to = self._go_to, None
                yield from self._epoch(epoch, start)
                if self._go_to is None:
                    self._go_to = Position(epoch + 1, 0)
        finally:
            self.ended = True

    def _epoch(self, epoch: int, start: int) -> Iterator[Any]:
        source = self._open(epoch, start)
        total = _num_samples(self._loader)
        for index in range(start, 2**62):
            begin = self._clock.monotonic_ns()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._waited(self._clock.monotonic_ns() - begin)
            self.position = Position(epoch, index)
            self._count(total, index)
            yield batch
            if self._go_to is not None:
                return

    def _count(self, total: int | None, index: int) -> None:
        """Add the batch to the samples handed out; the last one of an epoch may be smaller."""
        if total is None or self._samples is None:
            self._samples = None
        else:
            size: int = self._loader.batch_size  # type: ignore[attr-defined]
            self._samples += min(size, total - index * size)

    def _open(self, epoch: int, start: int) -> Iterator[Any]:
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return islice(iter(loader), start, None)
        set_epoch = getattr(loader.sampler, "set_epoch", None)
        if set_epoch is not None and self._epochs > 1:  # else the loop has its own epochs
            set_epoch(epoch)
        drawn = epoch in self._rng_at_open
        if not drawn:
            self._rng_at_open[epoch] = _rng(loader)
            while len(self._rng_at_open) > 8:
                self._rng_at_open.popitem(last=False)
        if not start and not drawn:
            return iter(loader)
        if not self.seekable:
            return islice(iter(loader), start, None)
        return iter(_rest_of(loader, self._rng_at_open[epoch], start))


def _num_samples(loader: Iterable[Any]) -> int | None:
    """Return the samples of one epoch, where a plain DataLoader knows them by its sampler."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_size is None:
        return None
    try:
        return len(loader.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _rng(loader: DataLoader[Any]) -> Rng:
    own = [
        g for g in (loader.generator, getattr(loader.sampler, "generator", None)) if g is not None
    ]
    # Persistent workers are seeded once: from the second epoch on their iterator is only reset.
    kept = loader.persistent_workers and loader._iterator is not None
    return Rng(torch.get_rng_state(), own[0].get_state() if own else None, not kept)


def _rest_of(loader: DataLoader[Any], rng: Rng, start: int) -> DataLoader[Any]:
    """Return a loader over the epoch's remaining indices, in the order first drawn."""
    generator = loader.generator or getattr(loader.sampler, "generator", None)
    now, own_now = torch.get_rng_state(), generator.get_state() if generator else None
    try:
        torch.set_rng_state(rng.state)
        if generator is not None and rng.own is not None:
            generator.set_state(rng.own)
        if rng.seeds_workers:
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=loader.generator)
        rest = list(islice(iter(loader.batch_sampler), start, None))  # type: ignore[arg-type]
    finally:
        torch.set_rng_state(now)
        if generator is not None and own_now is not None:
            generator.set_state(own_now)
    return DataLoader(
        loader.dataset,
        batch_sampler=rest,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
