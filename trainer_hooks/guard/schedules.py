"""The schedulers given to ``watch``: stepped by us, once an update or once an epoch.

Nothing is put into a scheduler, as all its attributes are its ``state_dict``. That somebody else
steps it shows by its count, which is then not the one we left.
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
    """Says what is likely a mistake."""

    def __call__(self, code: str, text: str, *, step: int) -> None:
        """Say it, as a note of this code."""


_NEARLY_ZERO = 1e-3
"""What is left of a learning rate that has decayed away."""


_MOST_EPOCHS = 1_000
"""A schedule that ends within so many counts may be one of epochs."""
_LOOK_EVERY = 16


class Schedules:
    """Steps the schedulers, and finds out whether the loop steps them too.

    ``look`` before each update and ``stepped`` after it. With ``every="epoch"`` the data's epochs
    step them: ``over`` yields a loader's batches and sees where one ends.

    Args:
        schedulers: at least one.
        every: an update or an epoch.
        warn: says something once, to the people who run the training.
    """

    def __init__(self, schedulers: Sequence[Any], every: SchedulerEvery, warn: Warn) -> None:
        self._schedulers = schedulers
        self.every = every
        self._warn = warn
        self._left = self._counts()
        """What the schedulers have counted by our steps alone."""
        self._num_looks = 0
        self._num_moves = 0
        """Gaps between two updates in which the loop moved a count by more or less than one."""
        self._is_told = self._is_over_told = False
        self._epoch = 0
        """The epoch of the data that the schedulers are set for."""
        self._is_training = False
        """Whether an update was made from the present loader, so that its epochs count."""
        self.sees_epochs = False
        """Whether an epoch of ``over`` has ended that was trained in."""
        self._ended: tuple[int, str] | None = None
        """From which step a scheduler of epochs has nothing left to do, and what is said then."""

    # -------------------------------------------------------------------- stepped by somebody else

    def look(self, step: int) -> UsageError | None:
        """Return what to raise where the loop steps a scheduler too: it shows at the second update.

        Before the first one a loop may bring the schedulers to where it resumes. Later it is said
        once, and training goes on.
        """
        if self._ended is not None and step >= self._ended[0]:
            self._warn("epoch_scheduler", self._ended[1], step=step)
            self._ended = None
        if self.every == "step" and not self._num_looks % _LOOK_EVERY and not self._is_over_told:
            self._look_for_end(step)
        now, is_second = self._counts(), self._num_looks == 1
        self._num_looks += 1
        if now == self._left:
            return None
        error = None if self._num_looks == 1 else self._moved(now, step)
        self._left = now
        if error is None or is_second:
            return error
        self._is_told = True
        self._warn("scheduler_stepped", f"{error.text}; {error.hint}", step=step)
        return None

    def _moved(self, now: list[int | None], step: int) -> UsageError | None:
        """Return what is wrong; a single jump may be a ``load_state_dict`` of the loop's."""
        if self._is_told:
            return None
        for scheduler, count, left in zip(self._schedulers, now, self._left, strict=True):
            if count is None or left is None or count == left:
                continue
            self._num_moves += count != left + 1
            if count == left + 1 or self._num_moves > 1:
                return stepped_twice(type(scheduler).__name__, self.every, step)
        return None

    def _look_for_end(self, step: int) -> None:
        """Report a schedule that was over long ago while training goes on.

        It needs nothing to be known of the loader, as in a loop without ``monitor.batches``.
        """
        for scheduler in self._schedulers:
            end, count = end_of(scheduler), count_of(scheduler)
            if end is None or count is None or not 0 < end <= _MOST_EPOCHS:
                continue
            if count < 2 * end + 20:
                continue
            self._is_over_told = True
            text = (
                f"{described(scheduler)} ended after {end} updates, and {count} have been made: if "
                "it counts epochs, use watch(..., scheduler_every='epoch') and monitor.end_epoch()"
            )
            self._warn("epoch_scheduler", text, step=step)
            return

    def _counts(self) -> list[int | None]:
        return [count_of(scheduler) for scheduler in self._schedulers]

    # --------------------------------------------------------------------------- stepped by us

    def stepped(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Take note of an update, made or skipped: it steps the schedulers of ``every="step"``.

        Args:
            optimizers: those that the update was of, where it was not of all.
        """
        self._is_training = True
        if self.every == "step":
            self._step(optimizers)

    def end_epoch(self) -> None:
        """Step the schedulers once."""
        self._step()

    def _step(self, optimizers: Sequence[Optimizer] = ()) -> None:
        for i, scheduler in enumerate(self._schedulers):
            if optimizers and not any(optimizer_of(scheduler) is o for o in optimizers):
                continue
            before, left = count_of(scheduler), self._left[i]
            scheduler.step()
            after = count_of(scheduler)
            if None not in (before, after, left):
                self._left[i] = left + after - before  # type: ignore[operator]

    def over(self, batches: Batches) -> Iterator[Any]:
        """Yield the batches; each epoch of them that ends steps the schedulers, if it trains.

        A validation's epochs do not. What is left in the middle of an epoch does not end it.
        """
        self._epoch = batches.next_position.epoch
        self._is_training = batches.resumes
        for batch in batches:
            assert batches.position is not None, "a batch that was handed out has a position"
            self._reach(batches.position.epoch)
            yield batch
        self._reach(batches.epochs[1])

    def _reach(self, epoch: int) -> None:
        missing, self._epoch = epoch - self._epoch, epoch
        if not self._is_training:
            return
        self.sees_epochs |= missing > 0
        for _ in range(missing):
            self._step()

    # ------------------------------------------------------------------------------ a rollback

    def restored(self, epoch: int | None) -> None:
        """Take the counts of a state that was put back.

        Args:
            epoch: the one in which the data goes on with that state; None where the data does not
                go back: then neither do schedulers of epochs.
        """
        counts = self._counts()
        undone = [
            left - now
            for now, left in zip(counts, self._left, strict=True)
            if now is not None and left is not None
        ]
        self._left = counts
        if self.every == "step":
            return
        if epoch is not None:
            self._epoch = epoch
            return
        for _ in range(max(undone, default=0)):
            self._step()

    # ------------------------------------------------------- epochs taken for updates

    def of_epochs(self, step: int, num_batches: int | None, num_epochs: int, per_step: int) -> None:
        """Look, at the first step, whether a scheduler that we step each update counts epochs.

        Where the loader's epochs make it certain enough it is said at once, else once the schedule
        is over while the first epoch is not.

        Args:
            step: the first one.
            num_batches: of an epoch, where it is known.
            num_epochs: that the loader is iterated for; 1 where the loop owns its epochs.
            per_step: batches of one step.
        """
        if self.every != "step" or not num_batches:
            return
        per_epoch = num_batches // max(1, per_step)
        for scheduler in self._schedulers:
            end, name = end_of(scheduler), described(scheduler)
            if end is None or end * 2 >= per_epoch * num_epochs:
                continue
            way_out = "if it counts epochs, use watch(..., scheduler_every='epoch')"
            if num_epochs > 1 and _is_planned_for(scheduler, num_epochs):
                self._is_over_told = True
                text = f"{name} looks planned for {num_epochs} epochs, and is stepped at every "
                text += f"update ({per_epoch} an epoch); {way_out}"
                self._warn("epoch_scheduler", text, step=step)
                return
            left = end - (count_of(scheduler) or 0)
            if 0 < left < per_epoch - 1:
                self._is_over_told = True
                text = f"{name} is at its end after {end} updates, within the first epoch of "
                self._ended = step + left + 1, f"{text}{per_epoch}; {way_out}"
                return


def stepped_twice(name: str, every: str, step: int) -> UsageError:
    """Return what is said where the loop steps a scheduler that was given to ``watch``."""
    ours = "monitor.step()" if every == "step" else "the monitor, which steps it once an epoch"
    return UsageError(
        f"{name}.step() was called by the loop before step {step}, as well as by {ours}: its "
        "learning rate moves too fast",
        hint="remove scheduler.step() from the loop, or leave the scheduler out of watch() and "
        "register it with watch(state={'scheduler': scheduler}), so that a rollback restores it",
    )


def every_update() -> UsageError:
    """Return what is said where an epoch is ended by hand, and the schedulers step by updates."""
    return UsageError(
        "monitor.end_epoch() was called, but the schedulers are stepped at every update",
        hint="watch(..., scheduler_every='epoch') steps them only at monitor.end_epoch()",
    )


def optimizer_of(scheduler: Any) -> Any:
    """Return whose rate a scheduler sets, by its own word or that of its first part."""
    parts = getattr(scheduler, "_schedulers", None)
    return getattr(scheduler, "optimizer", None) or (optimizer_of(parts[0]) if parts else None)


def is_scheduled(
    schedulers: Sequence[Any], optimizer: Optimizer, rates: Sequence[float | None]
) -> bool:
    """Return whether a scheduler given to ``watch`` has set the rate of the first group.

    Args:
        schedulers: those given to ``watch``.
        optimizer: the one whose groups come first in ``rates``.
        rates: what the optimizers' groups hold now.
    """
    for scheduler in schedulers:
        last = getattr(scheduler, "_last_lr", None) or ()
        if last and rates and optimizer_of(scheduler) is optimizer:
            return rates[0] is not None and math.isclose(float(last[0]), rates[0])
    return False


def count_of(scheduler: Any) -> int | None:
    """Return how often a scheduler was stepped, by its own count or that of its first part."""
    count = getattr(scheduler, "last_epoch", None)
    if count is None:
        parts = getattr(scheduler, "_schedulers", None)
        count = getattr(parts[0], "last_epoch", None) if parts else None
    return count if isinstance(count, int) else None


def end_of(scheduler: Any) -> int | None:
    """Return the count at which nothing is left of the schedule, or of its rate; None: unknown."""
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
        last = end_of(scheduler._schedulers[-1])
        return None if last is None else int(scheduler._milestones[-1]) + last
    return None


def _num_decays(gamma: float, each: int) -> int | None:
    if not 0.0 < gamma < 1.0:
        return None
    return math.ceil(math.log(_NEARLY_ZERO) / math.log(gamma)) * each


def _is_planned_for(scheduler: Any, num_epochs: int) -> bool:
    if isinstance(scheduler, lr_scheduler.MultiStepLR):
        return max(scheduler.milestones) < num_epochs
    if isinstance(scheduler, lr_scheduler.StepLR | lr_scheduler.ExponentialLR):
        return False
    return end_of(scheduler) == num_epochs


def described(scheduler: Any) -> str:
    """Return a scheduler's name with the setting that says how long it takes."""
    for key in ("T_max", "total_iters", "step_size", "gamma"):
        if key in vars(scheduler) and not hasattr(scheduler, "milestones"):
            return f"{type(scheduler).__name__}({key}={vars(scheduler)[key]})"
    if hasattr(scheduler, "milestones"):
        return f"{type(scheduler).__name__}(milestones={sorted(scheduler.milestones)})"
    return type(scheduler).__name__
