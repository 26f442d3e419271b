"""Heat maps: one metric of every rank, GPU, node or layer over the steps of a run's lineage.

A column of the map stands for some steps. Of these a cell shows the value that lies furthest from
the row's middle thereabouts, so that a spike of one step is as visible among a million steps as it
is in a hundred. Ranks, GPUs and nodes come out of the summaries beside the stored columns; layers
have none and are decoded.
"""

import difflib
from collections.abc import Mapping, Sequence

import numpy as np
from sqlalchemy import Connection, select

from trainvitals import catalog
from trainvitals.errors import UsageError
from trainvitals.identity import Source
from trainvitals.views import CellsReply
from vitals_collector.queries import layer_cells, metrics
from vitals_collector.queries.extremes import (
    Extremes,
    furthest,
    nanmedian,
    of_curves,
    starts_of,
)
from vitals_collector.queries.loading import Selection, load_outline, load_outlines_by_source
from vitals_collector.queries.recorded import attempt_rows
from vitals_collector.queries.series import AttemptRow, Floats, Ints, Points
from vitals_collector.storage.schema import measured_columns
from vitals_collector.storage.store import UNKNOWN

MAX_COLUMNS = 2_000
MAX_ROWS = 1_024
MAX_CELLS = 200_000
STREAMS = ("steps", "gpu", "node", "layers")
_POINTS_A_COLUMN = 4
"""A summary's entry stands for 256 values: it is taken where a column holds two of them."""
_TIMED = ("loss", "step_duration_seconds", "grad_norm")


def cells(
    connection: Connection,
    run_id: str,
    metric: str,
    *,
    points: int,
    rows: int,
    from_step: int | None = None,
    to_step: int | None = None,
) -> CellsReply:
    """Return the heat map.

    Args:
        connection: one moment of the store.
        run_id: of which run.
        metric: ``steps.COLUMN``, ``gpu.COLUMN``, ``node.COLUMN`` or ``layers.COLUMN``.
        points: at most so many columns.
        rows: at most so many rows: those that deviate most.
        from_step: first step wanted.
        to_step: last step wanted, inclusive.

    Raises:
        UsageError: no such metric, or a number out of bounds.
    """
    _check(points, rows)
    stream, column = _known(connection, run_id, metric)
    attempts = attempt_rows(connection, run_id)
    wanted = Selection(
        run_id=run_id, stream=stream, column=column, from_step=from_step, to_step=to_step
    )
    if stream == "layers":
        names, starts, found = layer_cells.load(connection, wanted, attempts, points)
    else:
        names, starts, found = _of_sources(connection, wanted, attempts, points)
    value = furthest(found)
    chosen = _most(value, found, rows, is_alike=stream != "layers")
    marks = np.argwhere(found.is_marked[chosen])
    return CellsReply(
        run_id=run_id,
        metric=metric,
        unit="ratio" if metric == f"layers.{layer_cells.RATIO}" else metrics.unit_of(metric),
        rows=tuple(names[i] for i in chosen),
        num_rows=len(names),
        step=tuple(starts.tolist()),
        value=tuple(tuple(None if v != v else v for v in row) for row in value[chosen].tolist()),
        nonfinite=tuple((int(r), int(c)) for r, c in marks),
    )


def _check(points: int, rows: int) -> None:
    if not 1 <= points <= MAX_COLUMNS:
        raise UsageError(f"points is {points}; it must be 1 to {MAX_COLUMNS}")
    if not 1 <= rows <= MAX_ROWS:
        raise UsageError(f"rows is {rows}; it must be 1 to {MAX_ROWS}")
    if points * rows > MAX_CELLS:
        raise UsageError(f"{points} points of {rows} rows; at most {MAX_CELLS} cells are drawn")


def _known(connection: Connection, run_id: str, metric: str) -> tuple[str, str]:
    """Return the stream and column of the metric."""
    table = measured_columns.c
    there = select(table.stream, table.name).where(
        table.run_id == run_id, table.stream.in_(STREAMS)
    )
    plain = {column.name for column in catalog.ROW_COLUMNS} | {"layer"}
    known = sorted(f"{s}.{name}" for s, name in connection.execute(there) if name not in plain)
    if {"layers.update_norm", "layers.weight_norm"} <= set(known):
        known.append("layers.update_ratio")
    if metric in known:
        stream, _, column = metric.partition(".")
        return stream, column
    close = difflib.get_close_matches(metric[:200], known, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise UsageError(
        f"run {run_id} has no heat map of {metric[:200]!r}",
        hint=f"{meant}it has {', '.join(known)}" if known else "the run has no rows yet",
        code=UNKNOWN,
    )


def _of_sources(
    connection: Connection, wanted: Selection, attempts: Sequence[AttemptRow], points: int
) -> tuple[Sequence[str], Ints, Extremes]:
    """Return the names of ranks, GPUs or nodes, the first step of each column, and the cells."""
    if wanted.stream == "steps":
        curves = load_outlines_by_source(
            connection, wanted, attempts, "lineage", _POINTS_A_COLUMN * points
        )
    else:
        curves = _host(connection, wanted, attempts, points)
    names = [name for name in _ordered(curves) if len(curves[name])]
    drawn = [curves[name] for name in names]
    starts = starts_of(drawn, points)
    return names, starts, of_curves(drawn, starts)


def _ordered(names: Mapping[str, Points]) -> Sequence[str]:
    """Return ranks by their number, all others in their own order."""

    def key(name: str) -> tuple[str, int]:
        kind, _, rest = name.partition(":")
        if kind == "rank" and rest.isdigit():
            return "", Source.parse(name).rank or 0
        return name, 0

    is_of_sources = all(name.partition(":")[0] in ("rank", "gpu", "node") for name in names)
    return sorted(names, key=key) if is_of_sources else list(names)


def _most(value: Floats, found: Extremes, num: int, *, is_alike: bool) -> list[int]:
    """Return which rows deviate most, in their order.

    Rows that measure the same are compared with each other, layers with themselves.
    """
    if len(value) <= num or not value.size:
        return list(range(len(value)))

    def middle_of(values: Floats) -> Floats:
        return nanmedian(values.T)[np.newaxis, :] if is_alike else nanmedian(values)[:, None]

    middle = middle_of(value)
    with np.errstate(over="ignore", invalid="ignore"):
        away = np.abs(value - middle)
        scale = 1.4826 * middle_of(away)
        score = away / np.maximum(scale, np.maximum(np.abs(middle) * 1e-6, 1e-300))
    score = np.where(np.isnan(score), 0.0, score).max(axis=1)
    score = np.where(found.is_marked.any(axis=1), np.inf, score)
    return sorted(np.argsort(-score, kind="stable")[:num].tolist())


# ------------------------------------------------------------------------------- GPUs and nodes


def _host(
    connection: Connection, wanted: Selection, attempts: Sequence[AttemptRow], points: int
) -> dict[str, Points]:
    """Return the curves of GPUs or nodes with the steps that ran as they were measured.

    What was measured before the first step ended, or after the last, belongs to none.
    """
    times, steps = clock_of_steps(connection, wanted.run_id, attempts, _POINTS_A_COLUMN * points)
    if not len(times):
        return {}
    of_host = Selection(run_id=wanted.run_id, stream=wanted.stream, column=wanted.column)
    found = load_outlines_by_source(connection, of_host, attempts, "all", _POINTS_A_COLUMN * points)
    curves = {}
    for name, curve in found.items():
        at = np.interp(curve.time_unix_ns, times, steps, left=-1.0, right=-1.0)
        step = np.floor(at).astype(np.int64)
        is_in = at >= 0
        if wanted.from_step is not None:
            is_in &= step >= wanted.from_step
        if wanted.to_step is not None:
            is_in &= step <= wanted.to_step
        with_steps = Points(step, curve.attempt, curve.time_unix_ns, curve.value)
        curves[name] = with_steps.take(is_in)
    return curves


def clock_of_steps(
    connection: Connection, run_id: str, attempts: Sequence[AttemptRow], num_points: int
) -> tuple[Floats, Floats]:
    """Return moments and the steps of the lineage that ended then, both rising."""
    for column in _TIMED:
        wanted = Selection(run_id=run_id, stream="steps", column=column, source="rank:0")
        found, _ = load_outline(connection, wanted, attempts, "lineage", max(num_points, 1_000))
        if len(found):
            order = np.argsort(found.time_unix_ns, kind="stable")
            steps = np.maximum.accumulate(found.step[order])
            return found.time_unix_ns[order].astype(np.float64), steps.astype(np.float64)
    return np.zeros(0), np.zeros(0)


__all__ = ["MAX_COLUMNS", "MAX_ROWS", "cells", "clock_of_steps"]
