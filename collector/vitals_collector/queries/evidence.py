"""The numbers around an incident: what moved first, what the GPUs did, what it cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from sqlalchemy import Connection

from trainvitals.detect.fleet.node import THROTTLES
from trainvitals.views import DecisionView, MoverView, RunSummary, StepView
from vitals_collector.queries.ledger import data_of, step_rows
from vitals_collector.queries.read_columns import (
    KEYS,
    ColumnBlock,
    find_parts,
    join_blocks,
    read_blocks,
)
from vitals_collector.queries.series import Floats
from vitals_collector.queries.top_changes import MAX_SCORE, WINDOW_STEPS, Moved, judge, moved
from vitals_collector.storage.schema import batches

Span = tuple[int, int, int]
"""Attempt, first and last step."""

AFTER_SECONDS = 60
BEFORE_SECONDS = 600
"""Samples of GPUs up to so long before the onset are what those after it are compared with."""
_OF_GPU = (
    "temperature_celsius", "power_watts", "sm_clock_hertz", "utilization_ratio",
    "memory_used_bytes", "throttle_reasons", "ecc_corrected_errors", "ecc_uncorrected_errors",
    "last_xid",
)  # fmt: skip
_RISING = ("ecc_corrected_errors", "ecc_uncorrected_errors", "last_xid")
"""Of these a new value is told, however small."""
THROTTLED = "throttle_reasons"
_MIN_SCORE = 6.0
_MAX_TOLD = 8


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the stored numbers say."""

    cost_steps: int
    cost_seconds: float | None
    """None where the durations are not stored."""
    is_gathered: bool = False
    """Whether what follows was looked for."""
    view: StepView | None = None
    """The step it began at."""
    movers: tuple[Moved, ...] = ()
    has_layers: bool = False
    has_gpus: bool = False
    gpus: tuple[MoverView, ...] = ()
    """What GPUs did that they had not done before."""


def gather(
    connection: Connection,
    run: RunSummary,
    attempt: int,
    onset: int,
    last: int,
    decided: Sequence[DecisionView],
    *,
    is_whole: bool,
) -> Evidence:
    """Return the numbers around an incident; without ``is_whole`` only what it cost."""
    spans = lost_spans(decided)
    cost = sum(high - low + 1 for _, low, high in spans)
    seconds = _seconds(connection, run.run_id, spans) if is_whole or len(spans) == 1 else None
    if not spans:
        seconds = 0.0
    if not is_whole:
        return Evidence(cost, seconds)
    view = StepView(
        run_id=run.run_id,
        step=onset,
        rows=tuple(r for r in step_rows(connection, run.run_id, onset) if r.attempt == attempt),
        findings=(),
        decisions=(),
        data=data_of(connection, run.run_id, onset),
    )
    has_layers = bool(
        find_parts(connection, run.run_id, "layers", from_step=onset - 500, to_step=onset)
    )
    gpus = _gpus(connection, run.run_id, attempt, onset, last)
    return Evidence(
        cost,
        seconds,
        is_gathered=True,
        view=view,
        movers=moved(connection, run.run_id, onset, attempt),
        has_layers=has_layers,
        has_gpus=gpus is not None,
        gpus=gpus or (),
    )


def lost_spans(decided: Iterable[DecisionView]) -> list[Span]:
    """Return the steps trained in vain, each once: skipped ones, and what rollbacks left behind."""
    spans: list[Span] = []
    for view in decided:
        decision = view.decision
        if not decision.acted:
            continue
        if decision.action == "rollback" and decision.rollback_to_step >= 0:
            spans.append((decision.attempt, decision.rollback_to_step, decision.decided_at_step))
        if decision.action == "skip_step":
            spans.append((decision.attempt, decision.step, decision.step))
    merged: list[Span] = []
    for attempt, low, high in sorted(spans):
        if merged and merged[-1][0] == attempt and low <= merged[-1][2] + 1:
            merged[-1] = (attempt, merged[-1][1], max(high, merged[-1][2]))
        else:
            merged.append((attempt, low, high))
    return [span for span in merged if span[1] <= span[2]]


def _seconds(connection: Connection, run_id: str, spans: Sequence[Span]) -> float | None:
    """Return how long rank 0 took for the steps; None where that is not stored."""
    total, num = 0.0, 0
    of_rank = batches.c.source == "rank:0"
    names = [*KEYS, "step_duration_seconds"]
    for attempt, low, high in spans:
        parts = find_parts(connection, run_id, "steps", of_rank, from_step=low, to_step=high)
        rows = join_blocks(
            list(read_blocks(connection, parts, names, from_step=low, to_step=high)), names
        )
        cells = rows.column("step_duration_seconds")
        took = cells.values.astype(np.float64)
        is_there = np.isfinite(took) & (rows.whole("attempt") == attempt)
        is_there &= True if cells.valid is None else cells.valid
        _, first = np.unique(rows.whole("step")[is_there], return_index=True)
        total += float(took[is_there][first].sum())
        num += len(first)
    return total if num else None


def _gpus(
    connection: Connection, run_id: str, attempt: int, onset: int, last: int
) -> tuple[MoverView, ...] | None:
    """Return what GPUs did between onset and end that they had not before; None: no samples."""
    when = _times(connection, run_id, attempt, onset, last)
    if when is None:
        return None
    early, begin = when[0] - BEFORE_SECONDS * 10**9, when[0]
    end = max(when[1], begin) + AFTER_SECONDS * 10**9
    table = batches.c
    near = (table.max_time_unix_ns >= early, table.min_time_unix_ns <= end)
    parts = find_parts(connection, run_id, "gpu", *near)
    names = ["time_unix_ns", *_OF_GPU]
    by_gpu: dict[str, list[MoverView]] = {}
    for source in dict.fromkeys(part.source for part in parts):
        mine = [part for part in parts if part.source == source]
        rows = join_blocks(list(read_blocks(connection, mine, names)), names)
        times = rows.whole("time_unix_ns")
        rows = rows.take((times >= early) & (times <= end))
        if np.any(rows.whole("time_unix_ns") >= begin):
            by_gpu[source] = _of_gpu(source, rows, begin)
    if not by_gpu:
        return None
    movers = [view for views in by_gpu.values() for view in views]
    return tuple(sorted(movers, key=lambda view: (-view.score, view.row, view.metric))[:_MAX_TOLD])


def _of_gpu(source: str, rows: ColumnBlock, begin: int) -> list[MoverView]:
    order = np.argsort(rows.whole("time_unix_ns"), kind="stable")
    views = []
    for name in _OF_GPU:
        cells = rows.column(name)
        is_there = np.ones(len(rows), bool) if cells.valid is None else cells.valid
        which = order[is_there[order]]
        values = cells.values.astype(np.float64)[which]
        is_late = rows.whole("time_unix_ns")[which] >= begin
        if name in _RISING:
            views += _risen(source, name, values[~is_late], values[is_late])
            continue
        if name == THROTTLED:
            views += _throttled(source, values[~is_late], values[is_late])
            continue
        # As steps of a window: what came before lies far enough back.
        pseudo = np.where(is_late, WINDOW_STEPS, 0)
        mover = judge(source, name, pseudo, values, WINDOW_STEPS)
        if mover is not None and mover.view.score >= _MIN_SCORE:
            views.append(msgspec.structs.replace(mover.view, peak_step=-1))
    return views


def _risen(source: str, name: str, before: Floats, late: Floats) -> list[MoverView]:
    """Return a counter, or the number of an error, that is not what it was."""
    last = float(before[-1]) if len(before) else None
    if not len(late) or float(late[-1]) == last or (last is None and name != "last_xid"):
        return []
    view = MoverView(
        row=source, metric=name, before=last, peak=float(late[-1]), peak_step=-1, score=MAX_SCORE
    )
    return [view]


def _throttled(source: str, before: Floats, late: Floats) -> list[MoverView]:
    """Return the reasons to throttle that are not usual, as bit masks: the usual ones, and all.

    A throttle comes and goes, and may have come some samples before its trouble showed in steps.
    """
    usual = began = 0
    for bit in THROTTLES:
        share = float(np.mean(before.astype(np.int64) & bit != 0)) if len(before) else 0.0
        share_late = float(np.mean(late.astype(np.int64) & bit != 0)) if len(late) else 0.0
        usual |= bit if share >= 0.5 else 0
        began |= bit if share < 0.5 and share_late > share else 0
    if not began:
        return []
    view = MoverView(
        row=source,
        metric=THROTTLED,
        before=float(usual),
        peak=float(usual | began),
        peak_step=-1,
        score=MAX_SCORE,
    )
    return [view]


def _times(
    connection: Connection, run_id: str, attempt: int, onset: int, last: int
) -> tuple[int, int] | None:
    """Return when the steps ended on rank 0."""
    of_rank = batches.c.source == "rank:0"
    parts = find_parts(connection, run_id, "steps", of_rank, from_step=onset, to_step=last)
    spans: list[tuple[int, int]] = []
    for block in read_blocks(connection, parts, KEYS, from_step=onset, to_step=last):
        mine = block.whole("time_unix_ns")[block.whole("attempt") == attempt]
        spans += [(int(mine.min()), int(mine.max()))] if len(mine) else []
    if not spans:
        return None
    return min(first for first, _ in spans), max(end for _, end in spans)


__all__ = ["THROTTLED", "Evidence", "gather", "lost_spans"]
