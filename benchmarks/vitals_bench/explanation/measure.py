"""Counts right, wrong and silent statements, and windows of healthy runs in which one is made."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from vitals_bench.explanation.jobs import Options, Outcome, jobs_of, run_jobs
from vitals_bench.explanation.kinds import KINDS
from vitals_bench.explanation.scoring import FIELDS, Mark, Score
from vitals_bench.rows import Cell, Grid, Row, at_least, at_most, exactly

MARKS: tuple[Mark, ...] = ("right", "wrong", "silent")


def measure_statements(*, quick: bool, options: Options | None = None) -> Iterator[Row | Grid]:
    """Train, damage, read the statements; about 10 seconds for each training."""
    options = options or Options()
    outcomes = []
    for outcome in run_jobs(jobs_of(options, quick=quick), options):
        sys.stderr.write(f"{line_of(outcome)}\n")
        outcomes.append(outcome)
    yield from figures(outcomes)


def line_of(outcome: Outcome) -> str:
    """Return a training and its scores in a line."""
    job = outcome.job
    words = f"{job.kind or 'healthy'} {job.placement} seed {job.seed} ranks {job.ranks}"
    words += " with signals:" if job.has_signals else ":"
    if outcome.error:
        return f"{words} {outcome.error}"
    if not job.kind:
        return f"{words} {len(outcome.statements)} incidents"
    first = outcome.scores[0]
    marks = ", ".join(f"{name} {getattr(first, name)}" for name in (*FIELDS, "end"))
    return f"{words} {first.whole} ({marks}), {outcome.seconds:g} s"


def figures(outcomes: Sequence[Outcome]) -> Iterator[Row | Grid]:
    """Yield the figures, and the table by kind."""
    for has_signals in (False, True):
        yield from _of_setting([o for o in outcomes if o.job.has_signals == has_signals])
    failed = [each for each in outcomes if each.error]
    if failed:
        yield Row(
            name="trainings that could not run", ours=len(failed), unit="", goal=exactly(0),
            note=line_of(failed[0]),
        )  # fmt: skip
    yield _table([o for o in outcomes if o.job.kind and not (o.error or o.job.has_signals)])


def _of_setting(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """Yield the figures of the trainings with, or without, the optional signals."""
    faulty = [each for each in outcomes if each.job.kind and not each.error]
    measured = ", all signals" if any(each.job.has_signals for each in outcomes) else ""
    for title, part in (
        ("tuning seeds", [each for each in faulty if not each.job.is_held_out]),
        ("held-out seeds", [each for each in faulty if each.job.is_held_out]),
    ):
        if part:
            yield from _of_part(f"{title}{measured}", part)
    others = [each for outcome in faulty for each in outcome.scores[1:]]
    if others:
        right = sum(each.whole == "right" for each in others)
        yield Row(
            name=f"earlier faults of the same runs explained correctly{measured}",
            ours=100 * right / len(others), unit="%", note=f"{right} of {len(others)}",
        )  # fmt: skip
    yield from _quiet([each for each in outcomes if not each.job.kind and not each.error], measured)


def _of_part(title: str, outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """Yield the figures of some trainings; only held-out ones in default settings have goals."""
    has_goal = all(each.job.is_held_out and not each.job.has_signals for each in outcomes)
    counts = Counter(each.scores[0].whole for each in outcomes)
    num = len(outcomes)
    shares = {mark: 100 * counts[mark] / num for mark in MARKS}
    goals = {"right": at_least(90), "wrong": at_most(100 / 30)} if has_goal else {}
    for mark in MARKS:
        yield Row(
            name=f"incidents {mark} as a whole, {title}", ours=shares[mark], unit="%",
            goal=goals.get(mark), note=f"{counts[mark]} of {num}",
        )  # fmt: skip
    ends = [each.scores[0].end for each in outcomes]
    yield Row(
        name=f"ends that are wrong, {title}", ours=ends.count("wrong"), unit="",
        note=f"of {len(ends) - ends.count('silent')} incidents that are shown",
    )  # fmt: skip
    invented = sum(each.num_invented for each in outcomes)
    yield Row(
        name=f"incidents before any fault, {title}", ours=invented, unit="",
        goal=exactly(0) if has_goal else None, note=f"in {num} runs",
    )  # fmt: skip


def _quiet(outcomes: Sequence[Outcome], measured: str) -> Iterator[Row]:
    windows = sum(each.windows for each in outcomes)
    if not windows:
        return
    by_why = sum(each.named_by_why for each in outcomes)
    by_changes = sum(each.named_by_changes for each in outcomes)
    for name, count, limit in (("why", by_why, 0), ("Largest changes", by_changes, 1)):
        yield Row(
            name=f"quiet windows in which {name} names something{measured}",
            ours=100 * count / windows, unit="%", goal=at_most(limit),
            note=f"{count} of {windows}",
        )  # fmt: skip
    invented = sum(each.num_invented for each in outcomes)
    yield Row(
        name=f"incidents of healthy runs{measured}", ours=invented, unit="", goal=exactly(0),
        note=f"in {len(outcomes)} runs",
    )  # fmt: skip


def _table(outcomes: Sequence[Outcome]) -> Grid:
    rows: list[tuple[Cell, ...]] = []
    for kind in KINDS:
        for placement in dict.fromkeys(each.job.placement for each in outcomes):
            mine = [o for o in outcomes if (o.job.kind, o.job.placement) == (kind, placement)]
            if mine:
                scores = [each.scores[0] for each in mine]
                fields = [_counts([getattr(s, name) for s in scores]) for name in (*FIELDS, "end")]
                rows.append((kind, placement, _counts([s.whole for s in scores]), *fields))
    all_: list[Score] = [each.scores[0] for each in outcomes]
    total = [_counts([getattr(s, name) for s in all_]) for name in (*FIELDS, "end")]
    rows.append(("all", "", _counts([s.whole for s in all_]), *total))
    return Grid(
        title="Statements by kind of fault: right/wrong/silent",
        columns=("fault", "placement", "incident", *FIELDS, "end"),
        rows=tuple(rows),
        note="Small real trainings with the default settings and one fault at a known step, rank "
        "and layer: alone, 40 steps after another fault, or while it lasts. Scored are the "
        "incidents of `vitals postmortem`, with `vitals why` of their first step. The rule is in "
        "`vitals_bench/explanation/scoring.py`; rules are tuned on even seeds, odd ones are only "
        "reported.",
        detail={line_of(outcome): json.loads(_plain(outcome)) for outcome in outcomes},
    )


def _plain(outcome: Outcome) -> bytes:
    import msgspec

    return msgspec.json.encode([outcome.truths, outcome.statements])


def _counts(marks: Sequence[str]) -> str:
    return "/".join(str(marks.count(mark)) for mark in MARKS)


__all__ = ["figures", "line_of", "measure_statements"]
