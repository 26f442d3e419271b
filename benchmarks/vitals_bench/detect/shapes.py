"""Synthetic logs, each with one fault or with something similar that is not a fault.

A loss that falls by a power law, times a residual that is correlated from step to step and has
heavier tails than a normal one; a gradient norm with single steps of 5 to 15 times its level
while the loss moves by less than 3 %, as in clean runs of GPT-2. Every step is logged. The same
seed gives the same log on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vitals_bench.detect.series import Event, Series

RECORDS = 1200
ONSET = 780
"""Record at which what goes wrong begins."""
WARM_UP = 100
BLOOM_LOSS = (2.199, 2.220, 2.595, 2.242, 2.345, 5.098, 3.492, 3.213, 2.805)
BLOOM_NORM = (0.242, 0.947, 2.39, 15.9, 145.0, 960.0, 353.0, 379.0, 650.0)
"""BLOOM-176B, iterations 31214 to 31222, from the chronicles of its training; the first is usual,
and the course before is made to lead up to it."""
BLOOM_PEAK = ONSET + 4
"""Record of the largest loss; the onset is that of the first unusual norm."""
NORM_SPIKES, MANY_NORM_SPIKES = 1 / 2000, 1 / 100
"""Share of steps whose norm alone is far out; in clean runs of GPT-2 it is one in 10,000."""
HEAVY_BATCHES, HEAVY_FROM, HEAVY_RATE, HEAVIEST = 0.015, 1.2, 10.0, 1.8
"""Losses of one rank, in clean runs whose residual spreads by 3 to 5 %: up to 1.7% are 1.2 times
their neighbors or more, a tenth of these 1.5 times, and a hundredth 1.9 times."""


class Course:
    """A log in the making: every value is positive until a shape says otherwise."""

    def __init__(self, rng: random.Random, *, floor: float = 2.1, start: float = 10.8) -> None:
        self.rng = rng
        self.norm_spikes = NORM_SPIKES
        self.norm_levels = [0.25 + 2.5 / (1.0 + i / 25.0) for i in range(RECORDS)]
        self.levels = [floor + (start - floor) * (1.0 + i / 12.0) ** -1.1 for i in range(RECORDS)]
        self.steps = list(range(RECORDS))
        self.noise = rng.uniform(0.008, 0.02)
        """Spread of the loss's residual: that of small and of large batches."""
        self.events: tuple[Event, ...] = ()
        self._factors: Mapping[int, float] = {}
        self._set: dict[int, tuple[float, float]] = {}

    def scale(self, factors: Mapping[int, float]) -> None:
        """Multiply the loss at these records, and the norm by the square of it."""
        self._factors = factors

    def put(self, row: int, loss: float, norm: float) -> None:
        """Set both values at a record to just these."""
        self._set[row] = (loss, norm)

    def finish(self, name: str) -> Series:
        """Return the log."""
        rng = self.rng
        residuals = _residuals(rng, RECORDS, self.noise, 0.3)
        wobble = _residuals(rng, RECORDS, 0.12, 0.5)
        losses: list[float | None] = []
        norms: list[float | None] = []
        for i, level in enumerate(self.levels):
            factor = self._factors.get(i, 1.0)
            loss = level * factor * math.exp(residuals[i])
            norm = self.norm_levels[i] * factor * factor
            if rng.random() < self.norm_spikes:
                norm *= rng.uniform(5.0, 15.0)
                loss *= rng.uniform(1.0, 1.03)
            else:
                norm *= math.exp(wobble[i])
            loss, norm = self._set.get(i, (loss, norm))
            losses.append(loss)
            norms.append(norm)
        return Series(
            name=name,
            steps=self.steps,
            losses=losses,
            norms=norms,
            rates=[_rate(step) for step in self.steps],
            events=self.events,
            is_clean=not any(event.severity == "major" for event in self.events),
        )


def _residuals(rng: random.Random, count: int, spread: float, memory: float) -> list[float]:
    """Return an autoregressive series of Student's t with five degrees of freedom."""
    scale = spread * math.sqrt((1.0 - memory**2) * 3.0 / 5.0)  # the variance of t is 5/3
    value, made = 0.0, []
    for _ in range(count):
        shock = rng.gauss(0.0, 1.0) / math.sqrt(rng.gammavariate(2.5, 2.0) / 5.0)
        value = memory * value + scale * shock
        made.append(value)
    return made


def _rate(step: int) -> float:
    """Return a learning rate that warms up and falls as a cosine."""
    if step < WARM_UP:
        return 3e-4 * (step + 1) / WARM_UP
    return 1.5e-4 * (1.1 + 0.9 * math.cos(math.pi * min(1.0, step / RECORDS)))


def _major(kind: str, onset: int, num: int) -> Event:
    return Event(kind=kind, onset=onset, end=onset + num - 1)


def _bloom(course: Course) -> None:
    of_loss = BLOOM_LOSS[0] / course.levels[ONSET - 1]
    of_norm = BLOOM_NORM[0] / course.norm_levels[ONSET - 1]
    course.levels = [level * of_loss for level in course.levels]
    course.norm_levels = [level * of_norm for level in course.norm_levels]
    for i, (loss, norm) in enumerate(zip(BLOOM_LOSS, BLOOM_NORM, strict=True)):
        course.put(ONSET - 1 + i, loss, norm)
    calm = len(BLOOM_LOSS) - 1
    back = {ONSET + calm + i: 1.0 + 0.27 * 0.85**i for i in range(30)}  # how it ended is not known
    course.scale(back)
    course.events = (_major("spike", ONSET, calm),)


def _spike(factor: float, num: int) -> Callable[[Course], None]:
    def change(course: Course) -> None:
        course.scale({ONSET + i: factor for i in range(num)})
        course.events = (_major("spike", ONSET, num),)

    return change


def _blip(course: Course) -> None:
    course.scale({ONSET: 1.5})
    course.events = (Event(kind="spike", onset=ONSET, end=ONSET, severity="minor"),)


def _shift(factor: float) -> Callable[[Course], None]:
    def change(course: Course) -> None:
        for i in range(ONSET, RECORDS):
            course.levels[i] *= factor
        course.events = (_major("level_shift", ONSET, RECORDS - ONSET),)

    return change


def _ramp(course: Course) -> None:
    """SPAM's slow divergence: from 4.85 to 6.5 in 570 steps."""
    onset, num = 500, 570
    calm = course.levels[onset]
    course.levels = [level * 4.85 / calm for level in course.levels]
    for i in range(onset, RECORDS):
        course.levels[i] = 4.85 + (6.5 - 4.85) * min(1.0, (i - onset) / num)
    course.events = (_major("divergence", onset, RECORDS - onset),)


def _nan(course: Course) -> None:
    course.put(ONSET, math.nan, math.nan)
    course.events = (_major("nonfinite", ONSET, 1),)


def _nan_then_spike(course: Course) -> None:
    _nan(course)
    course.scale({ONSET + 20 + i: 4.0 for i in range(3)})
    course.events += (_major("spike", ONSET + 20, 3),)


def _two_spikes(course: Course) -> None:
    course.scale({ONSET + start + i: 4.0 for start in (0, 20) for i in range(3)})
    course.events = (_major("spike", ONSET, 3), _major("spike", ONSET + 20, 3))


def _norm_spikes(course: Course) -> None:
    course.norm_spikes = MANY_NORM_SPIKES


def _warm_up_rise(course: Course) -> None:
    """A loss that climbs from 12.4 to 17 while the learning rate warms up, and then falls."""
    rise = 60
    fall = [2.1 + 14.9 * (1.0 + i / 30.0) ** -0.9 for i in range(RECORDS - rise)]
    course.levels = [12.4 + 4.6 * i / rise for i in range(rise)] + fall


def _saw_tooth(course: Course) -> None:
    """Epochs of 150 steps: the loss falls by 8% within each, and a part of it comes back."""
    for i in range(RECORDS):
        course.levels[i] *= 1.0 - 0.08 * (i % 150) / 150.0


def _bimodal(course: Course) -> None:
    """Mixup: both kinds of batches begin at 6.9, and one falls to 1.0, the other to 3.3."""
    for i in range(RECORDS):
        level = course.rng.choice((1.0, 3.3))
        course.levels[i] = level + (6.9 - level) / (1.0 + i / 60.0)


def _around_zero(course: Course) -> None:
    """Reinforcement learning: a loss that is small, and as often negative as not."""
    for i, value in enumerate(_residuals(course.rng, RECORDS, 0.05, 0.2)):
        course.put(i, value, 0.4 * math.exp(course.rng.gauss(0.0, 0.3)))


def _appended(course: Course) -> None:
    """A run that was resumed from a checkpoint 200 steps back, and wrote on into the same log."""
    again = list(range(ONSET)) + list(range(ONSET - 200, RECORDS - 200))
    course.levels = [course.levels[step] for step in again]
    course.steps = again


def _heavy_batches(course: Course) -> None:
    """One rank's loss: few batches are far heavier than their neighbors."""
    rng, factors = course.rng, {}
    course.noise = rng.uniform(0.03, 0.05)
    for i in range(WARM_UP, RECORDS):
        if rng.random() < HEAVY_BATCHES:
            factors[i] = min(HEAVIEST, HEAVY_FROM * math.exp(rng.expovariate(HEAVY_RATE)))
    course.scale(factors)


class Shape(NamedTuple):
    """A kind of log."""

    name: str
    change: Callable[[Course], None]
    must: bool = False
    """Whether we promise to find it every time."""


SHAPES: Sequence[Shape] = (
    Shape("BLOOM-176B's spike", _bloom, must=True),
    Shape("3x for five steps", _spike(3.0, 5), must=True),
    Shape("two spikes, 20 steps apart", _two_spikes, must=True),
    Shape("NaN once", _nan, must=True),
    Shape("NaN, and a spike 20 steps later", _nan_then_spike, must=True),
    Shape("+30 % that never comes back", _shift(1.3)),
    Shape("+3 % that never comes back", _shift(1.03)),
    Shape("slow ramp, 4.85 to 6.5 in 570 steps", _ramp),
    Shape("1.5x for one step (minor)", _blip),
    Shape("clean", lambda course: None),
    Shape("clean: norm spikes, loss unmoved", _norm_spikes),
    Shape("clean: single heavy batches", _heavy_batches),
    Shape("clean: loss rises in warm-up", _warm_up_rise),
    Shape("clean: saw-tooth", _saw_tooth),
    Shape("clean: two modes, 1.0 and 3.3", _bimodal),
    Shape("clean: loss around zero", _around_zero),
    Shape("clean: appended, steps go back", _appended),
)


def make_shape(shape: Shape, seed: int) -> Series:
    """Return the log of a shape and a seed."""
    course = Course(random.Random(f"{shape.name} {seed}"))
    shape.change(course)
    return course.finish(shape.name)
