"""Examples of the detectors that run in every rank."""

import math
import random
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from docs.drawn.entry import Entry, rest_of
from docs.drawn.runs import State, in_loop
from docs.drawn.svg import Line, Panel
from trainvitals.detect import guard, level, outliers, spike
from trainvitals.detect.outliers import RobustWindow
from trainvitals.detect.spike import BURST_DEFAULTS, BurstDetector
from trainvitals.records import StepRecord

BLOOM = (0.242, 0.947, 2.39)
"""Gradient norm of BLOOM-176B in the steps before its spike."""


def noisy(values: Sequence[float], spread: float, seed: int) -> list[float]:
    """Return the values, each times a log-normal factor."""
    rng = random.Random(seed)
    return [value * math.exp(rng.gauss(0.0, spread)) for value in values]


def falling(steps: int, start: float = 3.2, end: float = 2.6) -> list[float]:
    """Return a typical loss curve: fast at first, then ever more slowly."""
    return [end + (start - end) * math.exp(-3.0 * i / steps) for i in range(steps)]


def losses(values: Sequence[float]) -> list[StepRecord]:
    """Return records with only a loss."""
    return [StepRecord(step=i, attempt=1, loss=value) for i, value in enumerate(values)]


def norms(values: Sequence[float], seed: int) -> list[StepRecord]:
    """Return records of a gradient norm, with a matching loss."""
    around = noisy([2.6] * len(values), 0.01, seed)
    return [
        StepRecord(step=i, attempt=1, loss=loss, grad_norm=norm)
        for i, (loss, norm) in enumerate(zip(around, values, strict=True))
    ]


def nonfinite() -> list[Panel]:
    """A NaN on one rank; a gradient scaler that searches its scale."""
    bad = losses(noisy(falling(120), 0.015, 1))
    bad[70] = StepRecord(step=70, attempt=1, loss=math.nan, nonfinite_ranks=(3,))
    scaled = norms(noisy([0.4] * 120, 0.12, 2), 2)
    for step in (0, 1, 2, 3, 60):
        scaled[step] = StepRecord(
            step=step,
            attempt=1,
            loss=scaled[step].loss,
            grad_norm=math.inf,
            nonfinite_ranks=(0, 1),
            overflow=True,
        )
    return [
        in_loop("one rank's loss is NaN", bad, "nonfinite", limit=False),
        in_loop(
            "silent: overflows of a gradient scaler (crosses)",
            scaled,
            column="grad_norm",
            limit=False,
        ),
    ]


def in_force() -> list[Panel]:
    """Dead units; batches without a loss term."""
    dead = losses(noisy([2.6] * 120, 0.01, 22))
    dead[60:] = [replace(record, no_gradient=True) for record in dead[60:]]
    sparse = losses(noisy(falling(120), 0.02, 23))
    sparse[30::30] = [replace(record, no_gradient=True) for record in sparse[30::30]]
    return [
        in_loop("all gradients are 0 from step 60 on", dead, "guard", limit=False),
        in_loop("silent: every 30th batch has no loss term", sparse, limit=False),
    ]


def loss_spike() -> list[Panel]:
    """Three bad batches; five steps within the noise; healthy cases."""
    poisoned = noisy(falling(160), 0.015, 3)
    poisoned[110:113] = [7.4, 8.1, 6.9]
    within = noisy([2.0 * (1.5 if 220 <= i < 225 else 1.0) for i in range(260)], 0.1, 3)
    hard = noisy([2.0 * (10.0 if i % 47 == 46 else 1.0) for i in range(900)], 0.05, 4)
    rng = random.Random(4)
    bimodal = noisy([2.4 if rng.random() < 0.3 else 1.2 for _ in range(200)], 0.05, 4)
    epochs = noisy([1.7 + 0.9 * (i % 40) / 40 for i in range(200)], 0.02, 5)
    decay = noisy([2.6 if i < 100 else 1.9 + 0.7 * math.exp(-(i - 100) / 6) for i in range(200)],
                  0.02, 6)  # fmt: skip
    return [
        in_loop("three poisoned batches", losses(poisoned), "loss_spike"),
        in_loop("1.5 times the loss for five steps, at 10 % noise", losses(within), "loss_spike"),
        in_loop("hard batches that recur: reported three times", losses(hard),
                "loss_spike", log=True),
        in_loop("silent: two kinds of batches", losses(bimodal), log=True),
        in_loop("silent: a saw-tooth, as with data sorted by length", losses(epochs)),
        in_loop("silent: the learning rate is divided by ten", losses(decay)),
        _reinforcement(),
    ]  # fmt: skip


def _reinforcement() -> Panel:
    """Draw a value function's loss, which grows while the return improves."""
    grows = noisy([0.5 + 5.0 / (1.0 + math.exp(-(i - 500) / 80)) for i in range(1000)], 0.15, 14)
    title = "silent with loss_kind=rl: a value loss that grows tenfold"
    return in_loop(title, losses(grows), every=4, loss_kind="rl")


def grad_norm_spike() -> list[Panel]:
    """One step of sixty times the norm; one of fifteen times."""
    spiked, heavy = noisy([0.3] * 140, 0.15, 7), noisy([0.3] * 140, 0.15, 8)
    spiked[90], heavy[90] = 18.0, 4.5
    return [
        in_loop("sixty times the usual norm", norms(spiked, 7), "grad_norm_spike",
                column="grad_norm", log=True),
        in_loop("silent: fifteen times, for one step; the loss does not move", norms(heavy, 8),
                column="grad_norm", log=True),
    ]  # fmt: skip


def grad_norm_burst() -> list[Panel]:
    """The steps before BLOOM-176B's spike; single heavy steps."""
    rising = noisy([BLOOM[0]] * 120, 0.15, 9)
    rising[100:102] = BLOOM[1:]
    single = noisy([BLOOM[0]] * 120, 0.15, 10)
    for step in (40, 65, 90, 110):
        single[step] = 2.6
    burst = norms(rising[:106], 9)
    usual = {"median of its window": _median_of_window}
    return [
        in_loop("the steps before BLOOM-176B's spike", burst, "grad_norm_burst",
                column="grad_norm", limit=False, levels=usual, log=True),
        _evidence(burst),
        in_loop("silent: single heavy steps", norms(single, 10), column="grad_norm", log=True),
    ]  # fmt: skip


def _median_of_window(state: State) -> float | None:
    window = RobustWindow(BURST_DEFAULTS.window)
    window.restore(state["window"])
    return window.median() if len(window) else None


def _evidence(records: Sequence[StepRecord]) -> Panel:
    """Draw the detector's sum of evidence, and its threshold."""
    detector, sums = BurstDetector(), []
    for record in records:
        detector.update(record)
        sums.append((record.step, float(detector.state_dict()["sum"])))
    ends = [(record.step, BURST_DEFAULTS.enough) for record in (records[0], records[-1])]
    lines = [
        Line(label="sum of evidence", points=sums),
        Line(label="enough", points=ends, role="limit"),
    ]
    title = "the same: what each step adds is bounded"
    return Panel(title=title, lines=lines, x_label="step", y_label="deviations")


def loss_level() -> list[Panel]:
    """A slow drift, a permanent step up, and one that recovers."""
    walk = noisy([2.5 + _start(i) + max(0, i - 250) * 0.0035 for i in range(560)], 0.012, 11)
    shift = noisy([(2.5 if i < 250 else 2.58) + _start(i) for i in range(620)], 0.004, 12)
    up = [0.0 if i < 250 else 0.11 * math.exp(-(i - 250) / 45) for i in range(560)]
    back = noisy([2.5 + _start(i) + rise for i, rise in enumerate(up)], 0.012, 13)
    levels = {"median of 64 steps": _median_of_level, "lowest": lambda state: state["best"]}
    shown: dict[str, Any] = {"limit": False, "every": 3, "levels": levels, "of": "loss_level"}
    return [
        in_loop("a slow divergence", losses(walk), "loss_level", **shown),
        in_loop("3 % up, without recovery", losses(shift), "loss_level", **shown),
        in_loop("silent: 4 % up, but it recovers", losses(back), **shown),
    ]


def _start(step: int) -> float:
    return 1.5 * math.exp(-step / 15)


def _median_of_level(state: State) -> float | None:
    newest = sorted(state["losses"][-64:])
    return newest[len(newest) >> 1] if newest else None


def loss_drift() -> list[Panel]:
    """A permanent rise of 10% within the noise, 2% in 100 steps; epochs of a memorized set."""
    up = noisy([2.0 if i < 1200 else 2.2 for i in range(1800)], 0.1, 15)
    ramp = noisy([2.0 * 1.02 ** (max(0, i - 1200) / 100) for i in range(1800)], 0.05, 16)
    stairs = [1.1] * 416 + [0.71 * (1.0 + i / 5000) for i in range(384)]
    by_heart = noisy(stairs + [0.4 * (1.0 + 0.1 * i / 400) for i in range(400)], 0.05, 17)
    shown: dict[str, Any] = {"limit": False, "every": 6}
    return [
        in_loop("a lasting rise of 10 %, at 10 % noise", losses(up), "loss_drift", **shown),
        in_loop("2 % in 100 steps, at 5 % noise", losses(ramp), "loss_drift", **shown),
        in_loop("silent: epochs over a memorized data set", losses(by_heart), **shown),
    ]


def loss_progress() -> list[Panel]:
    """Progress lost; none made; a collapse; a repeated batch. A loss that has converged."""
    learned = [2.0 + 5.0 * math.exp(-i / 60) for i in range(600)]
    lost = noisy(learned + [min(7.0, 2.0 + 0.03 * i) for i in range(400)], 0.05, 18)
    never, collapsed = noisy([6.9] * 700, 0.05, 19), noisy(learned + [0.1] * 200, 0.05, 20)
    back = [0.4 + 2.05 * math.exp(-i / 60) for i in range(250)]
    setback = noisy(back + [0.4 + min(1.0, 0.01 * i) for i in range(150)], 0.45, 23)
    repeated = noisy(learned, 0.05, 22) + [2.0 * math.exp(-i / 80) for i in range(120)]
    converged = noisy([2.0 + 5.0 * max(0.0, 1 - i / 20) for i in range(900)], 0.05, 21)
    shown: dict[str, Any] = {"limit": False, "every": 4}
    return [
        in_loop("progress is lost", losses(lost), "loss_progress", **shown),
        in_loop("a setback within the noise", losses(setback), "loss_progress", **shown),
        in_loop("a loss that never learns", losses(never), "loss_progress", **shown),
        in_loop("a collapse: leaking labels, or a masked loss", losses(collapsed),
                "loss_progress", **shown),
        in_loop("one batch again and again", losses(repeated), "loss_progress", **shown),
        in_loop("silent: converged within 20 steps", losses(converged), **shown),
    ]  # fmt: skip


ENTRIES = (
    Entry(
        name="nonfinite",
        title="Non-finite numbers",
        owner=outliers.NonFiniteDetector,
        needs="Nothing but the step itself; it works from the first step on. `rank_failed` reports "
        "that a rank could not measure the step: unknown, not bad.",
        good="Every kind of training, including RL, GANs, curricula and large learning rates: it "
        "compares with no reference that these could shift.",
        bad="Damage whose values are still finite.",
        examples=nonfinite,
        notes=("MAX_OVERFLOWS",),
        source=outliers,
    ),
    Entry(
        name="guard",
        title="Unguarded or untrained steps",
        owner=guard.GuardDetector,
        needs="Nothing but the step itself. `unguarded` reports steps that could not be measured, "
        "so their updates were not checked; `zero_gradient` reports updates that train nothing.",
        good="Every kind of training, including curricula and large learning rates: it compares "
        "with no reference. In RL and GANs, and if the loss is exactly 0 as well, gradients of 0 "
        "may be normal, so 50 steps in a row are needed.",
        bad="A part of the model that is not trained, while another part is.",
        examples=in_force,
        notes=("UNMEASURED", "AGAIN", "ZERO", "ZERO_IS_USUAL"),
        source=guard,
    ),
    Entry(
        name="loss_spike",
        title="High loss",
        owner=spike.SpikeDetector,
        finds="Finds steps whose loss is above the limit set by the previous steps: single steps, "
        "or several together.",
        needs="`loss` of `warm_up` applied steps. Several steps are added up only if every loss is "
        "positive and the loss is minimized.",
        good="At 15 % noise: single outliers of 3x or more, or 1.5x for 5 steps or more. In "
        "low-noise runs smaller ones: there is no fixed floor.",
        bad="A level that changes often for good reason: alternating tasks, a curriculum that was "
        "not announced with `expect`. Each change is reported until the changes become regular. "
        "Single hard batches are reported five times, epoch boundaries three times. For "
        "reinforcement learning and GANs set `loss_kind`: then only single outliers are reported, "
        "and near zero only above ten times the whole range; heavy-tailed rewards are still "
        "reported. Large optimizer spikes (AdamW at 3e-2) are reported each time; the loss alone "
        "cannot show whether one did damage.",
        examples=loss_spike,
        module=spike,
        more=rest_of(spike.SpikeDetector._refresh_spread),
        config=spike.SpikeConfig,
    ),
    Entry(
        name="grad_norm_spike",
        title="Gradient-norm spike",
        owner=None,
        finds="Finds steps whose gradient norm is above the limit set by the previous steps: the "
        "rule for the loss, with a wider limit.",
        needs="`grad_norm` of `warm_up` applied steps.",
        good="Explosions to 40 times the usual norm or more, in any kind of training: also RL and "
        "GANs, whose loss says little, and large learning rates, whose spikes stay below that.",
        bad="Anything smaller: clean runs show single steps at 15 times, at worst 35 times. The "
        "first steps after a curriculum change that was not announced with `expect`.",
        examples=grad_norm_spike,
        config=spike.GradNormConfig,
        notes=("GRAD_NORM_DEFAULTS",),
        source=spike,
    ),
    Entry(
        name="grad_norm_burst",
        title="Gradient-norm burst",
        owner=spike.BurstDetector,
        needs="`grad_norm` of `warm_up` steps, above zero. If there is a `loss`, a norm that grows "
        "while the loss falls is not reported.",
        good="Early warning of a spike, two or more steps before the loss moves; lost optimizer "
        "state, also in RL, GANs, curricula and with large learning rates.",
        bad="Consecutive hard batches: reported at most five times. Unannounced curriculum "
        "changes and the largest optimizer spikes: each reported once.",
        examples=grad_norm_burst,
        config=spike.BurstConfig,
    ),
    Entry(
        name="loss_level",
        title="Level of the loss: divergence, failed recovery",
        owner=level.LevelDetector,
        needs="`loss` of `window` steps with some noise: a constant loss is not judged. Only if "
        "the loss is minimized.",
        good="A divergence of 6 sigma and 5 %; in low-noise runs a lasting rise of 3 %.",
        bad="Curricula and new data that were not announced with `expect`: the rise is real and is "
        "reported. A loss that rises while the run improves (RL) or wanders (GANs): set "
        "`loss_kind`, and this detector is off, for faults too. A series of large optimizer spikes "
        "raises the level and is reported.",
        examples=loss_level,
        module=level,
        config=level.LevelConfig,
    ),
    Entry(
        name="loss_drift",
        title="Drift of the loss within its noise",
        owner=level.DriftDetector,
        needs="`loss` of 512 steps, above zero. Only if the loss is minimized.",
        good="A lasting rise of 10 % at 15 % noise; a drift of 2 % per 100 steps, found within "
        "about 400 steps at 5 % noise, later with more noise.",
        bad="The first 500 steps, and 500 steps after a sudden fall. Warm restarts and other slow "
        "waves are reported once or twice, until their size is known. So are RL and GAN losses "
        "unless `loss_kind` is set, and unannounced curriculum changes. It does not see optimizer "
        "spikes.",
        examples=loss_drift,
        config=level.DriftConfig,
    ),
    Entry(
        name="loss_progress",
        title="Lost progress, a setback, a loss that never learns, a collapse",
        owner=level.ProgressDetector,
        needs="`loss`; a `learning_rate`, if present, shows when the warm-up ends. Only if the "
        "loss is minimized.",
        good="A run that lost 90 % of its improvement for 100 steps, or a quarter of it within 100 "
        "steps (a setback, within the noise of single losses), that has not improved in 500 steps, "
        "that is stuck after a restart, whose loss suddenly drops below 30 %, or whose loader "
        "repeats one batch.",
        bad="Fine-tuning that has nothing left to learn: reported once as not learning. A "
        "curriculum that switches to an easy task, or the recovery from a large optimizer spike, "
        "can look like a collapse. RL and GANs, whose loss shows no such progress: set "
        "`loss_kind`.",
        examples=loss_progress,
        config=level.ProgressConfig,
    ),
)
"""The detectors that are drawn here."""
