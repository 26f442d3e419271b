"""How long steps take: what is usual, which are slow, and which of those come at intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainvitals.detect.fleet.base import INFINITY, require
from trainvitals.windows import RobustWindow

Kind = Literal["ordinary", "periodic", "slow"]

_KEPT_SLOW = 64
_IN_ROW = 4
"""Slow steps at equal distances that make a period: three distances are no accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceConfig:
    """What makes a step slow."""

    window: int = 32
    """Ordinary steps whose median is the usual duration."""
    slow_ratio: float = 1.5
    """Multiple of the usual duration from which a step is slow."""
    accept_after: int = 16
    """Slow steps in a row after which that is the usual duration."""

    def __post_init__(self) -> None:
        require("pace", "window", self.window, least=4, most=4096)
        require("pace", "slow_ratio", self.slow_ratio, least=1.05, most=100.0)
        require("pace", "accept_after", self.accept_after, least=2, most=INFINITY)


class Pace:
    """Sorts steps by their duration. Slow ones never enter what is usual.

    Evaluations and checkpoints make nearly all slow steps of a healthy run, at equal distances in
    steps: a slow step is periodic where three more lie behind it at the same distance, one off at
    the most.
    """

    def __init__(self, config: PaceConfig | None = None) -> None:
        self._config = config or PaceConfig()
        self._usual = RobustWindow(self._config.window)
        self._slow: list[int] = []
        self._streak: list[float] = []
        self._longest = (0.0, 0.0)
        self.period = 0
        """Distance of the newest periodic slow steps; 0 until one is known."""

    @property
    def typical_seconds(self) -> float | None:
        """The usual duration of a step; None until some are known."""
        return self._usual.median() if len(self._usual) >= 4 else None

    @property
    def longest_seconds(self) -> float:
        """The second longest step: what happened once (a hang that ended) is no measure."""
        return self._longest[1]

    def push(self, step: int, seconds: float) -> Kind:
        """Take one step's duration in, finite and above zero, and return of what kind it is."""
        if seconds > self._longest[1]:
            self._longest = (max(seconds, self._longest[0]), min(seconds, self._longest[0]))
        usual = self.typical_seconds
        if usual is None or seconds <= self._config.slow_ratio * usual:
            self._usual.push(seconds)
            self._streak.clear()
            return "ordinary"
        self._streak.append(seconds)
        if len(self._streak) >= self._config.accept_after:
            self._usual.restore(self._streak)
            self._streak.clear()
        return "periodic" if self._is_periodic(step) else "slow"

    def _is_periodic(self, step: int) -> bool:
        slow = set(self._slow)
        cycle = 0
        for earlier in reversed(self._slow):
            period = step - earlier
            if period >= 2 and all(
                any(step - n * period + off in slow for off in ((0, -1, 1) if period > 8 else (0,)))
                for n in range(2, _IN_ROW)
            ):
                cycle = period
                break
        self._slow = [*self._slow, step][-_KEPT_SLOW:]
        self.period = cycle or self.period
        return cycle > 0

    def went_back(self, step: int) -> None:
        """Forget the slow steps that are made again."""
        self._slow = [slow for slow in self._slow if slow < step]
        self._streak.clear()

    def state(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "usual": self._usual.values(),
            "slow": list(self._slow),
            "streak": list(self._streak),
            "longest": list(self._longest),
            "period": self.period,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on as the pace that gave ``state``."""
        self._usual.restore(state["usual"])
        self._slow = [int(step) for step in state["slow"]]
        self._streak = [float(seconds) for seconds in state["streak"]]
        first, second = state["longest"]
        self._longest = (float(first), float(second))
        self.period = int(state["period"])
