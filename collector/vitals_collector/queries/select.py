"""Finds the batches that may hold what is asked for, and says which of their rows are wanted."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from sqlalchemy import Connection, Select, select

from trainvitals.views import Branch
from vitals_collector.queries.series import AttemptRow, ends
from vitals_collector.storage.read_rows import is_columnar
from vitals_collector.storage.schema import batches

HOST_STREAMS = ("gpu", "node", "process")
"""Streams that are ordered by time: their rows have no step."""

_AT_ONCE = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows of a run hold a metric."""

    run_id: str
    stream: str
    column: str
    source: str = ""
    """Only this source's rows; "" takes those of all."""
    key_column: str = ""
    """Only rows whose ``key_column`` has the incarnation's key, such as a scalar's name id."""
    keys: Mapping[str, int] | int = 0
    """The key: one for all, or one for each incarnation that knows it."""
    from_step: int | None = None
    to_step: int | None = None
    from_time_unix_ns: int | None = None
    to_time_unix_ns: int | None = None

    def key_of(self, incarnation: str) -> int | None:
        """Return the key in this incarnation's rows; None where it has none."""
        return self.keys if isinstance(self.keys, int) else self.keys.get(incarnation)


class Part(NamedTuple):
    """A batch that may hold some of it."""

    id: int
    source: str
    incarnation: str
    first_seq: int
    num_rows: int
    min_step: int
    max_step: int
    min_time_unix_ns: int
    max_time_unix_ns: int
    min_attempt: int
    max_attempt: int
    is_columnar: bool


Cluster = list[Part]
"""Batches whose steps overlap, by writer and in order; mostly a single one."""
Side = Literal["in", "out", "both"]
"""Whether a batch's rows are wanted: all, none, or perhaps some."""


def some_at_once(every: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield as many at a time as are to be read together."""
    for i in range(0, len(every), _AT_ONCE):
        yield every[i : i + _AT_ONCE]


def find(connection: Connection, selections: Sequence[Selection]) -> list[Sequence[Part]]:
    """Return the batches to look into for each; curves of the same rows share one list.

    A compacted batch may be among them that has not the column.
    """
    alike: dict[tuple[Any, ...], list[Selection]] = defaultdict(list)
    for selection in selections:
        alike[_rows_of(selection)].append(selection)
    parts_of = {key: _find_alike(connection, group) for key, group in alike.items()}
    return [parts_of[_rows_of(selection)][selection.source] for selection in selections]


def _rows_of(selection: Selection) -> tuple[Any, ...]:
    steps = selection.from_step, selection.to_step
    times = selection.from_time_unix_ns, selection.to_time_unix_ns
    return selection.run_id, selection.stream, steps, times


def _find_alike(connection: Connection, alike: Sequence[Selection]) -> dict[str, list[Part]]:
    """Return the batches by source, of selections that differ in nothing else but the column."""
    by_source: dict[str, list[Part]] = {selection.source: [] for selection in alike}
    fields = (is_columnar if n == "is_columnar" else batches.c[n] for n in Part._fields)
    query = _narrowed(select(*fields), alike[0])
    if "" not in by_source:
        query = query.where(batches.c.source.in_(sorted(by_source)))
    for row in connection.execute(query):
        part = Part._make(row)
        for source in (part.source, ""):
            if source in by_source:
                by_source[source].append(part)
    return by_source


def _narrowed(query: Select[Any], selection: Selection) -> Select[Any]:
    query = query.where(batches.c.run_id == selection.run_id, batches.c.stream == selection.stream)
    if selection.from_step is not None:
        query = query.where(batches.c.max_step >= selection.from_step)
    if selection.to_step is not None:
        query = query.where(batches.c.min_step <= selection.to_step)
    if selection.from_time_unix_ns is not None:
        query = query.where(batches.c.max_time_unix_ns >= selection.from_time_unix_ns)
    if selection.to_time_unix_ns is not None:
        query = query.where(batches.c.min_time_unix_ns <= selection.to_time_unix_ns)
    return query


def clusters_of(parts: Iterable[Part], selection: Selection) -> list[Cluster]:
    """Return the batches in the order of their steps, or of their times; together what overlaps."""
    clusters: list[Cluster] = []
    end = 0
    if selection.stream in HOST_STREAMS:
        spans = [(p.min_time_unix_ns, p.max_time_unix_ns, p) for p in parts]
    else:
        spans = [(p.min_step, p.max_step, p) for p in parts]
    for first, last, part in sorted(spans):
        if clusters and first <= end:
            clusters[-1].append(part)
            end = max(end, last)
        else:
            clusters.append([part])
            end = last
    for cluster in clusters:
        cluster.sort(key=lambda part: (part.incarnation, part.first_seq))
    return clusters


def sides(
    selection: Selection, attempts: Sequence[AttemptRow], branch: Branch
) -> Callable[[Part], Side]:
    """Return what says which of a batch's rows are wanted."""
    end_of = ends(attempts)
    low, since = (
        -math.inf if begin is None else begin
        for begin in (selection.from_step, selection.from_time_unix_ns)
    )
    high, until = (
        math.inf if end is None else end for end in (selection.to_step, selection.to_time_unix_ns)
    )

    def side_of(part: Part) -> Side:
        is_cut = part.min_step < low or part.max_step > high
        is_cut |= part.min_time_unix_ns < since or part.max_time_unix_ns > until
        if selection.stream in HOST_STREAMS:
            return "both" if is_cut else "in"
        end = end_of(part.min_attempt) if branch != "all" else math.inf
        is_split = part.min_attempt != part.max_attempt or part.min_step < end <= part.max_step
        if branch != "all" and not is_split and (part.max_step < end) != (branch == "lineage"):
            return "out"
        return "both" if is_split or is_cut else "in"

    return side_of


__all__ = [
    *("HOST_STREAMS", "Cluster", "Part", "Selection", "Side"),
    *("clusters_of", "find", "sides", "some_at_once"),
]
