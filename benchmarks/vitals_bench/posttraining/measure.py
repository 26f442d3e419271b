"""Trains, and counts which faults are reported by name, how soon, and what healthy runs raise."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import trainer_hooks
from trainvitals.detect.posttraining.set import PostTrainingDetectors
from trainvitals.errors import TrainingHalted
from trainvitals.jsonable import from_json, to_json
from trainvitals.records import Finding
from vitals_bench.judgement.ledger import READ_EVERY, Ledger
from vitals_bench.posttraining import with_trl
from vitals_bench.posttraining.kinds import FAULTS, HEALTHY, KINDS, TRL, Kind
from vitals_bench.posttraining.pairs import Compared, train_pairs
from vitals_bench.posttraining.policy import TRUTH, Sampled, Scalars, Writer, train_policy
from vitals_bench.posttraining.supervised import Tuned, prepare, train_rows
from vitals_bench.rows import Cell, Grid, Row, at_least, at_most, exactly
from vitals_bench.training import own_place

SEEDS = (0, 2, 4, 7, 9, 11)
"""Limits are chosen by the even ones; the odd ones are only reported."""
_MAX_NORM = 1.0
_SMOOTH = 5
"""Rewards of batches whose median is the success. An evaluation has less noise."""
_LOW = 5
"""Steps in a row with a low entropy: in one or two it is noise."""
_TOY = "reward without signal"
"""Kind whose only sign is its entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command."""

    kinds: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    results: Path | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one training."""

    kind: str
    seed: int
    findings: list[tuple[int, str]] = []
    """Step and detector of each finding about the scalars."""
    lost_at: int | None = None
    """Step, from the onset on, at which a tenth of the best success was lost."""
    low_entropy_at: int | None = None
    """First of five logged steps in a row in which the entropy was below a tenth of its level."""
    num_actions: int = 0
    """Updates that were withheld, rollbacks and halts."""
    messages: dict[str, int] = {}
    """Other alerts of the run, by name."""
    num_pages: int = 0

    @property
    def is_held_out(self) -> bool:
        """Whether no limit was chosen by its seed."""
        return self.seed % 2 == 1

    @property
    def delay(self) -> int | None:
        """Steps from the onset to the report by name; None: there is none."""
        kind = KINDS[self.kind]
        steps = [s - kind.onset for s, name in self.findings if name in kind.detectors]
        return min((step for step in steps if step >= 0), default=None)

    @property
    def reported_at(self) -> int | None:
        """Step of the report by name; None: there is none."""
        return None if self.delay is None else self.delay + KINDS[self.kind].onset

    @property
    def is_right(self) -> bool:
        """Whether the first report names the fault, after its onset."""
        first = self.findings[0][0] if self.findings else 0
        return self.delay is not None and self.delay == first - KINDS[self.kind].onset

    @property
    def is_in_time(self) -> bool:
        """Whether it is reported before the step in which a tenth of the success is lost.

        With a reward that is noise there is no success to lose.
        """
        is_lost = self.lost_at is not None and self.kind != _TOY
        return self.reported_at is not None and (
            not is_lost or self.reported_at < (self.lost_at or 0)
        )


def train(name: str, seed: int) -> Outcome:
    """Train a kind once with the library in the loop; return its reports."""
    kind = KINDS[name]
    if isinstance(kind.run, with_trl.TrlRun):
        return _train_with_trl(name, kind.run, seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model, optimizer, batches = _start(kind)
    course = Course(_SMOOTH if isinstance(kind.run, Sampled) else 1)
    with own_place(), trainer_hooks.watch(model, optimizer, task=kind.task) as monitor:
        loss_kind = "rl" if isinstance(kind.run, Sampled) else "minimize"
        ledger = Ledger(monitor.run_id, loss_kind=loss_kind)
        try:
            for step, (loss, scalars) in enumerate(batches):
                course.add(step, scalars.pop(TRUTH, None), scalars.get("entropy"), kind.onset)
                monitor.observe(**scalars)
                monitor.step(loss, max_norm=_MAX_NORM)
                if step % READ_EVERY == 0:
                    ledger.read()
        except TrainingHalted:  # the ledger counts it
            pass
        monitor.close()
        ledger.read()
    return _outcome(name, seed, ledger, course)


def _train_with_trl(name: str, run: with_trl.TrlRun, seed: int) -> Outcome:
    """Train a kind once with TRL's trainer and the callback; return its reports."""
    kind = KINDS[name]
    course, ledgers = Course(_SMOOTH), list[Ledger]()

    def read(run_id: str) -> None:
        if not ledgers:
            ledgers.append(Ledger(run_id, loss_kind="rl" if run.reward else "minimize"))
        ledgers[0].read()

    with own_place():
        with_trl.train(run, seed, kind.steps, kind.onset, read)
        ledgers[0].read()
    for step, scalars in ledgers[0].scalars().items():
        course.add(step, scalars.get("reward"), scalars.get("entropy"), kind.onset)
    return _outcome(name, seed, ledgers[0], course)


def _outcome(name: str, seed: int, ledger: Ledger, course: Course) -> Outcome:
    """Return what a training raised; its scalars are judged as the collector does."""
    detectors, findings = PostTrainingDetectors(KINDS[name].task), list[Finding]()
    for step, scalars in ledger.scalars().items():
        findings += detectors.update(scalars, step=step, attempt=1, time_unix_ns=0)
    return Outcome(
        kind=name,
        seed=seed,
        findings=[(finding.step, finding.kind) for finding in findings],
        lost_at=course.lost_at,
        low_entropy_at=course.low_entropy_at,
        num_actions=ledger.withheld + len(ledger.rollbacks()) + ledger.halts(),
        messages=ledger.messages(),
        num_pages=ledger.num_pages(),
    )


def _start(kind: Kind) -> tuple[nn.Module, Optimizer, Iterator[tuple[Tensor, Scalars]]]:
    """Return model, optimizer and steps of a kind with a loop of the benchmark's own."""
    run = kind.run
    assert not isinstance(run, with_trl.TrlRun)
    if isinstance(run, Tuned):
        reader, adam = prepare(run)
        return reader, adam, train_rows(reader, adam, kind.steps, run)
    model = Writer()
    optimizer = torch.optim.Adam(model.parameters(), lr=run.learning_rate)
    if isinstance(run, Compared):
        return model, optimizer, train_pairs(model, optimizer, kind.steps, run)
    return model, optimizer, train_policy(model, optimizer, kind.steps, run)


class Course:
    """True success of a training, and its entropy: when they were lost."""

    def __init__(self, smooth: int) -> None:
        self._recent: deque[float] = deque(maxlen=smooth)
        self._best: float | None = None
        self._highest = 0.0
        self._low = list[int]()
        """Latest steps in a row whose entropy was low."""
        self.lost_at: int | None = None
        """Step at which a tenth of the best success was lost."""
        self.low_entropy_at: int | None = None
        """Step at which the entropy passed a tenth of its level and stayed below it."""

    def add(self, step: int, success: float | None, entropy: float | None, onset: int) -> None:
        """Add the numbers of a step."""
        if entropy is not None:
            self._highest = max(self._highest, entropy)
            self._low = [*self._low, step] if entropy < 0.1 * self._highest else []
            if self.low_entropy_at is None and len(self._low) == _LOW:
                self.low_entropy_at = self._low[0]
        if success is None:
            return
        self._recent.append(success)
        level = statistics.median(self._recent)
        is_full = len(self._recent) == self._recent.maxlen
        if is_full and (self._best is None or level > self._best):
            self._best = level
        is_lost = self._best is not None and level < self._best - 0.1 * abs(self._best)
        if is_lost and self.lost_at is None and step >= onset:
            self.lost_at = step


def measure_trainings(*, quick: bool, options: Options | None = None) -> Iterator[Row | Grid]:
    """Train each kind with each seed; a training takes seconds."""
    options = options or Options()
    path = options.results
    stored = [] if path is None or not path.exists() else path.read_bytes().splitlines()
    earlier = {(o.kind, o.seed): o for line in stored for o in [from_json(line, Outcome)]}
    outcomes = []
    for seed in options.seeds or (SEEDS[:1] if quick else SEEDS):
        for name in _chosen(options.kinds or (("parser breaks", "solved") if quick else ())):
            if name in TRL and (name, seed) not in earlier and not with_trl.is_installed():
                sys.stderr.write(f"{name} {seed}: left out, because TRL is not installed\n")
                continue
            outcome = earlier.get((name, seed)) or train(name, seed)
            outcomes.append(outcome)
            if path is not None and (name, seed) not in earlier:
                with path.open("ab") as file:
                    file.write(to_json(outcome) + b"\n")
                sys.stderr.write(f"{name} {seed}: {outcome.findings} {outcome.messages}\n")
    yield from figures(outcomes)


def _chosen(kinds: Sequence[str]) -> list[str]:
    """Return the kinds with these names, or with one of them before the colon; () is all."""
    return [name for name in KINDS if not kinds or {name, name.split(":")[0]} & {*kinds}]


def figures(outcomes: Sequence[Outcome]) -> Iterator[Row | Grid]:
    """Yield the figures of both halves of the seeds, those with TRL, and the table by kind."""
    own = [each for each in outcomes if each.kind not in TRL]
    for title, part in (
        ("setting seeds", [each for each in own if not each.is_held_out]),
        ("held-out seeds", [each for each in own if each.is_held_out]),
    ):
        if part:
            yield from _of_part(title, part)
    if with_library := [each for each in outcomes if each.kind in TRL]:
        yield from _of_trl(with_library)
    yield _table(outcomes)


def _of_trl(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """Yield the figures of the trainings with TRL, of all seeds."""
    faulty = [each for each in outcomes if KINDS[each.kind].detectors]
    healthy = [each for each in outcomes if not KINDS[each.kind].detectors]
    named = sum(each.delay is not None for each in faulty)
    yield Row(
        name="faults reported by name, with TRL's trainers",
        ours=100 * named / len(faulty) if faulty else None, unit="%", goal=at_least(90),
        note=f"{named} of {len(faulty)}",
    )  # fmt: skip
    yield from _of_toy(faulty, "with TRL's trainers")
    yield from _of_healthy(healthy, "with TRL's trainers")


def _of_part(title: str, outcomes: Sequence[Outcome]) -> Iterator[Row]:
    faulty = [each for each in outcomes if each.kind in FAULTS]
    healthy = [each for each in outcomes if each.kind in HEALTHY]
    delays = [each.delay for each in faulty if each.delay is not None]
    reports = [each for each in outcomes if each.findings]
    for name, num, of, least in (
        ("faults reported by name", len(delays), len(faulty), 90),
        ("first reports that are right", sum(o.is_right for o in reports), len(reports), 95),
    ):
        yield Row(
            name=f"{name}, {title}", ours=100 * num / of if of else None, unit="%",
            goal=at_least(least), note=f"{num} of {of}",
        )  # fmt: skip
    if delays:
        yield Row(
            name=f"from the onset to the report, median, {title}",
            ours=statistics.median(delays), unit="steps", note=f"longest: {max(delays)}",
        )  # fmt: skip
    in_time = [o for o in faulty if o.is_in_time]
    yield Row(
        name=f"faults reported before a tenth of the success is lost, {title}",
        ours=100 * len(in_time) / len(faulty) if faulty else None, unit="%", goal=at_least(90),
        note=f"{len(in_time)} of {len(faulty)}",
    )  # fmt: skip
    lost = [o for o in faulty if o.lost_at is not None and o.kind != _TOY]
    num_before = sum(o.is_in_time for o in lost)
    num_same = sum(o.reported_at == o.lost_at for o in lost)
    if lost:
        yield Row(
            name=f"the same, of the faults in which a tenth is lost at all, {title}",
            ours=100 * num_before / len(lost), unit="%",
            note=f"{num_before} of {len(lost)}, {num_same} more in that very step",
        )  # fmt: skip
    yield from _of_toy(faulty, title)
    yield from _of_healthy(healthy, title)


def _of_toy(faulty: Sequence[Outcome], title: str) -> Iterator[Row]:
    """Yield how long after a tenth of its entropy a reward without signal is reported."""
    waits = [
        math.inf if o.reported_at is None else float(o.reported_at - o.low_entropy_at)
        for o in faulty
        if o.kind.endswith(_TOY) and o.low_entropy_at is not None
    ]
    if waits:
        yield Row(
            name=f"from a tenth of the entropy to the report, longest, {title}",
            ours=max(waits), unit="steps", goal=at_most(20),
            note=f"{_TOY}: {', '.join(f'{delay:g}' for delay in waits)}",
        )  # fmt: skip


def _of_healthy(healthy: Sequence[Outcome], title: str) -> Iterator[Row]:
    """Yield what healthy trainings raised."""
    for name, count, goal in (
        ("a report about the scalars", sum(bool(o.findings) for o in healthy), None),
        ("any other alert", sum(bool(o.messages) for o in healthy), None),
        ("a page", sum(o.num_pages > 0 for o in healthy), at_most(len(healthy) / 40)),
        ("an action", sum(o.num_actions > 0 for o in healthy), exactly(0)),
    ):
        yield Row(
            name=f"healthy runs with {name}, {title}", ours=count, unit="runs", goal=goal,
            note=f"of {len(healthy)}",
        )  # fmt: skip


def _table(outcomes: Sequence[Outcome]) -> Grid:
    rows: list[tuple[Cell, ...]] = []
    for name in KINDS:
        mine = [each for each in outcomes if each.kind == name]
        delays = [each.delay for each in mine if each.delay is not None]
        others = {detector for each in mine for _, detector in each.findings}
        row = (
            f"{len(delays)}/{len(mine)}" if KINDS[name].detectors else None,
            statistics.median(delays) if delays else None,
            ", ".join(sorted(others)) or None,
            sum(each.num_actions > 0 for each in mine),
        )
        rows += [(name, KINDS[name].task, *row)] if mine else []
    return Grid(
        title="Trainings by kind, all seeds",
        columns=("training", "task", "named", "steps to the report", "reported", "with actions"),
        rows=tuple(rows),
        note="Real trainings of a tiny network, in loops of the benchmark's own, or with TRL's "
        "trainers (TRL: ...). A fault counts as "
        "reported by name if one of the detectors listed in `vitals_bench/posttraining/kinds.py` "
        "reports it after its onset. Limits are chosen by the even seeds.",
    )
