"""One curve of a run: existing series, the rows of each, and the points that are drawn.

Downsampling removes only points that add nothing to the plot (``downsample``), and non-finite
values stay as marks. Programs get the whole curve, as stored in memory.
"""

import difflib
import math
from collections import defaultdict
from collections.abc import Collection
from typing import Literal

import numpy as np
from sqlalchemy import Connection, select

from trainvitals import catalog
from trainvitals.errors import UsageError
from trainvitals.identity import Source
from trainvitals.views import Branch, CurveReply, NonFiniteMark
from vitals_collector.numbers.interface import (
    HOST_STREAMS,
    RANKS,
    AttemptRow,
    CurveRequest,
    Ints,
    Points,
    RowSpan,
    SeriesKey,
)
from vitals_collector.storage.schema import attempts, measured_columns, names, sources
from vitals_collector.storage.store import UNKNOWN, ReadSnapshot

NAMED = {"scalars": ("name", "value"), "layers": ("layer", "grad_norm")}
"""Streams whose series have names: the column of the name's id, and that of the value."""

_OF_LAYERS = tuple(m.column for m in catalog.LAYER_METRICS if m.column != "grad_norm")
"""Further columns of a layer: the series ``layers.NAME:COLUMN``."""

_UNITS = {f"{m.stream}.{m.column}": m.unit for m in catalog.CATALOG}

NO_ROWS_YET = "the run has no rows yet"

_KEYS = {column.name for column in catalog.ROW_COLUMNS} | {"rank", "pid"}


def names_of(connection: Connection, run_id: str) -> tuple[str, ...]:
    """Query which curves a run has: ``stream.column`` or ``stream.NAME`` with any value."""
    measured = measured_by_stream(connection, run_id)
    series_names = {
        f"{stream}.{name}"
        for stream, columns in measured.items()
        for name in columns - _KEYS
        if stream != "events" and stream not in NAMED
    }
    query = select(names.c.stream, names.c.name).where(names.c.run_id == run_id)
    for stream, name in connection.execute(query):
        if stream in NAMED:
            series_names.add(f"{stream}.{name}")
        if stream == "layers":
            series_names |= {
                f"layers.{name}:{column}" for column in _OF_LAYERS if column in measured["layers"]
            }
    return tuple(sorted(series_names))


def measured_by_stream(connection: Connection, run_id: str) -> defaultdict[str, set[str]]:
    """Return the columns with at least one value in the run, by stream; none for other streams."""
    columns: defaultdict[str, set[str]] = defaultdict(set)
    table = measured_columns.c
    query = select(table.stream, table.name).where(table.run_id == run_id)
    for stream, name in connection.execute(query):
        columns[stream].add(name)
    return columns


def unit_of(metric: str) -> str:
    """Return the unit of a queried metric from the catalog, "" for none or user-defined ones."""
    series, _, column = metric.rpartition(":")
    if series.startswith("layers.") and column in _OF_LAYERS:
        metric = f"layers.{column}"
    if series.startswith("ranks.") and column in ("min", "mean", "max"):
        metric = f"steps.{series.removeprefix('ranks.')}"
    return _UNITS.get(metric, "")


def curve_of(
    moment: ReadSnapshot,
    run_id: str,
    metric: str,
    source: str,
    steps: tuple[int | None, int | None] = (None, None),
) -> tuple[str, CurveRequest]:
    """Find the stored curve for a query of a metric, limited to these steps; return its source.

    Raises:
        UsageError: no such metric or source; the message suggests a similar name.
    """
    chosen_source, curve = _curve_of(moment, run_id, metric, source)
    if curve.span.stream not in HOST_STREAMS:
        span = curve.span._replace(from_step=steps[0], to_step=exclusive_end(steps[1]))
        curve = curve._replace(span=span)
    return chosen_source, curve


def attempt_rows(connection: Connection, run_id: str) -> list[AttemptRow]:
    """Query the run's attempts as a curve's stitching needs them."""
    table = attempts.c
    query = select(table.id, table.parent, table.fork_step).where(table.run_id == run_id)
    return [AttemptRow(*row) for row in connection.execute(query.order_by(table.id))]


def exclusive_end(last: int | None) -> int | None:
    """Return the exclusive end of a queried range with this last step or time; None: no end."""
    return None if last is None or last >= 2**63 - 1 else last + 1


def _curve_of(
    moment: ReadSnapshot, run_id: str, metric: str, source: str
) -> tuple[str, CurveRequest]:
    """Find the stored rows of a queried metric: a column, or a name such as a layer's."""
    stream, dot, name = metric.partition(".")
    if not (stream and dot and name):
        raise UsageError(
            f"metric is {metric!r}; it must be stream.column, such as steps.loss", code=UNKNOWN
        )
    if source and source != RANKS:
        Source.parse(source)
    chosen_source = source or _default_source(moment, run_id, stream)
    if stream in NAMED:
        return _find_named_curve(moment.sql, run_id, metric, source)
    is_known = f"{stream}.{name}" in _UNITS
    if not is_known and name not in measured_by_stream(moment.sql, run_id)[stream]:
        raise _unknown_series_error(moment.sql, run_id, metric)
    if stream == "process":
        # An agent writes the rows of its node's ranks; a column names the rank.
        rank = Source.parse(chosen_source).rank
        if rank is None:
            raise UsageError(f"source is {chosen_source!r}; a {stream} series needs a rank, rank:N")
        return chosen_source, CurveRequest(
            RowSpan(run_id, stream, keyed=SeriesKey("rank", rank)), name
        )
    return chosen_source, CurveRequest(RowSpan(run_id, stream, _source_filter(chosen_source)), name)


def _source_filter(source: str) -> tuple[str, ...]:
    """Return the sources that the query for a curve reads: one, or all."""
    return (source,) if source else ()


def _find_named_curve(
    connection: Connection, run_id: str, metric: str, source: str
) -> tuple[str, CurveRequest]:
    """Find the stored curve of a queried name, such as a scalar or a layer."""
    stream, _, name = metric.partition(".")
    key_column, column = NAMED[stream]
    layer, _, other = name.rpartition(":")
    if stream == "layers" and other in _OF_LAYERS:
        name, column = layer, other
    query = select(names.c.incarnation, names.c.id).where(
        names.c.run_id == run_id, names.c.stream == stream, names.c.name == name
    )
    keys = {row.incarnation: row.id for row in connection.execute(query)}
    if not keys:
        raise _unknown_series_error(connection, run_id, metric)
    chosen_source = source or _source_of_incarnations(connection, run_id, keys)
    span = RowSpan(run_id, stream, _source_filter(chosen_source), keyed=SeriesKey(key_column, keys))
    return chosen_source, CurveRequest(span, column)


def _source_of_incarnations(
    connection: Connection, run_id: str, incarnations: Collection[str]
) -> str:
    """Query the source of a named curve: rank 0 if it has the name, otherwise the first."""
    query = select(sources.c.source).where(
        sources.c.run_id == run_id, sources.c.incarnation.in_(incarnations)
    )
    whose = set(connection.execute(query).scalars())
    return "rank:0" if "rank:0" in whose or not whose else min(whose)


def _default_source(moment: ReadSnapshot, run_id: str, stream: str) -> str:
    """Return the source of a curve if the query names none."""
    if stream == RANKS:
        return RANKS
    if stream not in ("gpu", "node"):
        return "rank:0"  # values that are equal on all ranks are written only by rank 0
    return next(iter(moment.numbers.sources(run_id, stream)), "")


def _unknown_series_error(connection: Connection, run_id: str, metric: str) -> UsageError:
    """Return the error for a query of an unknown curve, with similar names of the run."""
    series_names = names_of(connection, run_id)
    close = difflib.get_close_matches(metric, series_names, n=3)
    hint = f"the run has {', '.join(series_names[:12])}" if series_names else NO_ROWS_YET
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    return UsageError(f"run {run_id} has no series {metric!r}", hint=hint, code=UNKNOWN)


def _choose_evenly(which: Ints, num: int) -> Ints:
    """Choose at most ``num`` points of a response evenly, including the first and the last."""
    if len(which) <= num:
        return which
    return which[np.linspace(0, len(which) - 1, num).astype(np.int64)]


def nonfinite_marks(points: Points, max_marks: int) -> tuple[NonFiniteMark, ...]:
    """Return the NaN and infinities in a queried curve, or ``max_marks`` of them, evenly chosen."""
    which = _choose_evenly(np.flatnonzero(~np.isfinite(points.value)), max_marks)
    nonfinite = points.take(which)
    rows = zip(
        nonfinite.step.tolist(), nonfinite.attempt.tolist(), nonfinite.value.tolist(), strict=True
    )
    return tuple(NonFiniteMark(step, attempt, kind_of(value)) for step, attempt, value in rows)


def num_nonfinite(points: Points) -> int:
    """Count the values of a queried curve that are NaN or infinite."""
    return int(np.count_nonzero(~np.isfinite(points.value)))


def kind_of(value: float) -> Literal["nan", "+inf", "-inf"]:
    """Return the name by which responses show a non-finite number."""
    if math.isnan(value):
        return "nan"
    return "+inf" if value > 0 else "-inf"


MAX_POINTS = 4_000_000
"""Maximum number of points in a response: 32 bytes each."""


def curve_reply(
    run_id: str, metric: str, source: str, branch: Branch, points: Points
) -> CurveReply:
    """Build the response to the query for a curve with all points.

    Raises:
        UsageError: there are too many points for one response.
    """
    if len(points) > MAX_POINTS:
        raise UsageError(
            f"{metric} has {len(points)} points; at most {MAX_POINTS} are given at once",
            hint="ask for fewer steps: from_step, to_step",
        )
    return CurveReply(
        run_id=run_id,
        metric=metric,
        source=source,
        unit=unit_of(metric),
        branch=branch,
        step=points.step.astype("<i8", copy=False).tobytes(),
        time_unix_ns=points.time_unix_ns.astype("<i8", copy=False).tobytes(),
        attempt=points.attempt.astype("<i8", copy=False).tobytes(),
        value=points.value.astype("<f8", copy=False).tobytes(),
    )
