"""Alarms in real small trainings whose loss rises for good reasons, declared and not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vitals_bench.detect.logs import Logs, labelled
from vitals_bench.detect.ours import Verdicts, judge
from vitals_bench.detect.scoring import SeriesScore, Total, score
from vitals_bench.detect.series import Series
from vitals_bench.rows import Cell, Grid, Row, at_most, exactly

SEEDS = 3
QUICK_NAMES, QUICK_STEPS = ("ppo", "gan"), 440
WINDOW = 1_000
MOST_WITHHELD = 32
"""Updates that may be withheld in any ``WINDOW`` steps of a healthy training: what is promised."""


class _Case(NamedTuple):
    """A log, and what ours said of it."""

    series: Series
    verdict: Verdicts
    score: SeriesScore


def measure_trained(*, quick: bool, logs: Logs | None = None) -> Iterator[Row | Grid]:
    """Train, and yield found events, false alarms and actions, by the kind of training."""
    del logs
    made = list(_trained(quick=quick))
    cases = {
        "declared": [_judged(series) for series in made],
        "not declared": [_judged(series.undeclared()) for series in made],
    }
    yield from _promises(cases)
    yield _grid(cases)


def _trained(*, quick: bool) -> Iterator[Series]:
    from vitals_bench.judgement import series as trained  # torch: only where it is trained

    chosen: dict[str, Any] = {"names": QUICK_NAMES, "steps": QUICK_STEPS} if quick else {}
    for log, label in trained.make_logs(1 if quick else SEEDS, **chosen):
        yield labelled(
            log.name,
            label,
            steps=[point.step for point in log.points],
            losses=[point.loss for point in log.points],
            norms=[point.grad_norm for point in log.points],
            rates=[point.lr for point in log.points],
        )


def _judged(series: Series) -> _Case:
    verdict = judge(series)
    return _Case(series, verdict, score(series, verdict.alarms))


def _promises(cases: Mapping[str, Sequence[_Case]]) -> Iterator[Row]:
    """Yield what is done to healthy trainings: nothing where they declare what can be declared."""
    healthy = {
        words: [case for case in of_kind if not case.series.events]
        for words, of_kind in cases.items()
    }
    declared = [case for case in healthy["declared"] if case.series != case.series.undeclared()]
    undeclared = healthy["not declared"]
    for words, chosen, goal in (
        ("that declare their kind", declared, exactly(0)),
        ("that declare nothing", undeclared, at_most(MOST_WITHHELD)),
    ):
        names = [case.series.name for case in chosen if case.verdict.skipped]
        yield Row(
            name=f"healthy trainings {words}: updates withheld in {WINDOW:,} steps, at most",
            ours=max(most_withheld(case.verdict) for case in chosen),
            unit="updates",
            goal=goal,
            note=f"in {len(names)} of {len(chosen)}: {', '.join(names) or 'none'}",
        )
    done = [case.verdict.rollbacks + case.verdict.halts for case in (*declared, *undeclared)]
    yield Row(
        name="healthy trainings, declared or not: rollbacks and halts",
        ours=sum(len(rows) for rows in done),
        unit="times",
        goal=exactly(0),
        note=f"of {len(done)}",
    )


def most_withheld(verdict: Verdicts) -> int:
    """Return the most updates that were withheld within ``WINDOW`` records."""
    rows = sorted(alarm.row for alarm in verdict.skipped)
    return max((sum(row <= r < row + WINDOW for r in rows) for row in rows), default=0)


def _grid(cases: Mapping[str, Sequence[_Case]]) -> Grid:
    families = dict.fromkeys(case.series.family for case in cases["declared"])
    rows = [
        _line(family, words, [case for case in of_kind if case.series.family == family])
        for family in families
        for words, of_kind in cases.items()
    ]
    return Grid(
        title="real small trainings, each healthy and with a fault, ours (tell)",
        columns=(
            "training", "the run", "faults that can be seen", "recall", "delay",
            "healthy ones told", "false alarms per 10k", "updates withheld in healthy ones",
        ),
        rows=tuple(rows),
        note="Declared: watch(loss_kind=...) for RL and GANs, monitor.expect for each change of a "
        "curriculum, after which levels are not judged for 200 steps; a large rate has nothing to "
        "declare. A false alarm is an episode told outside every fault, in faulty logs too.",
        detail={
            words: [
                {
                    "log": case.series.name,
                    "missed": [event.reason for event in case.score.missed],
                    "false": list(case.score.false),
                    "withheld": [alarm.row for alarm in case.verdict.skipped],
                }
                for case in of_kind
            ]
            for words, of_kind in cases.items()
        },
    )  # fmt: skip


def _line(family: str, words: str, cases: Sequence[_Case]) -> tuple[Cell, ...]:
    total = Total.of(case.score for case in cases)
    healthy = [case for case in cases if not case.series.events]
    return (
        family, words, total.num_events, total.recall, total.delay,
        f"{sum(bool(case.score.false) for case in healthy)}/{len(healthy)}",
        total.false_per_10k,
        sum(len(case.verdict.skipped) for case in healthy),
    )  # fmt: skip
