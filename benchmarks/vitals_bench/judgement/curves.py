"""Synthetic worlds for the detectors that only tell: faulty and healthy curves, with labels.

``WORLDS`` maps a name to a pure function of seed and noise that makes a curve: (loss, gradient
norm, learning rate) step by step, and the steps in which its fault should be reported. A healthy
curve has none: every report is a false alarm.

``python -m vitals_bench.judgement.curves`` prints the share of reported curves, by world and noise:
for the seeds that settings were chosen by, and for held-out seeds.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainvitals.detect.detector_set import DetectorSet
from trainvitals.detect.outliers import LossKind
from trainvitals.records import Finding, StepRecord

STEPS = 2400
HEALTHY_STEPS = 6000
ONSET = 1200
NOISES = (0.02, 0.05, 0.10, 0.15)
TUNING_SEEDS, HELD_OUT_SEEDS = tuple(range(10)), tuple(range(100, 110))
"""Settings were chosen by the first; the others only ever gave the figures that are reported."""
PEAK_RATE = 3e-4
_WARM_UP = 100
_LATE = 20
"""Steps after a fault in which telling it still counts, as for labelled curves."""


class Point(NamedTuple):
    """One step."""

    loss: float
    grad_norm: float
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A training as its numbers show it, and what is wrong with it."""

    points: Sequence[Point]
    onset: int = -1
    """First step of the fault, or -1 where nothing is wrong."""
    told_by: int = -1
    """Last step in which telling it counts."""
    loss_kind: LossKind = "minimize"
    restarts: tuple[int, ...] = ()
    """Steps at which the run says that a change is expected."""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.onset < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A kind of curve."""

    make: Callable[[int, float], Curve]
    """The curve of a seed at a noise: the standard deviation of the logarithm of the loss."""
    is_healthy: bool
    goal: float = 0.0
    """Share of the curves that should be reported, over all noises."""
    noises: Sequence[float] = field(default=NOISES)


# ------------------------------------------------------------------------------- courses


def flat(steps: int) -> list[float]:
    """Return a loss that has converged, after a short fall."""
    return [2.0 + 2.0 * math.exp(-i / 60.0) for i in range(steps)]


def falling(steps: int) -> list[float]:
    """Return a loss that still falls, by 0.7% in 100 steps after 1,200."""
    return [2.0 + 5.0 / (1.0 + i / 40.0) for i in range(steps)]


def _rates(steps: int) -> list[float]:
    return [PEAK_RATE * min(1.0, (i + 1) / _WARM_UP) for i in range(steps)]


def _noisy(
    rng: random.Random,
    levels: Sequence[float],
    noise: float,
    *,
    norms: Mapping[int, float] | None = None,
    rates: Sequence[float] | None = None,
) -> list[Point]:
    """Return the points of a course: log-normal noise, independent for loss and norm."""
    factors = norms or {}
    steady = rates or _rates(len(levels))
    return [
        Point(
            level * math.exp(rng.gauss(0.0, noise)),
            factors.get(i, 1.0) * (0.3 + 1.5 / (1.0 + i / 30.0)) * math.exp(rng.gauss(0.0, 0.2)),
            rate,
        )
        for i, (level, rate) in enumerate(zip(levels, steady, strict=True))
    ]


def _course(rng: random.Random, steps: int = STEPS) -> list[float]:
    """Return a falling or a flat course: every second seed has either."""
    return falling(steps) if rng.random() < 0.5 else flat(steps)


def _rng(name: str, seed: int, noise: float) -> random.Random:
    return random.Random(f"{name} {seed} {noise}")


# --------------------------------------------------------------------------------- faulty


def excursion(name: str, ratio: float, length: int) -> Callable[[int, float], Curve]:
    """Make a loss of ``ratio`` times its course for ``length`` steps; the norm does not move."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        onset = ONSET + rng.randrange(200)
        levels = _course(rng)
        for i in range(onset, onset + length):
            levels[i] *= ratio
        return Curve(
            points=_noisy(rng, levels, noise), onset=onset, told_by=onset + length - 1 + _LATE
        )

    return make


def not_a_number(name: str) -> Callable[[int, float], Curve]:
    """Make one NaN."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        onset = ONSET + rng.randrange(200)
        levels = _course(rng)
        levels[onset] = math.nan
        return Curve(points=_noisy(rng, levels, noise), onset=onset, told_by=onset)

    return make


def ramp(name: str) -> Callable[[int, float], Curve]:
    """Make a loss that rises by 2% in 100 steps over its course, to be reported within 400."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        onset = ONSET + rng.randrange(200)
        levels = _course(rng)
        for i in range(onset, STEPS):
            levels[i] *= 1.02 ** ((i - onset) / 100.0)
        return Curve(points=_noisy(rng, levels, noise), onset=onset, told_by=onset + 400)

    return make


def step_up(name: str, ratio: float) -> Callable[[int, float], Curve]:
    """Make a loss that goes up for good."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        onset = ONSET + rng.randrange(200)
        levels = _course(rng)
        for i in range(onset, STEPS):
            levels[i] *= ratio
        return Curve(points=_noisy(rng, levels, noise), onset=onset, told_by=STEPS - 1)

    return make


def never_learns(name: str) -> Callable[[int, float], Curve]:
    """Make a loss that stays where it began."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        return Curve(points=_noisy(rng, [6.9] * STEPS, noise), onset=0, told_by=STEPS - 1)

    return make


def stuck(name: str) -> Callable[[int, float], Curve]:
    """Make a loss that is stuck high after a restart, which the run announces."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        levels = _course(rng)
        level = levels[0] * rng.uniform(0.7, 1.0)
        for i in range(ONSET, STEPS):
            levels[i] = level
        return Curve(
            points=_noisy(rng, levels, noise), onset=ONSET, told_by=STEPS - 1, restarts=(ONSET,)
        )

    return make


def lost(name: str) -> Callable[[int, float], Curve]:
    """Make a run that forgets what it learned: its loss goes back to where it began and stays."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        onset = ONSET + rng.randrange(200)
        levels = _course(rng)
        began, duration = levels[0], rng.choice((1, 30, 300))
        for i in range(onset, STEPS):
            share = min(1.0, (i - onset + 1) / duration)
            levels[i] += share * (began - levels[i])
        return Curve(points=_noisy(rng, levels, noise), onset=onset, told_by=STEPS - 1)

    return make


def collapse(name: str) -> Callable[[int, float], Curve]:
    """Make a loss that falls at once, to nothing or to a fifth or a tenth of its course."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        onset = ONSET + rng.randrange(200)
        levels, ratio = _course(rng), rng.choice((0.0, 0.1, 0.2))
        for i in range(onset, STEPS):
            levels[i] *= ratio
        return Curve(points=_noisy(rng, levels, noise), onset=onset, told_by=onset + 200)

    return make


# -------------------------------------------------------------------------------- healthy


def hard_batches(
    name: str, share: float, ratio: float, *, every: int = 0, length: int = 1
) -> Callable[[int, float], Curve]:
    """Make hard batches, at random or every so many steps, ``length`` of them in a row."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        levels, norms = _course(rng, HEALTHY_STEPS), {}
        for i in range(HEALTHY_STEPS - length):
            if i % every == every - 1 if every else rng.random() < share:
                for j in range(i, i + length):
                    levels[j] *= ratio
                    norms[j] = ratio
        return Curve(points=_noisy(rng, levels, noise, norms=norms))

    return make


def plain(name: str) -> Callable[[int, float], Curve]:
    """Make a run in which nothing happens."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        return Curve(points=_noisy(rng, _course(rng, HEALTHY_STEPS), noise))

    return make


def heavy_tail(name: str) -> Callable[[int, float], Curve]:
    """Make noise of Student's t with five degrees of freedom, correlated from step to step."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        levels, value = _course(rng, HEALTHY_STEPS), 0.0
        scale = noise * math.sqrt((1.0 - 0.09) * 3.0 / 5.0)
        for i in range(HEALTHY_STEPS):
            shock = rng.gauss(0.0, 1.0) / math.sqrt(rng.gammavariate(2.5, 2.0) / 5.0)
            value = 0.3 * value + scale * shock
            levels[i] *= math.exp(value)
        return Curve(points=_noisy(rng, levels, 0.0))

    return make


def blocks(name: str) -> Callable[[int, float], Curve]:
    """Make two tasks in blocks of 200 steps, the one at 1.6 times the other's loss."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        levels = _course(rng, HEALTHY_STEPS)
        for i in range(HEALTHY_STEPS):
            levels[i] *= 1.6 if i // 200 % 2 else 1.0
        return Curve(points=_noisy(rng, levels, noise))

    return make


def epochs(name: str, jump: float) -> Callable[[int, float], Curve]:
    """Make epochs of 300 steps: the loss goes up at each border and comes back within it."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        levels = _course(rng, HEALTHY_STEPS)
        for i in range(300, HEALTHY_STEPS):
            levels[i] *= 1.0 + jump * math.exp(-(i % 300) / 40.0)
        return Curve(points=_noisy(rng, levels, noise))

    return make


def saw_tooth(name: str) -> Callable[[int, float], Curve]:
    """Make epochs of 500 steps that the run learns by heart: a fall of 20% in each, half kept."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        levels = _course(rng, HEALTHY_STEPS)
        for i in range(HEALTHY_STEPS):
            levels[i] *= 1.0 - 0.2 * (i % 500) / 500.0
        return Curve(points=_noisy(rng, levels, noise))

    return make


def warm_restarts(name: str) -> Callable[[int, float], Curve]:
    """Make warm restarts of a cosine every 1,000 steps: the loss goes up by 15% with the rate."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        levels, rates = _course(rng, HEALTHY_STEPS), _rates(HEALTHY_STEPS)
        for i in range(HEALTHY_STEPS):
            rise = 0.5 + 0.5 * math.cos(math.pi * (i % 1000) / 1000.0)
            rates[i] *= 0.02 + 0.98 * rise
            levels[i] *= 1.0 + 0.15 * rise
        return Curve(points=_noisy(rng, levels, noise, rates=rates))

    return make


def curriculum(name: str) -> Callable[[int, float], Curve]:
    """Make harder data at steps 1,500 and 3,500: 1.5 times the loss, which then falls again."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        levels = _course(rng, HEALTHY_STEPS)
        for i in range(HEALTHY_STEPS):
            since = [i - begin for begin in (1500, 3500) if i >= begin]
            levels[i] *= math.prod(1.0 + 0.5 * math.exp(-steps / 200.0) for steps in since)
        return Curve(points=_noisy(rng, levels, noise))

    return make


def rl(name: str, kind: LossKind = "rl") -> Callable[[int, float], Curve]:
    """Make a policy's loss: around zero, wider as the rewards grow."""

    def make(seed: int, noise: float) -> Curve:
        rng, value = _rng(name, seed, noise), 0.0
        levels = []
        for i in range(HEALTHY_STEPS):
            value = 0.6 * value + noise * (1.0 + i / 1000.0) * rng.gauss(0.0, 1.0)
            levels.append(value)
        return Curve(points=_noisy(rng, levels, 0.0), loss_kind=kind)

    return make


def value_loss(name: str, kind: LossKind = "rl") -> Callable[[int, float], Curve]:
    """Make a value function's loss, which grows tenfold while the return improves."""

    def make(seed: int, noise: float) -> Curve:
        rng = _rng(name, seed, noise)
        levels = [0.5 + 5.0 / (1.0 + math.exp(-(i - 2500) / 400.0)) for i in range(HEALTHY_STEPS)]
        return Curve(points=_noisy(rng, levels, 2.0 * noise), loss_kind=kind)

    return make


def gan(name: str, kind: LossKind = "adversarial") -> Callable[[int, float], Curve]:
    """Make the sum of two players' losses: it wanders without an aim, up and down by half."""

    def make(seed: int, noise: float) -> Curve:
        rng, value = _rng(name, seed, noise), 0.0
        levels = []
        for _ in range(HEALTHY_STEPS):
            value = 0.995 * value + 0.03 * rng.gauss(0.0, 1.0)
            levels.append(1.4 * math.exp(value))
        return Curve(points=_noisy(rng, levels, noise), loss_kind=kind)

    return make


def _faulty() -> dict[str, World]:
    made: dict[str, World] = {}

    def add(name: str, make: Callable[[int, float], Curve], goal: float) -> None:
        made[name] = World(make=make, is_healthy=False, goal=goal)

    add("NaN once", not_a_number("nan"), 1.0)
    for ratio in (3, 5, 10):
        add(f"{ratio}x for one step", excursion(f"x{ratio}", ratio, 1), 1.0)
    add("1.5x for 5 steps", excursion("half5", 1.5, 5), 0.9)
    add("1.5x for 30 steps", excursion("half30", 1.5, 30), 0.95)
    add("+2 % in 100 steps, within 400", ramp("ramp"), 0.6)
    add("+10 % for good", step_up("up10", 1.1), 0.6)
    add("never learns", never_learns("never"), 0.9)
    add("stuck after a restart", stuck("stuck"), 0.9)
    add("loses what it learned", lost("lost"), 0.9)
    add("collapse", collapse("collapse"), 0.9)
    return made


def _healthy() -> dict[str, World]:
    made = {
        "plain": plain("plain"),
        "heavy tail, correlated": heavy_tail("tail"),
        "hard batches, .5 % at 10x": hard_batches("hard.5", 0.005, 10.0),
        "hard batches, 2 % at 10x": hard_batches("hard2", 0.02, 10.0),
        "hard batches, 5 % at 10x": hard_batches("hard5", 0.05, 10.0),
        "every 100th at 5x": hard_batches("hundredth", 0.0, 5.0, every=100),
        "bursts of 3 in 500, 5x": hard_batches("bursts", 0.0, 5.0, every=500, length=3),
        "two tasks in blocks of 200": blocks("blocks"),
        "epoch borders, +25 %": epochs("epochs25", 0.25),
        "epoch borders, +40 %": epochs("epochs40", 0.40),
        "epoch borders, +60 %": epochs("epochs60", 0.60),
        "saw-tooth": saw_tooth("saw"),
        "warm restarts": warm_restarts("restarts"),
        "curriculum": curriculum("curriculum"),
        "RL, around zero": rl("rl"),
        "RL, around zero, undeclared": rl("rl", "minimize"),
        "RL, value loss": value_loss("value"),
        "GAN": gan("gan"),
        "GAN, undeclared": gan("gan", "minimize"),
    }
    return {name: World(make=make, is_healthy=True) for name, make in made.items()}


WORLDS: Mapping[str, World] = {**_faulty(), **_healthy()}


# ---------------------------------------------------------------------------------- rates


def findings_of(curve: Curve) -> list[Finding]:
    """Return all that the detectors in the loop find, fed with every step. Nothing is withheld."""
    detectors = DetectorSet(loss_kind=curve.loss_kind)
    findings: list[Finding] = []
    for step, point in enumerate(curve.points):
        if step in curve.restarts:
            detectors.rebaseline(0)
        record = StepRecord(
            step=step,
            attempt=1,
            loss=point.loss,
            grad_norm=point.grad_norm,
            learning_rate=point.learning_rate,
            skipped=not math.isfinite(point.loss),
        )
        findings += detectors.update(record)
    return findings


def is_told(curve: Curve, findings: Sequence[Finding]) -> bool:
    """Return whether a finding was reported during the fault."""
    return any(curve.onset <= finding.step <= curve.told_by for finding in findings)


def episodes(findings: Sequence[Finding], gap: int = 20) -> int:
    """Return the number of episodes: findings at most ``gap`` steps apart are one."""
    steps = sorted({finding.step for finding in findings})
    return sum(i == 0 or step - steps[i - 1] > gap for i, step in enumerate(steps))


class Rate(NamedTuple):
    """Reports about the curves of one world at one noise."""

    num_alarmed: int
    """Reported faulty curves; healthy ones with any report."""
    curves: int
    episodes: float
    """False episodes per curve, on average: in all of a healthy one, before the onset of a faulty
    one."""
    causes: Counter[str]


def rate(world: World, noise: float, seeds: Sequence[int]) -> Rate:
    """Return the reports about the curves of these seeds."""
    num_told, num_early, causes = 0, 0, Counter[str]()
    for seed in seeds:
        curve = world.make(seed, noise)
        findings = findings_of(curve)
        early = [f for f in findings if curve.is_healthy or f.step < curve.onset]
        num_told += bool(findings) if curve.is_healthy else is_told(curve, findings)
        num_early += episodes(early)
        causes.update(finding.cause for finding in early)
    return Rate(num_told, len(seeds), num_early / len(seeds), causes)


def table(names: Sequence[str], seeds: Sequence[int]) -> Iterator[str]:
    """Yield one line a world: its share told, or how often a healthy one is."""
    for name in names:
        world = WORLDS[name]
        rates = [rate(world, noise, seeds) for noise in world.noises]
        total = sum(each.num_alarmed for each in rates) / sum(each.curves for each in rates)
        shares = " ".join(
            f"{each.episodes:7.2f}"
            if world.is_healthy
            else f"{100 * each.num_alarmed / each.curves:6.0f}%"
            for each in rates
        )
        if world.is_healthy:
            causes = sum((each.causes for each in rates), Counter[str]())
            most = ", ".join(f"{cause} {num}" for cause, num in causes.most_common(3))
            mean = sum(each.episodes for each in rates) / len(rates)
            yield f"{name:32} {shares}  mean {mean:6.2f}  {most}"
        else:
            early = sum(each.episodes for each in rates) / len(rates)
            mark = "" if total >= world.goal else "  BELOW"
            goal = f"{100 * world.goal:.0f} %"
            yield f"{name:32} {shares}  all {100 * total:4.0f} % of {goal}{mark}  early {early:.2f}"


def main(arguments: Sequence[str]) -> None:
    """Print the table of both halves of the seeds; arguments: parts of worlds' names."""
    names = [name for name in WORLDS if not arguments or any(part in name for part in arguments)]
    halves = {"settings were chosen by": TUNING_SEEDS, "never used": HELD_OUT_SEEDS}
    for words, seeds in halves.items():
        sys.stdout.write(f"\nseeds {seeds[0]} to {seeds[-1]}, {words}: noise {NOISES}\n")
        sys.stdout.write("faulty: share told; healthy: times told in 6,000 steps\n\n")
        for line in table(names, seeds):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
