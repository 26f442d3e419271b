"""The schedule that a run declared, simulated during training: the expected rate of each group.

A scheduler is copied, and the copy is stepped together with the training; it sets the rates of
groups without parameters. The user's objects are not changed, and nothing is computed ahead: a
million steps would take seconds, while a step costs as much as a step of the user's scheduler.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer_hooks.guard.lr_schedule import LRSchedule, RateBand, ScheduleFollower
from trainer_hooks.guard.schedules import (
    SchedulerEvery,
    describe_scheduler,
    optimizer_of,
    scheduler_step_count,
)
from trainer_hooks.measures.host import HostMeasurements
from trainvitals.errors import UsageError
from trainvitals.printable import name_type
from trainvitals.records import Finding

Declared = LRScheduler | LRSchedule | str | Sequence[LRScheduler]

_KEPT = 4_096
"""Counts whose rates are kept: most rollbacks go back by less."""
_CATCH_UP = 256
"""Counts of a resumed run that are simulated per step: takes less than 2 ms."""
_EXACT, _SHAPED = 1e-3, 1e-6
"""Relative tolerances: the first covers rounding in a restored scheduler, the second a shape."""
_MOST_SKIPS = 64


class DeclaredSchedule:
    """Compares the rates of each step with the declared schedule.

    ``optimizers`` are in the order of the rates; the monitor steps the ``schedulers``.

    Raises:
        UsageError: the schedule cannot be declared; the message explains why.
    """

    def __init__(
        self,
        declared: Declared,
        optimizers: Sequence[Optimizer],
        *,
        schedulers: Sequence[Any] = (),
        total_steps: int | None = None,
        every: SchedulerEvery = "step",
    ) -> None:
        shape: Any = declared
        if isinstance(declared, str):
            shape = LRSchedule(kind=declared)  # type: ignore[arg-type]
        self._every = every
        self._total_steps = total_steps
        self._sizes = [len(optimizer.param_groups) for optimizer in optimizers]
        self._simulated: list[_SimulatedSchedule | None] = []
        self._peaks: list[float] = []
        self._shape: LRSchedule | None = None
        self._is_ours = False
        self._num_skips = 0
        self._epoch: int | None = None
        """Epoch of the latest step that was judged."""
        self._rate = 0.0
        """Rate of the first group in the step before."""
        if isinstance(shape, LRSchedule):
            self._shape = shape
            if shape.kind != "constant" and total_steps is None:
                raise UsageError(
                    f"schedule is {shape.kind!r}, which ends with the run, but total_steps is not "
                    "given",
                    hint=f"watch(..., total_steps=100_000, schedule={shape.kind!r})",
                )
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            self._peaks = [float(group.get("initial_lr", group["lr"])) for group in groups]
            name = f"{shape.kind} schedule"
        else:
            shapes = _simulatable_schedulers(shape)
            by_optimizer = {id(optimizer_of(scheduler)): scheduler for scheduler in shapes}
            declared_for = [by_optimizer.pop(id(optimizer), None) for optimizer in optimizers]
            if by_optimizer:
                other = next(iter(by_optimizer.values()))
                raise UsageError(
                    f"schedule has {describe_scheduler(other)}, whose optimizer was not given to "
                    "watch()",
                    hint="one scheduler an optimizer: watch(model, [a, b], schedule=[sa, sb])",
                )
            self._simulated = [None if s is None else _SimulatedSchedule(s) for s in declared_for]
            self._is_ours = all(any(s is wrapped for wrapped in schedulers) for s in shapes)
            name = " and ".join(describe_scheduler(scheduler) for scheduler in shapes)
        self.name = name
        self.follower = ScheduleFollower(name, tolerance=_SHAPED if self._shape else _EXACT)

    def judge(self, measured: HostMeasurements, *, skipped: bool) -> Finding | None:
        """Return the finding about a step of all optimizers; None if all rates are as declared."""
        self._num_skips += skipped
        self._epoch = measured.epoch
        if measured.turn or len(measured.learning_rates) != sum(self._sizes):
            return None
        count = measured.step if self._every == "step" else measured.epoch
        bands = self._rate_bands(measured.step, count, *self._count_tolerance())
        return self.follower.update(measured.step, measured.learning_rates, bands)

    def has_rise(self, step: int, rates: Sequence[float | None]) -> bool:
        """Return whether the first group's rate rises in this step to its declared value.

        Call before the step is judged. At this point it is unknown whether the step starts an
        epoch, so a rate of the next epoch counts as declared too.
        """
        rate, before = (rates[0] if rates else None), self._rate
        self._rate = before if rate is None else rate
        if rate is None or rate <= before or len(rates) != sum(self._sizes):
            return False
        by_step = self._every == "step"
        back, ahead = self._count_tolerance()
        count = step if by_step else self._epoch
        band = self._rate_bands(step, count, back, ahead if by_step else ahead + 1)[0]
        return band is not None and self.follower.is_declared(rate, band)

    def _rate_bands(
        self, step: int, count: int | None, back: int, ahead: int
    ) -> list[RateBand | None]:
        """Return each parameter group's range of declared rates at a step."""
        if self._shape is not None:
            factors = self._shape.band(step, self._total_steps or 0)
            return [factors.times(peak) for peak in self._peaks]
        bands: list[RateBand | None] = []
        for played, size in zip(self._simulated, self._sizes, strict=True):
            known = None
            if played is not None and count is not None:
                known = played.at(count, back, ahead)
            bands += known or [None] * size
        return bands

    def _count_tolerance(self) -> tuple[int, int]:
        """Return the number of counts before and after its own that may belong to a step.

        A loop that steps its scheduler itself may do so before or after our step, and may not step
        it for skipped updates.
        """
        return (0, 0) if self._is_ours else (1 + min(self._num_skips, _MOST_SKIPS), 1)


def _simulatable_schedulers(declared: object) -> list[LRScheduler]:
    """Return the declared schedulers, after a check that each of them can be simulated ahead."""
    listed: list[Any] = list(declared) if isinstance(declared, list | tuple) else [declared]
    for scheduler in listed:
        if not isinstance(scheduler, LRScheduler):
            raise UsageError(
                f"schedule is {name_type(scheduler)}; it must be a scheduler of torch, an "
                "LRSchedule, or one of constant, linear, cosine, wsd",
                hint="give the scheduler inside a wrapper, or declare its shape: "
                "trainvitals.LRSchedule(kind='cosine', warmup_steps=1000)",
            )
        for part in _iterate_schedulers(scheduler):
            if isinstance(part, ReduceLROnPlateau):
                raise UsageError(
                    "schedule has a ReduceLROnPlateau, whose rate depends on the training: it "
                    "cannot be declared ahead",
                    hint="leave schedule= out; jumps of the learning rate are reported anyway",
                )
    return listed


def _iterate_schedulers(scheduler: Any) -> Iterator[Any]:
    """Yield a declared learning-rate scheduler and all its parts."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _iterate_schedulers(part)


class _StandInOptimizer(Optimizer):
    """Replaces an optimizer: groups with all their settings and no parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        # Without the constructor of Optimizer, which refuses groups without parameters.
        self.param_groups = [
            {key: _copy_group_value(value) for key, value in group.items() if key != "params"}
            | {"params": []}
            for group in optimizer.param_groups
        ]
        self.defaults = dict(optimizer.defaults)
        self._opt_called = True  # otherwise the scheduler warns at its first step

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing: only the rates of a declared schedule are simulated."""


_StandInOptimizer.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as above


def _copy_group_value(value: Any) -> Any:
    """Copy a group's setting to simulate the declared schedule; a tensor as a number."""
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else copy.copy(value)


class _SchedulerState(NamedTuple):
    scheduler: Any
    rates: _StandInOptimizer


class _SimulatedSchedule:
    """A copy of one scheduler, stepped to the count of the training."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._first = scheduler_step_count(scheduler) or 0
        self._offset: int | None = None
        try:
            self._begin = _copy_scheduler(scheduler, optimizer_of(scheduler))
            self._restart_simulation()
        except Exception as error:
            raise UsageError(
                f"schedule has {describe_scheduler(scheduler)}, which cannot be copied: "
                f"{type(error).__name__}: {error}",
                hint="declare its shape: trainvitals.LRSchedule(kind='cosine', warmup_steps=1000)",
            ) from error

    def _restart_simulation(self) -> None:
        """Copy the scheduler again, and simulate it from its first count."""
        self._now = _copy_scheduler(self._begin.scheduler, self._begin.rates)
        self._count = self._first
        self._cached_rates: deque[tuple[float, ...]] = deque([self._current_rates()], maxlen=_KEPT)

    def _current_rates(self) -> tuple[float, ...]:
        """Return the current learning rate of each group in a simulated declared schedule."""
        return tuple(float(group["lr"]) for group in self._now.rates.param_groups)

    def at(self, step: int, before: int, after: int) -> list[RateBand] | None:
        """Return each group's simulated rates at a step; None while it catches up.

        A scheduler that had counted before the run started keeps this offset.
        """
        if self._offset is None:
            self._offset = max(0, self._first - step)
        count = step + self._offset
        low, high = max(self._first, count - before), count + after
        if low < self._count - len(self._cached_rates) + 1:
            self._restart_simulation()  # a rollback by more than the kept counts
        for _ in range(_CATCH_UP):
            if self._count >= high:
                break
            self._now.scheduler.step()
            self._count += 1
            self._cached_rates.append(self._current_rates())
        if self._count < high:
            return None
        newest = self._count
        rows = [self._cached_rates[each - newest - 1] for each in range(low, high + 1)]
        return [RateBand(min(of_group), max(of_group)) for of_group in zip(*rows, strict=True)]


def _copy_scheduler(scheduler: Any, optimizer: Optimizer) -> _SchedulerState:
    """Return a declared scheduler's copy whose optimizer is replaced: no parameters are copied.

    Functions are shared: the object of a method may be a complete trainer.
    """
    rates = _StandInOptimizer(optimizer)
    memo: dict[int, Any] = {id(optimizer): rates}
    for part in _iterate_schedulers(scheduler):
        for function in getattr(part, "lr_lambdas", ()):
            if isinstance(function, FunctionType | MethodType):
                memo[id(function)] = function
    return _SchedulerState(copy.deepcopy(scheduler, memo), rates)
