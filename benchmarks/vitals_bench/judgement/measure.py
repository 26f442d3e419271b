"""Runs the trainings of the benchmark and yields their results."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vitals_bench.judgement.jobs import QUICK_STEPS, Asked, jobs_of, run_jobs
from vitals_bench.judgement.tables import Results, goals, grids
from vitals_bench.rows import Grid, Row


def measure_trainings(*, quick: bool, asked: Asked | None = None) -> Iterator[Row | Grid]:
    """Yield goals and tables of real small trainings, each bare and with the library in its loop.

    Says each hundredth on stderr: all of them take hours.
    """
    asked = asked or Asked()
    jobs = jobs_of(asked, quick=quick)
    outcomes = []
    for outcome in run_jobs(jobs, asked, steps=QUICK_STEPS if quick else None):
        outcomes.append(outcome)
        if len(outcomes) % 100 == 0:
            print(f"{len(outcomes)} of {len(jobs)} trainings", file=sys.stderr)  # noqa: T201
    results = Results.of(outcomes)
    for outcome in outcomes:
        if outcome.error:
            name = f"{outcome.world} ({outcome.policy}, seed {outcome.seed})"
            yield Row(name=name, ours=None, unit="", note=f"could not run: {outcome.error}")
    yield from goals(results)
    yield from grids(results)
