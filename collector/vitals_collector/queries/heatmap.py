"""Heat maps: one metric of every rank, GPU, node or layer over the steps of a run.

A column of the map covers a range of steps. A cell shows the value in it with the largest distance
from the row's local median, so that a spike of one step is as visible among a million steps as
among a hundred. Discarded steps are included unless the query excludes them: they contain the
problem, and a cell then shows the worst of all attempts.

Ranks, GPUs and nodes are read from the summaries next to the stored columns; layers have no
summaries and are decoded.
"""

import difflib
from collections.abc import Mapping, Sequence

import numpy as np

from trainvitals import catalog
from trainvitals.errors import UsageError
from trainvitals.identity import Source
from trainvitals.views import (
    MAX_MAP_COLUMNS,
    MAX_MAP_ROWS,
    Branch,
    CellsQuestion,
    CellsReply,
)
from vitals_collector.numbers.interface import (
    AttemptRow,
    CurveRequest,
    Floats,
    NumberStoreReader,
    Points,
    RowSpan,
    concat_points,
    is_of_lineage,
    make_lineage_end_lookup,
    sort_by_time,
)
from vitals_collector.queries import heatmap_cells, heatmap_layers, series
from vitals_collector.queries.series import attempt_rows
from vitals_collector.storage.store import UNKNOWN, ReadSnapshot

MAX_CELLS = 200_000
STREAMS = ("steps", "gpu", "node", "layers")
_POINTS_A_COLUMN = 4
"""A summary entry covers 256 values: it is used if a column holds two of them."""
_TIMED = ("loss", "step_duration_seconds", "grad_norm")


def cells(moment: ReadSnapshot, question: CellsQuestion) -> CellsReply:
    """Query a heat map of one metric over ranks, hosts or layers and the steps of a run.

    Raises:
        UsageError: no such metric, or a number out of bounds.
    """
    run_id, metric = question.run_id, question.metric
    _check_map_size(question.points, question.rows)
    stream, column = _stream_and_column(moment, run_id, metric)
    attempts = attempt_rows(moment.sql, run_id)
    curve = CurveRequest(
        RowSpan(
            run_id,
            stream,
            from_step=question.from_step,
            to_step=series.exclusive_end(question.to_step),
        ),
        column,
    )
    load = heatmap_layers.load_layer_rows if stream == "layers" else _load_source_rows
    names, starts, extremes, rolled_back = load(
        moment, curve, attempts, question.branch, question.points
    )
    value = heatmap_cells.most_deviating_values(extremes)
    selected_rows = _most_deviating_rows(
        value, extremes, question.rows, is_alike=stream != "layers"
    )
    marks, rolled_back_marks = (
        np.argwhere(mask[selected_rows]) for mask in (extremes.is_marked, extremes.is_left)
    )
    return CellsReply(
        run_id=run_id,
        metric=metric,
        unit="ratio" if metric == f"layers.{heatmap_layers.RATIO}" else series.unit_of(metric),
        rows=tuple(names[i] for i in selected_rows),
        num_rows=len(names),
        step=tuple(starts.tolist()),
        value=tuple(
            tuple(None if v != v else v for v in row) for row in value[selected_rows].tolist()
        ),
        nonfinite=tuple((int(r), int(c)) for r, c in marks),
        rolled_back=rolled_back,
        nonfinite_rolled_back=tuple((int(r), int(c)) for r, c in rolled_back_marks),
    )


def _check_map_size(points: int, rows: int) -> None:
    """Reject a query for a heat map with too many columns, rows or cells."""
    if not 1 <= points <= MAX_MAP_COLUMNS:
        raise UsageError(f"points is {points}; it must be 1 to {MAX_MAP_COLUMNS}")
    if not 1 <= rows <= MAX_MAP_ROWS:
        raise UsageError(f"rows is {rows}; it must be 1 to {MAX_MAP_ROWS}")
    if points * rows > MAX_CELLS:
        raise UsageError(f"{points} points of {rows} rows; at most {MAX_CELLS} cells are drawn")


def _stream_and_column(moment: ReadSnapshot, run_id: str, metric: str) -> tuple[str, str]:
    """Return the stream and column of the metric in a query for a heat map."""
    plain = {column.name for column in catalog.ROW_COLUMNS} | {"layer"}
    measured = series.measured_by_stream(moment.sql, run_id)
    metric_names = sorted(f"{s}.{name}" for s in STREAMS for name in measured[s] - plain)
    if {"layers.update_norm", "layers.weight_norm"} <= set(metric_names):
        metric_names.append("layers.update_ratio")
    if metric in metric_names:
        stream, _, column = metric.partition(".")
        return stream, column
    close = difflib.get_close_matches(metric[:200], metric_names, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise UsageError(
        f"run {run_id} has no heat map of {metric[:200]!r}",
        hint=f"{meant}it has {', '.join(metric_names)}" if metric_names else series.NO_ROWS_YET,
        code=UNKNOWN,
    )


def _load_source_rows(
    moment: ReadSnapshot,
    curve: CurveRequest,
    attempts: Sequence[AttemptRow],
    branch: Branch,
    points: int,
) -> heatmap_cells.HeatmapRows:
    """Load the rows of a queried heat map: ranks, GPUs or nodes."""
    numbers, whole = moment.numbers, curve._replace(num_points=_POINTS_A_COLUMN * points)
    if curve.span.stream == "steps":
        curves = _by_source(numbers, whole, attempts, branch)
    else:
        curves = _load_host_curves(numbers, whole, attempts)
    end_of = make_lineage_end_lookup(attempts)
    names: list[str] = []
    lineage_points: list[Points] = []
    discarded_points: list[Points] = []
    for name in _ordered(curves):
        drawn = curves[name]
        is_kept = is_of_lineage(drawn.attempt, drawn.step, end_of)
        of_lineage = drawn.take(is_kept) if branch != "discarded" else concat_points([])
        discarded = drawn.take(~is_kept) if branch != "lineage" else concat_points([])
        if len(of_lineage) or len(discarded):
            names.append(name)
            lineage_points.append(of_lineage)
            discarded_points.append(discarded)
    starts = heatmap_cells.starts_of(
        [drawn for drawn in (*lineage_points, *discarded_points) if len(drawn)], points
    )
    cells = heatmap_cells.of_curves(lineage_points, starts).with_discarded(
        heatmap_cells.of_curves(discarded_points, starts)
    )
    again = concat_points(discarded_points).step
    rolled_back = (int(again.min()), int(again.max())) if len(again) else None
    return heatmap_cells.HeatmapRows(names, starts, cells, rolled_back)


def _by_source(
    numbers: NumberStoreReader, curve: CurveRequest, attempts: Sequence[AttemptRow], branch: Branch
) -> dict[str, Points]:
    """Query the curve of every source, each a row of a heat map."""
    sources = numbers.sources(curve.span.run_id, curve.span.stream)
    curves = [curve._replace(span=curve.span._replace(sources=(source,))) for source in sources]
    drawn = numbers.curves(curves, attempts, branch)
    return {source: of_source.points for source, of_source in zip(sources, drawn, strict=True)}


def _ordered(names: Mapping[str, Points]) -> Sequence[str]:
    """Return the heat map's ranks by number, other sources in their own order."""

    def key(name: str) -> tuple[str, int]:
        kind, _, rest = name.partition(":")
        if kind == "rank" and rest.isdigit():
            return "", Source.parse(name).rank or 0
        return name, 0

    is_of_sources = all(name.partition(":")[0] in ("rank", "gpu", "node") for name in names)
    return sorted(names, key=key) if is_of_sources else list(names)


def _most_deviating_rows(
    value: Floats, extremes: heatmap_cells.CellExtremes, num: int, *, is_alike: bool
) -> list[int]:
    """Choose the heat map's rows that deviate most, as many as the query wants.

    Rows of the same quantity are compared with each other, layers with themselves.
    """
    if len(value) <= num or not value.size:
        return list(range(len(value)))

    def middle_of(values: Floats) -> Floats:
        return (
            heatmap_cells.nanmedian(values.T)[np.newaxis, :]
            if is_alike
            else heatmap_cells.nanmedian(values)[:, None]
        )

    middle = middle_of(value)
    with np.errstate(over="ignore", invalid="ignore"):
        away = np.abs(value - middle)
        scale = 1.4826 * middle_of(away)
        score = away / np.maximum(scale, np.maximum(np.abs(middle) * 1e-6, 1e-300))
    score = np.where(np.isnan(score), 0.0, score).max(axis=1)
    score = np.where(extremes.is_marked.any(axis=1), np.inf, score)
    return sorted(np.argsort(-score, kind="stable")[:num].tolist())


def _load_host_curves(
    numbers: NumberStoreReader, curve: CurveRequest, attempts: Sequence[AttemptRow]
) -> dict[str, Points]:
    """Query the curves of GPUs or nodes for a heat map, with the steps during each sample.

    Samples before the end of the first step, or after that of the last, belong to no step.
    """
    span = curve.span
    clock = _load_step_times(numbers, span.run_id, attempts, curve.num_points or 0)
    if not len(clock):
        return {}
    of_host = curve._replace(span=RowSpan(span.run_id, span.stream))
    curves = {}
    for name, points in _by_source(numbers, of_host, attempts, "all").items():
        with_steps = _assign_steps(points, clock)
        is_in = np.ones(len(with_steps), dtype=np.bool_)
        if span.from_step is not None:
            is_in &= with_steps.step >= span.from_step
        if span.to_step is not None:
            is_in &= with_steps.step < span.to_step
        curves[name] = with_steps.take(is_in)
    return curves


def _load_step_times(
    numbers: NumberStoreReader, run_id: str, attempts: Sequence[AttemptRow], num_points: int
) -> Points:
    """Query the end times of steps, to place samples of a host in a heat map."""
    of_rank0 = RowSpan(run_id, "steps", ("rank:0",))
    for column in _TIMED:
        curve = CurveRequest(of_rank0, column, max(num_points, 1_000))
        (drawn,) = numbers.curves([curve], attempts, "all")
        if len(drawn.points):
            return sort_by_time(drawn.points)
    return concat_points([])


def _assign_steps(curve: Points, clock: Points) -> Points:
    """Assign a host's samples to the steps during which they were taken, for a heat map.

    During a rollback no step ends: its samples belong to the last step before it.
    """
    time = curve.time_unix_ns
    at = np.searchsorted(clock.time_unix_ns, time, side="right") - 1
    is_in = (at >= 0) & (time <= clock.time_unix_ns[-1])
    at, time, value = at[is_in], time[is_in], curve.value[is_in]
    after = np.minimum(at + 1, len(clock) - 1)
    begun, step = clock.time_unix_ns[at], clock.step[at]
    part = (time - begun) / np.maximum(clock.time_unix_ns[after] - begun, 1)
    ended = np.floor(part * np.maximum(clock.step[after] - step, 0)).astype(np.int64)
    return Points(step + ended, clock.attempt[at], time, value)
