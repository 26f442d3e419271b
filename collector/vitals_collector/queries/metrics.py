"""Which series a run has, and where the rows of each are."""

import difflib

from sqlalchemy import Connection, select

from trainvitals import catalog
from trainvitals.errors import UsageError
from trainvitals.identity import Source
from vitals_collector.numbers.interface import HOST_STREAMS, Curve, Keyed, Span
from vitals_collector.storage.schema import RANKS, measured_columns, names
from vitals_collector.storage.store import UNKNOWN, Moment

NAMED = {"scalars": ("name", "value"), "layers": ("layer", "grad_norm")}
"""Streams whose series have names: the column of the name's id, and that of the value."""

_OF_LAYERS = tuple(m.column for m in catalog.LAYER_METRICS if m.column != "grad_norm")
"""Further columns of a layer: the series ``layers.NAME:COLUMN``."""

_KEYS = {column.name for column in catalog.ROW_COLUMNS} | {"rank", "pid"}


def names_of(connection: Connection, run_id: str) -> tuple[str, ...]:
    """Return the run's series with at least one value: ``stream.column`` or ``stream.NAME``."""
    table = measured_columns.c
    query = select(table.stream, table.name).where(table.run_id == run_id)
    series_names = {
        f"{stream}.{name}"
        for stream, name in connection.execute(query)
        if stream != "events" and stream not in NAMED and name not in _KEYS
    }
    of_layers = select(table.name).where(table.run_id == run_id, table.stream == "layers")
    measured = set(connection.execute(of_layers).scalars())
    query = select(names.c.stream, names.c.name).where(names.c.run_id == run_id)
    for stream, name in connection.execute(query):
        if stream in NAMED:
            series_names.add(f"{stream}.{name}")
        if stream == "layers":
            series_names |= {
                f"layers.{name}:{column}" for column in _OF_LAYERS if column in measured
            }
    return tuple(sorted(series_names))


def unit_of(metric: str) -> str:
    """Return the metric's unit by the catalog, "" where it has none or is the user's own."""
    series, _, column = metric.rpartition(":")
    if series.startswith("layers.") and column in _OF_LAYERS:
        metric = f"layers.{column}"
    if series.startswith("ranks.") and column in ("min", "mean", "max"):
        metric = f"steps.{series.removeprefix('ranks.')}"
    try:
        return catalog.spec(metric).unit
    except KeyError:
        return ""


def curve_of(
    moment: Moment,
    run_id: str,
    metric: str,
    source: str,
    steps: tuple[int | None, int | None] = (None, None),
) -> tuple[str, Curve]:
    """Return whose series it is, and the curve, of these steps where its rows have one.

    Raises:
        UsageError: no such metric or source; where a name is close to a known one, that is said.
    """
    chosen, curve = _curve_of(moment, run_id, metric, source)
    if curve.span.stream not in HOST_STREAMS:
        span = curve.span._replace(from_step=steps[0], to_step=behind(steps[1]))
        curve = curve._replace(span=span)
    return chosen, curve


def behind(last: int | None) -> int | None:
    """Return where a span ends of which this is the last step or time; None: nowhere."""
    return None if last is None or last >= 2**63 - 1 else last + 1


def _curve_of(moment: Moment, run_id: str, metric: str, source: str) -> tuple[str, Curve]:
    stream, dot, name = metric.partition(".")
    if not (stream and dot and name):
        raise UsageError(
            f"metric is {metric!r}; it must be stream.column, such as steps.loss", code=UNKNOWN
        )
    if source and source != RANKS:
        Source.parse(source)
    chosen = source or _default_source(moment, run_id, stream)
    if stream in NAMED:
        return chosen, _by_name(moment.sql, run_id, metric, chosen)
    if not _is_known(moment.sql, run_id, stream, name):
        raise _unknown(moment.sql, run_id, metric)
    if stream == "process":
        # An agent writes the rows of its node's ranks; whose they are is a column.
        rank = Source.parse(chosen).rank
        if rank is None:
            raise UsageError(f"source is {chosen!r}; a {stream} series is of a rank, rank:N")
        return chosen, Curve(Span(run_id, stream, keyed=Keyed("rank", rank)), name)
    return chosen, Curve(Span(run_id, stream, _only(chosen)), name)


def _only(source: str) -> tuple[str, ...]:
    return (source,) if source else ()


def _by_name(connection: Connection, run_id: str, metric: str, source: str) -> Curve:
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
        raise _unknown(connection, run_id, metric)
    return Curve(Span(run_id, stream, _only(source), keyed=Keyed(key_column, keys)), column)


def _default_source(moment: Moment, run_id: str, stream: str) -> str:
    if stream == RANKS:
        return RANKS
    if stream not in ("gpu", "node"):
        return "rank:0"  # numbers that are equal on all ranks are written by this one alone
    return next(iter(moment.numbers.sources(run_id, stream)), "")


def _is_known(connection: Connection, run_id: str, stream: str, name: str) -> bool:
    if any(m.stream == stream and m.column == name for m in catalog.CATALOG):
        return True
    table = measured_columns.c
    query = select(table.name).where(
        table.run_id == run_id, table.stream == stream, table.name == name
    )
    return connection.execute(query).first() is not None


def _unknown(connection: Connection, run_id: str, metric: str) -> UsageError:
    series_names = names_of(connection, run_id)
    close = difflib.get_close_matches(metric, series_names, n=3)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = (
            f"the run has {', '.join(series_names[:12])}"
            if series_names
            else "the run has no rows yet"
        )
    return UsageError(f"run {run_id} has no series {metric!r}", hint=hint, code=UNKNOWN)
