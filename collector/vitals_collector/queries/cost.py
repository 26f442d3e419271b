"""Cost of an incident: steps, batches, tokens, time, GPU-hours, and money at a set price."""

import math
import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from sqlalchemy import Connection, func, select

from trainvitals.errors import ConfigError
from trainvitals.records import is_skip
from trainvitals.views import DecisionView, FindingView, LostWork
from vitals_collector.live.restarts import Lost, Restart
from vitals_collector.numbers.interface import AttemptRow, NumberStoreReader, RowSpan, lineage
from vitals_collector.queries.series import attempt_rows, exclusive_end
from vitals_collector.queries.top_changes import ancestry
from vitals_collector.storage.schema import sources
from vitals_collector.storage.store import ReadSnapshot

N = TypeVar("N", int, float)
PRICE_VARIABLE = "VITALS_GPU_HOUR_PRICE"
_SECONDS_AN_HOUR = 3_600.0
_BETWEEN_STEPS = ("checkpoint_seconds", "evaluation_seconds")


def price_in(text: str) -> float:
    """Parse the price of a GPU-hour, for the cost of incidents; 0 if the text is empty.

    Raises:
        ConfigError: it is not a number of at least 0.
    """
    try:
        price = float(text or 0.0)
    except ValueError:
        price = -1.0
    if not 0.0 <= price < float("inf"):
        raise ConfigError(
            f"{PRICE_VARIABLE} is {text!r}; it must be a number of at least 0",
            hint="give the price of one GPU for one hour, such as 2.5, or leave it unset",
        )
    return price


def price_of_environment() -> float:
    """Return the price of a GPU-hour that queries about cost use, from the environment."""
    return price_in(os.environ.get(PRICE_VARIABLE, ""))


def lost_work(
    moment: ReadSnapshot,
    run_id: str,
    decided: Sequence[DecisionView],
    price: float,
    *,
    restarts: Sequence[Restart] = (),
    waits: Sequence[FindingView] = (),
    is_timed: bool = True,
) -> LostWork:
    """Measure the cost of an incident: steps, batches and time of its decisions and restarts.

    A ``price`` of a GPU-hour of 0 is not set. ``waits`` are findings about steps that did not end.
    Without ``is_timed`` no rows are read, and times are unknown.
    """
    spans = lost_spans(decided, restarts)
    batches = sum(view.decision.skip_batches for view in decided if view.decision.acted)
    steps = sum(high - low + 1 for _, low, high in spans)
    down = None
    if is_timed:
        down = _down_seconds(moment.numbers, run_id, restarts) or 0.0
        down = down + _waited_seconds(moment.numbers, run_id, waits) or None
    if not is_timed or not spans:
        seconds = None if spans else 0.0
        return LostWork(steps=steps, batches=batches, seconds=seconds, down_seconds=down)
    attempts = attempt_rows(moment.sql, run_id)
    seconds, tokens = _measure_lost_steps(moment.numbers, run_id, spans, attempts)
    num_gpus = _num_gpus(moment.sql, run_id)
    hours, money = hours_and_money(None if seconds is None else seconds * num_gpus, price)
    return LostWork(
        steps=steps,
        batches=batches,
        tokens=tokens,
        seconds=seconds,
        gpu_hours=hours,
        money=money,
        down_seconds=down,
    )


def _down_seconds(
    numbers: NumberStoreReader, run_id: str, restarts: Sequence[Restart]
) -> float | None:
    """Measure the cost of restarts in time without steps, up to the next step; None: unknown."""
    total_ns = 0
    for restart in (each for each in restarts if not each.is_planned):
        span = RowSpan(run_id, "steps", ("rank:0",), restart.step, restart.step + 1)
        rows = numbers.scan(span, ["attempt", "time_unix_ns"])
        times = rows["time_unix_ns"].values[rows["attempt"].values == restart.attempt]
        if len(times):
            total_ns += max(0, int(times.min()) - restart.stopped_unix_ns)
    return total_ns / 1e9 if total_ns else None


def _waited_seconds(numbers: NumberStoreReader, run_id: str, waits: Sequence[FindingView]) -> float:
    """Measure the cost of hangs that ended, in time from the last progress before each."""
    began: dict[int, int] = {}
    for view in waits:
        since = view.time_unix_ns - int((view.finding.value or 0.0) * 1e9)
        began[view.finding.step] = min(since, began.get(view.finding.step, since))
    total_ns = 0
    for step, since in began.items():
        span = RowSpan(run_id, "steps", ("rank:0",), step, step + 1)
        times = numbers.scan(span, ["time_unix_ns"])["time_unix_ns"].values
        total_ns += max(0, int(times.min()) - since) if len(times) else 0
    return total_ns / 1e9


def late_seconds(
    numbers: NumberStoreReader, run_id: str, found: Sequence[FindingView], steps: tuple[int, int]
) -> float:
    """Return the time that other ranks waited for a straggler in these steps, the last included.

    Its finding contains the lost fraction of a step.
    """
    shares = [v.finding.value or 0.0 for v in found if v.finding.kind == "straggler"]
    if not shares:
        return 0.0
    span = RowSpan(
        run_id, "steps", ("rank:0",), from_step=steps[0], to_step=exclusive_end(steps[1])
    )
    took, is_missing = numbers.scan(span, ["step_duration_seconds"])["step_duration_seconds"]
    return max(shares) * float(np.nansum(np.where(is_missing, 0.0, took.astype(np.float64))))


def hours_and_money(gpu_seconds: float | None, price: float) -> tuple[float | None, float | None]:
    """Return the cost in GPU-hours and in money; None without a known GPU or a price."""
    if not gpu_seconds:
        return None, None
    hours = gpu_seconds / _SECONDS_AN_HOUR
    return hours, hours * price if price else None


def total_lost_work(each: Sequence[LostWork]) -> LostWork:
    """Add up the cost of incidents; a part that is unknown for one is unknown for the total."""
    return LostWork(
        steps=sum(lost.steps for lost in each),
        batches=sum(lost.batches for lost in each),
        tokens=_sum_if_complete([lost.tokens for lost in each if lost.steps]),
        seconds=_sum_if_complete([lost.seconds for lost in each if lost.steps]),
        gpu_hours=_sum_if_complete([lost.gpu_hours for lost in each if lost.steps]),
        money=_sum_if_complete([lost.money for lost in each if lost.steps]),
        down_seconds=sum(lost.down_seconds or 0.0 for lost in each) or None,
    )


def _sum_if_complete(values: Sequence[N | None]) -> N | None:
    """Return the total of an incident's costs; None if one is unknown."""
    measured = [value for value in values if value is not None]
    if not measured or len(measured) < len(values):
        return None
    return sum(measured, start=measured[0] * 0)


def lost_spans(decided: Iterable[DecisionView], restarts: Iterable[Restart] = ()) -> list[Lost]:
    """Return the steps in an incident's cost, each once: skipped, rolled back, or repeated."""
    spans: list[Lost] = [span for restart in restarts for span in restart.lost]
    for view in decided:
        decision = view.decision
        if decision.acted and decision.action == "rollback" and decision.rollback_to_step >= 0:
            spans.append((decision.attempt, decision.rollback_to_step, decision.decided_at_step))
        if is_skip(decision):
            spans.append((decision.attempt, decision.step, decision.step))
    merged: list[Lost] = []
    for attempt, low, high in sorted(spans):
        if merged and merged[-1][0] == attempt and low <= merged[-1][2] + 1:
            merged[-1] = (attempt, merged[-1][1], max(high, merged[-1][2]))
        else:
            merged.append((attempt, low, high))
    return [span for span in merged if span[1] <= span[2]]


def _measure_lost_steps(
    numbers: NumberStoreReader, run_id: str, spans: Sequence[Lost], attempts: Sequence[AttemptRow]
) -> tuple[float | None, int | None]:
    """Measure the cost of lost steps: rank 0's seconds, and the run's tokens in them.

    As in ``trainvitals.goodput``, checkpoints and evaluations between steps do not count.
    """
    seconds, num, tokens, num_counted = 0.0, 0, 0, 0
    for attempt, low, high in spans:
        # One step more: token counts are cumulative, so a step's tokens are a difference.
        span = RowSpan(run_id, "steps", ("rank:0",), from_step=low - 1, to_step=exclusive_end(high))
        rows = numbers.scan(
            span, ["step", "attempt", "step_duration_seconds", "tokens_seen", *_BETWEEN_STEPS]
        )
        steps = rows["step"].values
        # A rollback may restore a step before the start of its attempt.
        bounds = lineage(ancestry(attempts, attempt)) | {attempt: math.inf}
        is_own = np.zeros(len(steps), dtype=bool)
        for measured, bound in bounds.items():
            is_own |= (rows["attempt"].values == measured) & (steps < bound)
        took, is_missing = rows["step_duration_seconds"]
        took = took.astype(np.float64)
        for name in _BETWEEN_STEPS:
            aside, is_unmeasured = rows[name]
            took = took - np.where(is_unmeasured, 0.0, np.nan_to_num(aside.astype(np.float64)))
        is_there = np.isfinite(took) & ~is_missing & is_own & (steps >= low)
        _, first = np.unique(steps[is_there], return_index=True)
        seconds += float(took[is_there][first].sum())
        num += len(first)
        counted, is_uncounted = rows["tokens_seen"]
        # The step before a span may belong to the parent attempt.
        seen = counted[~is_uncounted & (is_own | (steps < low))]
        if len(seen) > 1:
            tokens += int(seen.max() - seen.min())
            num_counted += 1
    return (seconds if num else None), (tokens if num_counted == len(spans) else None)


def _num_gpus(connection: Connection, run_id: str) -> int:
    """Query the number of GPUs that the run's ranks reported, for the cost of an incident."""
    table = sources.c
    query = select(func.count(table.gpu_uuid.distinct()))
    return connection.execute(
        query.where(table.run_id == run_id, table.gpu_uuid != "")
    ).scalar_one()
