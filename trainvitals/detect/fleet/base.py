"""Input and base classes of fleet detectors: one step of the job, one sample of a node.

The collector makes these from the rows that all ranks wrote for a step; a replay of a stored run
makes the same. Nothing here decides: actions are judged in the job, only on ``StepRecord``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from trainvitals.detect.reporter import Reporter
from trainvitals.records import Finding
from trainvitals.stateful import StatefulRow, StateKey, state_row

Value = float | int | None


class MergedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step: rank 0's columns, each rank's own, and the layers' if they were written.

    Columns have the names of ``trainvitals.catalog``. A missing one is absent or None, never 0.
    """

    step: int
    attempt: int
    time_unix_ns: int
    run: Mapping[str, Value] = {}
    """Columns that rank 0 writes for all: ``loss``, ``learning_rate``, ``loss_scale``..."""
    ranks: Mapping[str, Sequence[Value]] = {}
    """Columns of each rank, by rank: ``step_duration_seconds``, ``rank_loss``..."""
    layers: Mapping[str, Mapping[str, float]] = {}
    """Columns of the layers, by layer: ``grad_norm``, ``update_norm``, ``activation_max``..."""


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a node's GPUs by its agent."""

    node: str
    time_unix_ns: int
    step: int
    """The latest known step of the run at that time."""
    gpus: Mapping[str, Mapping[str, Value]] = {}
    """Columns of every GPU, by its UUID."""


INFINITY = math.inf
LONGEST_SECONDS = 1e9
"""Thirty years: a longer duration is due to a broken clock."""


def number(value: Value) -> float | None:
    """Return a value of a merged step or node sample as a finite float; None for anything else."""
    if value is None:
        return None
    if value.__class__ is float and value - value == 0.0:
        return value  # the usual case: costs only a comparison
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def finite(values: Sequence[Value] | None) -> tuple[Sequence[float], Sequence[int]]:
    """Return the ranks' finite values in a column of a merged step, and the ranks.

    Nearly always all of them are finite, and one sum in C shows it.
    """
    if not values:
        return (), ()
    try:
        if math.isfinite(math.fsum(values)):  # type: ignore[arg-type]
            return values, range(len(values))  # type: ignore[return-value]
    except (TypeError, OverflowError, ValueError):
        pass  # a None, a huge value, or both infinities: check them individually
    pairs = [(reading, rank) for rank, v in enumerate(values) if (reading := number(v)) is not None]
    return [reading for reading, _ in pairs], [rank for _, rank in pairs]


def step_seconds(merged: MergedStep) -> float:
    """Return the duration of a merged step on its slowest rank; 0.0 if unknown."""
    durations, _ = finite(merged.ranks.get("step_duration_seconds"))
    longest = max(durations, default=0.0)
    return float(longest) if 0.0 < longest < LONGEST_SECONDS else 0.0


def upper_median(values: Sequence[float]) -> float:
    """Return the median over ranks, layers or steps, the upper one of two."""
    return sorted(values)[len(values) >> 1]


def clamped_exp(value: float) -> float:
    """Return the exponential of a logarithm, bounded to stay finite."""
    return math.exp(max(-700.0, min(700.0, value)))


class ConditionEpisode(StatefulRow):
    """Reports a condition once, until it has been absent for a while.

    Call it only if the condition could be judged: unknown is not absent.
    """

    __slots__ = ("_absent", "_clear_after", "on")
    STATE = ("on", "_absent")

    def __init__(self, clear_after: int) -> None:
        self._clear_after = clear_after
        self._absent = 0
        self.on = False

    def begins(self, present: bool) -> bool:
        """Add whether the condition of a fleet detector holds; return whether an episode starts."""
        if present:
            self._absent = 0
            was_on, self.on = self.on, True
            return not was_on
        if self.on:
            self._absent += 1
            if self._absent >= self._clear_after:
                self.on, self._absent = False, 0
        return False


class Watcher(Reporter):
    """Base of the step detectors: detects a rollback or a new start of the run.

    A subclass provides ``_judge`` and ``STATE``, ``_restarted`` if it keeps state that a new
    attempt makes void, and ``goes_on`` if it reports a lasting condition.
    """

    STATE: ClassVar[tuple[str | StateKey, ...]] = (
        state_row("place", "_attempt", "_step", "_has_seen"),
    )
    FLAGS_ARE_NUMBERS = True

    def __init__(self) -> None:
        self._attempt = 0
        self._step = 0
        self._has_seen = False

    @property
    def goes_on(self) -> bool:
        """Whether a reported lasting condition still holds; never for events of one step."""
        return False

    def holds(self, cause: str) -> bool:
        """Return whether the condition still holds that was reported with this cause."""
        return self.goes_on

    def update(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Add one merged step; steps come in order, a newer attempt may go back."""
        if self._has_seen and (merged.attempt != self._attempt or merged.step <= self._step):
            self._restarted(merged)
        self._attempt, self._step, self._has_seen = merged.attempt, merged.step, True
        return self._judge(merged)

    def _restarted(self, merged: MergedStep) -> None:
        """Discard state that the first merged step of another attempt or process makes void."""

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Return the findings of the fleet detector on one merged step."""
        raise NotImplementedError


class LastingWatcher(Watcher):
    """Base of the step detectors that report one lasting condition, once."""

    def __init__(self, clear_after: int) -> None:
        super().__init__()
        self._episode = ConditionEpisode(clear_after)

    @property
    def goes_on(self) -> bool:
        """Whether the reported condition still holds."""
        return self._episode.on


class NodeWatcher(Reporter):
    """Reports problems in a node's samples."""

    FLAGS_ARE_NUMBERS = True

    def update(self, sample: NodeSample) -> tuple[Finding, ...]:
        """Return the findings on one sample of a node's GPUs; samples come in order."""
        raise NotImplementedError
