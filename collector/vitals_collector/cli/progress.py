"""Progress of a run: its current state, and the events since the previous poll."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from trainvitals import views
from trainvitals.records import decision_text
from vitals_collector.queries.open import Reader

SPEED_STEPS = 50
"""Number of latest steps over which the speed is measured."""
MAX_ACTIONS = 5
"""Maximum number of actions listed per poll; further ones are counted."""
ALERTS_SHARE = 0.01
"""Maximum share of the time for alerts: in a directory, the detectors first process all rows."""
_METRICS = ("loss", "grad_norm", "learning_rate", "mfu_ratio", "tokens_seen")


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run at one poll."""

    summary: views.RunSummary
    attempt: int
    """Counts from 1."""
    step: int
    """Latest step of the current attempt; -1 before the first."""
    values: Mapping[str, float]
    """Values of that step, by column; without those that were not measured."""
    steps_per_second: float | None
    tokens_per_second: float | None
    last_action: str
    last_alert: str
    happened: tuple[str, ...]
    """Events since the previous poll, as text lines; empty at the first poll."""


class ProgressReader:
    """Polls one run; remembers the reported events. ``stopwatch`` measures the alert queries."""

    def __init__(
        self, reader: Reader, run_id: str, *, stopwatch: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader = reader
        self._run_id = run_id
        self._stopwatch = stopwatch
        self._alerts_due = 0.0
        self._is_first = True
        self._attempt_id = 0
        self._acted: tuple[int, int, str] | None = None
        self._ledger_seq = -1
        self._own_forks: set[int] = set()
        self._last_action = ""
        self._alerts: set[tuple[str, int]] = set()
        self._last_alert = ""

    def poll(self) -> RunProgress:
        """Query a followed run as it is now, with the events since the previous poll."""
        detail = self._reader.ask(views.RunQuestion(run_id=self._run_id))
        happened = [
            *self._new_action_lines(detail.summary),
            *self._restarts(detail.attempts),
            *self._new_alerts(),
        ]
        newest = detail.attempts[-1] if detail.attempts else None
        step = detail.summary.last_step if newest is None else newest.last_step
        series = self._recent_series(detail, step)
        # In the meantime, a collector may have stored more steps.
        step = max((reply.step[-1] for reply in series.values() if reply.step), default=step)
        progress = RunProgress(
            summary=detail.summary,
            attempt=1 if newest is None else newest.ordinal,
            step=step,
            values={name: value for name, reply in series.items() for value in _at(reply, step)},
            steps_per_second=_steps_per_second(series),
            tokens_per_second=_tokens_per_second(series.get("tokens_seen")),
            last_action=self._last_action,
            last_alert=self._last_alert,
            happened=() if self._is_first else tuple(happened),
        )
        self._is_first = False
        return progress

    def how_it_ended(self) -> str:
        """Return the reason that the run, or its agent, reported for its end; "" for none."""
        events = self._reader.ask(views.EventsQuestion(run_id=self._run_id, kind="RunEnded"))
        return events[-1].text if events else ""

    def _new_action_lines(self, summary: views.RunSummary) -> list[str]:
        """Query a followed run's decisions since the last poll, as lines of text."""
        acted = (summary.num_skips, summary.num_rollbacks, summary.last_decision)
        if acted == self._acted:
            return []
        self._acted = acted
        ledger = self._reader.ask(views.DecisionsQuestion(run_id=self._run_id))
        new = [
            view.decision
            for view in ledger
            if view.decision.ledger_seq > self._ledger_seq and view.decision.action != "continue"
        ]
        if not new:
            return []
        self._ledger_seq = new[-1].ledger_seq
        self._own_forks |= {decision.new_attempt for decision in new}
        lines = [f"step {decision.step:,}: {decision_text(decision)}" for decision in new]
        self._last_action = lines[-1]
        num_more = len(lines) - MAX_ACTIONS
        if num_more <= 0:
            return lines
        return [*lines[: MAX_ACTIONS - 1], f"and {num_more} more", lines[-1]]

    def _restarts(self, attempts: Sequence[views.AttemptView]) -> list[str]:
        """Return a line for each restart of a followed run since the last poll."""
        lines = [
            f"restarted at step {attempt.fork_step:,} (attempt {attempt.ordinal}): {attempt.reason}"
            for attempt in attempts
            if attempt.id > self._attempt_id and attempt.id not in self._own_forks
        ]
        self._attempt_id = max((attempt.id for attempt in attempts), default=0)
        return lines

    def _new_alerts(self) -> list[str]:
        """Query a followed run's alerts since the last poll, as lines of text."""
        began = self._stopwatch()
        if began < self._alerts_due:
            return []
        alerts = self._reader.ask(views.AlertsQuestion(run_id=self._run_id))
        ended = self._stopwatch()
        self._alerts_due = ended + (ended - began) / ALERTS_SHARE
        new = [
            alert
            for alert in alerts
            if alert.state != "pending"
            and alert.severity != "log"
            and (alert.fingerprint, alert.started_unix_ns) not in self._alerts
        ]
        self._alerts |= {(alert.fingerprint, alert.started_unix_ns) for alert in new}
        new.sort(key=lambda alert: alert.started_unix_ns)
        if new:
            self._last_alert = _alert_text(new[-1])
        return [f"alert: {_alert_text(alert)}" for alert in new if alert.state == "firing"]

    def _recent_series(self, detail: views.RunDetail, step: int) -> dict[str, views.SeriesReply]:
        """Query the latest steps of a followed run, for its loss and its speed."""
        names = [name for name in _METRICS if f"steps.{name}" in detail.metrics]
        first = max(0, step - SPEED_STEPS + 1)
        requests = tuple(
            views.SeriesRequest(metric=f"steps.{name}", points=2 * SPEED_STEPS, from_step=first)
            for name in names
        )
        if step < 0 or not requests:
            return {}
        question = views.ManySeriesQuestion(run_id=self._run_id, series=requests)
        return dict(zip(names, self._reader.ask(question), strict=True))


def _alert_text(alert: views.AlertView) -> str:
    """Return an alert of a followed run as a line of text."""
    return f"{alert.name} ({alert.severity}): {alert.summary}"


def _at(reply: views.SeriesReply, step: int) -> list[float]:
    """Return the value of a followed run's queried series at a step, if it was measured."""
    if not reply.step or reply.step[-1] != step:
        return []
    value = reply.value[-1]
    if value is not None:
        return [value]
    kinds = {mark.step: mark.kind for mark in reply.nonfinite}
    return [float(kinds.get(step, "nan"))]


def _steps_per_second(series: Mapping[str, views.SeriesReply]) -> float | None:
    """Return the speed of a followed run in steps, from its queried series."""
    longest = max(series.values(), key=lambda reply: len(reply.step), default=None)
    return None if longest is None else _rate(longest, longest.step)


def _tokens_per_second(tokens_seen: views.SeriesReply | None) -> float | None:
    """Return the speed of a followed run in tokens, from its queried series."""
    return None if tokens_seen is None else _rate(tokens_seen, tokens_seen.value)


def _rate(reply: views.SeriesReply, values: Sequence[float | None]) -> float | None:
    """Return the growth per second of a queried series, for the speed of a followed run."""
    if len(values) < 2 or values[0] is None or values[-1] is None:
        return None
    seconds = (reply.time_unix_ns[-1] - reply.time_unix_ns[0]) / 1e9
    rate = (values[-1] - values[0]) / seconds if seconds > 0 else math.nan
    return rate if rate > 0 else None
