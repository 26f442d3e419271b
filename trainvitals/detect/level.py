"""The level of the loss: divergence, and a recovery that fails.

A spike is one step against its neighbours. A run that slowly walks away, or that takes a step up of
3 % and never comes back, shows no such step; it shows in the level: the median of the newest steps
against the lowest level the run has had. That reference cannot be poisoned: bad steps raise a
median, never a minimum.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from trainvitals.detect.protocol import Detector
from trainvitals.errors import ConfigError
from trainvitals.records import Finding, StepRecord
from trainvitals.windows import RobustWindow

_SIGMA_OF_DIFFERENCES = 1.28 * math.sqrt(2.0)
"""The distance that one in five differences of two normal samples exceeds, in their deviations.
Not the median: where most losses repeat and some jump (two kinds of batches, sparse rewards) it
says nothing."""
_EXCEEDED_BY = 0.2
_LOOKS = 4
"""Looks at the level, evenly spaced, that a stretch of ``flat_steps`` is told by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelConfig:
    """What counts as a loss that walked away, and as one that stays there."""

    window: int = 64
    """Steps whose median is the level."""
    noise: int = 256
    """Steps whose differences give the noise of the loss."""
    sigmas: float = 6.0
    """Deviations of that noise by which the level must be above the lowest; the median of 64 steps
    itself deviates by a sixth of one. Clean real runs reach 3."""
    rise: float = 0.02
    """And the part of the lowest level; from there on the loss has not recovered."""
    divergence: float = 0.05
    """Rise at which it is told at once; told again where it has risen by twice as much further."""
    act: float = 0.25
    """Rise at which the ladder may go back for it (``heal``)."""
    act_sigmas: float = 10.0
    """And its deviations."""
    flat_steps: int = 150
    """Steps without progress, since the level rose, after which it is a plateau."""
    flat: float = 0.01
    """What the level may move by in these and still be flat; half of it downwards."""

    def __post_init__(self) -> None:
        if not 8 <= self.window <= self.noise:
            raise ConfigError(
                f"level.window is {self.window}; it must be 8 to level.noise ({self.noise})"
            )
        if not 0.0 < self.rise <= self.divergence <= self.act:
            raise ConfigError(
                f"level.rise is {self.rise}, level.divergence {self.divergence}, level.act "
                f"{self.act}; they must be above 0 and in this order"
            )
        if not 0.0 < self.sigmas <= self.act_sigmas:
            raise ConfigError(
                f"level.sigmas is {self.sigmas}, level.act_sigmas {self.act_sigmas}; they must be "
                "above 0 and in this order"
            )
        if self.flat_steps < _LOOKS or not 0.0 < self.flat < 1.0:
            raise ConfigError(
                f"level.flat_steps is {self.flat_steps}, level.flat {self.flat}; they must be at "
                f"least {_LOOKS} and between 0 and 1"
            )


LEVEL_DEFAULTS = LevelConfig()


class LevelDetector(Detector):
    """Tells of a divergence once per rise, and of a plateau above the lowest level once."""

    name = "loss_level"

    def __init__(self, config: LevelConfig | None = None) -> None:
        self._config = config or LEVEL_DEFAULTS
        self._window = RobustWindow(self._config.window)
        self._steps: deque[int] = deque(maxlen=self._config.window)
        self._differences = RobustWindow(self._config.noise)
        self._last: float | None = None
        self._forget_level()

    def _forget_level(self) -> None:
        self._best: float | None = None
        self._onset = -1
        """First step of the rise, or -1 while the level is where it should be."""
        self._low = 0.0
        self._num_told = 0
        self._acted = False
        self._excused = False
        self._since = 0
        self._looks: list[float] = []

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Take one step in and return what is to be said about it.

        Steps that were kept back count: half of 64 in a row are no bad batch any more.
        """
        loss = record.loss
        if loss is None or not math.isfinite(loss):
            return ()
        if self._last is not None:
            difference = abs(loss - self._last)
            if math.isfinite(difference):
                self._differences.push(difference)
        self._last = loss
        self._window.push(loss)
        self._steps.append(record.step)
        if len(self._window) < self._config.window:
            return ()
        noise = self._differences.upper(_EXCEEDED_BY) / _SIGMA_OF_DIFFERENCES
        return self._judge(record, self._window.median(), noise)

    def _judge(self, record: StepRecord, level: float, noise: float) -> tuple[Finding, ...]:
        config = self._config
        best = level if self._best is None else self._best
        if self._onset < 0:
            best = self._best = min(best, level)
        rise = max(config.rise * abs(best), config.sigmas * noise)
        if self._onset < 0:
            if level <= best + rise or noise == 0.0:
                return ()
            self._begin(level, best)
        if level < best + 0.5 * rise:
            self._onset, self._excused = -1, False  # it has recovered
            return ()
        diverged = self._divergence(record, level, best, noise)
        if diverged is not None:
            return (diverged,)
        self._low = min(self._low, level)
        return self._plateau(record, level, best)

    def _begin(self, level: float, best: float) -> None:
        self._onset = self._steps[0]
        self._low, self._num_told, self._acted = best, 0, False
        self._since, self._looks = 0, [level]

    def _divergence(
        self, record: StepRecord, level: float, best: float, noise: float
    ) -> Finding | None:
        config = self._config
        far = level > best + max(config.act * abs(best), config.act_sigmas * noise)
        acts = far and not self._excused
        further = 2.0 if self._num_told else 1.0
        told = max(config.divergence * abs(best), config.sigmas * noise) * further
        if not (level > self._low + told or (acts and not self._acted)):
            return None
        self._num_told += 1
        self._acted = self._acted or acts
        self._low = level
        self._since, self._looks = 0, [level]
        return self._finding(
            record,
            "divergence",
            f"the loss walked away: its level {level:.4g} ({config.window} steps) is "
            f"{_percent(level, best)} above the lowest, {best:.4g}, and "
            f"{(level - best) / noise:.0f} deviations of its noise",
            level,
            best,
            acts=acts,
        )

    def _plateau(self, record: StepRecord, level: float, best: float) -> tuple[Finding, ...]:
        config = self._config
        if self._acted:
            return ()  # told with all weight already
        self._since += 1
        if self._since % max(1, config.flat_steps // (_LOOKS - 1)):
            return ()
        looks = self._looks = [*self._looks, level][-_LOOKS:]
        flat = config.flat * abs(level)
        if len(looks) < _LOOKS or max(looks) - min(looks) > flat or looks[0] - level > flat / 2:
            return ()
        finding = self._finding(
            record,
            "plateau",
            f"the loss rose and does not recover: for {config.flat_steps} steps its level is "
            f"{level:.4g}, {_percent(level, best)} above the lowest, {best:.4g}",
            level,
            best,
            acts=False,
        )
        self._best, self._onset = level, -1  # a new regime: what comes is measured against it
        self._excused = False
        return (finding,)

    def _finding(
        self,
        record: StepRecord,
        kind: str,
        reason: str,
        level: float,
        best: float,
        *,
        acts: bool,
    ) -> Finding:
        return Finding(
            kind=kind,
            level="act" if acts else "tell",
            step=record.step,
            detector=self.name,
            reason=reason,
            value=level,
            limit=best,
            onset_step=self._onset,
            cause=f"loss_{kind}",
        )

    def excuse(self) -> None:
        """Let the rise that is under way only be told: it was accepted as the new level."""
        self._excused = True

    def rebaseline(self) -> None:
        """Forget the level and the lowest: a planned or accepted change."""
        self._window.clear()
        self._steps.clear()
        self._differences.clear()
        self._last = None
        self._forget_level()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "window": self._window.values(),
            "steps": list(self._steps),
            "differences": self._differences.values(),
            "last": self._last,
            "best": self._best,
            "onset": self._onset,
            "low": self._low,
            "num_told": self._num_told,
            "acted": self._acted,
            "excused": self._excused,
            "since": self._since,
            "looks": list(self._looks),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the detector that gave ``state``."""
        self._window.restore(state["window"])
        self._steps.clear()
        self._steps.extend(int(step) for step in state["steps"])
        self._differences.restore(state["differences"])
        self._last, self._best = state["last"], state["best"]
        self._onset, self._low = int(state["onset"]), float(state["low"])
        self._num_told, self._acted = int(state["num_told"]), bool(state["acted"])
        self._excused = bool(state["excused"])
        self._since, self._looks = int(state["since"]), [float(x) for x in state["looks"]]


def _percent(level: float, best: float) -> str:
    if best <= 0.0:
        return f"{level - best:.4g}"
    return f"{100.0 * (level - best) / best:.3g} %"
