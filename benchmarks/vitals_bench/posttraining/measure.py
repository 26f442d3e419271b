"""Trains, and counts which faults are reported by name, how soon, and what healthy runs raise."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

import trainer_hooks
from trainvitals.detect.posttraining.set import PostTrainingDetectors
from trainvitals.errors import TrainingHalted
from trainvitals.jsonable import from_json, to_json
from trainvitals.records import Finding
from vitals_bench.judgement.ledger import READ_EVERY, Ledger
from vitals_bench.posttraining.kinds import FAULTS, HEALTHY, KINDS
from vitals_bench.posttraining.pairs import Compared, train_pairs
from vitals_bench.posttraining.policy import Writer, train_policy
from vitals_bench.rows import Cell, Grid, Row, at_least, at_most, exactly
from vitals_bench.training import own_place

SEEDS = (0, 1, 2, 3, 4, 5)
"""Limits are chosen by the even ones; the odd ones are only reported."""
_MAX_NORM = 1.0


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
    def is_right(self) -> bool:
        """Whether the first report names the fault, after its onset."""
        first = self.findings[0][0] if self.findings else 0
        return self.delay is not None and self.delay == first - KINDS[self.kind].onset


def train(name: str, seed: int) -> Outcome:
    """Train a kind once with the library in the loop; return its reports."""
    kind = KINDS[name]
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = Writer()
    optimizer = torch.optim.Adam(model.parameters(), lr=kind.run.learning_rate)
    run = kind.run
    batches = (
        train_pairs(model, optimizer, kind.steps, run)
        if isinstance(run, Compared)
        else train_policy(model, optimizer, kind.steps, run)
    )
    detectors, findings = PostTrainingDetectors(kind.task), list[Finding]()
    with own_place(), trainer_hooks.watch(model, optimizer, task=kind.task) as monitor:
        ledger = Ledger(monitor.run_id, loss_kind="minimize" if isinstance(run, Compared) else "rl")
        try:
            for step, (loss, scalars) in enumerate(batches):
                monitor.observe(**scalars)
                # As the collector does with the scalars of the run.
                findings += detectors.update(scalars, step=step, attempt=1, time_unix_ns=0)
                monitor.step(loss, max_norm=_MAX_NORM)
                if step % READ_EVERY == 0:
                    ledger.read()
        except TrainingHalted:  # the ledger counts it
            pass
        monitor.close()
        ledger.read()
    return Outcome(
        kind=name,
        seed=seed,
        findings=[(finding.step, finding.kind) for finding in findings],
        num_actions=ledger.withheld + len(ledger.rollbacks()) + ledger.halts(),
        messages=ledger.messages(),
        num_pages=ledger.num_pages(),
    )


def measure_trainings(*, quick: bool, options: Options | None = None) -> Iterator[Row | Grid]:
    """Train each kind with each seed; a training takes seconds."""
    options = options or Options()
    path = options.results
    stored = [] if path is None or not path.exists() else path.read_bytes().splitlines()
    earlier = {(o.kind, o.seed): o for line in stored for o in [from_json(line, Outcome)]}
    outcomes = []
    for seed in options.seeds or (SEEDS[:1] if quick else SEEDS):
        for name in options.kinds or (("parser breaks", "solved") if quick else tuple(KINDS)):
            outcome = earlier.get((name, seed)) or train(name, seed)
            outcomes.append(outcome)
            if path is not None and (name, seed) not in earlier:
                with path.open("ab") as file:
                    file.write(to_json(outcome) + b"\n")
                sys.stderr.write(f"{name} {seed}: {outcome.findings} {outcome.messages}\n")
    yield from figures(outcomes)


def figures(outcomes: Sequence[Outcome]) -> Iterator[Row | Grid]:
    """Yield the figures of both halves of the seeds, and the table by kind."""
    for title, part in (
        ("setting seeds", [each for each in outcomes if not each.is_held_out]),
        ("held-out seeds", [each for each in outcomes if each.is_held_out]),
    ):
        if part:
            yield from _of_part(title, part)
    yield _table(outcomes)


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
            f"{len(delays)}/{len(mine)}" if name in FAULTS else None,
            statistics.median(delays) if delays else None,
            ", ".join(sorted(others)) or None,
            sum(each.num_actions > 0 for each in mine),
        )
        rows += [(name, KINDS[name].task, *row)] if mine else []
    return Grid(
        title="Trainings by kind, all seeds",
        columns=("training", "task", "named", "steps to the report", "reported", "with actions"),
        rows=tuple(rows),
        note="Real trainings of a tiny network, in loops of the benchmark's own. A fault counts as "
        "reported by name if one of the detectors listed in `vitals_bench/posttraining/kinds.py` "
        "reports it after its onset. Limits are chosen by the even seeds.",
    )
