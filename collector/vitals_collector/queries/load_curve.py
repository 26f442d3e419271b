"""Loads one metric out of the store: every value, or what an overview of them needs.

An overview takes the outlines of compacted batches (``outlines``), two points for some hundred
values each, with each value that is not finite. A batch is read in full where that would not do:
where too many values are not finite, where the branch or what is asked for ends within it, and
where another batch has rows of the same steps. So no spike and no NaN is lost that the rows have.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from trainvitals.views import Branch
from vitals_collector.queries.chunk_summary_cache import ChunkSummary, ChunkSummaryCache
from vitals_collector.queries.read_points import Reading, read_points
from vitals_collector.queries.select import (
    HOST_STREAMS,
    Cluster,
    Part,
    Selection,
    Side,
    clusters_of,
    find,
    sides,
)
from vitals_collector.queries.series import AttemptRow, Points, by_time, join, stitch


class Outlined(NamedTuple):
    """A curve of which an overview is wanted."""

    selection: Selection
    branch: Branch
    num_points: int


def load(connection: Connection, selection: Selection) -> Points:
    """Return every measured point of the selection, as good as ordered by step or time."""
    (parts,) = find(connection, [selection])
    ordered = [part for cluster in clusters_of(parts, selection) for part in cluster]
    return read_points(connection, [Reading(selection, ordered)])[0]


def load_curve(
    connection: Connection, selection: Selection, attempts: Sequence[AttemptRow], branch: Branch
) -> Points:
    """Return every point of the branch in its order: by step, or by time where there is none."""
    return _arranged(load(connection, selection), selection, attempts, branch)


def load_outline(
    connection: Connection,
    selection: Selection,
    attempts: Sequence[AttemptRow],
    branch: Branch,
    num_points: int,
) -> tuple[Points, int]:
    """Return the curve, or at least ``num_points`` points of it that keep its shape.

    Every non-finite value, the ends, and the extremes of each stretch are among them.

    Returns:
        The points, and how many the whole curve has.
    """
    outlined = [Outlined(selection, branch, num_points)]
    return load_outlines(connection, outlined, attempts, ChunkSummaryCache())[0]


def load_outlines(
    connection: Connection,
    outlined: Sequence[Outlined],
    attempts: Sequence[AttemptRow],
    outlines: ChunkSummaryCache,
) -> list[tuple[Points, int]]:
    """Return what ``load_outline`` does, of several curves of one run; what they share, read once.

    Args:
        connection: one moment of the store.
        outlined: the curves.
        attempts: the run's branches.
        outlines: what is remembered of batches.
    """
    selections = [request.selection for request in outlined]
    part_lists = find(connection, selections)
    batch_outlines = outlines.of(connection, selections, part_lists)
    return _load(connection, outlined, attempts, list(zip(part_lists, batch_outlines, strict=True)))


def load_outlines_by_source(
    connection: Connection,
    selection: Selection,
    attempts: Sequence[AttemptRow],
    branch: Branch,
    num_points: int,
) -> dict[str, Points]:
    """Return what ``load_outline`` would, of every source that has rows, in one search."""
    (parts,) = find(connection, [selection])
    (outlines,) = ChunkSummaryCache().of(connection, [selection], [parts])
    by_source: dict[str, list[Part]] = {}
    for part in _with_column(parts, outlines):
        by_source.setdefault(part.source, []).append(part)
    request = Outlined(selection, branch, num_points)
    stored = [
        (source_parts, {part.id: outlines[part.id] for part in source_parts if part.id in outlines})
        for source_parts in by_source.values()
    ]
    loaded = _load(connection, [request] * len(stored), attempts, stored)
    return {source: curve for source, (curve, _) in zip(by_source, loaded, strict=True)}


_Found = tuple[Sequence[Part], Mapping[int, ChunkSummary]]
"""The batches to look into, and the outlines of those that are compacted."""


def _load(
    connection: Connection,
    outlined: Sequence[Outlined],
    attempts: Sequence[AttemptRow],
    stored: Sequence[_Found],
) -> list[tuple[Points, int]]:
    plans = _plans(outlined, attempts, stored)
    readings = [
        Reading(request.selection, p.read) for request, p in zip(outlined, plans, strict=True)
    ]
    loaded = []
    for request, plan, read in zip(outlined, plans, read_points(connection, readings), strict=True):
        curve = _arranged(read, request.selection, attempts, request.branch)
        num_values = len(curve) + sum(outline.num_values for outline in plan.drawn)
        if plan.drawn:
            drawn = [outline.points for outline in plan.drawn if outline.points is not None]
            curve = _arranged(join([*drawn, curve]), request.selection, attempts, request.branch)
        loaded.append((curve, num_values))
    return loaded


class _Plan(NamedTuple):
    """Of which batches a curve takes the outlines, and which are read."""

    drawn: Sequence[ChunkSummary]
    read: Sequence[Part]


_Placed = Sequence[tuple[Cluster, Sequence[Side]]]
"""The batches of a curve in their order, and which of their rows are wanted."""


def _plans(
    outlined: Sequence[Outlined], attempts: Sequence[AttemptRow], stored: Sequence[_Found]
) -> list[_Plan]:
    placed: dict[tuple[int, Branch, tuple[int, ...]], _Placed] = {}
    plans = []
    for request, (parts, outlines) in zip(outlined, stored, strict=True):
        key = id(parts), request.branch, tuple(outlines)
        if key not in placed:  # mostly all columns of a writer lie alike
            side_of = sides(request.selection, attempts, request.branch)
            clusters = clusters_of(_with_column(parts, outlines), request.selection)
            placed[key] = [(cluster, [side_of(part) for part in cluster]) for cluster in clusters]
        plans.append(_plan(placed[key], outlines, request.num_points))
    return plans


def _plan(placed: _Placed, outlines: Mapping[int, ChunkSummary], num_points: int) -> _Plan:
    drawn: list[ChunkSummary] = []
    read: list[Part] = []
    num_drawn = 0
    for cluster, part_sides in placed:
        outline = outlines.get(cluster[0].id) if part_sides == ["in"] else None
        if outline is not None and outline.points is not None:
            drawn.append(outline)
            num_drawn += outline.num_drawn
        else:
            read += [part for part, side in zip(cluster, part_sides, strict=True) if side != "out"]
    if num_drawn + sum(part.num_rows for part in read) < num_points:
        return _Plan((), [part for cluster, _ in placed for part in cluster])
    return _Plan(drawn, read)


def _with_column(parts: Sequence[Part], outlines: Mapping[int, ChunkSummary]) -> list[Part]:
    """Return the batches but those that are compacted and of which no row has the column."""
    return [part for part in parts if not part.is_columnar or part.id in outlines]


def _arranged(
    points: Points, selection: Selection, attempts: Sequence[AttemptRow], branch: Branch
) -> Points:
    if selection.stream in HOST_STREAMS:
        return by_time(points)
    return stitch(points, attempts, branch)


__all__ = [
    "HOST_STREAMS",
    "Outlined",
    "Selection",
    "load",
    "load_curve",
    "load_outline",
    "load_outlines",
    "load_outlines_by_source",
]
