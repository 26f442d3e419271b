"""Delivers alerts to receivers: each has its own queue and thread, and is retried until it accepts.

An alert's state waits for a receiver until it was delivered, acknowledged, silenced, or replaced by
a later state; a refusal (4xx) is retried too, at growing intervals. Its delivery id is the same for
every try, also after a restart. Deliveries are recorded (``deliveries``), so another collector can
continue: after a kill between a delivery and its record, the delivery is repeated with the same id,
and none is lost.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from trainvitals.alerting import fingerprint
from trainvitals.clock import Clock
from trainvitals.errors import StorageError
from trainvitals.views import AlertView
from vitals_collector.alerts.deliveries import DeliveryCheck, SqlDeliveryLedger
from vitals_collector.alerts.notifiers import DeliveryResult, Notifier, delivery_id
from vitals_collector.storage.store import SteadyClock

_ERROR_SECONDS = 5.0
"""Pause of a receiver's thread after an internal error."""
_LOG = logging.getLogger("vitals.collector.notify")
_REMEMBERED = 10_000
"""Deliveries remembered per receiver, in addition to the records."""
_FAILING = "ReceiverFailing"
_URGENCY = {"page": 0, "notify": 1, "log": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """Limits of delivery."""

    max_pending: int = 1_000
    """Alerts waiting per receiver; beyond it the least urgent, oldest one is dropped and counted.
    It is read from the store again once there is room."""
    batch: int = 100
    """Alerts in one delivery."""
    first_retry_seconds: float = 1.0
    """Wait after the first failure; doubled each time."""
    max_retry_seconds: float = 60.0
    """Maximum wait between two attempts, unless the receiver asked for a longer one."""
    max_retry_after_seconds: float = 900.0
    """Maximum wait that a receiver may request: a request may be wrong, and pages wait."""
    failing_after_seconds: float = 300.0
    """A receiver that has accepted no alert for this long is failing: the others get an alert about
    it."""
    failing_after_refusals: int = 10
    """So is one that refused this many deliveries in a row."""
    repost_seconds: float = 60.0
    """Interval of reposts of a firing alert to a receiver that wants them."""


@dataclass(slots=True)
class _PendingAlert:
    """An alert that waits in a receiver's queue."""

    alert: AlertView
    due_ns: int
    tries: int = 0
    failed_ns: int | None = None
    """When this alert, in this state or an older one, was first refused."""
    settled: bool = False
    """Delivered, and queued only for reposts."""


@dataclass(slots=True)
class _ReceiverQueue:
    """Queue of one receiver, and its latest results."""

    notifier: Notifier
    waiting: dict[str, _PendingAlert] = field(default_factory=dict)
    delivered: dict[str, str] = field(default_factory=dict)
    """The latest delivery id by fingerprint."""
    unrecorded: list[AlertView] = field(default_factory=list)
    """Delivered, but not recorded because the store failed."""
    wake: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    not_before_ns: int = 0
    failures: int = 0
    refusals: int = 0
    error: str = ""
    """The last error of a failed delivery."""
    failing: AlertView | None = None
    """The alert about this receiver, while it fires."""

    @property
    def late_ns(self) -> int | None:
        """Return since when an alert waits that it did not accept; None if there is none."""
        failed_ns = [w.failed_ns for w in self.waiting.values() if w.failed_ns is not None]
        return min(failed_ns, default=None)

    @property
    def after_seconds(self) -> float:
        """Return the seconds until an unacknowledged page is escalated to this receiver."""
        return float(getattr(self.notifier, "after_seconds", 0.0))

    def accepts_alert(self, alert: AlertView) -> bool:
        """Return whether this receiver gets alerts of that severity."""
        if alert.name == _FAILING and alert.labels["receiver"] == self.notifier.name:
            return False  # about itself
        if alert.severity == "log":
            return self.notifier.takes_log
        return alert.severity == "page" or not self.after_seconds


class Dispatcher:
    """Delivers alerts to receivers, each in its own thread; ``submit`` never waits for one.

    An alert's later state replaces a waiting earlier one. ``on_settled`` is called when every
    receiver has an alert's state, so that the inbox does not submit it again; ``report`` is called
    when a receiver fails, or accepts alerts again. If ``is_pager`` is false, another collector
    delivers: nothing is queued or sent here.
    """

    def __init__(
        self,
        notifiers: Iterable[Notifier],
        *,
        clock: Clock,
        config: DispatchConfig | None = None,
        on_settled: Callable[[AlertView], None] | None = None,
        report: Callable[[AlertView], None] | None = None,
        ledger: SqlDeliveryLedger | None = None,
        is_pager: Callable[[], bool] = lambda: True,
    ) -> None:
        self.notifiers = tuple(notifiers)
        self.is_pager = is_pager
        self._on_settled = on_settled
        self._report = report or self.submit
        self._ledger = ledger
        self._config = config or DispatchConfig()
        self._clock, self._steady = clock, SteadyClock(clock)
        self._lines = {n.name: _ReceiverQueue(n) for n in self.notifiers}
        self._lock = threading.Lock()
        self._stopping = False
        self._outcomes: Counter[tuple[str, str]] = Counter()

    # ---------------------------------------------------------------------------- what waits

    def submit(self, alert: AlertView) -> None:
        """Queue the alert's current state for every receiver."""
        self._queue_for_receivers(alert, self._lines.values())

    def resume(self, alert: AlertView, *, active_since: float | None = None) -> None:
        """Queue an alert again for the receivers that do not have it in their queue.

        Its escalation counts from ``active_since``, in seconds of this collector's clock; None:
        now.
        """
        with self._lock:
            lines = [line for line in self._lines.values() if alert.fingerprint not in line.waiting]
        self._queue_for_receivers(alert, lines, active_since=active_since)

    def keep_posting(self, alert: AlertView) -> None:
        """Repost a settled, firing alert to receivers that want it."""
        with self._lock:
            lines = [
                line
                for line in self._lines.values()
                if line.notifier.reposts and alert.fingerprint not in line.waiting
            ]
        self._queue_for_receivers(alert, lines, settled=True)

    def load_failing_receivers(self, failing: Iterable[AlertView]) -> list[AlertView]:
        """Load failing receivers that an earlier process reported; return unknown ones' alerts."""
        by_receiver = {alert.labels.get("receiver", ""): alert for alert in failing}
        with self._lock:
            for name, line in self._lines.items():
                line.failing = by_receiver.pop(name, None)
        return list(by_receiver.values())

    def drop_queues(self) -> None:
        """Drop the receivers' queues: undelivered alerts are submitted again."""
        with self._lock:
            for line in self._lines.values():
                line.waiting.clear()
                line.unrecorded.clear()

    def withdraw(self, fingerprint: str, *, keep_posting: bool = False) -> None:
        """Drop a silenced or acknowledged alert from the receivers' queues.

        With ``keep_posting``, receivers with reposts keep it until it resolves.
        """
        with self._lock:
            for line in self._lines.values():
                if not (keep_posting and line.notifier.reposts):
                    line.waiting.pop(fingerprint, None)

    def _queue_for_receivers(
        self,
        alert: AlertView,
        lines: Iterable[_ReceiverQueue],
        *,
        settled: bool = False,
        active_since: float | None = None,
    ) -> None:
        """Queue an alert for those of the receivers that accept it, if this is the pager."""
        if not self.is_pager():
            return
        with self._lock:
            for line in lines:
                if line.accepts_alert(alert):
                    due_ns = self._due_ns(line, alert, active_since)
                    self._add_to_queue(line, _PendingAlert(alert, due_ns, settled=settled))
                    line.wake.set()

    def _due_ns(self, line: _ReceiverQueue, alert: AlertView, active_since: float | None) -> int:
        """Return when the alert is due for a receiver: now, or when it escalates."""
        now = self._clock.monotonic_ns()
        if alert.state != "firing":
            return now
        # Not since the alert's start: that is by a rank's clock, which may be wrong.
        age = 0.0 if active_since is None else self._steady.time_ns() / 1e9 - active_since
        return now + int(max(0.0, line.after_seconds - max(0.0, age)) * 1e9)

    def _add_to_queue(self, line: _ReceiverQueue, item: _PendingAlert) -> None:
        """Add an alert to a receiver's queue; a full one drops its least urgent alert."""
        waiting = line.waiting
        if (older := waiting.pop(item.alert.fingerprint, None)) is not None:
            item.failed_ns = older.failed_ns
        if len(waiting) >= self._config.max_pending:
            # The first of the least urgent: information never pushes a page out.
            least = max(waiting.values(), key=lambda w: _URGENCY[w.alert.severity])
            self._outcomes[line.notifier.name, "dropped"] += 1
            if _URGENCY[item.alert.severity] > _URGENCY[least.alert.severity]:
                return
            waiting.pop(least.alert.fingerprint)
        waiting[item.alert.fingerprint] = item

    def outcomes(self) -> dict[tuple[str, str], int]:
        """Return counts by (receiver, outcome): delivered, retried, failed (refused), dropped."""
        with self._lock:
            return dict(self._outcomes)

    # ------------------------------------------------------------------------------- threads

    def deliver_due(self) -> float | None:
        """Deliver all alerts that are due; return the seconds until the next, or None."""
        for line in self._lines.values():
            self._process_queue(line)
        # After all of them: one may put to others.
        waits = [self._seconds_until_due(line) for line in self._lines.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    def start(self) -> None:
        """Start one thread per receiver of alerts."""
        for name, line in self._lines.items():
            line.thread = threading.Thread(
                target=self._run, args=(line,), name=f"vitals-notify-{name}", daemon=True
            )
            line.thread.start()

    def close(self, *, timeout: float = 5.0) -> None:
        """Stop the threads after a last try, and close the receivers' connections."""
        self._stopping = True
        end = self._clock.monotonic_ns() + int(timeout * 1e9)
        for line in self._lines.values():
            line.wake.set()
        for line in self._lines.values():
            if line.thread is not None:
                line.thread.join(max(0.0, (end - self._clock.monotonic_ns()) / 1e9))
            if (close := getattr(line.notifier, "close", None)) is not None:
                close()
            line.thread = None

    def _run(self, line: _ReceiverQueue) -> None:
        """Deliver one receiver's queue in its thread until the dispatcher is closed."""
        while True:
            line.wake.clear()
            wait: float | None = _ERROR_SECONDS
            try:
                wait = self._process_queue(line)
            except Exception:  # noqa: BLE001 - without this thread the receiver hears nothing more
                with self._lock:  # popped alerts are submitted again, because they are not settled
                    self._outcomes[line.notifier.name, "retried"] += 1
                _LOG.exception("delivery_failed receiver=%s", line.notifier.name)
            if self._stopping:
                return
            line.wake.wait(wait)

    def _process_queue(self, line: _ReceiverQueue) -> float | None:
        """Deliver a receiver's due alerts; return the seconds until the next one."""
        while due := self._pop_due_alerts(line):
            self._deliver_alerts(line, due)
        self._tell_if_failing(line)
        return self._seconds_until_due(line)

    def _seconds_until_due(self, line: _ReceiverQueue) -> float | None:
        """Return the seconds until a receiver's next alert is due; None without one."""
        now = self._clock.monotonic_ns()
        with self._lock:
            dues = [max(w.due_ns, line.not_before_ns) for w in line.waiting.values()]
            if line.failing is None and line.late_ns is not None:
                dues.append(line.late_ns + self._failing_after_ns)
        return max(0.0, (min(dues) - now) / 1e9) if dues else None

    # ------------------------------------------------------------------------------ delivery

    def _pop_due_alerts(self, line: _ReceiverQueue) -> list[_PendingAlert]:
        """Pop the due alerts of a receiver's queue, the most urgent first."""
        now = self._clock.monotonic_ns()
        is_pager = self.is_pager()
        with self._lock:
            if not is_pager:
                line.waiting.clear()
            if line.not_before_ns > now:
                return []
            due = [w for w in line.waiting.values() if w.due_ns <= now]
            due.sort(key=lambda w: _URGENCY[w.alert.severity])
            # After a refusal one by one: a refused alert must not block others.
            is_single = line.refusals or getattr(line.notifier, "one_by_one", False)
            due = due[: 1 if is_single else self._config.batch]
            for item in due:
                del line.waiting[item.alert.fingerprint]
        return due

    def _deliver_alerts(self, line: _ReceiverQueue, due: list[_PendingAlert]) -> None:
        """Deliver due alerts to a receiver, and record whether it accepted them."""
        due = self._select_needed_alerts(line, due)
        if not due:
            return
        notifier = line.notifier
        try:
            result = notifier.notify([w.alert for w in due])
        except Exception as error:  # noqa: BLE001 - one receiver's fault must not silence the rest
            _LOG.exception("receiver %s raised", notifier.name)
            result = DeliveryResult(recoverable=False, error=f"{type(error).__name__}: {error}")
        if result.error:
            _LOG.warning("receiver %s: %s", notifier.name, result.error)
            self._after_failure(line, due, result)
        else:
            self._after_delivery(line, due)

    def _select_needed_alerts(
        self, line: _ReceiverQueue, due: list[_PendingAlert]
    ) -> list[_PendingAlert]:
        """Return the alerts that the receiver still needs, by the store if it is readable."""
        name = line.notifier.name
        if line.unrecorded:
            # Otherwise the end of a delivered alert would not be delivered.
            self._record_deliveries(line, [])
        fresh = [w for w in due if w.settled or not self._has_delivered(line, w.alert)]
        checked = DeliveryCheck(frozenset(w.alert.fingerprint for w in fresh), frozenset())
        alerts = [w.alert for w in fresh]
        if self._ledger is not None and alerts:
            try:
                checked = self._ledger.check(name, alerts, reposts=line.notifier.reposts)
            except StorageError as error:  # rather deliver twice than not at all
                _LOG.warning("receiver %s: delivering without the delivery log: %s", name, error)
        for item in due:
            if item not in fresh or item.alert.fingerprint in checked.had:
                self._remember_delivered(line, item.alert)
                self._settle(item.alert)
        return [w for w in fresh if w.alert.fingerprint in checked.due]

    def _has_delivered(self, line: _ReceiverQueue, alert: AlertView) -> bool:
        """Return whether the receiver has had the alert's state, and wants no reposts."""
        had = line.delivered.get(alert.fingerprint) == delivery_id(alert, line.notifier.name)
        return had and not line.notifier.reposts

    def _after_delivery(self, line: _ReceiverQueue, due: list[_PendingAlert]) -> None:
        """Record a successful delivery; report a receiver that works again."""
        notifier, alerts = line.notifier, [w.alert for w in due if not w.settled]
        for item in due:
            self._remember_delivered(line, item.alert)
        self._record_deliveries(line, alerts)
        with self._lock:
            self._outcomes[notifier.name, "delivered"] += len(due)
            line.failures = line.refusals = 0
            for item in due:
                if notifier.reposts and item.alert.state == "firing":
                    item.tries, item.failed_ns, item.settled = 0, None, True
                    self._requeue_after(line, item, self._config.repost_seconds)
            recovered = None
            if not self._is_late(line):
                recovered, line.failing = line.failing, None
        for alert in alerts:
            self._settle(alert)
        if recovered is not None:
            self._report_receiver_alert(resolve_alert(recovered, self._clock.time_ns()))

    def _after_failure(
        self, line: _ReceiverQueue, due: list[_PendingAlert], result: DeliveryResult
    ) -> None:
        """Queue the alerts of a failed delivery again, with a longer wait each time."""
        now = self._clock.monotonic_ns()
        with self._lock:
            line.failures += 1
            line.refusals = 0 if result.recoverable else line.refusals + 1
            line.error = result.error
            outcome = "retried" if result.recoverable else "failed"
            self._outcomes[line.notifier.name, outcome] += len(due)
            for item in due:
                item.tries += 1
                item.failed_ns = now if item.failed_ns is None else item.failed_ns
                self._requeue_after(line, item, self._backoff_seconds(item.tries))
            wait = self._backoff_seconds(line.failures) if result.recoverable else 0.0
            retry_after = min(result.retry_after, self._config.max_retry_after_seconds)
            line.not_before_ns = now + int(max(wait, retry_after) * 1e9)
        self._tell_if_failing(line)

    def _backoff_seconds(self, tries: int) -> float:
        """Return the wait before the next try to deliver to a failing receiver."""
        wait = self._config.first_retry_seconds * 2.0 ** min(tries - 1, 30)
        return min(wait, self._config.max_retry_seconds)

    def _tell_if_failing(self, line: _ReceiverQueue) -> None:
        """Report a failing receiver to the others, once; also while it asked for a pause."""
        with self._lock:
            is_failing = self._is_late(line) or line.refusals >= self._config.failing_after_refusals
            if line.failing is not None or not is_failing:
                return
            alert = _receiver_failing_alert(line.notifier.name, line.error, self._clock.time_ns())
            line.failing = alert
        self._report_receiver_alert(alert)

    @property
    def _failing_after_ns(self) -> int:
        """Return the time without a delivery after which a receiver counts as failing."""
        return int(self._config.failing_after_seconds * 1e9)

    def _is_late(self, line: _ReceiverQueue) -> bool:
        """Return whether the receiver has accepted no alert for too long."""
        since, now = line.late_ns, self._clock.monotonic_ns()
        return since is not None and now - since >= self._failing_after_ns

    def _report_receiver_alert(self, alert: AlertView) -> None:
        """Report an alert about a receiver; without a store, only submit it."""
        try:
            self._report(alert)
        except StorageError as error:  # deliver without a record rather than not at all
            _LOG.warning("alert %s of a receiver is not stored: %s", alert.fingerprint, error)
            self.submit(alert)

    def _requeue_after(self, line: _ReceiverQueue, item: _PendingAlert, seconds: float) -> None:
        """Put an alert back into its receiver's queue, to be sent again later."""
        item.due_ns = self._clock.monotonic_ns() + int(seconds * 1e9)
        # A later state that came in the meantime has priority.
        waiting = line.waiting.setdefault(item.alert.fingerprint, item)
        waiting.failed_ns = item.failed_ns

    def _remember_delivered(self, line: _ReceiverQueue, alert: AlertView) -> None:
        """Remember that the receiver has had the alert's state."""
        with self._lock:
            line.delivered.pop(alert.fingerprint, None)
            line.delivered[alert.fingerprint] = delivery_id(alert, line.notifier.name)
            if len(line.delivered) > _REMEMBERED:
                line.delivered.pop(next(iter(line.delivered)))

    def _record_deliveries(self, line: _ReceiverQueue, alerts: list[AlertView]) -> None:
        """Record a receiver's deliveries in the store, with those not recorded earlier."""
        alerts = [*line.unrecorded, *alerts]
        if self._ledger is None or not alerts:
            return
        receiver = line.notifier.name
        line.unrecorded = []
        try:
            self._ledger.record(receiver, alerts)
        except StorageError as error:  # remembered here; a restart may repeat it, with the same id
            line.unrecorded = alerts[-_REMEMBERED:]
            _LOG.warning("receiver %s: a delivery could not be recorded: %s", receiver, error)

    def _settle(self, alert: AlertView) -> None:
        """Call ``on_settled`` if every receiver has the alert's state."""
        if self._on_settled is None:
            return
        with self._lock:
            open_lines = {
                name
                for name, line in self._lines.items()
                if line.accepts_alert(alert)
                and line.delivered.get(alert.fingerprint) != delivery_id(alert, name)
            }
        try:
            if open_lines and self._ledger is not None:
                open_lines -= self._ledger.heard_by(alert)
            if not open_lines:
                self._on_settled(alert)
        except StorageError as error:  # submitted again later, and then found in the records
            _LOG.warning("alert %s stays open: %s", alert.fingerprint, error)


def _receiver_failing_alert(receiver: str, error: str, now: int) -> AlertView:
    """Return the alert that a receiver accepts no alerts."""
    labels = {"receiver": receiver}
    return AlertView(
        fingerprint=fingerprint(_FAILING, labels),
        name=_FAILING,
        run_id="",
        severity="page",
        state="firing",
        summary=f"Receiver {receiver} takes no alerts: {error}"[:500],
        labels=labels,
        step=-1,
        started_unix_ns=now,
        updated_unix_ns=now,
    )


def resolve_alert(alert: AlertView, now: int) -> AlertView:
    """Return the alert for its receivers as it is once it is over."""
    return replace(alert, state="resolved", updated_unix_ns=now, ended_unix_ns=now)
