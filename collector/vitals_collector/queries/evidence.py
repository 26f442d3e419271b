"""Measurements around an incident: the first change, and the state of the GPUs."""

import msgspec
import numpy as np

from trainvitals.detect.fleet.node import THROTTLES
from trainvitals.views import MoverView, RunSummary, StepView
from vitals_collector.numbers.interface import Columns, Floats, NumberStoreReader, RowSpan
from vitals_collector.queries.attribution import Precursor, precursor
from vitals_collector.queries.ledger import samples_of_step, step_rows
from vitals_collector.queries.series import exclusive_end
from vitals_collector.queries.top_changes import (
    MAX_SCORE,
    WINDOW_STEPS,
    TopChange,
    find_top_changes,
    judge_change,
)
from vitals_collector.storage.store import ReadSnapshot

AFTER_SECONDS = 60
BEFORE_SECONDS = 600
"""GPU samples of this time before the onset are the reference for those after it."""
_OF_GPU = (
    "temperature_celsius", "power_watts", "sm_clock_hertz", "utilization_ratio",
    "memory_used_bytes", "throttle_reasons", "ecc_corrected_errors", "ecc_uncorrected_errors",
    "last_xid",
)  # fmt: skip
_RISING = ("ecc_corrected_errors", "ecc_uncorrected_errors", "last_xid")
"""Columns whose new values are always reported, however small the change."""
THROTTLED = "throttle_reasons"
_GPUS_AT_ONCE = 64
_MIN_SAMPLES = 8
"""Samples of a GPU without which nothing is usual: with one a minute there are ten."""
_MIN_SCORE = 6.0
_MAX_TOLD = 8


class IncidentEvidence(msgspec.Struct, frozen=True):
    """Measurements around one incident."""

    is_gathered: bool = False
    """Whether the fields below were read."""
    view: StepView | None = None
    """The step of the onset."""
    precursor: Precursor | None = None
    """The first change; None: unknown."""
    movers: tuple[TopChange, ...] = ()
    """The largest changes, if there was a first change: without one, they are noise."""
    has_layers: bool = False
    has_gpus: bool = False
    gpus: tuple[MoverView, ...] = ()
    """GPU changes that did not occur before the onset."""


def gather_evidence(
    moment: ReadSnapshot,
    run: RunSummary,
    attempt: int,
    onset: int,
    last: int,
    cause: str,
) -> IncidentEvidence:
    """Query the measurements around an incident that its story cites."""
    first = precursor(moment, run.run_id, attempt, onset, cause)
    has_named = first is not None and first.onset is not None
    view = StepView(
        run_id=run.run_id,
        step=onset,
        rows=tuple(r for r in step_rows(moment, run.run_id, onset) if r.attempt == attempt),
        findings=(),
        decisions=(),
        data=samples_of_step(moment.sql, run.run_id, onset),
    )
    near = RowSpan(run.run_id, "layers", from_step=onset - 500, to_step=exclusive_end(onset))
    has_layers = moment.numbers.num_rows(near) > 0
    gpus = _gpu_changes(moment.numbers, run.run_id, attempt, onset, last)
    return IncidentEvidence(
        is_gathered=True,
        view=view,
        precursor=first,
        movers=find_top_changes(moment, run.run_id, onset, attempt) if has_named else (),
        has_layers=has_layers,
        has_gpus=gpus is not None,
        gpus=gpus or (),
    )


def _gpu_changes(
    numbers: NumberStoreReader, run_id: str, attempt: int, onset: int, last: int
) -> tuple[MoverView, ...] | None:
    """Query GPU changes during an incident that did not occur before it; None: no samples."""
    when = _times(numbers, run_id, attempt, onset, last)
    if when is None:
        return None
    early, begin = when[0] - BEFORE_SECONDS * 10**9, when[0]
    end = max(when[1], begin) + AFTER_SECONDS * 10**9
    near = RowSpan(run_id, "gpu", from_unix_ns=early, to_unix_ns=exclusive_end(end))
    if not numbers.num_rows(near):
        return None
    by_gpu: dict[str, list[MoverView]] = {}
    sources = numbers.sources(run_id, "gpu")
    for i in range(0, len(sources), _GPUS_AT_ONCE):
        of_some_gpus = near._replace(sources=tuple(sources[i : i + _GPUS_AT_ONCE]))
        rows = numbers.scan(of_some_gpus, ["time_unix_ns", "source", *_OF_GPU])
        which_of: dict[str, list[int]] = {}
        for row, source in enumerate(rows["source"].values.tolist()):
            which_of.setdefault(source, []).append(row)
        for source, which in which_of.items():
            gpu_columns = {name: column.take(np.array(which)) for name, column in rows.items()}
            if np.any(gpu_columns["time_unix_ns"].values >= begin):
                by_gpu[source] = _changes_of_gpu(source, gpu_columns, begin)
    if not by_gpu:
        return None
    movers = [view for views in by_gpu.values() for view in views]
    return tuple(sorted(movers, key=lambda view: (-view.score, view.row, view.metric))[:_MAX_TOLD])


def _changes_of_gpu(source: str, rows: Columns, begin: int) -> list[MoverView]:
    """Find the changes of one GPU's counters, throttling and measurements during an incident."""
    times = rows["time_unix_ns"].values
    order = np.argsort(times, kind="stable")
    views = []
    for name in _OF_GPU:
        which = order[~rows[name].is_missing[order]]
        values = rows[name].values.astype(np.float64)[which]
        is_late = times[which] >= begin
        if name in _RISING:
            views += _risen(source, name, values[~is_late], values[is_late])
            continue
        if name == THROTTLED:
            views += _throttled(source, values[~is_late], values[is_late])
            continue
        # Numbered as steps of a window: the earlier samples are far enough before it.
        pseudo = np.where(is_late, WINDOW_STEPS, 0)
        # A GPU may throttle minutes before its effect shows in a step: such values are not usual.
        mover = judge_change(
            source, name, pseudo, values, WINDOW_STEPS, min_before=_MIN_SAMPLES, has_jumps=False
        )
        if mover is not None and mover.view.score >= _MIN_SCORE:
            views.append(msgspec.structs.replace(mover.view, peak_step=-1))
    return views


def _risen(source: str, name: str, before: Floats, late: Floats) -> list[MoverView]:
    """Return a GPU counter or error number, as evidence, if an incident changed it."""
    last = float(before[-1]) if len(before) else None
    if not len(late) or float(late[-1]) == last or (last is None and name != "last_xid"):
        return []
    peak = float(late[-1])
    return [
        MoverView(row=source, metric=name, before=last, peak=peak, peak_step=-1, score=MAX_SCORE)
    ]


def _throttled(source: str, before: Floats, late: Floats) -> list[MoverView]:
    """Return a GPU's throttle reasons, as evidence of an incident, if some are unusual.

    A throttle may start and end some samples before its effect shows in steps.
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
    numbers: NumberStoreReader, run_id: str, attempt: int, onset: int, last: int
) -> tuple[int, int] | None:
    """Query the first and last end time of an incident's steps on rank 0."""
    span = RowSpan(run_id, "steps", ("rank:0",), from_step=onset, to_step=exclusive_end(last))
    rows = numbers.scan(span, ["time_unix_ns", "attempt"])
    attempt_times = rows["time_unix_ns"].values[rows["attempt"].values == attempt]
    return (int(attempt_times.min()), int(attempt_times.max())) if len(attempt_times) else None
