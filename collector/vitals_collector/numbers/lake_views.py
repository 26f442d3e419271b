"""The views that people ask: numbers from the lake, all else from the collector's SQL database.

Names stand in place of numbers, times are in UTC, and what has no column here (bodies, commands,
settings of the collector, who asked for what) is not offered.
"""

import re
from collections.abc import Mapping, Sequence

from vitals_collector.numbers.interface import RANKS
from vitals_collector.numbers.lake_tables import (
    KEYS,
    TYPES,
    Places,
    own_expression,
    quoted,
    unspelled,
)

_NAMED = {"scalars": "name", "layers": "layer"}
"""Streams whose rows have a number in place of a name, and its column."""
_NUMBERS = {
    "steps": ("steps", "rank = 0"),
    "ranks": ("steps", "rank >= 0"),
    "levels": (RANKS, "true"),
    "layers": ("layers", "true"),
    "scalars": ("scalars", "true"),
    "nodes": ("node", "true"),
    "gpus": ("gpu", "true"),
    "processes": ("process", "true"),
}
"""Each with the stream that it shows, and which of its rows."""
_WRITER = ("source", "incarnation", "seq")
_BRACED = re.compile(r"\{(\w+)\}")
_RECORDS = {
    "decisions": "run_id, step, action, rule, cause, rank, acted, attempt, decided_at_step,"
    " {time_unix_ns}",
    "findings": "run_id, step, attempt, rank, kind, level, detector, {time_unix_ns}",
    "alerts": "run_id, name, severity, state, summary, step, {started_unix_ns},"
    " {updated_unix_ns}, {ended_unix_ns}, acknowledged_by",
    "checkpoints": "run_id, checkpoint_id, place, step, attempt, state, num_bytes, detail,"
    " {time_unix_ns}",
    "events": "run_id, source, step, attempt, kind, summary, {time_unix_ns}",
    "annotations": "run_id, step, text, written_by, {time_unix_ns}",
}
"""Tables of the SQL database, and what of them is shown; times in braces."""
VIEWS = frozenset({"runs", *_NUMBERS, *_RECORDS})
"""Names that are offered once there is something to show."""
_RUNS = """
SELECT r.run_id, r.name, r.project, r.user_name AS "user", r.mode, r.world_size,
  {started} AS started, s.last_step, s.loss, {seen} AS last_seen,
  coalesce(s.ended_state, '') AS ended_state, coalesce(s.ended_reason, '') AS ended_reason
FROM db.runs r LEFT JOIN (
  SELECT run_id, max(last_step) AS last_step, max(last_seen_unix_ns) AS seen,
    arg_max(loss, last_step_unix_ns) AS loss,
    arg_max(ended_state, started_unix_ns) AS ended_state,
    arg_max(ended_reason, started_unix_ns) AS ended_reason
  FROM db.sources WHERE rank = 0 GROUP BY run_id
) s ON s.run_id = r.run_id
"""


def views_of(
    columns: Mapping[str, Sequence[tuple[str, str]]], *, has_records: bool
) -> dict[str, str]:
    """Return each view's SELECT.

    Args:
        columns: of each of the lake's tables, the names and DuckDB's types.
        has_records: whether the SQL database is there, as ``db``.
    """
    views = {
        view: _numbers(stream, columns[stream], which, has_names=has_records)
        for view, (stream, which) in _NUMBERS.items()
        if stream in columns
    }
    if has_records:
        views |= {
            table: f"SELECT {_with_times(listed)} FROM db.{table}"
            for table, listed in _RECORDS.items()
        }
        views["runs"] = _RUNS.format(started=_time("r.started_unix_ns"), seen=_time("s.seen"))
    elif "runs" in columns:
        views["runs"] = "SELECT run_id FROM lake.runs"
    return views


def _numbers(
    stream: str, columns: Sequence[tuple[str, str]], which: str, *, has_names: bool
) -> str:
    kinds = {kind: short for short, kind in TYPES.items()}
    places: Places = {
        (unspelled(place), kinds[kind]): place for place, kind in columns if place not in KEYS
    }
    shown = {"rank": "rank", "time": _time("time_unix_ns")}
    for (name, _), place in places.items():
        if own_expression(name, places) not in shown.values():
            # The engine folds case: the second of two such names is shown as the lake spells it.
            labels = (*shown, *_WRITER, "run", "run_id")
            is_free = name.casefold() not in {label.casefold() for label in labels}
            shown[name if is_free else place] = own_expression(name, places)
    listed = ", ".join(f"{value} AS {quoted(label)}" for label, value in shown.items())
    rows = f"SELECT run, {listed}, {', '.join(_WRITER)} FROM lake.{stream} WHERE {which}"
    every = "SELECT u.run_id, r.* EXCLUDE (run)"
    runs = f"FROM ({rows}) r JOIN lake.runs u ON u.run = r.run"
    named = _NAMED.get(stream)
    if named not in shown or not has_names:
        return f"{every} {runs}"
    return (
        f"{every} REPLACE (coalesce(n.name, CAST(r.{named} AS VARCHAR)) AS {named}) {runs}"
        f" LEFT JOIN db.names n ON n.stream = '{stream}' AND n.run_id = u.run_id"
        f" AND n.incarnation = r.incarnation AND n.id = r.{named}"
    )


def _with_times(listed: str) -> str:
    """Return the columns, those in braces as moments under names without their unit."""
    return _BRACED.sub(
        lambda match: f"{_time(match[1])} AS {match[1].removesuffix('_unix_ns')}", listed
    )


def _time(column: str) -> str:
    """Return a moment in UTC; NULL for none."""
    return f"make_timestamp(nullif({column}, 0) // 1000)"
