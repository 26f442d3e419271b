"""The rank that all others wait for: its number, the cause, the frequency, and the cost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from trainvitals.config import Settings
from trainvitals.detect.fleet.base import (
    LONGEST_SECONDS,
    MergedStep,
    Value,
    Watcher,
    finite,
    number,
    step_seconds,
    upper_median,
)
from trainvitals.records import Finding
from trainvitals.stateful import state_table
from trainvitals.units import humanize_seconds, name_ranks


class StragglerConfig(Settings, frozen=True, kw_only=True):
    """When one rank counts as keeping the others waiting. All values are our own choice."""

    section = "straggler"
    # A smaller window could never hold enough late steps.
    ascending = (("steps", "window"),)

    late: Annotated[float, Meta(ge=0.01, le=1.0)] = 0.07
    """Share of a step that the others wait for it, on average over `steps`. A rank that writes logs
    and checkpoints is a few per cent late."""
    least_seconds: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.002
    """Lateness below this never counts: in steps of a few milliseconds a log line is 7 %."""
    steps: Annotated[int, Meta(ge=2, le=1_000)] = 20
    """Steps in which it must be late, of the last `window`."""
    window: Annotated[int, Meta(ge=2, le=1_000)] = 32
    """Steps that are looked at together."""
    sigmas: Annotated[float, Meta(ge=1.0, le=100.0)] = 6.0
    """Standard errors by which the mean lateness must be above 0, where steps in which another
    rank is late count against it: ranks that are late alternately never reach it."""
    diffuse_steps: Annotated[int, Meta(ge=0, le=100_000)] = 200
    """Steps for which it must stay late where no part of the step explains half of it, or where it
    waits for a core: then its processor is busy with something else, and that mostly passes."""
    changed_steps: Annotated[int, Meta(ge=1, le=1_000)] = 5
    """Steps for which a reported rank must be late by another cause to be reported again."""
    hits: Annotated[int, Meta(ge=3, le=1_000)] = 6
    """Late steps at one distance, of 2 to 5 steps, that are reported too: every n-th step. What
    comes more rarely, such as an evaluation, is not."""


class _StepPart(NamedTuple):
    """A part of the step that belongs to one rank."""

    column: str
    cause: str
    words: str
    is_before: bool = True
    """Whether it is before the wait for gradients, not between that and the exchange."""


_PARTS = (
    _StepPart("data_wait_seconds", "data", "its wait for data"),
    _StepPart("before_forward_seconds", "host", "its loop before forward"),
    _StepPart("forward_seconds", "forward", "forward"),
    _StepPart("backward_seconds", "backward", "backward compute"),
    _StepPart("optimizer_seconds", "optimizer", "the optimizer's step"),
    _StepPart("checkpoint_seconds", "checkpoint", "snapshots and saves"),
    _StepPart("monitor_seconds", "host", "Vitals itself"),
    _StepPart("after_backward_seconds", "host", "its loop after backward", is_before=False),
)
_BETWEEN = ("monitor_seconds", "after_backward_seconds")
"""Columns that are, or may be, between the wait for gradients and the exchange."""
_LINK = _StepPart("", "link", "the other ranks' gradients")
_QUEUE = _StepPart("run_queue_seconds", "host", "the wait for a CPU core")
"""Reason for the length of other parts; not a separate part of the step."""
_DIFFUSE = _StepPart("", "host", "all parts of its step")
_UNKNOWN = _StepPart("", "", "")
_LASTING = (_QUEUE, _DIFFUSE, _UNKNOWN)
"""Causes that must last longer before a report: most of them end by themselves."""
_CAUSES = (*_PARTS, _LINK, _QUEUE)
_FIGURES = 2 + 2 * len(_CAUSES)
"""Numbers kept per late rank and step: the rank, its lateness, and for each part its own and the
usual seconds."""
_MOST_RANKS = 8
"""Maximum late ranks kept per step; the ranks of one node are late together."""
_LONGEST_PERIOD = 5
_LITTLE = 4
"""A straggler does not start at a step whose lateness is this many times below the usual one."""
_TRIMMED = 0.1
"""Share of the steps left out of the mean at either end."""


class StragglerWatcher(Watcher):
    """Finds the rank that the others wait for, and in which part of the step it loses the time.

    Synchronous ranks all have the same step time; the late one is the rank that waits least. A rank
    is late by what the others wait longer than it, for gradients (as far as parts of its own are
    longer than the others') and in the exchange. The part that is longest beyond the others'
    median is the cause; where none is, and it had the gradients later than the others, its link.

    Silent if ranks are late alternately, or one is late rarely, for example by an evaluation.
    """

    name = "straggler"
    STATE = ("_window", "_optimizer", state_table("_since"), state_table("_told"))

    def __init__(self, config: StragglerConfig | None = None) -> None:
        super().__init__()
        self._config = config or StragglerConfig()
        self._window: deque[list[Any]] = deque(maxlen=self._config.window)
        """Step, seconds, and the figures of each late rank."""
        self._optimizer: list[Value] = []
        """Seconds of the last step's optimizers by rank, if they differ: the others wait for them
        in the next step."""
        self._since: dict[int, tuple[int]] = {}
        """By rank that is late enough for a report: number of steps since then."""
        self._told: dict[int, tuple[int, int, int, int]] = {}
        """By reported rank: steps since it was last late, whether it is late periodically, the
        cause, and the number of steps with another cause."""

    @property
    def goes_on(self) -> bool:
        """Return whether a straggler that was reported is still late."""
        return bool(self._told)

    def _restarted(self, merged: MergedStep) -> None:
        """Discard the lateness of all ranks: another attempt starts."""
        self._window.clear()
        self._optimizer = []
        self._since.clear()
        self._told.clear()

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge a merged step: find the rank that the others wait for."""
        duration = step_seconds(merged)
        if duration <= 0.0:
            return ()
        least = max(self._config.late / 2 * duration, self._config.least_seconds)
        columns = {**merged.ranks, "optimizer_seconds": self._optimizer}
        latecomers = _find_late_ranks(columns, least)
        self._keep_optimizer_seconds(merged.ranks.get("optimizer_seconds") or (), least)
        self._window.append([merged.step, duration, latecomers])
        ranks = {int(figures[0]) for _, _, late in self._window for figures in late}
        courses = {rank: self._measure_lateness(rank) for rank in sorted(ranks)} if ranks else {}
        self._ease(courses)
        late = {rank: course for rank, course in courses.items() if self._is_late(course)}
        self._since = {rank: (self._since.get(rank, (0,))[0] + 1,) for rank in late}
        fresh = [
            rank
            for rank, course in late.items()
            if self._is_cause_clear(course)
            and (rank not in self._told or self._has_other_cause(course))
        ]
        if not fresh:
            return ()
        for rank in fresh:
            is_periodic = courses[rank].num_late < self._config.steps
            self._told[rank] = (
                0,
                int(is_periodic),
                _find_cause_index(_find_lateness_cause(courses[rank].late)),
                0,
            )
        worst = max(fresh, key=lambda rank: courses[rank].share)
        return self._report_straggler(merged, courses[worst], [r for r in fresh if r != worst])

    def _ease(self, courses: Mapping[int, _RankLateness]) -> None:
        """Remove stragglers that have been in time for long: allow another report."""
        for rank, (absent, is_periodic, cause, changed) in list(self._told.items()):
            course = courses.get(rank)
            share = 0.0 if course is None else course.mean_share if is_periodic else course.recent
            absent = 0 if share > self._config.late / 2 else absent + 1
            if absent < self._config.steps // 2:
                self._told[rank] = (absent, is_periodic, cause, changed)
            else:
                del self._told[rank]

    def _keep_optimizer_seconds(self, seconds: Sequence[Value], least: float) -> None:
        """Keep the ranks' seconds in the optimizer for the next step, if they differ."""
        values, _ = finite(seconds)
        differ = len(values) > 1 and max(values) - min(values) > least
        self._optimizer = [number(value) for value in seconds] if differ else []

    def _measure_lateness(self, rank: int) -> _RankLateness:
        """Return the rank's lateness in each step of the window, as shares of the step."""
        shares, figures = [], []
        for _, duration, late in self._window:
            lateness = next((f for f in late if f[0] == rank), None)
            others = max((f[1] for f in late if f[0] != rank), default=0.0)
            late_by = min(others if lateness is None else lateness[1], duration)
            shares.append((-late_by if lateness is None else late_by) / duration)
            figures.append(lateness)
        recent, _ = _robust_mean(shares[-self._config.steps :])
        mean, error = _robust_mean(shares)
        return _RankLateness(rank, shares, figures, recent, mean, error)

    def _is_late(self, course: _RankLateness) -> bool:
        """Return whether a rank is late enough, or periodically, for a report."""
        config = self._config
        usual = upper_median([duration for _, duration, _ in self._window])
        limit = max(config.late, config.least_seconds / usual)
        if course.num_late >= config.steps:
            is_one_sided = course.mean >= config.sigmas * course.error
            return course.recent >= limit and is_one_sided
        return course.share >= limit and course.period(config.hits) > 0

    def _has_other_cause(self, course: _RankLateness) -> bool:
        """Return whether a reported rank has been late by another cause for some steps."""
        absent, is_periodic, reported_step, changed = self._told[course.rank]
        now = _find_lateness_cause(course.late)
        is_another = now not in _LASTING and _find_cause_index(now) != reported_step
        changed = changed + 1 if is_another else 0
        self._told[course.rank] = (absent, is_periodic, reported_step, changed)
        return changed >= self._config.changed_steps

    def _is_cause_clear(self, course: _RankLateness) -> bool:
        """Return whether one part explains the lateness, or it has lasted long enough."""
        is_clear = _find_lateness_cause(course.late) not in _LASTING
        # If no part is placed, no cause can be expected.
        is_placed = any(_median_part_seconds(part, course.late)[1] for part in _PARTS[1:])
        lasted = self._since[course.rank][0] > self._config.diffuse_steps
        return is_clear or not is_placed or lasted

    def _report_straggler(
        self, merged: MergedStep, course: _RankLateness, more: Sequence[int]
    ) -> tuple[Finding, ...]:
        late = course.late
        seconds = min(upper_median([figures[1] for figures in late]), LONGEST_SECONDS)
        period = course.period(self._config.hits)
        num_ranks = max(len(values) for values in merged.ranks.values())
        usual_step = upper_median([duration for _, duration, _ in self._window])
        share, often = course.share, "a step"
        if course.num_late < self._config.steps:
            often = {2: "in every other step", 3: "in every 3rd step"}.get(
                period, f"in every {period}th step"
            )
        part = _find_lateness_cause(late)
        value, usual = _median_part_seconds(part, late)
        lasted = self._since[course.rank][0]  # may start before the window
        since = min(self._window[course.onset(self._config.steps)][0], merged.step - lasted + 1)
        why = ""
        if part.cause == "link":
            why = (
                f": it has the other ranks' gradients {humanize_seconds(value - usual)} later than "
                "they do, and nothing of its own takes longer"
            )
        elif part == _DIFFUSE:
            why = (
                ": every part of its step takes a little longer, as on a processor that is slow or "
                "shared"
            )
        elif part == _QUEUE:
            why = (
                f": its training thread waits {humanize_seconds(value)} for a CPU core against "
                f"{humanize_seconds(usual)} of the others"
            )
        elif part.cause:
            why = (
                f": {part.words} takes {humanize_seconds(value)} against {humanize_seconds(usual)} "
                "of the others"
            )
        verb = "is" if len(more) == 1 else "are"
        others = f"; {name_ranks(more)} {verb} late as well" if more else ""
        hours = share * num_ranks
        reason = (
            f"rank {course.rank} is late by {humanize_seconds(seconds)} {often} since step {since}"
            f"{why}{others}; it costs {share:.1%} of the job: {share * 1000:.0f} of every 1,000 "
            f"steps of {humanize_seconds(usual_step)}, and {hours:.2g} GPU-hours in every "
            f"hour of {num_ranks} ranks"
        )
        return self._report(
            merged.step, reason, rank=course.rank, value=share, limit=self._config.late,
            onset_step=since, cause=f"straggler_{part.cause}" if part.cause else "straggler",
        )  # fmt: skip


class _RankLateness(NamedTuple):
    """Lateness of a rank in the steps of the window."""

    rank: int
    shares: list[float]
    """Share of each step; below 0 if another rank was late, and this one was not."""
    figures: list[list[float] | None]
    recent: float
    """Robust mean of the last steps."""
    mean: float
    error: float

    @property
    def share(self) -> float:
        """Return the share of the time that the other ranks wait for a straggler."""
        return max(self.recent, self.mean_share)

    @property
    def mean_share(self) -> float:
        """Return a straggler's plain mean: a robust one would ignore periodic late steps."""
        return math.fsum(self.shares) / len(self.shares)

    @property
    def late(self) -> list[list[float]]:
        """Return the figures of the steps in which the rank was a straggler."""
        return [figures for figures in self.figures if figures is not None]

    @property
    def num_late(self) -> int:
        """Return the number of steps in which the rank was a straggler."""
        return len(self.late)

    def onset(self, steps: int) -> int:
        """Return the straggler's start in the window: from there on it is late in most steps.

        A step counts by its lateness, compared with the latest steps: noise of a shared processor
        before the start is much less.
        """
        if self.num_late < steps:
            return next(i for i, figures in enumerate(self.figures) if figures is not None)
        typical = upper_median([figures[1] for figures in self.late[-steps:]])
        best, start, balance = 0.0, len(self.figures) - 1, 0.0
        for i in reversed(range(len(self.figures))):
            figures = self.figures[i]
            is_typical = figures is not None and figures[1] > typical / _LITTLE
            balance += 1.0 if is_typical else -1.5
            if balance > best:
                best, start = balance, i
        return start

    def period(self, hits: int) -> int:
        """Return the distance at which only this straggler is late; 0 if there is none.

        One step in six may be off: noise hides a late step, or adds one.
        """
        late = [i for i, share in enumerate(self.shares) if share > 0.0]
        others = sum(share < 0.0 for share in self.shares)
        if len(late) < hits or others * 4 > len(late):
            return 0
        gaps = [b - a for a, b in pairwise(late)]
        period = int(upper_median(gaps))
        is_steady = sum(gap == period for gap in gaps) * 6 >= len(gaps) * 5
        is_on = len(self.shares) - 1 - late[-1] < 2 * period
        return period if is_steady and is_on and 2 <= period <= _LONGEST_PERIOD else 0


def _find_late_ranks(columns: Mapping[str, Sequence[Value]], least: float) -> list[list[float]]:
    """Return the figures of the ranks that the others wait for, the latest first."""
    waits, exchange = (
        _finite_seconds_by_rank(columns, "gradient_wait_seconds"),
        _finite_seconds_by_rank(columns, "communication_seconds"),
    )
    if not waits:
        return _late_ranks_by_exchange(columns, exchange, least)
    spread = [max(w.values()) - min(w.values()) for w in (waits, exchange) if w]
    if sum(spread) <= least:  # nearly always, and without computing a median
        return []
    late = [
        (rank, by_wait, by_exchange)
        for rank, by_wait, by_exchange in _measure_wait_deficits(waits, exchange)
        if by_wait + by_exchange > least
    ]
    if not late:
        return []
    parts = [_finite_seconds_by_rank(columns, part.column) for part in _PARTS]
    usual = [_lower_median(list(part.values())) if len(part) > 1 else 0.0 for part in parts]
    queued = _finite_seconds_by_rank(columns, _QUEUE.column)
    usually_queued = _lower_median(list(queued.values())) if queued else 0.0
    latecomers = []
    for rank, by_wait, by_exchange in late:
        arrivals = [part.get(rank, middle) for part, middle in zip(parts, usual, strict=True)]
        excess = [max(0.0, a - b) for a, b in zip(arrivals, usual, strict=True)]
        before = sum(e for e, part in zip(excess, _PARTS, strict=True) if part.is_before)
        after = sum(excess[i] for i, part in enumerate(_PARTS) if part.column in _BETWEEN)
        # A rank that only has the gradients sooner than the others is not late.
        lateness = min(by_wait, before) + by_exchange
        if lateness > least:
            # Between the two waits are its own loop and our preparation; it lost the time that they
            # do not explain by having the gradients later.
            by_link = max(0.0, by_exchange - after)
            pairs = [x for pair in zip(arrivals, usual, strict=True) for x in pair]
            of_queue = (queued.get(rank, usually_queued), usually_queued)
            latecomers.append([float(rank), lateness, *pairs, by_link, 0.0, *of_queue])
    return sorted(latecomers, key=lambda figures: -figures[1])[:_MOST_RANKS]


def _late_ranks_by_exchange(
    columns: Mapping[str, Sequence[Value]], exchange: Mapping[int, float], least: float
) -> list[list[float]]:
    """Return the stragglers' figures, from the exchange and the waits for data only.

    With gradients summed during backward, the wait for data is then the only visible sign.
    """
    data = _finite_seconds_by_rank(columns, "data_wait_seconds")
    usual = _lower_median(list(data.values())) if len(data) > 1 else 0.0
    middle = upper_median(list(exchange.values())) if len(exchange) > 1 else 0.0
    latecomers = []
    for rank in sorted({*exchange, *data}):
        rank_seconds = data.get(rank, usual) if len(data) > 1 else usual
        by_exchange = middle - exchange.get(rank, middle) if len(exchange) > 1 else 0.0
        lateness = max(rank_seconds - usual, by_exchange)
        if lateness > least:
            rest = [0.0] * (_FIGURES - 4)
            latecomers.append([float(rank), lateness, rank_seconds, usual, *rest])
    return sorted(latecomers, key=lambda figures: -figures[1])[:_MOST_RANKS]


def _measure_wait_deficits(
    waits: Mapping[int, float], exchange: Mapping[int, float]
) -> Iterator[tuple[int, float, float]]:
    """Yield each rank of a merged step, and how much less it waits than the others."""
    middle = upper_median(list(waits.values())) if len(waits) > 1 else 0.0
    of_exchange = upper_median(list(exchange.values())) if len(exchange) > 1 else 0.0
    for rank, waited in waits.items():
        by_wait = max(0.0, middle - waited)
        by_exchange = max(0.0, of_exchange - exchange.get(rank, of_exchange))
        yield rank, by_wait, by_exchange


def _find_lateness_cause(late: Sequence[Sequence[float]]) -> _StepPart:
    """Return the part of the step that makes a straggler late, if it explains half of it.

    If a thread waits for a core, its other parts are longer by exactly that wait.
    """
    lateness = upper_median([figures[1] for figures in late])
    *excess, by_queue = (
        value - usual for value, usual in (_median_part_seconds(p, late) for p in _CAUSES)
    )
    if by_queue > lateness / 2:
        return _QUEUE
    if max(excess) > lateness / 2:
        return _CAUSES[excess.index(max(excess))]
    return _DIFFUSE if sum(max(0.0, e) for e in excess) > lateness / 2 else _UNKNOWN


def _find_cause_index(part: _StepPart) -> int:
    """Return a step part's position among a straggler's causes; -1 if it is not among them."""
    return _CAUSES.index(part) if part in _CAUSES else -1


def _median_part_seconds(part: _StepPart, late: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the straggler's and the other ranks' usual seconds in a part of the step."""
    if part not in _CAUSES:
        return 0.0, 0.0
    i = 2 + 2 * _CAUSES.index(part)
    late = [figures for figures in late if len(figures) == _FIGURES]
    if not late:  # from a state that was stored before a part was added
        return 0.0, 0.0
    value = upper_median([figures[i] for figures in late])
    return value, upper_median([figures[i + 1] for figures in late])


def _finite_seconds_by_rank(columns: Mapping[str, Sequence[Value]], name: str) -> dict[int, float]:
    """Return a column's finite seconds by rank, to find stragglers; nothing for one rank."""
    values, ranks = finite(columns.get(name))
    if len(values) < 2:
        return {}
    if min(values) < 0.0 or max(values) > LONGEST_SECONDS:
        values = [min(max(0.0, float(value)), LONGEST_SECONDS) for value in values]
    return dict(zip(ranks, values, strict=True))


def _robust_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the trimmed mean of a straggler's lateness, and its standard error (Yuen)."""
    ordered, num = sorted(values), len(values)
    cut = int(num * _TRIMMED)
    middle_values = ordered[cut : num - cut]
    mean = math.fsum(middle_values) / len(middle_values)
    full = [middle_values[0]] * cut + middle_values + [middle_values[-1]] * cut
    middle = math.fsum(full) / num
    variance = math.fsum((x - middle) ** 2 for x in full) / max(1, num - 1)
    return mean, math.sqrt(variance / num) / (1.0 - 2.0 * cut / num)


def _lower_median(values: Sequence[float]) -> float:
    """Return the median of the ranks' seconds, the lower one of two."""
    return sorted(values)[len(values) - 1 >> 1]
