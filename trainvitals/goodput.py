"""Divides a run's wall time into buckets: each nanosecond is in exactly one.

Pure: input are columns of steps, starts of the process and reports of hangs; output are sums. No
loop over steps: a million take a fraction of a second.

Time is divided at ends: of a step (its row), of a start (``watch`` returned), of a process. Each
interval is assigned to buckets in the order of ``PRECEDENCE``; each bucket gets its measured time,
at most the rest. So the buckets add up to the wall time, to the nanosecond, whatever was measured.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

Bucket = Literal[
    "productive", "start", "compile", "data_wait", "straggler_wait", "exchange", "skipped",
    "rolled_back", "checkpoint", "evaluation", "hang", "down", "restart", "halted", "unknown",
]  # fmt: skip
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)

PRECEDENCE: tuple[tuple[Bucket, str], ...] = (
    ("halted", "the run was paused by an operator, or halted and not yet resumed"),
    ("down", "no process of the run was alive, and it was not halted"),
    ("start", "from the start of the first process until `watch` had returned"),
    ("restart", "the same for every later process, and the time a rollback took to restore"),
    ("hang", "a reported hang, from the last progress until the ranks moved again"),
    ("checkpoint", "snapshots and saves that the loop waited for"),
    ("evaluation", "the loop evaluated between two steps"),
    ("rolled_back", "the rest of a step that was discarded, by a rollback or an older checkpoint"),
    ("skipped", "the rest of a step whose update was not applied"),
    ("data_wait", "the ranks waited for the next batch"),
    ("straggler_wait", "the ranks waited longer for others than the rank that waited least"),
    ("exchange", "the time that every rank spent in the exchange of gradients"),
    ("compile", "the rest of one of a process's first ten steps, above a usual step"),
    ("productive", "the rest of a step whose update is in the model"),
    ("unknown", "no record of this time"),
)
"""Priority of the buckets: a second that two could claim goes to the upper one."""

OF_STEPS: tuple[Bucket, ...] = (
    "skipped", "data_wait", "straggler_wait", "exchange", "compile", "productive",
)  # fmt: skip
"""Parts of a step: all of them are lost if the step is rolled back."""

Ended = Literal["finished", "halted", "interrupted", "failed", "lost", "running"]

_FIRST_STEPS = 10
"""First steps of a process: these may compile, tune and allocate."""
_USUAL_STEPS = 200
"""Steps that determine a process's usual step, after the first ones: so that it does not change."""
_COMPILES = 3.0
"""From this multiple of the usual step on, a first step compiled."""
_LONGEST_SECONDS = 1e9
"""Thirty years: a longer duration is a broken clock, and overflows int64 nanoseconds."""
_SLACK_RATIO, _SLACK_NS = 0.01, 1_000_000
"""Row times and durations are from two clocks: smaller differences belong to the step."""


class Launch(NamedTuple):
    """One start of the training process (rank 0's)."""

    process_ns: int
    """Start of the process, by the wall clock; if that is unknown, the call of ``watch``."""
    ready_ns: int
    """When ``watch`` had returned."""
    end_ns: int
    """When it ended, or last reported."""
    ended: Ended
    num_gpus: int = 0


class TimeSpan(NamedTuple):
    """From when to when, in nanoseconds of the wall clock."""

    begin_ns: int
    end_ns: int


class EndedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of each completed step, one entry per step, in the order of their ends.

    Seconds are of the mean rank; NaN: not measured.
    """

    end_unix_ns: Ints
    launch: Ints
    """Index of its launch, from 0; never decreasing."""
    attempt: Ints
    seconds: Floats
    """Time since the end of the previous step; NaN after a start, a rollback or a pause."""
    data_wait: Floats
    checkpoint: Floats
    evaluation: Floats
    wait: Floats
    """Waiting time for other ranks, within backward and in the exchange."""
    least_wait: Floats
    """The same of the rank that waited least: the late one."""
    is_undone: Mask
    is_skipped: Mask

    def __len__(self) -> int:
        return len(self.end_unix_ns)


class Failure(NamedTuple):
    """An unplanned stop."""

    at_ns: int
    """Time of the last progress before it."""
    back_ns: int
    """End of the next step; 0: there was none."""
    what: str


class AttemptTimes(NamedTuple):
    """The wall time of one branch of the run."""

    attempt: int
    nanoseconds: Mapping[Bucket, int]


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time by bucket. ``nanoseconds`` add up to ``wall_ns``."""

    begin_unix_ns: int
    end_unix_ns: int
    nanoseconds: Mapping[Bucket, int]
    undone: Mapping[Bucket, int] = {}
    """Buckets of the steps in ``rolled_back`` before their rollback."""
    attempts: tuple[AttemptTimes, ...] = ()
    failures: tuple[Failure, ...] = ()
    gpu_nanoseconds: int = 0
    """GPU time while a process of the run held GPUs, over all of them."""
    lost_steps: int = 0
    """Steps that were skipped or undone."""
    steps: int = 0
    notes: tuple[str, ...] = ()
    """Missing data, one sentence each."""

    @property
    def wall_ns(self) -> int:
        """Return the wall time from the first start to the last report."""
        return self.end_unix_ns - self.begin_unix_ns

    @property
    def ratio(self) -> float | None:
        """Return the productive share of the wall time; None without any."""
        return self.nanoseconds["productive"] / self.wall_ns if self.wall_ns else None

    @property
    def mttf_seconds(self) -> float | None:
        """Return the mean time to failure: running time over failures; None without a failure."""
        if not self.failures:
            return None
        repairs = sum((f.back_ns or self.end_unix_ns) - f.at_ns for f in self.failures)
        return (self.wall_ns - repairs) / len(self.failures) / 1e9

    @property
    def mttr_seconds(self) -> float | None:
        """Return the mean time to recovery: from the last progress to the next step's end."""
        repairs = [f.back_ns - f.at_ns for f in self.failures if f.back_ns]
        return sum(repairs) / len(repairs) / 1e9 if repairs else None


def goodput(
    launches: Sequence[Launch],
    steps: EndedSteps,
    *,
    hangs: Sequence[TimeSpan] = (),
    pauses: Sequence[TimeSpan] = (),
) -> Goodput:
    """Return the wall time by bucket.

    Args:
        launches: in their order; at least one.
        steps: of rank 0, or of the mean rank.
        hangs: from the last progress until ranks moved again, or the process ended.
        pauses: pauses by commands, without overlap.
    """
    bounds = np.searchsorted(steps.launch, np.arange(len(launches) + 1))
    line = _build_timeline(launches, steps, bounds)
    hung = _merge_spans(hangs)
    usual = _usual_compute_time(steps, bounds)
    taken = _StepIntervals(line.intervals)
    _assign_buckets(
        taken,
        steps,
        usual,
        bounds[:-1],
        _seconds_in_spans(hung, line),
        _seconds_in_spans(pauses, line),
    )
    return _sum_buckets(line, steps, taken, hung, usual)


# ------------------------------------------------------------------------------------ the timeline


class _Timeline(NamedTuple):
    """Ends of steps; non-decreasing, although clocks may be set, and those of nodes differ."""

    launches: Sequence[Launch]
    bounds: Ints
    """Index of each launch's first step, and the end of the last one's."""
    ends: Ints
    intervals: Ints
    """From the end before, of a step or a start, to each step's end."""


def _build_timeline(launches: Sequence[Launch], steps: EndedSteps, bounds: Ints) -> _Timeline:
    """Return the ends of steps in order, and the intervals that goodput divides."""
    ends = steps.end_unix_ns.copy()
    intervals = np.diff(ends, prepend=ends[:1])
    ordered: list[Launch] = []
    before = launches[0].process_ns
    for k, launch in enumerate(launches):
        process = max(before, launch.process_ns)
        ready = max(process, launch.ready_ns)
        low, high = int(bounds[k]), int(bounds[k + 1])
        step_ends = ends[low:high]
        np.maximum.accumulate(np.maximum(step_ends, ready), out=step_ends)
        intervals[low:high] = np.diff(step_ends, prepend=ready)
        last = int(step_ends[-1]) if len(step_ends) else ready
        # A dead process's last report may arrive after the next start.
        end = (
            launch.end_ns
            if k + 1 == len(launches)
            else min(launch.end_ns, launches[k + 1].process_ns)
        )
        before = max(last, end)
        ordered.append(launch._replace(process_ns=process, ready_ns=ready, end_ns=before))
    return _Timeline(ordered, bounds, ends, intervals)


def _usual_compute_time(steps: EndedSteps, bounds: Ints) -> Ints:
    """Return each launch's usual compute time of a step, for goodput; -1 if no step shows it."""
    usual = np.full(len(bounds) - 1, -1, np.int64)
    for k, (low, high) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        for begin in (min(low + _FIRST_STEPS, high), low):
            part = slice(begin, min(high, begin + _USUAL_STEPS))
            lasted = steps.seconds[part]
            aside = sum(_fill_missing_seconds(each[part]) for each in _non_compute_seconds(steps))
            durations = (_fill_missing_seconds(lasted) - aside)[np.isfinite(lasted)]
            if len(durations):
                usual[k] = max(0, round(float(np.median(durations)) * 1e9))
                break
    counted = usual[usual >= 0]
    if len(counted):  # a launch without two steps does as the others do
        usual[usual < 0] = int(np.median(counted))
    return usual


def _non_compute_seconds(steps: EndedSteps) -> tuple[Floats, ...]:
    """Return a step's measured times that goodput separates from its compute time."""
    return steps.data_wait, steps.checkpoint, steps.evaluation, steps.wait


def _seconds_in_spans(spans: Sequence[TimeSpan], line: _Timeline) -> Ints:
    """Return how much of each step's interval is in a hang or pause, for goodput."""
    inside = np.zeros(len(line.ends), np.int64)
    begins = line.ends - line.intervals
    for begin, end in spans:
        low = int(np.searchsorted(line.ends, begin, "right"))
        part = slice(low, max(low, int(np.searchsorted(begins, end, "left"))))
        until = np.minimum(line.ends[part], end)
        inside[part] += np.maximum(0, until - np.maximum(begins[part], begin))
    return inside


def _merge_spans(spans: Sequence[TimeSpan]) -> list[TimeSpan]:
    """Return the hangs that goodput counts, in order and without overlap."""
    merged: list[TimeSpan] = []
    for span in sorted(spans):
        if merged and span.begin_ns <= merged[-1].end_ns:
            last = merged[-1]
            merged[-1] = TimeSpan(last.begin_ns, max(last.end_ns, span.end_ns))
        else:
            merged.append(span)
    return merged


def _fill_missing_seconds(seconds: Floats) -> Floats:
    """Return the measured seconds that goodput divides; 0 if missing or invalid."""
    filled = np.nan_to_num(seconds, nan=0.0, posinf=0.0, neginf=0.0)
    return np.clip(filled, 0.0, _LONGEST_SECONDS, out=filled)


def _to_nanoseconds(seconds: Floats) -> Ints:
    """Return the measured seconds that goodput divides, in whole nanoseconds."""
    return np.rint(_fill_missing_seconds(seconds) * 1e9).astype(np.int64)


# ----------------------------------------------------------------------------------- handing it out


class _StepIntervals:
    """Rest of each step's interval, and the part of each bucket."""

    def __init__(self, intervals: Ints) -> None:
        self.left = intervals.copy()
        self.parts: dict[Bucket, Ints] = {}
        self.undone: dict[Bucket, int] = {}
        """Buckets of rolled-back steps before their rollback."""

    def assign(self, bucket: Bucket, nanoseconds: Ints) -> None:
        """Assign time of each step's interval to a bucket of goodput, at most the rest."""
        part = np.minimum(np.maximum(nanoseconds, 0), self.left)
        self.left -= part
        before = self.parts.get(bucket)
        self.parts[bucket] = part if before is None else before + part

    def mark_rolled_back(self, which: Mask) -> None:
        """Move these steps to goodput's bucket ``rolled_back``; saves and evaluations stay."""
        at = np.flatnonzero(which)
        lost = np.zeros(len(at), np.int64)
        for bucket in OF_STEPS:
            part = self.parts[bucket]
            self.undone[bucket] = int(part[at].sum())
            lost += part[at]
            part[at] = 0
        self.parts["rolled_back"] = np.zeros(len(which), np.int64)
        self.parts["rolled_back"][at] = lost

    def assign_rest(self, bucket: Bucket, which: Mask | None = None) -> None:
        """Assign the rest of these steps' intervals to a bucket of goodput."""
        self.assign(bucket, self.left if which is None else np.where(which, self.left, 0))


def _assign_buckets(
    taken: _StepIntervals, steps: EndedSteps, usual: Ints, first: Ints, hung: Ints, paused: Ints
) -> None:
    """Divide each step's interval among the buckets of goodput, by ``PRECEDENCE``."""
    intervals = taken.left.copy()
    own_usual = usual[steps.launch]
    is_known = np.isfinite(steps.seconds)
    taken.assign("halted", paused)
    taken.assign("hang", hung)
    # Rows in between were lost, or a clock was set: the step's own duration counts.
    outside_steps = intervals - _to_nanoseconds(steps.seconds) - paused
    slack = np.maximum(_SLACK_NS, (intervals * _SLACK_RATIO).astype(np.int64))
    taken.assign("unknown", np.where(is_known & (outside_steps > slack), outside_steps, 0))
    # A step with an unknown start gets a usual step and its measured times.
    data_wait, saved, evaluated, waited = (
        _to_nanoseconds(seconds) for seconds in _non_compute_seconds(steps)
    )
    computed = taken.left - data_wait - saved - evaluated - waited
    excess = np.where(is_known | (own_usual < 0), 0, computed - own_usual)
    index = np.arange(len(steps)) - first[steps.launch]
    at_start = index == 0
    taken.assign("restart", np.where(at_start | (paused > 0), 0, excess))
    taken.assign("unknown", np.where(~is_known & (own_usual < 0), computed, 0))
    taken.assign("checkpoint", saved)
    taken.assign("evaluation", evaluated)
    taken.assign_rest("skipped", steps.is_skipped)
    taken.assign("data_wait", data_wait)
    least = _to_nanoseconds(steps.least_wait)
    taken.assign("straggler_wait", waited - least)
    taken.assign("exchange", least)
    is_first = (index < _FIRST_STEPS) & (own_usual >= 0)
    compiled = is_first & (at_start | (taken.left > _COMPILES * own_usual))
    taken.assign("compile", np.where(compiled, taken.left - own_usual, 0))
    taken.assign_rest("productive")
    taken.mark_rolled_back(steps.is_undone)


# ------------------------------------------------------------------------------------- adding it up


class _BucketSums:
    """Nanoseconds by attempt and bucket."""

    def __init__(self) -> None:
        self.by_attempt: dict[int, dict[Bucket, int]] = {}

    def add(self, attempt: int, bucket: Bucket, nanoseconds: int) -> None:
        """Add nanoseconds to an attempt's bucket of goodput."""
        if nanoseconds > 0:
            attempt_sums = self.by_attempt.setdefault(attempt, {})
            attempt_sums[bucket] = attempt_sums.get(bucket, 0) + nanoseconds

    def add_steps(self, attempts: Ints, parts: Mapping[Bucket, Ints]) -> None:
        """Add the steps' parts to the buckets of goodput, by consecutive steps of one attempt."""
        if not len(attempts):
            return
        starts = np.flatnonzero(np.diff(attempts, prepend=attempts[0] - 1))
        for bucket, nanoseconds in parts.items():
            sums = np.add.reduceat(nanoseconds, starts).tolist()
            for attempt, of_stretch in zip(attempts[starts].tolist(), sums, strict=True):
                self.add(attempt, bucket, of_stretch)


def _sum_buckets(
    line: _Timeline,
    steps: EndedSteps,
    taken: _StepIntervals,
    hangs: Sequence[TimeSpan],
    usual: Ints,
) -> Goodput:
    """Add up goodput's buckets of steps, and of the time between and around them."""
    sums, failures = _BucketSums(), []
    sums.add_steps(steps.attempt, taken.parts)
    before, attempt, gap = line.launches[0].process_ns, 0, "down"
    for k, launch in enumerate(line.launches):
        low, high = int(line.bounds[k]), int(line.bounds[k + 1])
        attempt = int(steps.attempt[low]) if low < high else attempt
        sums.add(attempt, "halted" if gap == "halted" else "down", launch.process_ns - before)
        sums.add(attempt, "restart" if k else "start", launch.ready_ns - launch.process_ns)
        last = int(line.ends[high - 1]) if low < high else launch.ready_ns
        attempt = int(steps.attempt[high - 1]) if low < high else attempt
        hung = [span for span in hangs if span.begin_ns < launch.end_ns and span.end_ns > last]
        hung_ns = sum(min(s.end_ns, launch.end_ns) - max(s.begin_ns, last) for s in hung)
        sums.add(attempt, "hang", hung_ns)
        rest = launch.end_ns - last - hung_ns
        is_cut = launch.ended not in ("finished", "running") and not hung
        lost = min(rest, int(usual[k])) if is_cut else 0  # the unfinished step
        sums.add(attempt, "rolled_back", lost)
        sums.add(attempt, "unknown", rest - max(0, lost))
        if hung or launch.ended in ("failed", "lost", "halted"):
            at = max(last, hung[0].begin_ns) if hung else last
            back = int(line.ends[high]) if high < len(steps) else 0
            failures.append(Failure(at, back, "hang" if hung else launch.ended))
        failures += _overcome(line, low, high, hangs)
        before, gap = launch.end_ns, launch.ended
    by_attempt = sums.by_attempt
    return Goodput(
        begin_unix_ns=line.launches[0].process_ns,
        end_unix_ns=before,
        nanoseconds={
            b: sum(attempt_sums.get(b, 0) for attempt_sums in by_attempt.values()) for b in BUCKETS
        },
        undone=taken.undone,
        attempts=tuple(
            AttemptTimes(attempt, attempt_sums)
            for attempt, attempt_sums in sorted(by_attempt.items())
        ),
        failures=tuple(sorted(failures)),
        gpu_nanoseconds=sum(
            (launch.end_ns - launch.process_ns) * launch.num_gpus for launch in line.launches
        ),
        steps=len(steps),
        lost_steps=int(np.count_nonzero(steps.is_undone | steps.is_skipped)),
    )


def _overcome(line: _Timeline, low: int, high: int, hangs: Sequence[TimeSpan]) -> list[Failure]:
    """Return the hangs from which a launch recovered without a restart, as goodput's failures."""
    ends = line.ends[low:high]
    # By their ends: agents check twice a second, and a hang may seem to start before its step did.
    rows = [(span, int(np.searchsorted(ends, span.end_ns))) for span in hangs]
    begin = int(ends[0] - line.intervals[low]) if low < high else 0
    return [
        Failure(span.begin_ns, int(ends[row]), "hang")
        for span, row in rows
        if row < len(ends) and span.end_ns > begin
    ]
