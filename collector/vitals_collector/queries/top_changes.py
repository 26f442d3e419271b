"""Layers and ranks that changed before a step: the last steps compared with earlier ones.

The scale is robust (1.4826 times the median distance from the median), so that the problem itself
does not widen it. It is at least as wide as the row's earlier jumps: otherwise the largest of many
noisy rows would always be far from its median. Positive values are compared as logarithms.
Non-finite values come first, the earliest before the others.

Single steps are late on any machine, also two in a row if many are. A duration counts in one of two
cases. In the brief one, three of five consecutive steps are late, compared with single steps
before. In the lasting one, eight of 15 are, compared with two of three before. A delay adds to a
step, so brief ones are compared in seconds: the logarithm of a short wait is noise.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from sqlalchemy import Connection, func, select

from trainvitals.records import RATE_DECLARED
from trainvitals.views import MoverView
from vitals_collector.numbers.interface import (
    AttemptRow,
    Columns,
    Floats,
    Ints,
    Mask,
    NumberStoreReader,
    Points,
    RowSpan,
    stitch,
)
from vitals_collector.queries.heatmap_layers import RATIO, layer_names, metric_values
from vitals_collector.queries.series import attempt_rows, exclusive_end, measured_by_stream
from vitals_collector.storage.schema import decisions, findings
from vitals_collector.storage.store import ReadSnapshot

WINDOW_STEPS = 50
BEFORE_STEPS = 500
MAX_MOVERS = 50
MIN_SCORE = 4.0
"""Minimum score of a change, in scales."""
MAX_SCORE = 1e6
NONFINITE_SCORE = 1e9
"""Score of a non-finite value: above any other."""
_MIN_BEFORE = 20
"""Minimum number of values for a median to compare with."""
_MOVED = 5.0
"""Scales from which a row has started to change."""
_USUAL = 0.99
"""Share of the earlier steps whose distances do not count as a change."""
_OF_USUAL = 2.5
"""Multiple of the largest usual distance from which a row has changed. For normal noise it is 6.4
standard deviations: among 50 late values of 20 rows, once in 500,000 windows."""

_RATE_JUMP = 1.5
"""Ratio of two steps from which a learning rate has jumped."""

_BRIEF_STEPS, _SHORT_STEPS, _LASTING_STEPS = 5, 3, 15
"""Steps of a running median of durations."""

_LEAST_SCALE = 1e-3
_LEAST = {"loss_scale": 0.18, "memory_allocated_bytes": 0.0125}
"""Least scales of metrics that are constant for long, as logarithms: one doubling or halving of a
loss scale, or 5% of memory, is not a change."""

_KEYS = ("step", "attempt", "time_unix_ns")

RUN = "run"
"""Row of values that are equal on all ranks."""
_OF_RUN = ("loss", "grad_norm", "learning_rate", "loss_scale", "update_ratio", "weight_norm")
_OF_RANK = (
    "rank_loss", "step_duration_seconds", "data_wait_seconds", "communication_seconds",
    "forward_backward_seconds", "memory_allocated_bytes",
)  # fmt: skip
_OF_LAYER = (
    "grad_norm", RATIO, "weight_norm", "activation_rms", "activation_max", "activation_dead_ratio",
)  # fmt: skip
_SOURCES_OF = {RATIO: ("update_norm", "weight_norm")}
OF_SPEED = frozenset(name for name in _OF_RANK if name.endswith("_seconds"))
"""Metrics of the speed, not of the training."""


class TopChange(NamedTuple):
    """A change, with the step at which it started."""

    view: MoverView
    first_step: int


def top_change_views(moment: ReadSnapshot, run_id: str, step: int) -> tuple[MoverView, ...]:
    """Query the largest changes up to a step, on the attempt with a problem at it."""
    attempt = attempt_of(moment.sql, run_id, step)
    return tuple(mover.view for mover in find_top_changes(moment, run_id, step, attempt))


def attempt_of(connection: Connection, run_id: str, step: int) -> int | None:
    """Return the latest attempt with a problem at the step, which may be outside the lineage.

    Problems are findings and decisions about it, and the steps that led to a rollback.
    """
    step = _within(step)
    for table in (decisions, findings):
        query = select(func.max(table.c.attempt)).where(
            table.c.run_id == run_id, table.c.step == step
        )
        attempt = connection.execute(query).scalar()
        if attempt is not None:
            return int(attempt)
    query = select(func.max(decisions.c.attempt)).where(
        decisions.c.run_id == run_id,
        decisions.c.action == "rollback",
        decisions.c.acted,
        decisions.c.step <= step + WINDOW_STEPS,
        decisions.c.decided_at_step >= step,
    )
    return connection.execute(query).scalar()


def _within(step: int) -> int:
    """Return the queried step, limited so that a window of steps around it fits in 64 bits."""
    return max(-(2**62), min(step, 2**62))


def find_top_changes(
    moment: ReadSnapshot, run_id: str, step: int, attempt: int | None
) -> tuple[TopChange, ...]:
    """Find what changed most up to a step, to explain it: layers and ranks."""
    step = _within(step)
    branch = ancestry(attempt_rows(moment.sql, run_id), attempt)
    measured = measured_by_stream(moment.sql, run_id)
    first = step - WINDOW_STEPS - BEFORE_STEPS + 1
    candidates: list[TopChange] = []
    candidates += _layer_changes(moment, run_id, (first, step), branch, measured["layers"])
    candidates += _rank_changes(moment.numbers, run_id, (first, step), branch, measured["steps"])
    candidates = [mover for mover in candidates if mover.view.score >= MIN_SCORE]
    return tuple(sorted(candidates, key=_mover_sort_key)[:MAX_MOVERS])


def _mover_sort_key(mover: TopChange) -> tuple[float, int, bool, str, str]:
    """Return the order in which a response lists changes: the largest first."""
    # Layers and ranks are more exact than the run's own value: they come first.
    return (
        -mover.view.score,
        mover.first_step,
        mover.view.row == RUN,
        mover.view.row,
        mover.view.metric,
    )


def ancestry(attempts: Sequence[AttemptRow], attempt: int | None) -> list[AttemptRow]:
    """Return the attempt that a query is about and its ancestors; without one, all."""
    by_id = {row.id: row for row in attempts}
    if attempt is None or attempt not in by_id:
        return list(attempts)
    ancestors: dict[int, AttemptRow] = {}
    current: int | None = attempt
    while current is not None and current in by_id and current not in ancestors:
        ancestors[current] = by_id[current]
        current = by_id[current].parent
    return list(ancestors.values())


def _layer_changes(
    moment: ReadSnapshot,
    run_id: str,
    steps: tuple[int, int],
    branch: Sequence[AttemptRow],
    measured: set[str],
) -> list[TopChange]:
    """Query how much each layer's norms changed in the steps before a problem."""
    columns_of = {name: _SOURCES_OF.get(name, (name,)) for name in _OF_LAYER}
    columns_of = {
        name: needed for name, needed in columns_of.items() if measured.issuperset(needed)
    }
    if not columns_of:
        return []
    columns = sorted({column for needed in columns_of.values() for column in needed})
    span = RowSpan(run_id, "layers", from_step=steps[0], to_step=exclusive_end(steps[1]))
    rows = moment.numbers.scan(span, [*_KEYS, "layer", "incarnation", *columns])
    named = layer_names(moment.sql, run_id)
    writers, numbers = rows["incarnation"].values.tolist(), rows["layer"].values.tolist()
    pairs = list(zip(writers, map(int, numbers), strict=True))
    labels = [named.get(pair) or f"layer {pair[1]}" for pair in pairs]
    order = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    key = np.array([order[label] for label in labels], dtype=np.int64)
    return _judge_rows(rows, key, list(order), columns_of, steps[1], branch)


def _rank_changes(
    numbers: NumberStoreReader,
    run_id: str,
    steps: tuple[int, int],
    branch: Sequence[AttemptRow],
    measured: set[str],
) -> list[TopChange]:
    """Query how much the values of each rank and of the run changed before a problem."""
    candidates: list[TopChange] = []
    last = steps[1] + _BRIEF_STEPS // 2  # shows whether the step is late alone
    span = RowSpan(run_id, "steps", from_step=steps[0], to_step=exclusive_end(last))
    for metrics, sources in ((_OF_RUN, ("rank:0",)), (_OF_RANK, ())):
        names = [name for name in metrics if name in measured]
        if not names:
            continue
        columns = [*_KEYS, "rank", *names]
        is_judging_rate = "learning_rate" in names and "verdict" in measured
        rows = numbers.scan(
            span._replace(sources=sources), [*columns, "verdict"] if is_judging_rate else columns
        )
        if is_judging_rate:  # declared schedules are skipped
            bits = rows["verdict"].values[~rows["verdict"].is_missing].astype(np.int64)
            names = [n for n in names if n != "learning_rate" or not (bits & RATE_DECLARED).any()]
        ranks, key = np.unique(rows["rank"].values, return_inverse=True)
        labels = [RUN] if sources else [f"rank:{rank}" for rank in ranks.tolist()]
        columns_of = {name: (name,) for name in names}
        candidates += _judge_rows(rows, key, labels, columns_of, steps[1], branch)
    return candidates


def _judge_rows(
    rows: Columns,
    key: Ints,
    labels: Sequence[str],
    columns_of: Mapping[str, Sequence[str]],
    step: int,
    branch: Sequence[AttemptRow],
) -> list[TopChange]:
    """Return the change of each row of each metric; ``key`` returns the row of a value."""
    at, attempt, time = (rows[name].values.astype(np.int64, copy=False) for name in _KEYS)
    points = Points(at, attempt, time, np.arange(len(key), dtype=np.float64))
    is_of_branch = np.isin(points.attempt, [attempt.id for attempt in branch]) | (not branch)
    candidates = []
    by_key = np.argsort(key, kind="stable")
    bounds = np.searchsorted(key[by_key], np.arange(len(labels) + 1)).tolist()
    for label, (begin, end) in zip(labels, pairwise(bounds), strict=True):
        series_indices = by_key[begin:end]
        branch_points = points.take(series_indices[is_of_branch[series_indices]])
        which = stitch(branch_points, branch, "lineage").value.astype(np.int64)
        own_steps = points.step[which]
        for metric, columns in columns_of.items():
            value, is_there = metric_values(
                {name: rows[name].take(which) for name in columns}, columns
            )
            mover = judge_change(label, metric, own_steps[is_there], value[is_there], step)
            candidates += [] if mover is None else [mover]
    return candidates


def judge_change(
    row: str,
    metric: str,
    steps: Ints,
    values: Floats,
    step: int,
    *,
    min_before: int = _MIN_BEFORE,
    has_jumps: bool = True,
) -> TopChange | None:
    """Return the deviation of the values before a problem at ``step`` from earlier ones.

    None: nothing was measured in the window, or fewer than ``min_before`` values before it. With
    ``has_jumps`` a distance that single values before it had is usual.
    """
    if metric in OF_SPEED:
        is_finite = np.isfinite(values)
        steps, values = steps[is_finite], values[is_finite]
    is_late: Mask = (steps > step - WINDOW_STEPS) & (steps <= step)
    is_before: Mask = steps <= step - WINDOW_STEPS
    smooth = _running_median(values, _BRIEF_STEPS) if metric in OF_SPEED else values
    at, late, before = steps[is_late], smooth[is_late], values[is_before]
    before = before[np.isfinite(before)]
    if not len(late):
        return None
    middle = float(np.median(before)) if len(before) else None
    is_bad = ~np.isfinite(late)
    if is_bad.any():
        first = int(at[is_bad][0])
        view = MoverView(
            row=row, metric=metric, before=middle, peak=None, peak_step=first, score=NONFINITE_SCORE
        )
        return TopChange(view, first)
    if middle is None or len(before) < min_before:
        return None
    if metric == "learning_rate" and not _has_jumped(before, late):
        return None
    if metric in OF_SPEED:
        short = _running_median(values, _SHORT_STEPS)[is_before]
        lasting = _running_median(values, _LASTING_STEPS)[is_late]
        away = np.maximum(_distances(before, late, is_log=False), _distances(short, lasting))
    else:
        least = _LEAST.get(metric, _LEAST_SCALE)
        away = _distances(before, late, has_jumps=has_jumps, least=least)
    peak = int(np.argmax(away))
    score = min(float(away[peak]), MAX_SCORE)
    begins = np.flatnonzero(away >= min(_MOVED, score))
    view = MoverView(
        row=row,
        metric=metric,
        before=middle,
        peak=float(late[peak]),
        peak_step=int(at[peak]),
        score=score,
    )
    return TopChange(view, int(at[begins[0]]))


def _has_jumped(before: Floats, late: Floats) -> bool:
    """Return whether the learning rate jumped before a problem: schedules change it slowly."""
    rates = np.concatenate([before[-1:], late])
    return bool((rates[1:] > _RATE_JUMP * rates[:-1]).any() and late.max() > before.max())


def _running_median(values: Floats, num_steps: int) -> Floats:
    """Return the median of the steps around each one, at the ends of the first or last ones."""
    if len(values) < num_steps:
        return values
    medians = np.median(sliding_window_view(values, num_steps), axis=1)
    return np.pad(medians, num_steps // 2, mode="edge")


def _distances(
    before: Floats,
    late: Floats,
    *,
    has_jumps: bool = True,
    least: float = _LEAST_SCALE,
    is_log: bool = True,
) -> Floats:
    """Return the distance of each late value from the earlier median, to rank changes."""
    if is_log and before.min() > 0.0:
        before, late = np.log(before), np.log(np.maximum(late, np.finfo(np.float64).tiny))
    else:
        least = max(abs(float(np.median(before))) * least, 1e-12)
    with np.errstate(over="ignore"):
        middle = np.median(before)
        usual = np.abs(before - middle)
        scale = max(1.4826 * float(np.median(usual)), least)
        if has_jumps:
            scale = max(scale, float(np.quantile(usual, _USUAL)) * _OF_USUAL / MIN_SCORE)
        return np.asarray(np.abs(late - middle) / scale)
