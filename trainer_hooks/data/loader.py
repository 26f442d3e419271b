"""Iterates a loader with a known position: measures the wait, skips windows, and can replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from torch.utils.data import DataLoader, IterableDataset

from trainer_hooks.data.order import (
    Opening,
    RecordingSampler,
    capture_epoch_rng,
    comes_in_order,
    generator_states,
    is_checkpointable,
    is_seekable,
    restore_generator_states,
    sampler_epoch,
    sampler_seed_and_epoch,
    sampler_with_state,
)
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.stateful import HasStateDict
from trainer_hooks.tensors.rng import capture_now, capture_rng, restore_rng
from trainvitals.clock import Clock
from trainvitals.policy.plan import BatchWindow
from trainvitals.units import humanize_count

MAX_WINDOWS = 1000
"""Oldest windows are dropped first. At most ten rollbacks per run add one or two windows each."""


def is_in_windows(windows: Iterable[BatchWindow], epoch: int, batch: int) -> bool:
    """Return whether one of the windows that the loader skips contains the batch."""
    return any(
        w.epoch == epoch and w.first_batch <= batch < w.first_batch + w.num_batches for w in windows
    )


def carry_over(windows: Iterable[BatchWindow], epoch: int, length: int) -> list[BatchWindow]:
    """Move the parts of skipped windows behind the end of a loader's epoch to the next epoch."""
    carried: list[BatchWindow] = []
    for window in windows:
        end = window.first_batch + window.num_batches
        if window.epoch != epoch or end <= length:
            carried.append(window)
            continue
        inside = max(0, length - window.first_batch)
        if inside:
            carried.append(replace(window, num_batches=inside))
        first = max(0, window.first_batch - length)
        rest = window.num_batches - inside
        carried.append(replace(window, epoch=epoch + 1, first_batch=first, num_batches=rest))
    return carried


def convert_window(window: BatchWindow, num_ranks: int) -> BatchWindow:
    """Convert a window of batches to another number of ranks, rounded outward to cover no less."""
    if window.num_ranks in (0, num_ranks):
        return window
    first = window.first_batch * window.num_ranks // num_ranks
    end = -(-(window.first_batch + window.num_batches) * window.num_ranks // num_ranks)
    return replace(window, first_batch=first, num_batches=end - first, num_ranks=num_ranks)


# ------------------------------------------------------------------------------ batches


DataState = dict[str, Any]
"""Position of a loop in its data, as plain values and tensors; see ``Batches.state_dict``."""

_Found = tuple[int, tuple[Any, ...] | None, Any]
"""Index of a batch in the epoch, indices of its samples if known, and the batch."""


class BatchIndex(NamedTuple):
    """Epoch and index of a batch, both from 0."""

    epoch: int
    batch: int


class BatchPosition(NamedTuple):
    """Last batch of a step, and the number of batches in the step."""

    epoch: int
    batch: int
    num_batches: int


class LoadedBatch(NamedTuple):
    """Batch that was yielded to the loop."""

    position: BatchIndex
    indices: tuple[Any, ...] | None
    """Indices of its samples in the dataset; None if the loader's sampler does not provide them."""
    content: Any
    """The batch itself if ``keeps_content``; otherwise None, since accumulation would keep them
    all."""
    num_samples: int | None
    rng: dict[str, Any] | None = None
    """RNG state when it was yielded; None unless ``keeps_rng``."""


class Batches:
    """Iterates ``loader`` for ``epochs`` epochs; can skip windows of batches, and be rewound.

    A map-style ``DataLoader`` is addressed by index: skipped batches are not loaded, and a replayed
    epoch keeps its original order whatever the RNG state is now. A loader with ``state_dict`` is
    replayed with it; skipped batches are loaded and dropped. Other iterables load and drop, and
    cannot be replayed.

    With more than one epoch, ``set_epoch`` of the sampler is called. ``waits`` is called before
    each wait, ``waited`` after it with nanoseconds. ``seen`` gets each batch before it is yielded,
    and may modify it; ``handed_out`` is called just before. ``state`` is a position of an equal
    loader, to continue from. ``loop`` counts the run's loops over data from 0. ``can_rewind`` keeps
    the initial state for ``rewind``.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        epochs: int,
        clock: Clock,
        waited: Callable[[int], None],
        waits: Callable[[], None] = lambda: None,
        windows: Iterable[BatchWindow] = (),
        state: DataState | None = None,
        loop: int = 0,
        num_ranks: int = 1,
        can_rewind: bool = False,
        faults: FaultCounter | None = None,
        keeps_content: bool = False,
        keeps_rng: bool = False,
        seen: Callable[[Any], None] | None = None,
        handed_out: Callable[[LoadedBatch], None] | None = None,
    ) -> None:
        self._loader = loader
        self._epochs = epochs
        self._clock = clock
        self._waited = waited
        self._waits = waits
        self.loop = loop
        self._num_ranks = num_ranks
        self._faults = faults or FaultCounter()
        self._keeps_content = keeps_content
        self._keeps_rng = keeps_rng
        self._seen = seen
        self._handed_out = handed_out
        self._total = _num_samples(loader)
        self._length = _loader_length(loader)
        self._num_seen = 0
        """Batches of the epoch so far, including skipped ones."""
        self._opening: Opening | None = None
        self._sampler_state: dict[str, Any] | None = None
        self.next_position = BatchIndex(0, 0)
        """The next batch, before windows are applied."""
        self._rewound_to: DataState | None = None
        self._initial_state = state
        self.resumes = state is not None
        """Whether it continues from the position of an earlier process."""
        self._keeps_initial_state = can_rewind
        self.windows: list[BatchWindow] = []
        saved_windows = () if state is None else state["windows"]
        for window in (*(BatchWindow(*saved) for saved in saved_windows), *windows):
            self.skip(window)
        self.position: BatchIndex | None = None
        """Batch that was yielded last; None before the first."""
        self.ended = False
        """Whether the iteration has ended."""
        self.shares_steps = False
        """Whether an outer loop feeds the same steps; it would not be rewound with this one."""
        if state is not None:
            self._rewind_to_state(state)

    # ------------------------------------------------------------------------------- position

    @property
    def epochs(self) -> tuple[int | None, int]:
        """Return the loader's batches per epoch (None if unknown), and the number of epochs."""
        return self._length, self._epochs

    @property
    def sampler_seed_and_epoch(self) -> tuple[int, int]:
        """Return seed and epoch of the loader's ``DistributedSampler``; (-1, -1) for others."""
        return sampler_seed_and_epoch(self._loader)

    def move_to(self, target: BatchIndex) -> BatchIndex:
        """Continue the loader at ``target``, at or behind its position; carry to the next epoch."""
        while self._length and target.batch >= self._length:
            target = BatchIndex(target.epoch + 1, target.batch - self._length)
        self.next_position = max(self.next_position, target)
        return target

    def skip(self, window: BatchWindow) -> list[BatchWindow]:
        """Let the loader skip these batches from now on; return the window's part in each epoch."""
        parts = [window]
        if self._length:
            while parts[-1].first_batch + parts[-1].num_batches > self._length:
                parts[-1:] = carry_over(parts[-1:], parts[-1].epoch, self._length)
        self.windows += [part for part in parts if part not in self.windows]
        del self.windows[:-MAX_WINDOWS]
        return parts

    def why_not_exact(self, state: DataState | None) -> str:
        """Return why the loader cannot resume exactly from ``state``; empty if it can."""
        loader, saved_state = self._loader, state or self._initial_state
        if saved_state is None:
            return "the checkpoint holds no position"
        if saved_state["loop"] != self.loop:
            return "the checkpoint belongs to another loop over data"
        if self.shares_steps or saved_state.get("beside"):
            return "another loop over data feeds the same steps"
        if self._epochs == 1 and saved_state.get("sampler_epoch") != sampler_epoch(loader):
            was, now = saved_state.get("sampler_epoch"), sampler_epoch(loader)
            return f"the sampler was at epoch {was}, and is set to {now}"
        if saved_state["num_ranks"] != self._num_ranks:
            ranks = humanize_count(saved_state["num_ranks"], "rank")
            return f"the data was shared by {ranks}, now by {self._num_ranks}"
        if saved_state["length"] != self._length:
            batches = humanize_count(saved_state["length"], "batch", "batches")
            return f"the loader had {batches}, now it has {self._length}"
        if isinstance(loader, DataLoader) and is_seekable(loader):
            if saved_state["opening"] is None and sampler_with_state(loader) is not None:
                return "the sampler's state before its first batch cannot be resumed from"
            return (
                "" if comes_in_order(loader) else "workers return batches in any order (in_order)"
            )
        if isinstance(loader, Sequence):
            return ""
        if not isinstance(loader, HasStateDict):
            return "the loader has no state_dict"
        if saved_state["loader"] is None:
            return "the loader's state_dict could not be kept as plain values and tensors"
        return ""

    def rewind(self, state: DataState | None) -> str:
        """Rewind to ``state`` to yield the same batches again; None is the initial state.

        Windows stay skipped. If an exact replay is impossible, do nothing and return the reason;
        otherwise return "".
        """
        reason = self.why_not_exact(state)
        saved_state = state or self._initial_state
        if not reason and saved_state is not None:
            self._rewind_to_state(saved_state)
        return reason

    def _rewind_to_state(self, state: DataState) -> None:
        """Continue the data loader at a saved position, converted to this number of ranks."""
        # With another number of ranks, each rank has a share of another size.
        batch = -(-state["batch"] * state["num_ranks"] // self._num_ranks)
        self.next_position, self._rewound_to = BatchIndex(state["epoch"], batch), state

    def state_dict(self) -> DataState | None:
        """Return the loader's position as plain values and tensors; at first, the initial state.

        The state of the loader itself is omitted if a checkpoint cannot store it.
        """
        if self.position is None:
            return self._initial_state
        last = self.position
        return self._build_data_state(last.epoch, last.batch + 1) | {"opening": self._opening}

    def _build_data_state(self, epoch: int, batch: int) -> DataState:
        """Return the loader's position as plain values, for a checkpoint."""
        state: DataState = {
            "loop": self.loop,
            "num_ranks": self._num_ranks,
            "length": self._length,
            "epoch": epoch,
            "batch": batch,
            "beside": self.shares_steps,
            "sampler_epoch": sampler_epoch(self._loader),
            "opening": None,
            "own": generator_states(self._loader),
            "windows": [list(msgspec.structs.astuple(window)) for window in self.windows],
            "sampler": self._sampler_state if is_checkpointable(self._sampler_state) else None,
            "loader": None,
        }
        loader = self._loader
        if isinstance(loader, HasStateDict) and not is_seekable(loader):
            with self._faults.fail_open("data.state_dict"):
                loader_state = deepcopy(loader.state_dict())
                state["loader"] = loader_state if is_checkpointable(loader_state) else None
        return state

    # ---------------------------------------------------------------------------------- iterating

    def __iter__(self) -> Iterator[Any]:
        """Yield batches; after each one, check whether the position was changed by a rollback."""
        epoch, seekable = self.next_position.epoch, is_seekable(self._loader)
        try:
            while epoch < self._epochs:
                yield from self._iterate_epoch(epoch)
                # Each epoch draws from the RNG state that the previous one left, so none may be
                # left out.
                by_one = seekable and self._rewound_to is None
                epoch = epoch + 1 if by_one else self.next_position.epoch
        finally:
            self.ended = True

    def _iterate_epoch(self, epoch: int) -> Iterator[Any]:
        """Yield an epoch's batches, except skipped ones; record each position."""
        seekable = is_seekable(self._loader)
        self._waits()
        begin = self._clock.monotonic_ns()
        for index, indices, batch in self._open_epoch(epoch):
            if self._is_skipped(epoch, index):
                continue
            self._waited(self._clock.monotonic_ns() - begin)
            self.position = BatchIndex(epoch, index)
            self.next_position = BatchIndex(epoch, index + 1)
            content = batch if self._keeps_content else None
            if self._seen is not None:
                self._seen(batch)
            if self._handed_out is not None:
                rng = self._capture_rng() if self._keeps_rng else None
                num_samples = self._size_of(index, indices)
                self._handed_out(LoadedBatch(self.position, indices, content, num_samples, rng))
            yield batch
            # Draw the sampler to its end: the next epoch starts from the RNG state behind it.
            if self._rewound_to is not None or (self.next_position.epoch > epoch and not seekable):
                return
            self._waits()
            begin = self._clock.monotonic_ns()
        self._finish_epoch(epoch)

    def _capture_rng(self) -> dict[str, Any] | None:
        """Return the RNG state at which the loader yields a batch, for a repro capsule."""
        with self._faults.fail_open("capsule.rng"):
            return capture_now()
        return None

    def _finish_epoch(self, epoch: int) -> None:
        """Continue the loader in the next epoch; move the rest of windows and position there."""
        self.windows = carry_over(self.windows, epoch, self._num_seen)
        if self.next_position.epoch == epoch:
            self.next_position = BatchIndex(
                epoch + 1, max(0, self.next_position.batch - self._num_seen)
            )

    def _is_skipped(self, epoch: int, index: int) -> bool:
        """Return whether the loader skips a batch: before the position, or in a window."""
        return BatchIndex(epoch, index) < self.next_position or is_in_windows(
            self.windows, epoch, index
        )

    def _size_of(self, index: int, indices: tuple[Any, ...] | None) -> int | None:
        """Return a loader's batch size, None if unknown; an epoch's last one may be smaller."""
        if indices is not None:
            return len(indices)
        if self._total is None:
            return None
        size: int = self._loader.batch_size  # type: ignore[attr-defined]
        return min(size, self._total - index * size)

    # ------------------------------------------------------------------------------------ opening

    def _open_epoch(self, epoch: int) -> Iterator[_Found]:
        """Open the loader's epoch: return its batches with indices; the caller skips windows."""
        state, self._rewound_to = self._rewound_to, None
        self._set_epoch(epoch)
        if state is not None and state["opening"] is None:
            self._restart_from(state)
        elif state is not None:
            self._opening = state["opening"]
            return self._reopen(state)
        self._opening = capture_epoch_rng(self._loader)
        if begins := self._keeps_initial_state and self._initial_state is None:
            self._initial_state = self._build_data_state(epoch, self.next_position.batch) | {
                "first": self._opening
            }
        if isinstance(self._loader, DataLoader) and is_seekable(self._loader):
            draws = RecordingSampler(self._loader, lambda index: self._is_skipped(epoch, index))
            return self._pair_with_draws(draws.open(self._loader), draws)
        iterator = iter(self._loader)
        if state is not None:
            restore_generator_states(self._loader, state["own"])
        elif begins and self._initial_state is not None:
            self._initial_state["own"] = generator_states(self._loader)
        return self._count_batches(iterator, 0)

    def _count_batches(self, iterator: Iterator[Any], start: int) -> Iterator[_Found]:
        """Number the batches of a loader whose sample indices are unknown."""
        self._num_seen = start
        for batch in iterator:
            self._num_seen += 1
            yield self._num_seen - 1, None, batch

    def _pair_with_draws(
        self, iterator: Iterator[Any], draws: RecordingSampler
    ) -> Iterator[_Found]:
        """Pair each loaded batch with the sample indices drawn for it."""
        in_order = comes_in_order(self._loader)  # type: ignore[arg-type]
        try:
            for batch in iterator:
                drawn = draws.planned.popleft()
                self._sampler_state = drawn.sampler_state
                yield drawn.number, drawn.indices if in_order else None, batch
        finally:
            self._num_seen = draws.num_drawn
            draws.close()

    def _set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader's samplers, if the loop has several epochs."""
        # With one epoch, the loop calls set_epoch itself.
        if self._epochs > 1 and isinstance(self._loader, DataLoader):
            for sampler in (self._loader.sampler, self._loader.batch_sampler):
                set_epoch = getattr(sampler, "set_epoch", None)
                if set_epoch is not None:
                    set_epoch(epoch)

    def _restart_from(self, state: DataState) -> None:
        """Restart the data loader from its initial state, including the process's RNG state."""
        loader, first = self._loader, state["first"]
        restore_rng(first["rng"])
        restore_generator_states(loader, first["own"])
        if isinstance(loader, DataLoader) and loader.persistent_workers and first["fresh"]:
            loader._iterator = None  # new workers then get the seeds of the first ones
        if state["loader"] is not None:
            loader.load_state_dict(deepcopy(state["loader"]))  # type: ignore[attr-defined]

    def _reopen(self, state: DataState) -> Iterator[_Found]:
        """Open the loader's epoch again, behind the batches that ``state`` yielded."""
        loader, start = self._loader, self.next_position.batch
        epoch = self.next_position.epoch
        source: Iterator[_Found]
        if isinstance(loader, DataLoader) and is_seekable(loader):
            draws = RecordingSampler(loader, lambda index: self._is_skipped(epoch, index))
            sampler = state["sampler"] if start == state["batch"] else None
            iterator = draws.reopen(loader, state["opening"], start, sampler)
            source = self._pair_with_draws(iterator, draws)
        else:
            with _preserve_rng():
                iterator = self._at_state(state) or self._skip_ahead(state["opening"], start)
            source = self._count_batches(iterator, start)
        restore_generator_states(loader, state["own"])
        return source

    def _at_state(self, state: DataState) -> Iterator[Any] | None:
        """Return the loader's iterator from its own saved state; None if that fails."""
        if state["loader"] is None or not isinstance(self._loader, HasStateDict):
            return None
        with self._faults.fail_open("data.load_state_dict"):
            self._loader.load_state_dict(deepcopy(state["loader"]))
            return iter(self._loader)
        return None

    def _skip_ahead(self, opening: Opening, start: int) -> Iterator[Any]:
        """Return the loader's iterator after its first ``start`` batches were drawn and dropped."""
        restore_rng(opening["rng"])
        restore_generator_states(self._loader, opening["own"])
        iterator = iter(self._loader)
        for _ in islice(iterator, start):
            pass
        return iterator


@contextmanager
def _preserve_rng() -> Iterator[None]:
    """Restore the process's RNG state after a loader's iterator has been created in the body."""
    now = capture_rng()
    try:
        yield
    finally:
        restore_rng(now)


def _loader_length(loader: Iterable[Any]) -> int | None:
    """Return the number of batches in an epoch of a data loader; None if it has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _num_samples(loader: Iterable[Any]) -> int | None:
    """Return the samples per epoch of a map-style ``DataLoader``, or None if unknown."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_size is None:
        return None
    try:
        return len(loader.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
