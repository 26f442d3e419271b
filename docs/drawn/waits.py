"""Examples of the watchers of time and memory: throughput, waits, what does not come."""

import math
import random
from collections.abc import Sequence
from typing import Any

from docs.drawn.entry import Entry, rest_of
from docs.drawn.loop import noisy
from docs.drawn.runs import State, check, silence, watched
from docs.drawn.steps import each_rank, of_rank, of_run, step
from docs.drawn.svg import Line, Mark, Panel, Point
from trainvitals.detect.fleet import FleetDetectors, memory, ranks, speed
from trainvitals.detect.fleet import straggler as straggling
from trainvitals.detect.fleet.base import MergedStep
from trainvitals.detect.fleet.ranks import DataBoundConfig
from trainvitals.detect.fleet.speed import CheckpointConfig, ThroughputConfig
from trainvitals.records import Finding

GIB = 2.0**30


def throughput() -> list[Panel]:
    """A lasting fall; evaluations at intervals."""
    slower = noisy([100.0 if i < 300 else 86.0 for i in range(440)], 0.02, 30)
    evaluated = noisy([25.0 if i and i % 50 == 0 else 100.0 for i in range(440)], 0.02, 31)
    return [
        _rates("14 % are lost from step 300 on", slower, "throughput"),
        _rates("silent: an evaluation every 50 steps", evaluated),
    ]


def _rates(title: str, rates: Sequence[float], detector: str = "") -> Panel:
    steps = [
        step(i, run={"tokens_per_second": rate * 1e3},
             ranks={"step_duration_seconds": [100.0 / rate]})
        for i, rate in enumerate(rates)
    ]  # fmt: skip
    fall = ThroughputConfig().fall
    lines = {"tokens a second": lambda s: (of_run("tokens_per_second")(s) or 0.0) / 1e3}

    def limit(state: State) -> float | None:
        return None if state["best"] is None else (1.0 - fall) * _per_second(state["best"]) / 1e3

    label = f"{100 * fall:g} % below the best course"
    return watched(title, steps, detector, of="throughput", lines=lines, limit=(label, limit),
                   y_label="thousands a second", every=2)  # fmt: skip


def _per_second(log_cost: float) -> float:
    return math.exp(-log_cost)


def data_bound() -> list[Panel]:
    """Every fourth step waits; the start of an epoch does."""
    slow = [1.6 if i >= 100 and i % 4 == 0 else 0.02 for i in range(240)]
    epochs = [8.0 if i % 80 == 0 else 0.02 for i in range(240)]
    return [
        _waits("four workers are too slow from step 100 on", slow, "data_bound"),
        _waits("silent: the first batch of an epoch", epochs),
    ]


def _waits(title: str, waits: Sequence[float], detector: str = "") -> Panel:
    steps = [
        step(i, ranks={"data_wait_seconds": [wait], "step_duration_seconds": [1.0 + wait]})
        for i, wait in enumerate(waits)
    ]
    share = DataBoundConfig().share

    def waited(merged: MergedStep) -> float:
        wait = of_rank("data_wait_seconds", 0)(merged) or 0.0
        return 100.0 * wait / (1.0 + wait)

    lines = {"part of the step": waited, "limit, of 50 steps": lambda _: 100.0 * share}
    return watched(title, steps, detector, lines=lines, y_label="% waiting")


def straggler() -> list[Panel]:
    """One rank is slow in backward, in nearly every step; each is now and then."""
    rng = random.Random(32)
    lasting, by_turns = [], []
    for i in range(160):
        late = 0 if i >= 60 and rng.random() < 0.9 else -1
        lasting.append(_late_in_backward(i, late, rng))
        by_turns.append(_late_in_backward(i, rng.randrange(4), rng))
    return [
        _gradient_waits("rank 0 is slow in backward from step 60 on", lasting, "straggler"),
        _gradient_waits("silent: another late rank in each step", by_turns),
    ]


def _late_in_backward(number: int, late: int, rng: random.Random) -> MergedStep:
    """Return a step of a second, in which all wait for the late rank, and it waits for nobody."""
    slower = 0.2 if late >= 0 else 0.0
    own = [0.5 + rng.uniform(0.0, 0.02) + (slower if r == late else 0.0) for r in range(4)]
    columns = {
        "backward_seconds": own,
        "gradient_wait_seconds": [max(own) - seconds + 0.02 for seconds in own],
        "communication_seconds": [0.01] * 4,
        "step_duration_seconds": [1.0 + slower] * 4,
    }
    return step(number, ranks=columns)


def _gradient_waits(title: str, steps: Sequence[MergedStep], detector: str = "") -> Panel:
    lines: dict[str, Any] = each_rank("gradient_wait_seconds", 4)
    return watched(title, steps, detector, lines=lines, y_label="s waiting for gradients")


def memory_creep() -> list[Panel]:
    """A leak below batches of all lengths; a buffer that is made once."""
    rng = random.Random(33)
    batches = [20.0 + rng.uniform(0.0, 12.0) for _ in range(1000)]
    leak = [gib + 0.02 * i for i, gib in enumerate(batches)]
    buffer = [gib + (12.0 if i >= 500 else 0.0) for i, gib in enumerate(batches)]
    return [
        _memory("20 MiB a step are not given back", leak, "memory_creep"),
        _memory("silent: one large buffer, made once", buffer),
    ]


def _memory(title: str, gibs: Sequence[float], detector: str = "") -> Panel:
    steps = [step(i, ranks={"memory_allocated_bytes": [g * GIB]}) for i, g in enumerate(gibs)]
    lines = {
        "allocated": lambda s: (of_rank("memory_allocated_bytes", 0)(s) or 0.0) / GIB,
        "limit: the device's": lambda _: 80.0,
    }
    return watched(title, steps, detector, lines=lines, y_label="GiB", totals=80 * GIB, every=4)


def stalled() -> list[Panel]:
    """A step that does not come; long evaluations that came before."""
    steady = [2.0 * i for i in range(200)]
    evaluated = []
    now = 0.0
    for i in range(200):
        evaluated.append(now)
        now += {60: 1_500.0, 120: 1_700.0, 180: 3_000.0}.get(i, 2.0)
    return [
        silence("no step after half an hour", steady, 2_200.0, "stalled"),
        silence("silent: evaluations; the third takes longer", evaluated, 0.0),
    ]


def checkpoint_overdue() -> list[Panel]:
    """Checkpoints that end; one that is missed."""
    return [
        _saves("the last checkpoint is of step 200", {50, 100, 150, 200}, "checkpoint_overdue"),
        _saves("silent: one save fails", {50, 100, 150, 250, 300, 350}),
    ]


def _saves(title: str, saves: set[int], detector: str = "") -> Panel:
    watchers, newest, findings = FleetDetectors(), 0, list[Finding]()
    ages, limits = list[Point](), list[Point]()
    for i in range(400):
        if i in saves:
            watchers.saved(i)
            newest = i
        findings += watchers.update(step(i))
        ages.append((i, float(i - newest)))
        limits.append((i, 50 * CheckpointConfig().ratio if i >= 100 else None))
    mine = check(title, findings, detector)
    lines = [
        Line(label="age of the newest", points=ages),
        Line(label="limit", points=limits, role="limit"),
    ]
    marks = [Mark(x=f.step, y=dict(ages)[f.step], level=f.level, word="overdue") for f in mine]
    return Panel(
        title=title, lines=lines, marks=marks, findings=mine, x_label="step", y_label="steps"
    )


ENTRIES = (
    Entry(
        name="throughput",
        title="Throughput",
        owner=speed.ThroughputWatcher,
        needs="`tokens_per_second`, or `step_duration_seconds` of the ranks; five measurements of "
        "`block` steps. A change of the number of ranks starts over.",
        examples=throughput,
        more="Periodic slow steps are left out. " + rest_of(speed.SlowStepFilter),
        config=speed.ThroughputConfig,
    ),
    Entry(
        name="data_bound",
        title="Waiting for data",
        owner=ranks.DataBoundWatcher,
        needs="`data_wait_seconds` and `step_duration_seconds` of the ranks.",
        examples=data_bound,
        config=ranks.DataBoundConfig,
    ),
    Entry(
        name="straggler",
        title="Straggling rank",
        owner=straggling.StragglerWatcher,
        needs="`step_duration_seconds`, and of two ranks or more `gradient_wait_seconds` and the "
        "other parts of the step, which DDP and FSDP2 provide. Otherwise "
        "`communication_seconds` or `data_wait_seconds`: then no cause within the step is named.",
        examples=straggler,
        config=straggling.StragglerConfig,
    ),
    Entry(
        name="memory_creep",
        title="Memory creep",
        owner=memory.MemoryCreepWatcher,
        needs="`memory_allocated_bytes` of every rank, and the device's size from an agent's "
        "`memory_total_bytes`.",
        examples=memory_creep,
        config=memory.MemoryConfig,
    ),
    Entry(
        name="stalled",
        title="Stalled step",
        owner=speed.stalled,
        finds="Finds a run whose steps stopped coming.",
        needs="One step.",
        examples=stalled,
        config=speed.StallConfig,
    ),
    Entry(
        name="checkpoint_overdue",
        title="Overdue checkpoint",
        owner=speed.checkpoint_overdue,
        finds="Finds a checkpoint that is overdue.",
        needs="Two checkpoints, which define the usual interval.",
        examples=checkpoint_overdue,
        config=speed.CheckpointConfig,
    ),
)
"""The detectors that are drawn here."""
