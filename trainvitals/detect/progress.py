"""Too little: what was learned is lost, nothing was ever learned, or the loss collapses.

A spike and a rise are too much. A loss that stays where it began, that goes back there, or that
drops to nothing at once is as wrong, and no limit from above sees it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainvitals.detect.protocol import Detector
from trainvitals.errors import ConfigError
from trainvitals.records import Finding, StepRecord

_EVERY = 16
"""Steps from one look to the next."""
_FIRST = 20
"""First losses whose median is where the run began."""
_START = 64
"""First losses that a loss which never learns is compared with."""
_BEGINNINGS = (9, 20, 64)
"""Of these many first losses: the medians that say where it began."""
_LEVEL = 64
_GIVEN_BACK = 100
"""Steps for which what was learned must be gone."""
_KEPT = _LEVEL + _GIVEN_BACK
_LEAST_GAIN = 0.25
"""Part of the first losses that must have been gained before it can be lost."""
_REGAINED = 0.1
"""Part of the gain that may be missing where what was lost counts as learned again."""
_MOST_LOST = 2
"""Times it is told, at most, until progress is measured anew."""
_BOTTOM = 16
"""Steps in a row that lie far below, for a collapse."""
_STEADY = 1.3
_WIDE = 1.25
"""The error of a median of n normal samples is this deviation over the root of n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressConfig:
    """What counts as progress that is lost, never made, or too good."""

    given_back: float = 0.9
    """Part of the gain since the first losses that is given back for 100 steps."""
    learn_steps: int = 500
    """Steps after which a loss that is still where it began never learns. They count from the end
    of the learning rate's warm-up."""
    learned: float = 0.02
    """Part of the first losses by which it must have fallen by then, beyond its noise."""
    collapse: float = 0.3
    """A loss that falls below this part of its course within 16 steps, and stays there for 16."""
    stuck: float = 1.15
    """Multiple of the lowest level before a restart at which a loss that does not fall is stuck."""

    def __post_init__(self) -> None:
        if not 0.0 < self.given_back <= 1.0 or not 0.0 < self.collapse < 1.0:
            raise ConfigError(
                f"progress.given_back is {self.given_back}, progress.collapse {self.collapse}; "
                "they must be above 0, at most 1 and below 1"
            )
        if self.learn_steps < 2 * _KEPT:
            raise ConfigError(
                f"progress.learn_steps is {self.learn_steps}; it must be at least {2 * _KEPT}"
            )
        if not 0.0 < self.learned < 1.0 or self.stuck < 1.0:
            raise ConfigError(
                f"progress.learned is {self.learned}, progress.stuck {self.stuck}; they must be "
                "between 0 and 1, and at least 1"
            )


PROGRESS_DEFAULTS = ProgressConfig()


class ProgressDetector(Detector):
    """Tells of lost progress, of a loss that never learns or is stuck, and of a collapse.

    It looks at every 16th step. Losses at or below zero make it abstain, except from a collapse to
    exactly zero.
    """

    name = "loss_progress"

    def __init__(self, config: ProgressConfig | None = None) -> None:
        self._config = config or PROGRESS_DEFAULTS
        self._losses: deque[float] = deque(maxlen=_KEPT)
        self._before: float | None = None
        """Lowest level before the last restart or announced change."""
        self._suspended = 0
        self._forget()

    def _forget(self) -> None:
        self._seen = 0
        self._start: list[float] = []
        self._first: float | None = None
        self._best: float | None = None
        """Lowest level that is older than 100 steps."""
        self._lowest: float | None = None
        self._learning = 0
        """Steps since the learning rate's warm-up ended; -1: it has learned, or was told."""
        self._rate = 0.0
        self._lost, self._num_lost = False, 0
        self._collapsed: float | None = None
        """Where the loss was before it collapsed; it is over at half of that."""

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Take one step in and return what is to be said about it."""
        loss = record.loss
        if loss is None or record.skipped or not math.isfinite(loss):
            return ()
        if self._suspended:
            self._suspended -= 1
            return ()
        self._losses.append(loss)
        self._seen += 1
        if self._learning >= 0:
            self._learn(record, loss)
        if self._seen % _EVERY:
            return ()
        if self._first is None:
            if self._seen < _FIRST:
                return ()
            self._first = sorted(list(self._losses)[:_FIRST])[_FIRST >> 1]
        losses = list(self._losses)
        findings = self._collapse(record, losses)
        if self._first > 0.0 and len(losses) == _KEPT:
            findings += self._progress(record, losses, self._first)
        if self._learning >= self._config.learn_steps and self._seen % 64 == 0:
            findings += self._never_learned(record, losses)
        return findings

    def _learn(self, record: StepRecord, loss: float) -> None:
        rate = record.learning_rate
        if len(self._start) < _START:
            self._start.append(loss)
        if rate is not None and (rate > self._rate or rate <= 0.0):
            self._rate = max(rate, self._rate)
            self._learning = 0  # a warm-up: what it learns shows after it
        else:
            self._learning += 1

    # ---------------------------------------------------------------------- lost progress

    def _progress(
        self, record: StepRecord, losses: list[float], first: float
    ) -> tuple[Finding, ...]:
        older = sorted(losses[:_LEVEL])[_LEVEL >> 1]
        self._best = older if self._best is None else min(self._best, older)
        best, gain = self._best, first - self._best
        quarter = _GIVEN_BACK // 4
        parts = [
            sorted(losses[_LEVEL + i * quarter : _LEVEL + (i + 1) * quarter])[quarter >> 1]
            for i in range(4)
        ]
        floor = first - (1.0 - self._config.given_back) * gain
        if self._lost and sorted(losses[-_LEVEL:])[_LEVEL >> 1] <= best + _REGAINED * gain:
            self._lost = False
        lost = best > 0.0 and gain > _LEAST_GAIN * first and min(parts) > floor
        if not lost or self._lost or self._num_lost >= _MOST_LOST:
            return ()
        self._lost = True
        self._num_lost += 1
        back = 100.0 * (min(parts) - best) / gain
        return (
            self._finding(
                record,
                "lost_progress",
                f"what was learned is lost: the loss fell from {first:.4g} to {best:.4g}, and for "
                f"{_GIVEN_BACK} steps it lies at {min(parts):.4g} or above: {back:.0f} % of that "
                "is given back",
                value=parts[-1],
                limit=floor,
                onset=record.step - _GIVEN_BACK,
                cause="loss_lost_progress",
            ),
        )

    # --------------------------------------------------------------------------- collapse

    def _collapse(self, record: StepRecord, losses: list[float]) -> tuple[Finding, ...]:
        newest = losses[-_BOTTOM:]
        if self._collapsed is not None:
            if sorted(newest)[_BOTTOM >> 1] > 0.5 * self._collapsed:
                self._collapsed = None
            return ()
        course = losses[-5 * _BOTTOM : -2 * _BOTTOM]
        if len(course) < 3 * _BOTTOM or min(course) < 0.0:
            return ()
        half = len(course) >> 1
        older, newer = sorted(course[:half])[half >> 1], sorted(course[half:])[half >> 1]
        lowest = self._lowest
        self._lowest = newer if lowest is None else min(lowest, newer)
        top = sorted(newest)[-2]
        if newer <= 0.0 or top > self._config.collapse * newer or older > _STEADY * newer:
            return ()
        if top > 0.5 * self._lowest or (top <= 0.0 and min(newest) < 0.0):
            return ()
        self._collapsed = newer
        return (
            self._finding(
                record,
                "collapse",
                f"the loss collapsed: from {newer:.4g} to {sorted(newest)[_BOTTOM >> 1]:.4g} "
                f"within {2 * _BOTTOM} steps; too good to be true (labels that leak, a loss that "
                "is masked out)",
                value=sorted(newest)[_BOTTOM >> 1],
                limit=self._config.collapse * newer,
                onset=record.step - 2 * _BOTTOM + 1,
                cause="loss_collapse",
            ),
        )

    # ---------------------------------------------------------------------- never learned

    def _never_learned(self, record: StepRecord, losses: list[float]) -> tuple[Finding, ...]:
        start, ordered = self._start, sorted(losses)
        if len(start) < _START or len(losses) < _KEPT or min(start) <= 0.0 or ordered[0] <= 0.0:
            return ()
        # A run may learn all that it learns within a few steps: where it began is the highest.
        began = max(sorted(start[:num])[num >> 1] for num in _BEGINNINGS)
        level = ordered[_KEPT >> 1]
        spread = 0.5 * (ordered[int(0.84 * _KEPT)] - ordered[int(0.16 * _KEPT)]) / began
        error = _WIDE * spread / math.sqrt(_BEGINNINGS[0])
        least = self._config.learned
        if level < began * (1.0 - least - 3.0 * error):
            self._learning = -1
            return ()
        if level < began * (1.0 - least - error):
            return ()
        before = self._before
        if before is not None and level < self._config.stuck * before:
            return ()  # as good as it was before the restart
        self._learning = -1
        num = self._seen
        if before is None:
            cause = "never_learned"
            reason = (
                f"the loss does not learn: after {num} steps its level is {level:.4g}, and it "
                f"began at {began:.4g}"
            )
        else:
            cause = "stuck_after_restart"
            reason = (
                f"the loss is stuck since a restart or an announced change {num} steps ago: its "
                f"level is {level:.4g}, it began at {began:.4g} and had reached {before:.4g} before"
            )
        return (
            self._finding(
                record, "plateau", reason, value=level,
                limit=began if before is None else before, onset=record.step - num + 1, cause=cause,
            ),
        )  # fmt: skip

    def _finding(
        self,
        record: StepRecord,
        kind: str,
        reason: str,
        *,
        value: float,
        limit: float,
        onset: int,
        cause: str,
    ) -> Finding:
        return Finding(
            kind=kind,
            level="advisory",
            step=record.step,
            detector=self.name,
            reason=reason,
            value=value,
            limit=limit,
            onset_step=max(onset, 0),
            cause=cause,
        )

    def accept(self, losses: Sequence[float]) -> None:
        """Measure progress anew: the policy accepted these losses as the new level."""
        before, learning = self._before, self._learning
        self._losses.clear()
        self._forget()
        self._before = before
        self._learning = -1 if learning < 0 else 0
        for loss in losses:
            if math.isfinite(loss):
                self._losses.append(loss)
                self._seen += 1

    def rebaseline(self, steps: int = 0) -> None:
        """Measure progress anew after the next ``steps`` steps: a planned change or a restart."""
        lowest = min(
            (level for level in (self._best, self._lowest, self._before) if level is not None),
            default=None,
        )
        self._before = lowest
        self._losses.clear()
        self._suspended = max(self._suspended, steps)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "losses": list(self._losses),
            "before": self._before,
            "suspended": self._suspended,
            "seen": self._seen,
            "start": list(self._start),
            "first": self._first,
            "best": self._best,
            "lowest": self._lowest,
            "learning": self._learning,
            "rate": self._rate,
            "lost": self._lost,
            "num_lost": self._num_lost,
            "collapsed": self._collapsed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the detector that gave ``state``."""
        self._losses.clear()
        self._losses.extend(float(loss) for loss in state["losses"])
        self._before, self._suspended = state["before"], int(state["suspended"])
        self._seen, self._first = int(state["seen"]), state["first"]
        self._start = [float(loss) for loss in state["start"]]
        self._best, self._lowest = state["best"], state["lowest"]
        self._learning, self._rate = int(state["learning"]), float(state["rate"])
        self._lost, self._num_lost = bool(state["lost"]), int(state["num_lost"])
        self._collapsed = state["collapsed"]
