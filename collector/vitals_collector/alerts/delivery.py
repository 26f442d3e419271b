"""The bounded queue between the inbox and the notifiers: at least once, never blocking.

The newest state of each alert waits per notifier until it was delivered, with back-off. A firing
alert is posted again until it resolves to notifiers that want that, so a receiver that was
restarted, or an Alertmanager that forgets after its ``resolve_timeout``, still knows.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trainvitals.clock import Clock
from trainvitals.views import AlertView
from vitals_collector.alerts.notifiers import Notifier, Result

_LOG = logging.getLogger("vitals.collector.notify")


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """How hard delivery is tried."""

    max_pending: int = 1_000
    """Alerts waiting per notifier; beyond it the oldest is dropped, and counted."""
    batch: int = 100
    """Alerts in one delivery."""
    first_retry_seconds: float = 1.0
    """Wait after the first failure; doubled each time."""
    max_retry_seconds: float = 60.0
    """Longest wait between two tries."""
    max_tries: int = 12
    """Tries of one state of one alert: about eight minutes; then it is given up, and counted."""
    repost_seconds: float = 60.0
    """How often a firing alert is told again to a notifier that wants it."""


@dataclass(slots=True)
class _Waiting:
    alert: AlertView
    due_ns: int
    tries: int = 0
    settled: bool = False
    """Delivered, and kept only to be posted again."""


class Dispatcher:
    """Delivers alerts to notifiers in its own thread; ``submit`` never blocks and never raises.

    One alert's newer state replaces its older one that still waits. ``on_settled`` is told when
    every notifier has had an alert's state (or gave up), so that the inbox need not send it again
    after a restart.
    """

    def __init__(
        self,
        notifiers: Iterable[Notifier],
        *,
        clock: Clock,
        config: DispatchConfig | None = None,
        on_settled: Callable[[AlertView], None] | None = None,
    ) -> None:
        self.notifiers = tuple(notifiers)
        self._on_settled = on_settled
        self._config = config or DispatchConfig()
        self._clock = clock
        self._waiting: dict[str, dict[str, _Waiting]] = {n.name: {} for n in self.notifiers}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._outcomes: Counter[tuple[str, str]] = Counter()

    def submit(self, alert: AlertView) -> None:
        """Queue the alert's present state for every notifier."""
        with self._lock:
            for notifier in self.notifiers:
                if notifier.takes_log or alert.severity != "log":
                    self._put(notifier.name, _Waiting(alert, self._clock.monotonic_ns()))
        self._wake.set()

    def resume(self, alert: AlertView) -> None:
        """Queue a state that was not settled, unless it is on its way already."""
        with self._lock:
            is_waiting = any(alert.fingerprint in waiting for waiting in self._waiting.values())
        if not is_waiting:
            self.submit(alert)

    def keep_posting(self, alert: AlertView) -> None:
        """See to it that a settled, firing alert is posted again where that is wanted."""
        with self._lock:
            for notifier in self.notifiers:
                can_repost = (
                    notifier.reposts and alert.fingerprint not in self._waiting[notifier.name]
                )
                if can_repost and alert.severity != "log":
                    item = _Waiting(alert, self._clock.monotonic_ns(), settled=True)
                    self._put(notifier.name, item)
        self._wake.set()

    def withdraw(self, fingerprint: str) -> None:
        """Forget what waits of an alert: it was silenced."""
        with self._lock:
            for waiting in self._waiting.values():
                waiting.pop(fingerprint, None)

    def _put(self, name: str, item: _Waiting) -> None:
        waiting = self._waiting[name]
        waiting.pop(item.alert.fingerprint, None)
        if len(waiting) >= self._config.max_pending:
            waiting.pop(next(iter(waiting)))
            self._outcomes[name, "dropped"] += 1
        waiting[item.alert.fingerprint] = item

    def outcomes(self) -> dict[tuple[str, str], int]:
        """Return counts by (notifier, outcome): delivered, retried, failed, dropped."""
        with self._lock:
            return dict(self._outcomes)

    def pump(self) -> float | None:
        """Deliver what is due and return the seconds until the next is, or None."""
        for notifier in self.notifiers:
            while due := self._take_due(notifier.name):
                self._deliver(notifier, due)
        now = self._clock.monotonic_ns()
        with self._lock:
            dues = [w.due_ns for waiting in self._waiting.values() for w in waiting.values()]
        return max(0.0, (min(dues) - now) / 1e9) if dues else None

    def start(self) -> None:
        """Start the delivering thread."""
        self._thread = threading.Thread(target=self._run, name="vitals-notify", daemon=True)
        self._thread.start()

    def close(self, *, timeout: float = 5.0) -> None:
        """Stop the thread after a last try, and close the notifiers' connections."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
            self._thread = None
        for notifier in self.notifiers:
            if (close := getattr(notifier, "close", None)) is not None:
                close()

    def _run(self) -> None:
        while True:
            wait = self.pump()
            if self._stopping:
                return
            self._wake.wait(wait)
            self._wake.clear()

    def _take_due(self, name: str) -> list[_Waiting]:
        now = self._clock.monotonic_ns()
        with self._lock:
            waiting = self._waiting[name]
            due = [w for w in waiting.values() if w.due_ns <= now][: self._config.batch]
            for item in due:
                del waiting[item.alert.fingerprint]
        return due

    def _deliver(self, notifier: Notifier, due: list[_Waiting]) -> None:
        try:
            result = notifier.notify([w.alert for w in due])
        except Exception as error:  # noqa: BLE001 - one notifier's fault must not silence the rest
            _LOG.exception("notifier %s raised", notifier.name)
            result = Result(recoverable=False, error=f"{type(error).__name__}: {error}")
        with self._lock:
            settled = [w.alert for w in due if self._after(notifier, w, result)]
        if result.error:
            _LOG.warning("notifier %s: %s", notifier.name, result.error)
        for alert in settled:
            if self._on_settled is not None and self._settled_everywhere(alert):
                self._on_settled(alert)

    def _after(self, notifier: Notifier, item: _Waiting, result: Result) -> bool:
        """Keep the item for a retry or a re-post; return whether its state is done with."""
        item.tries += 1
        again = result.recoverable and item.tries < self._config.max_tries
        outcome = ("retried" if again else "failed") if result.error else "delivered"
        self._outcomes[notifier.name, outcome] += 1
        if again:
            wait = self._config.first_retry_seconds * 2.0 ** (item.tries - 1)
            self._hold(notifier, item, min(wait, self._config.max_retry_seconds))
        elif notifier.reposts and item.alert.state == "firing":
            item.tries, item.settled = 0, True
            self._hold(notifier, item, self._config.repost_seconds)
        return not again

    def _hold(self, notifier: Notifier, item: _Waiting, seconds: float) -> None:
        item.due_ns = self._clock.monotonic_ns() + int(seconds * 1e9)
        # A newer state that came in the meantime stands.
        self._waiting[notifier.name].setdefault(item.alert.fingerprint, item)

    def _settled_everywhere(self, alert: AlertView) -> bool:
        with self._lock:
            held = (waiting.get(alert.fingerprint) for waiting in self._waiting.values())
            return all(item is None or item.settled for item in held)
