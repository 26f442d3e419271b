"""Overviews out of the lake: outlines in place of most rows, and the rows where those do not hold.

Rows are read that are not outlined yet, of stretches that a bound cuts or that have too much that
is not finite, and of stretches that others overlap: which of two rows of a step counts is known
from the rows alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from trainvitals.views import Branch
from vitals_collector.numbers.drawn import arranged, on_branch
from vitals_collector.numbers.interface import HOST_STREAMS, Curve, Drawn
from vitals_collector.numbers.lake_curves import (
    NO_POINTS,
    Fetched,
    Group,
    fetch,
    grouped,
    whole_curves,
)
from vitals_collector.numbers.lake_engine import Engine
from vitals_collector.numbers.lake_known import Known
from vitals_collector.numbers.lake_outlines import OUTLINES, name_key
from vitals_collector.numbers.lake_scan import Chosen, of_seqs, of_sources
from vitals_collector.numbers.lake_tables import table_of
from vitals_collector.numbers.outlines import EXTREMES, NONFINITE, ROWS
from vitals_collector.numbers.points import AttemptRow, Floats, Ints, Mask, Points, ends, join

_MOST_RANGES = 4
"""Read apart from each other: each costs as much as a small question."""
_INTS = (
    *("kind", "attempt", "num", "low_step", "low_unix_ns", "high_step", "high_unix_ns"),
    *("first_step", "first_unix_ns", "last_step", "last_unix_ns"),
)
_FLOATS = ("low", "high", "first", "last")


def curves(
    engine: Engine,
    known: Known,
    curves: Sequence[Curve],
    attempts: Sequence[AttemptRow],
    branch: Branch,
) -> list[Drawn]:
    """Return each curve's measured values on the branch; of an overview, what keeps its shape.

    Raises:
        FormatError: a column is text.
    """
    drawn: dict[int, Drawn] = {}
    for group, is_overview in grouped(known, curves):
        rest = group.curves
        if is_overview:
            least = {number: curves[number].num_points or 0 for number, _, _ in group.curves}
            drawn |= _overviews(engine, known, group, least, attempts, branch)
            rest = [curve for curve in group.curves if curve[0] not in drawn]
        if rest:
            drawn |= whole_curves(engine, group.of(rest), attempts, branch)
    return [drawn.get(i, Drawn(NO_POINTS, 0)) for i in range(len(curves))]


class _Entries(NamedTuple):
    """Entries of outlines by curve, then along it."""

    curve: Ints
    """Place in the group."""
    numbers: Mapping[str, Ints]
    values: Mapping[str, Floats]

    def take(self, which: Mask | Ints) -> "_Entries":
        return _Entries(
            self.curve[which],
            {name: column[which] for name, column in self.numbers.items()},
            {name: column[which] for name, column in self.values.items()},
        )

    def is_kind(self, kind: int) -> Mask:
        is_kind: Mask = self.numbers["kind"] == kind
        return is_kind


def _overviews(
    engine: Engine,
    known: Known,
    group: Group,
    least: Mapping[int, int],
    attempts: Sequence[AttemptRow],
    branch: Branch,
) -> dict[int, Drawn]:
    """Return those curves of which the outlines have as many points as are wanted."""
    stream = group.span.stream
    along = "unix_ns" if stream in HOST_STREAMS else "step"
    entries, outlined = _entries(engine, group)
    if not outlined:
        return {}
    entries, is_cut = _on_branch(entries, group, attempts, branch)
    pending = _pending(known, group, outlined)
    rows = fetch(engine, group, [_numbered(pending)]) if pending else None
    is_read = _to_read(entries, is_cut, along)
    if rows is not None and along == "step":
        is_read |= _is_met(entries, group, rows)
    wanted = _enough(group, entries, is_read, rows, least)
    if not wanted:
        return {}
    entries_kept, ranges = _cut_out(entries, is_read, along, len(group.curves))
    reread = _reread(engine, group, ranges, wanted, pending, outlined, along)
    points, num = _drawn_points(entries_kept, along)
    bounds = np.searchsorted(entries_kept.curve, np.arange(len(group.curves) + 1))
    ends_of = np.searchsorted(points[0], np.arange(len(group.curves) + 1))
    drawn = {}
    for i in wanted:
        number, name, cell = group.curves[i]
        parts = [points[1].take(np.arange(ends_of[i], ends_of[i + 1]))]
        read = []
        if rows is not None:
            read.append(rows.points(name, cell))
        if reread is not None and len(ranges[i]):
            read.append(_within(reread.points(name, cell), ranges[i], along))
        of_rows = on_branch(join(read), stream, attempts, branch)
        curve = arranged(join([*parts, of_rows]), stream, attempts, branch)
        if len(curve) >= least[number]:
            num_values = int(num[bounds[i] : bounds[i + 1]].sum()) + len(of_rows)
            drawn[number] = Drawn(curve, num_values)
    return drawn


def _entries(engine: Engine, group: Group) -> tuple[_Entries, dict[str, int]]:
    """Return the outlines of the curves, and how far each writer is outlined."""
    span = group.span
    engine.files.need(OUTLINES, group.run)
    chosen = Chosen(group.run, "", "run = ? AND stream = ?", [group.run, span.stream], {})
    keys = [*map(name_key, group.names), name_key(ROWS)]
    chosen = chosen.also(f"name IN ({', '.join(map(str, keys))})")
    if span.sources:
        chosen = of_sources(chosen, span.sources)
    for side, bound in (("last_step >= ?", span.from_step), ("first_step < ?", span.to_step)):
        if bound is not None:
            chosen = chosen.also(f"(name = {keys[-1]} OR {side})", bound)
    listed = ", ".join((*_INTS, *_FLOATS))
    found = engine.ask(
        f"SELECT name, source, incarnation, last_seq, {listed} FROM {OUTLINES}"
        f" WHERE {chosen.where}",
        chosen.values,
    )
    is_rows = pa.compute.equal(found["name"], keys[-1])
    marks = found.select(["incarnation", "last_seq"]).filter(is_rows)
    marks = marks.group_by("incarnation").aggregate([("last_seq", "max")])
    outlined = dict(
        zip(marks["incarnation"].to_pylist(), marks["last_seq_max"].to_pylist(), strict=True)
    )
    found = found.filter(pa.compute.invert(is_rows))
    entries = _Entries(
        _curve_of(group, found),
        {name: found[name].to_numpy().astype(np.int64, copy=False) for name in _INTS},
        {name: found[name].to_numpy() for name in _FLOATS},
    )
    return entries.take(entries.curve >= 0), outlined


def _curve_of(group: Group, found: pa.Table) -> Ints:
    """Return for each entry which curve of the group it is of; -1 where no curve asks for it."""
    names = group.names
    num_cells = len(group.cells)
    name = pa.compute.index_in(found["name"], pa.array(map(name_key, names), pa.int64())).to_numpy()
    cell = np.zeros(len(found), np.int64)
    if group.column:
        cell = pa.compute.index_in(found["source"], pa.array(group.cells, pa.string())).to_numpy()
    numbers = np.full(len(names) * num_cells, -1)
    place = {name: i for i, name in enumerate(names)}
    for i, (_, of_curve, of_cell) in enumerate(group.curves):
        numbers[place[of_curve] * num_cells + of_cell] = i
    curve: Ints = numbers[name.astype(np.int64) * num_cells + cell]
    return curve


def _on_branch(
    entries: _Entries, group: Group, attempts: Sequence[AttemptRow], branch: Branch
) -> tuple[_Entries, Mask]:
    """Return the entries that are asked for, in order, and which of them a bound cuts."""
    span, numbers = group.span, entries.numbers
    is_in = np.ones(len(entries.curve), np.bool_)
    is_cut = ~is_in
    bounds = [
        ("step", span.from_step, span.to_step),
        ("unix_ns", span.from_unix_ns, span.to_unix_ns),
    ]
    for unit, begin, end in bounds:
        first, last = numbers[f"first_{unit}"], numbers[f"last_{unit}"]
        if begin is not None:
            is_in &= last >= begin
            is_cut |= first < begin
        if end is not None:
            is_in &= first < end
            is_cut |= last >= end
    if branch != "all" and span.stream not in HOST_STREAMS:
        end_of = ends(attempts)
        distinct, of_entry = np.unique(numbers["attempt"], return_inverse=True)
        end_at = np.array([end_of(attempt) for attempt in distinct.tolist()])[of_entry]
        first, last = numbers["first_step"], numbers["last_step"]
        is_in &= first < end_at if branch == "lineage" else last >= end_at
        is_cut |= (first < end_at) & (last >= end_at)
    along = "first_unix_ns" if span.stream in HOST_STREAMS else "first_step"
    order = np.flatnonzero(is_in)
    order = order[np.lexsort((numbers[along][order], entries.curve[order]))]
    return entries.take(order), is_cut[order]


def _to_read(entries: _Entries, is_cut: Mask, along: str) -> Mask:
    """Return the stretches whose rows are to be read: what overlaps is read or outlined together.

    What is not finite follows its stretch (``_cut_out``).
    """
    is_stretch = ~entries.is_kind(NONFINITE)
    is_read = is_stretch & (is_cut | ~entries.is_kind(EXTREMES))
    at = np.flatnonzero(is_stretch)
    curve = entries.curve[at]
    first, last = (entries.numbers[f"{side}_{along}"][at] for side in ("first", "last"))
    is_overlap = (curve[1:] == curve[:-1]) & (first[1:] <= last[:-1])
    for i in np.unique(curve[1:][is_overlap]).tolist():
        start, end = np.searchsorted(curve, (i, i + 1))
        highest = np.maximum.accumulate(last[start:end])
        cluster = np.concatenate(([0], np.cumsum(first[start + 1 : end] > highest[:-1])))
        is_together = np.bincount(cluster, is_read[at[start:end]]) > 0
        if along == "step":  # one of two rows of a step counts
            is_together |= np.bincount(cluster) > 1
        is_read[at[start:end]] = is_together[cluster]
    return is_read


def _pending(known: Known, group: Group, outlined: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return by writer the numbers of the rows that are not outlined yet."""
    span = group.span
    return {
        incarnation: (outlined.get(incarnation, -1) + 1, mark + 1)
        for incarnation, (mark, source) in known.marks(span.run_id, span.stream).items()
        if mark > outlined.get(incarnation, -1) and (not span.sources or source in span.sources)
    }


def _numbered(seqs: Mapping[str, tuple[int, int]]) -> Callable[[Chosen], Chosen]:
    """Return what narrows rows to these of each writer."""
    return lambda chosen: of_seqs(chosen, seqs)


def _is_met(entries: _Entries, group: Group, rows: Fetched) -> Mask:
    """Return the stretches within whose steps rows lie that are not outlined."""
    is_met = np.zeros(len(entries.curve), np.bool_)
    bounds = np.searchsorted(entries.curve, np.arange(len(group.curves) + 1))
    first, last = entries.numbers["first_step"], entries.numbers["last_step"]
    is_stretch = ~entries.is_kind(NONFINITE)
    for i, (_, _, cell) in enumerate(group.curves):
        own = slice(bounds[i], bounds[i + 1])
        steps = rows.steps_of(cell, "step")
        if len(steps) and bounds[i] < bounds[i + 1] and steps[0] <= last[own].max():
            is_met[own] = np.searchsorted(steps, first[own]) < np.searchsorted(
                steps, last[own], side="right"
            )
    is_met &= is_stretch
    return is_met


def _enough(
    group: Group, entries: _Entries, is_read: Mask, rows: Fetched | None, least: Mapping[int, int]
) -> list[int]:
    """Return the curves that have about as many points as are wanted without reading all."""
    num = np.where(is_read, entries.numbers["num"], np.where(entries.is_kind(EXTREMES), 2, 1))
    nums = np.bincount(entries.curve, num, minlength=len(group.curves))
    is_there = np.bincount(entries.curve, ~is_read, minlength=len(group.curves)) > 0
    if rows is not None:
        nums += np.diff(rows.bounds)[[cell for _, _, cell in group.curves]]
    return [
        i
        for i, (number, _, _) in enumerate(group.curves)
        if is_there[i] and nums[i] >= least[number]
    ]


_Ranges = list[tuple[int, int]]


def _cut_out(
    entries: _Entries, is_read: Mask, along: str, num_curves: int
) -> tuple[_Entries, list[_Ranges]]:
    """Return what is drawn of the outlines, and of each curve where rows are read instead."""
    first, last = (entries.numbers[f"{side}_{along}"] for side in ("first", "last"))
    ranges: list[_Ranges] = [[] for _ in range(num_curves)]
    for i, begin, end in zip(
        entries.curve[is_read].tolist(),
        first[is_read].tolist(),
        last[is_read].tolist(),
        strict=True,
    ):
        of_curve = ranges[i]
        if of_curve and begin <= of_curve[-1][1]:
            of_curve[-1] = of_curve[-1][0], max(end, of_curve[-1][1])
        else:
            of_curve.append((begin, end))
    is_drawn = ~is_read
    bounds = np.searchsorted(entries.curve, np.arange(num_curves + 1))
    for i in np.unique(entries.curve[is_read]).tolist():
        own = slice(bounds[i], bounds[i + 1])
        is_drawn[own] &= ~_is_within(first[own], ranges[i])
    return entries.take(is_drawn), ranges


def _is_within(along: Ints, ranges: _Ranges) -> Mask:
    begins, ends_at = np.array(ranges, np.int64).T
    place = np.searchsorted(begins, along, side="right") - 1
    is_within: Mask = (place >= 0) & (along <= ends_at[place])
    return is_within


def _within(points: Points, ranges: _Ranges, along: str) -> Points:
    return points.take(_is_within(points.step if along == "step" else points.time_unix_ns, ranges))


def _reread(
    engine: Engine,
    group: Group,
    ranges: Sequence[_Ranges],
    wanted: Iterable[int],
    pending: Mapping[str, tuple[int, int]],
    outlined: Mapping[str, int],
    along: str,
) -> Fetched | None:
    """Return the rows in the ranges, but for those that are not outlined: they are read already."""
    together = sorted({of_range for i in wanted for of_range in ranges[i]})
    if not together:
        return None
    column = "step" if along == "step" else "time_unix_ns"
    narrowed = []
    for begin, end in _coalesced(together):

        def narrow(chosen: Chosen, begin: int = begin, end: int = end) -> Chosen:
            chosen = chosen.also(f"{column} BETWEEN ? AND ?", begin, end)
            if not pending:
                return chosen
            marks = table_of(("incarnation", "outlined_seq"), outlined.items())
            return chosen._replace(
                joins=f"{chosen.joins} JOIN span_outlined USING (incarnation)",
                tables={**chosen.tables, "span_outlined": marks},
            ).also("seq <= outlined_seq")

        narrowed.append(narrow)
    return fetch(engine, group, narrowed)


def _coalesced(ranges: _Ranges) -> Iterator[tuple[int, int]]:
    """Yield few ranges that hold all of these; the widest gaps stay between them."""
    joined: _Ranges = []
    for begin, end in ranges:
        if joined and begin <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    gaps = sorted(range(1, len(joined)), key=lambda i: joined[i - 1][1] - joined[i][0])[
        : _MOST_RANGES - 1
    ]
    start = 0
    for cut in [*sorted(gaps), len(joined)]:
        yield joined[start][0], joined[cut - 1][1]
        start = cut


def _drawn_points(entries: _Entries, along: str) -> tuple[tuple[Ints, Points], Ints]:
    """Return the points of outlines with the curve of each, and how many values an entry has."""
    curve, numbers, values = entries
    is_first = _is_end(curve, numbers[f"first_{along}"], np.minimum)
    is_last = _is_end(curve, numbers[f"last_{along}"], np.maximum)
    is_nonfinite = entries.is_kind(NONFINITE)
    low, high = (numbers[f"{side}_step"] for side in ("low", "high"))
    is_same = (low == high) & (numbers["low_unix_ns"] == numbers["high_unix_ns"])
    sides = [
        ("low", np.isfinite(values["low"]) | is_nonfinite),
        ("high", np.isfinite(values["high"]) & ~is_same),
        ("first", is_first & np.isfinite(values["first"]) & ~_is_extreme(numbers, "first")),
        ("last", is_last & np.isfinite(values["last"]) & ~_is_extreme(numbers, "last")),
    ]
    owners = np.concatenate([curve[mask] for _, mask in sides])
    points = Points(
        np.concatenate([numbers[f"{side}_step"][mask] for side, mask in sides]),
        np.concatenate([numbers["attempt"][mask] for _, mask in sides]),
        np.concatenate([numbers[f"{side}_unix_ns"][mask] for side, mask in sides]),
        np.concatenate([values[side][mask] for side, mask in sides]),
    )
    order = np.argsort(owners, kind="stable")
    return (owners[order], points.take(order)), numbers["num"]


def _is_end(curve: Ints, along: Ints, extreme: np.ufunc) -> Mask:
    """Return which entries reach as far as any of their curve: one may lie within another."""
    starts = np.flatnonzero(np.diff(curve, prepend=-1))
    if not len(starts):
        return np.zeros(0, np.bool_)
    farthest = np.repeat(extreme.reduceat(along, starts), np.diff(starts, append=len(curve)))
    is_end: Mask = along == farthest
    return is_end


def _is_extreme(numbers: Mapping[str, Ints], side: str) -> Mask:
    """Return where the value at a side is the least or the greatest one, which is drawn anyway."""
    is_extreme = np.zeros(len(numbers["num"]), np.bool_)
    for extreme in ("low", "high"):
        is_same = numbers[f"{side}_step"] == numbers[f"{extreme}_step"]
        is_extreme |= is_same & (numbers[f"{side}_unix_ns"] == numbers[f"{extreme}_unix_ns"])
    return is_extreme
