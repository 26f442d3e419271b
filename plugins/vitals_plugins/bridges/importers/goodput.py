"""Time buckets of a third-party log, as far as it contains them."""

import numpy as np
from msgspec.structs import replace

from trainvitals.errors import UsageError
from trainvitals.goodput import BUCKETS, EndedSteps, Floats, Goodput, Ints, Launch, Mask, goodput
from vitals_plugins.bridges.importers.columns import ImportedLog

_OWN = 2.0
"""Up to this multiple of the usual duration, all of it counts as the step."""


def log_goodput(history: ImportedLog) -> Goodput:
    """Return the goodput between the first and the last record of an imported log.

    A log has steps and, at best, times: time beyond a usual step is unknown. Steps that were logged
    again, after the log went back, are rolled back.

    Raises:
        UsageError: it has neither times nor seconds per step.
    """
    if not history.steps:
        raise UsageError(f"{history.source} has no step with a loss or a gradient norm")
    step = np.array([record.step for record in history.steps], np.int64)
    seconds, waited, at = (
        np.array(values, np.float64)  # None becomes NaN
        for values in zip(
            *((r.step_seconds, r.data_seconds, r.time_seconds) for r in history.steps), strict=True
        )
    )
    before = np.concatenate((step[:1] - 1, step[:-1]))
    is_back = step <= before
    num = np.where(is_back, 1, step - before)  # steps of a record
    num[0] = 1
    evaluated = np.zeros(len(step))
    for position, lasted in history.evaluations.items():
        if position < len(step):  # time after the last step is in no interval
            evaluated[position] = lasted
    unseen = "" if history.evaluations else "evaluations, "
    notes = [
        f"A log does not tell starts, compilation, checkpoints, {unseen}hangs, or waits for "
        "other ranks: what is longer than a usual step is unknown."
    ]
    if np.isfinite(at).all() and not np.isfinite(seconds).any() and at[-1] <= at[0]:
        problem = "has one step alone" if len(at) == 1 else "has times that do not rise"
        raise UsageError(
            f"{history.source} {problem}, which tells no duration",
            hint="name another column: --time or --step-seconds",
        )
    if np.isfinite(at).all() and at[-1] > at[0]:
        ends, taken = _record_times(at, seconds, num, is_back, evaluated)
    elif np.isfinite(seconds).any():
        notes.append("It has no times: the time between its steps is not included.")
        taken = np.nan_to_num(seconds * num, nan=float(np.nanmedian(seconds * num))) + evaluated
        ends = np.rint(np.cumsum(taken) * 1e9).astype(np.int64)
    elif history.total_seconds is not None:
        return _goodput_without_times(history, int(step.max()))
    else:
        raise UsageError(
            f"{history.source} has neither times nor seconds per step",
            hint="name a column: --time or --step-seconds; of Hugging Face's Trainer, its "
            "TensorBoard or wandb log has times; `vitals replay` needs neither",
        )
    none = np.zeros(len(step))
    rows = EndedSteps(
        end_unix_ns=ends,
        launch=np.zeros(len(step), np.int64),
        attempt=np.cumsum(is_back) + 1,
        seconds=taken,
        data_wait=np.nan_to_num(waited * num),
        checkpoint=none,
        evaluation=evaluated,
        wait=none,
        least_wait=none,
        is_undone=_undone(step, np.flatnonzero(is_back)),
        is_skipped=np.zeros(len(step), np.bool_),
    )
    begin = int(ends[0]) - max(0, round(float(taken[0]) * 1e9))
    sums = goodput([Launch(begin, begin, int(ends[-1]), "finished")], rows)
    return replace(sums, notes=tuple(notes + history.notes))


def _goodput_without_times(history: ImportedLog, last_step: int) -> Goodput:
    """Return the goodput of a log that has only the whole duration, and none per step."""
    assert history.total_seconds is not None
    wall = round(history.total_seconds * 1e9)
    evaluation = min(wall, round(sum(history.evaluations.values()) * 1e9))
    nanoseconds = dict.fromkeys(BUCKETS, 0)
    nanoseconds |= {"evaluation": evaluation, "unknown": wall - evaluation}
    note = (
        "The log says how long the whole training took, of its last start, and no step's time: "
        f"{'evaluations apart, ' if evaluation else ''}what of it went to steps is unknown."
    )
    return Goodput(
        begin_unix_ns=0,
        end_unix_ns=wall,
        nanoseconds=nanoseconds,
        steps=last_step,
        notes=(note, *history.notes),
    )


def _record_times(
    at: Floats, seconds: Floats, num: Ints, is_back: Mask, evaluated: Floats
) -> tuple[Ints, Floats]:
    """Return when each imported record ended, and its steps' duration: as logged, or the usual.

    With the evaluations between them.
    """
    ends = np.rint(at * 1e9).astype(np.int64)
    gaps = np.diff(at, prepend=at[:1])
    paces = (gaps / num)[1:][~is_back[1:]]
    usual = float(np.median(paces[paces > 0])) if (paces > 0).any() else 0.0
    durations = np.where(np.isfinite(seconds), seconds * num, usual * num)
    is_own = ~np.isfinite(seconds) & (gaps <= _OWN * usual * num) & ~is_back
    durations = np.where(
        is_own, gaps, np.minimum(durations + evaluated, np.maximum(gaps, durations))
    )
    durations[0] = seconds[0] if np.isfinite(seconds[0]) else usual
    return ends, durations


def _undone(step: Ints, backs: Ints) -> Mask:
    """Return which imported records were logged again: before the log went back, later steps."""
    undone = np.zeros(len(step), np.bool_)
    for back in backs:
        undone[:back] |= step[:back] >= step[back]
    return undone
