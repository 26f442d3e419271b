"""Order of a loader's batches: recorded when it is drawn, and reproduced after a rollback.

Only for a ``DataLoader`` with torch's own iterator over a map-style dataset: its sampler yields the
indices of a batch before anything is loaded, so skipping a batch costs no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from trainer_hooks.stateful import HasStateDict
from trainer_hooks.tensors.rng import capture_rng, restore_rng

Opening = dict[str, Any]
"""Random state from which an epoch's order was drawn, as plain values and tensors."""


def is_seekable(loader: object) -> bool:
    """Return whether the sample indices of a loader's batch are known before it is loaded."""
    return (
        isinstance(loader, DataLoader)
        # The iterator of a subclass could merge or drop batches, so indices would not match.
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
        and not isinstance(loader.dataset, IterableDataset)
    )


def is_checkpointable(value: object) -> bool:
    """Return whether a checkpoint can store a loader's state; its reader only loads plain types."""
    if isinstance(value, dict):
        return all(map(is_checkpointable, value)) and all(map(is_checkpointable, value.values()))
    if type(value) in (list, tuple, set):
        return all(map(is_checkpointable, value))  # type: ignore[call-overload]
    return value is None or type(value) in (bool, int, float, str, bytes, torch.Tensor)


def sampler_with_state(loader: DataLoader[Any]) -> HasStateDict | None:
    """Return the loader's batch sampler or sampler, if it has a ``state_dict``."""
    both: tuple[object, object] = (loader.batch_sampler, loader.sampler)
    return next((sampler for sampler in both if isinstance(sampler, HasStateDict)), None)


def sampler_epoch(loader: object) -> int | None:
    """Return the epoch that was last set in the loader's sampler, or None."""
    samplers = (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    epochs = (getattr(sampler, "epoch", None) for sampler in samplers)
    return next((epoch for epoch in epochs if type(epoch) is int), None)


def sampler_seed_and_epoch(loader: object) -> tuple[int, int]:
    """Return the seed and epoch with which a ``DistributedSampler`` splits the data among ranks.

    They must be equal on all ranks; otherwise some samples are trained twice, and others never.
    (-1, -1) for other samplers: their seed may differ on purpose.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.shuffle:
            return int(sampler.seed), int(sampler.epoch)
    return -1, -1


def comes_in_order(loader: DataLoader[Any]) -> bool:
    """Return whether a DataLoader yields batches in its sampler's order."""
    return loader.in_order or not loader.num_workers


def capture_epoch_rng(loader: Iterable[Any]) -> Opening:
    """Return the random state from which the next epoch draws; call before ``iter(loader)``."""
    rng = capture_rng()
    rng.pop("cuda", None)  # samplers draw on the CPU
    is_persistent = isinstance(loader, DataLoader) and loader.persistent_workers
    return {
        "rng": rng,
        "own": generator_states(loader),
        # Persistent workers are seeded once; in later epochs their iterator is only reset.
        "fresh": not (is_persistent and loader._iterator is not None),  # type: ignore[attr-defined]
    }


def generator_states(loader: Iterable[Any]) -> list[torch.Tensor]:
    """Return the states of the generators of the loader and its samplers."""
    return [generator.get_state() for generator in _loader_generators(loader)]


def restore_generator_states(loader: Iterable[Any], states: list[torch.Tensor]) -> None:
    """Restore the states that ``generator_states`` returned for the same kind of loader."""
    for generator, state in zip(_loader_generators(loader), states, strict=False):
        generator.set_state(state)


def _loader_generators(loader: Iterable[Any]) -> list[torch.Generator]:
    """Return the random generators of a data loader and its samplers, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, inner)
    generators = (getattr(holder, "generator", None) for holder in holders)
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


class PlannedBatch(NamedTuple):
    """Batch that was drawn, but not loaded yet."""

    number: int
    """Index in the epoch."""
    indices: tuple[Any, ...]
    """Indices of its samples in the dataset."""
    sampler_state: dict[str, Any] | None
    """State of the sampler after it drew this batch; None if the sampler has no ``state_dict``."""


class RecordingSampler:
    """Replaces a loader's sampler while its iterator is created; skips and records batches.

    ``planned`` holds batches that were drawn and are not loaded yet: as many as the loader
    prefetches.
    """

    def __init__(self, loader: DataLoader[Any], is_skipped: Callable[[int], bool]) -> None:
        self._key = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler: Any = loader.__dict__[self._key]
        self._is_skipped = is_skipped
        self._source: Iterator[Any] | None = None
        self._reopened = False
        self._stateful = sampler_with_state(loader)
        self.planned: deque[PlannedBatch] = deque()
        self.num_drawn = 0
        """Batches of the epoch drawn so far, including skipped ones."""

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Return the loader's iterator, which draws its batches from this object."""
        persistent_iterator = loader._iterator if loader.persistent_workers else None
        with _replace_attribute(loader, self._key, self):
            if persistent_iterator is not None:
                persistent_iterator._index_sampler = self
            iterator = iter(loader)
        iterator._index_sampler = self._sampler
        return iterator

    def reopen(
        self,
        loader: DataLoader[Any],
        opening: Opening,
        num_drawn: int,
        sampler_state: dict[str, Any] | None,
    ) -> Iterator[Any]:
        """Return an iterator over the rest of an epoch, in its original order.

        Workers get their original seeds. The RNG state of the process is unchanged; the loader's
        own generators continue from their state after ``num_drawn`` batches.
        """
        now = capture_rng()
        try:
            restore_rng(opening["rng"])
            restore_generator_states(loader, opening["own"])
            self._redraw(loader, opening, num_drawn, sampler_state)
        finally:
            restore_rng(now)
        seeds = torch.Generator()
        seeds.set_state(opening["rng"]["torch"] if loader.generator is None else opening["own"][0])
        with _replace_attribute(loader, "generator", seeds):
            return self.open(loader)

    def _redraw(
        self,
        loader: DataLoader[Any],
        opening: Opening,
        num_drawn: int,
        sampler_state: dict[str, Any] | None,
    ) -> None:
        """Draw the first batches again, with torch's own order of generator calls."""
        if sampler_state is not None and self._stateful is not None:
            self._stateful.load_state_dict(deepcopy(sampler_state))
            self._source = iter(self._sampler)
        else:
            self._source = iter(self._sampler)
            if opening["fresh"]:
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
                if loader.num_workers:
                    self._source = iter(self._sampler)
            for _ in range(num_drawn):
                next(self._source, None)
        self.num_drawn, self._reopened = num_drawn, True

    def close(self) -> None:
        """Stop skipping: persistent workers keep the loader alive, and it keeps this object."""
        self._is_skipped = lambda _: False

    def __len__(self) -> int:
        assert isinstance(self._sampler, Sized), "asked of a loader with a length only"
        return len(self._sampler)

    def __iter__(self) -> RecordingSampler:
        if not self._reopened:  # torch calls iter() twice if there are workers
            self._source = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        assert self._source is not None, "the loader iterates it first"
        while True:
            indices = next(self._source)
            index, self.num_drawn = self.num_drawn, self.num_drawn + 1
            if not self._is_skipped(index):
                break
        ids = tuple(indices) if isinstance(indices, list | tuple) else (indices,)
        state = None if self._stateful is None else deepcopy(self._stateful.state_dict())
        self.planned.append(PlannedBatch(index, ids, state))
        return indices


@contextmanager
def _replace_attribute(loader: DataLoader[Any], key: str, stand_in: object) -> Iterator[None]:
    """Replace an attribute temporarily; ``DataLoader.__setattr__`` refuses an assignment."""
    attribute = loader.__dict__[key]
    loader.__dict__[key] = stand_in
    try:
        yield
    finally:
        loader.__dict__[key] = attribute
