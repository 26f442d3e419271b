"""Position of steps along x: the step, its time, its tokens, or the time since the start."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainvitals.views import SeriesReply

Axis = Literal["step", "time", "tokens", "elapsed"]

_TOKEN_UNITS = {"trillion tokens": 1e12, "billion tokens": 1e9, "million tokens": 1e6}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScale:
    """Steps to positions along x, interpolated between known ones."""

    axis: Axis = "step"
    unit: str = "step"
    steps: tuple[float, ...] = ()
    places: tuple[float, ...] = ()

    def x_of(self, steps: Sequence[float]) -> list[float]:
        """Return the positions of steps on a chart's x-axis; outside the known ones, the ends."""
        if not self.steps:
            return list(steps)
        places: list[float] = np.interp(steps, self.steps, self.places).tolist()
        return places

    def step_at(self, x: float) -> int:
        """Return the step nearest to a position on the x-axis of the curves."""
        if not self.steps:
            return round(x)
        return round(float(np.interp(x, self.places, self.steps)))

    def xs(self, reply: SeriesReply) -> list[float]:
        """Return the x positions of a curve's points; along time, each has its own time."""
        if self.axis == "time":
            return [time / 1_000_000 for time in reply.time_unix_ns]
        return self.x_of(reply.step)


STEPS = StepScale()
TIMES = StepScale(axis="time", unit="time (UTC)")


def time_scale(reply: SeriesReply) -> StepScale:
    """Return the scale of wall time, in milliseconds, by a series that has most of the steps."""
    return _monotonic_scale(reply.step, [t / 1e6 for t in reply.time_unix_ns], "time", TIMES.unit)


def elapsed_scale(reply: SeriesReply) -> StepScale:
    """Return the x-axis of compared curves: hours since the first point of a run's series."""
    hours = [(time - reply.time_unix_ns[0]) / 3.6e12 for time in reply.time_unix_ns]
    return _monotonic_scale(reply.step, hours, "elapsed", "hours since the start")


def token_unit(most: float) -> str:
    """Return in what unit a chart's axis counts tokens, so that it has short numbers."""
    return next((unit for unit, size in _TOKEN_UNITS.items() if most >= size), "tokens")


def token_size(unit: str) -> float:
    """Return how many tokens one unit of a chart's axis is."""
    return _TOKEN_UNITS.get(unit, 1.0)


def token_scale(reply: SeriesReply, *, unit: str = "") -> StepScale:
    """Return a chart's scale of tokens by ``steps.tokens_seen``; ``unit`` "" selects one."""
    points = [(s, v) for s, v in zip(reply.step, reply.value, strict=True) if v is not None]
    unit = unit or token_unit(max((value for _, value in points), default=0.0))
    places = [value / token_size(unit) for _, value in points]
    return _monotonic_scale([step for step, _ in points], places, "tokens", unit)


def _monotonic_scale(
    steps: Sequence[float], places: Sequence[float], axis: Axis, unit: str
) -> StepScale:
    """Make the scale of an x-axis; if a clock or count was set back, it stays constant."""
    if not steps:
        return StepScale(axis=axis, unit=unit)
    rising = np.maximum.accumulate(np.asarray(places, dtype=np.float64)).tolist()
    return StepScale(axis=axis, unit=unit, steps=tuple(map(float, steps)), places=tuple(rising))
