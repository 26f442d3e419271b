"""Forwards the alerts of a drill to the user's own receivers, marked as a drill."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from trainvitals.errors import UsageError
from trainvitals.views import AlertView

if TYPE_CHECKING:
    from vitals_collector.alerts.worker import WorkerNotifier


class UserReceiver:
    """One receiver of the user. It gets no more alerts of the drill after its first failure."""

    def __init__(self, notifier: WorkerNotifier) -> None:
        self.name = notifier.name
        self.error = ""
        self._notifier = notifier
        self._executor = ThreadPoolExecutor(1)  # one that hangs delays no other
        self._deliveries: dict[tuple[str, str], Future[bool]] = {}
        """Result of each alert's first delivery, by run and name."""
        self._firing: dict[str, AlertView] = {}

    def send(self, alert: AlertView) -> None:
        """Deliver an alert of the drill in the background."""
        future = self._executor.submit(self._deliver, alert)
        self._deliveries.setdefault((alert.run_id, alert.name), future)

    def _deliver(self, alert: AlertView) -> bool:
        if self.error:
            return False
        self.error = self._notifier.notify([mark_alert(alert)]).error
        if alert.state == "firing" and not self.error:
            self._firing[alert.fingerprint] = alert
        else:
            self._firing.pop(alert.fingerprint, None)
        return not self.error

    def has_accepted(self, run_id: str, name: str) -> bool:
        """Return whether the receiver accepted this alert of a drilled run; waits for it."""
        delivery = self._deliveries.get((run_id, name))
        return delivery is not None and delivery.result()

    def close(self) -> None:
        """Resolve what the drill has left firing, and end the receiver's process."""
        self._executor.shutdown()
        now = time.time_ns()
        for alert in list(self._firing.values()):
            self._deliver(replace(alert, state="resolved", ended_unix_ns=now))
        self._notifier.close()


def mark_alert(alert: AlertView) -> AlertView:
    """Return an alert of a drilled run in which run, summary and labels name the drill."""
    return replace(
        alert,
        run_id=f"DRILL-{alert.run_id}",
        summary=f"DRILL (vitals drill), no action needed: {alert.summary}",
        labels={**alert.labels, "drill": "true"},
    )


@contextmanager
def user_receivers(file: Path | None) -> Iterator[Sequence[UserReceiver]]:
    """Open the receivers in a file of `vitals collector --receivers`; none without a file.

    Receivers of alerts that nobody acknowledged are omitted.

    Raises:
        ConfigError: the file is wrong, or others may read it.
        UsageError: it has no receiver for a drill.
    """
    if file is None:
        yield ()
        return
    from vitals_collector.alerts.receivers import notifier_settings
    from vitals_collector.alerts.worker import WorkerNotifier

    settings = notifier_settings(file=file)
    notifiers = [WorkerNotifier(each, links=settings.links) for each in settings.receivers]
    receivers = [UserReceiver(each) for each in notifiers if not each.after_seconds]
    if not receivers:
        raise UsageError(
            f"{file} has no receiver without after_minutes", hint="docs/guides/alerts.md#receivers"
        )
    try:
        yield receivers
    finally:
        for receiver in receivers:
            receiver.close()
