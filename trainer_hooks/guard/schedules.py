"""The schedulers given to ``watch``: stepped by Vitals, once per update or once per epoch.

Nothing is stored in a scheduler, because all its attributes are its ``state_dict``. If the loop
steps it too, its count differs from the count after Vitals' last step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from torch.optim import Optimizer, lr_scheduler

from trainer_hooks.data.loader import Batches
from trainvitals.errors import UsageError

SchedulerEvery = Literal["step", "epoch"]


class Warn(Protocol):
    """Reports a likely mistake."""

    def __call__(self, code: str, text: str, *, step: int) -> None:
        """Report it as a note with this code."""


_NEARLY_ZERO = 1e-3
"""Share of a learning rate that is left after it has decayed."""
_MOST_EPOCHS = 1_000
"""A schedule that ends within this number of counts may count epochs."""
_LOOK_EVERY = 16


class SchedulerStepper:
    """Steps the schedulers, and detects whether the loop steps them too.

    Call ``check_double_stepping`` before each update and ``note_update`` after it. With
    ``every="epoch"`` the epochs of the data step them: ``iterate_epochs`` yields a loader's batches
    and detects the end of an epoch.
    """

    def __init__(self, schedulers: Sequence[Any], every: SchedulerEvery, warn: Warn) -> None:
        self._schedulers = schedulers
        self.every = every
        self._warn = warn
        self._last_counts = self._step_counts()
        """Counts of the schedulers after our own steps."""
        self._num_looks = 0
        self._num_moves = 0
        """Gaps between two updates in which the loop changed a count by more or less than one."""
        self._is_reported = self._is_end_reported = False
        self._epoch = 0
        """Epoch of the data for which the schedulers are set."""
        self._is_training = False
        """Whether an update was made from the current loader, so that its epochs count."""
        self.sees_epochs = False
        """Whether an epoch of ``iterate_epochs`` with training has ended."""
        self._ended: tuple[int, str] | None = None
        """Step from which a scheduler of epochs has no effect, and the warning about it."""

    def check_double_stepping(self, step: int) -> UsageError | None:
        """Return the error if the loop steps a scheduler too: visible at the second update.

        Before the first update a loop may move the schedulers to its resume position. Later it is
        reported once, and training continues.
        """
        if self._ended is not None and step >= self._ended[0]:
            self._warn("epoch_scheduler", self._ended[1], step=step)
            self._ended = None
        if self.every == "step" and not self._num_looks % _LOOK_EVERY and not self._is_end_reported:
            self._check_end(step)
        now, is_second = self._step_counts(), self._num_looks == 1
        self._num_looks += 1
        if now == self._last_counts:
            return None
        error = None if self._num_looks == 1 else self._double_stepping_error(now, step)
        self._last_counts = now
        if error is None or is_second:
            return error
        self._is_reported = True
        self._warn("scheduler_stepped", f"{error.text}; {error.hint}", step=step)
        return None

    def _double_stepping_error(self, now: list[int | None], step: int) -> UsageError | None:
        """Return the error; a single jump may be a ``load_state_dict`` of the loop."""
        if self._is_reported:
            return None
        for scheduler, count, pending in zip(self._schedulers, now, self._last_counts, strict=True):
            if count is None or pending is None or count == pending:
                continue
            self._num_moves += count != pending + 1
            if count == pending + 1 or self._num_moves > 1:
                return double_step_error(type(scheduler).__name__, self.every, step)
        return None

    def _check_end(self, step: int) -> None:
        """Report a schedule that ended long ago while training continues.

        It needs no knowledge about the loader, as in a loop without ``monitor.batches``.
        """
        for scheduler in self._schedulers:
            end, count = schedule_end_count(scheduler), scheduler_step_count(scheduler)
            if end is None or count is None or not 0 < end <= _MOST_EPOCHS:
                continue
            if count < 2 * end + 20:
                continue
            self._is_end_reported = True
            text = (
                f"{describe_scheduler(scheduler)} ended after {end} updates, and {count} have been "
                "made: if it counts epochs, use watch(..., scheduler_every='epoch') and "
                "monitor.end_epoch()"
            )
            self._warn("epoch_scheduler", text, step=step)
            return

    def _step_counts(self) -> list[int | None]:
        """Return how often each scheduler was stepped; None if it has no count."""
        return [scheduler_step_count(scheduler) for scheduler in self._schedulers]

    def note_update(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Note an update, applied or skipped: it steps the schedulers of ``every="step"``.

        Only those of ``optimizers``, if any are given.
        """
        self._is_training = True
        if self.every == "step":
            self.step_schedulers(optimizers)

    def step_schedulers(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Step the LR schedulers of these optimizers, or all of them."""
        for i, scheduler in enumerate(self._schedulers):
            if optimizers and not any(optimizer_of(scheduler) is o for o in optimizers):
                continue
            before, pending = scheduler_step_count(scheduler), self._last_counts[i]
            scheduler.step()
            after = scheduler_step_count(scheduler)
            if None not in (before, after, pending):
                self._last_counts[i] = pending + after - before  # type: ignore[operator]

    def iterate_epochs(self, batches: Batches) -> Iterator[Any]:
        """Yield the batches; each completed epoch steps the schedulers, if it contained training.

        Epochs of a validation do not. Leaving the loop during an epoch does not end it.
        """
        self._epoch = batches.next_position.epoch
        self._is_training = batches.resumes
        for batch in batches:
            assert batches.position is not None, "a batch that was handed out has a position"
            self._advance_to_epoch(batches.position.epoch)
            yield batch
        self._advance_to_epoch(batches.epochs[1])

    def _advance_to_epoch(self, epoch: int) -> None:
        """Step the schedulers once for each completed epoch, if there was training."""
        missing, self._epoch = epoch - self._epoch, epoch
        if not self._is_training:
            return
        self.sees_epochs |= missing > 0
        for _ in range(missing):
            self.step_schedulers()

    def restore_counts(self, epoch: int | None) -> None:
        """Set the schedulers' counts to those of a restored state.

        ``epoch`` is where the data continues with it; None if the data does not go back, in which
        case schedulers of epochs do not either.
        """
        counts = self._step_counts()
        undone = [
            pending - now
            for now, pending in zip(counts, self._last_counts, strict=True)
            if now is not None and pending is not None
        ]
        self._last_counts = counts
        if self.every == "step":
            return
        if epoch is not None:
            self._epoch = epoch
            return
        for _ in range(max(undone, default=0)):
            self.step_schedulers()

    def check_epoch_schedule(
        self, step: int, num_batches: int | None, num_epochs: int, per_step: int
    ) -> None:
        """Check at the first step whether a scheduler that is stepped per update counts epochs.

        If the loader's epochs make this certain enough, it is reported at once. Otherwise it is
        reported when the schedule ends during the first epoch. ``num_epochs`` is 1 if the loop
        handles epochs; ``per_step`` is the number of batches.
        """
        if self.every != "step" or not num_batches:
            return
        per_epoch = num_batches // max(1, per_step)
        for scheduler in self._schedulers:
            end, name = schedule_end_count(scheduler), describe_scheduler(scheduler)
            if end is None or end * 2 >= per_epoch * num_epochs:
                continue
            way_out = "if it counts epochs, use watch(..., scheduler_every='epoch')"
            if num_epochs > 1 and _is_planned_for(scheduler, num_epochs):
                self._is_end_reported = True
                text = f"{name} looks planned for {num_epochs} epochs, and is stepped at every "
                text += f"update ({per_epoch} an epoch); {way_out}"
                self._warn("epoch_scheduler", text, step=step)
                return
            remaining = end - (scheduler_step_count(scheduler) or 0)
            if 0 < remaining < per_epoch - 1:
                self._is_end_reported = True
                text = f"{name} is at its end after {end} updates, within the first epoch of "
                self._ended = step + remaining + 1, f"{text}{per_epoch}; {way_out}"
                return


def double_step_error(name: str, every: str, step: int) -> UsageError:
    """Return the error for a loop that steps a scheduler that was given to ``watch``."""
    ours = "monitor.step()" if every == "step" else "the monitor, which steps it once an epoch"
    return UsageError(
        f"{name}.step() was called by the loop before step {step}, as well as by {ours}: its "
        "learning rate moves too fast",
        hint="remove scheduler.step() from the loop, or leave the scheduler out of watch() and "
        "register it with watch(state={'scheduler': scheduler}), so that a rollback restores it",
    )


def end_epoch_error() -> UsageError:
    """Return the error for a manually ended epoch with schedulers that step by updates."""
    return UsageError(
        "monitor.end_epoch() was called, but the schedulers are stepped at every update",
        hint="watch(..., scheduler_every='epoch') steps them only at monitor.end_epoch()",
    )


def optimizer_of(scheduler: Any) -> Any:
    """Return the optimizer whose rate a scheduler sets, from it or its first part."""
    parts = getattr(scheduler, "_schedulers", None)
    return getattr(scheduler, "optimizer", None) or (optimizer_of(parts[0]) if parts else None)


def is_scheduled(
    schedulers: Sequence[Any], optimizer: Optimizer, rates: Sequence[float | None]
) -> bool:
    """Return whether a scheduler given to ``watch`` has set the first of the current ``rates``.

    The first rates belong to the ``optimizer``.
    """
    for scheduler in schedulers:
        last = getattr(scheduler, "_last_lr", None) or ()
        if last and rates and optimizer_of(scheduler) is optimizer:
            return rates[0] is not None and math.isclose(float(last[0]), rates[0])
    return False


def scheduler_step_count(scheduler: Any) -> int | None:
    """Return the number of steps of a scheduler, from its own count or that of its first part."""
    count = getattr(scheduler, "last_epoch", None)
    if count is None:
        parts = getattr(scheduler, "_schedulers", None)
        count = getattr(parts[0], "last_epoch", None) if parts else None
    return count if isinstance(count, int) else None


def schedule_end_count(scheduler: Any) -> int | None:
    """Return the count at which the schedule, or its rate, has ended; None: unknown."""
    kind = type(scheduler)
    if kind is lr_scheduler.StepLR:
        return _num_decays(scheduler.gamma, scheduler.step_size)
    if kind is lr_scheduler.ExponentialLR:
        return _num_decays(scheduler.gamma, 1)
    if kind is lr_scheduler.MultiStepLR and scheduler.gamma < 1:
        return max(scheduler.milestones, default=None)
    if kind is lr_scheduler.CosineAnnealingLR:
        return int(scheduler.T_max)
    if kind is lr_scheduler.PolynomialLR:
        return int(scheduler.total_iters)
    if kind is lr_scheduler.SequentialLR:
        last = schedule_end_count(scheduler._schedulers[-1])
        return None if last is None else int(scheduler._milestones[-1]) + last
    return None


def _num_decays(gamma: float, each: int) -> int | None:
    """Return the steps until a decaying learning rate is almost zero."""
    if not 0.0 < gamma < 1.0:
        return None
    return math.ceil(math.log(_NEARLY_ZERO) / math.log(gamma)) * each


def _is_planned_for(scheduler: Any, num_epochs: int) -> bool:
    """Return whether a scheduler's length equals the number of epochs."""
    if isinstance(scheduler, lr_scheduler.MultiStepLR):
        return max(scheduler.milestones) < num_epochs
    if isinstance(scheduler, lr_scheduler.StepLR | lr_scheduler.ExponentialLR):
        return False
    return schedule_end_count(scheduler) == num_epochs


def describe_scheduler(scheduler: Any) -> str:
    """Return a scheduler's name with the setting that determines its length."""
    for key in ("T_max", "total_iters", "step_size", "gamma"):
        if key in vars(scheduler) and not hasattr(scheduler, "milestones"):
            return f"{type(scheduler).__name__}({key}={vars(scheduler)[key]})"
    if hasattr(scheduler, "milestones"):
        return f"{type(scheduler).__name__}(milestones={sorted(scheduler.milestones)})"
    return type(scheduler).__name__
