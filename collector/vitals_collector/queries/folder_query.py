"""Queries to a store without a collector: detectors and alerts run when findings are queried."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainvitals.clock import Clock
from trainvitals.question import Question
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store

if TYPE_CHECKING:
    from vitals_collector.live.engine import AlertEngine
    from vitals_collector.live.live_monitor import LiveMonitor

A = TypeVar("A")


class FolderQuery(Query):
    """A ``Query`` that runs the fleet detectors over a run's rows before it returns findings.

    A collector does so as rows arrive; without this, a directory would show less than its
    dashboard. Other queries do not wait: on a run of a million steps the detectors need half
    a minute. No notifications are sent.
    """

    newest_alerts_by = "started_unix_ns"
    """Alerts are updated when they are read, so their update time has no meaning."""

    def __init__(
        self, store: Store, *, clock: Clock, gpu_hour_price: float = 0.0, folder: Path | None = None
    ) -> None:
        super().__init__(store, clock=clock, gpu_hour_price=gpu_hour_price)
        self._folder = folder
        self._engine: AlertEngine | None = None
        self._monitor: LiveMonitor | None = None

    def run_dir(self, run_id: str) -> Path | None:
        """Return the directory of a queried run: the directory that is read, or one in it."""
        folder = self._folder
        return folder if folder is None or folder.name == run_id else folder / run_id

    def ask(self, question: Question[A]) -> A:
        """Respond to a query about runs in a directory; ``Query.ask`` documents the errors."""
        if question.has_findings:
            self._watch(question.run_id)  # type: ignore[attr-defined]
        return super().ask(question)

    def _watch(self, run_id: str) -> None:
        """Run, before a query for findings, the fleet detectors over rows not processed yet."""
        if self._engine is not None:  # it processes all runs
            self._engine.poll()
            return
        if self._monitor is None:
            # Here, as it would be a tenth of the start of a command that needs no findings.
            from vitals_collector.live.live_monitor import LiveMonitor

            self._monitor = LiveMonitor(self.store)
        self._monitor.note(run_id)
        now_ns = self.clock.monotonic_ns()
        while self._monitor.poll(now_ns=now_ns, running=(), owned={run_id}).has_more:
            pass

    def raise_alerts(self) -> None:
        """Update the alerts of runs in a directory before a query for them."""
        if self._engine is None:
            from vitals_collector.live.engine import build_alert_service

            self._monitor = None
            self._engine = build_alert_service(self.store, (), clock=self.clock).engine
        self._engine.poll()
        # This pass leaves new alerts firing, and its steps may be older than they are; the next
        # pass resolves those that are over.
        self._engine.poll()
