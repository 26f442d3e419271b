"""Queries to a store without a collector: detectors and alerts run when findings are queried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainvitals.clock import Clock
from trainvitals.views import RunSummary
from vitals_collector.live.overview import load_run_summaries
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store

if TYPE_CHECKING:
    from vitals_collector.live.engine import AlertEngine
    from vitals_collector.live.live_monitor import LiveMonitor


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
        folders = () if folder is None else (folder,)
        super().__init__(store, clock=clock, gpu_hour_price=gpu_hour_price, folders=folders)
        self._folder = folder
        self._engine: AlertEngine | None = None
        self._monitor: LiveMonitor | None = None

    def run_dir(self, run_id: str) -> Path | None:
        """Return the directory of a queried run: the directory that is read, or one in it."""
        folder = self._folder
        return folder if folder is None or folder.name == run_id else folder / run_id

    def update_findings(self, run_id: str) -> None:
        """Run, before a query for findings, the fleet detectors over rows not processed yet."""
        if self._engine is not None:  # it processes all runs
            _poll_all_rows(self._engine)
            return
        with self.read() as moment:
            runs = load_run_summaries(moment.sql, self.liveness(), run_id or None)
        for run in runs:
            self._run_fleet_detectors(run)

    def _run_fleet_detectors(self, run: RunSummary) -> None:
        """Run the fleet detectors over a run's rows, and store their findings."""
        # Here, as it would be a tenth of the start of a command that needs no findings.
        from vitals_collector.live.live_monitor import LiveMonitor
        from vitals_collector.live.step_join import MergeConfig

        if self._monitor is None:
            self._monitor = LiveMonitor(self.store)
        self._monitor.note(run.run_id)
        times_ns = [self.clock.monotonic_ns()]
        if run.state != "running":  # rows that are missing will not arrive: do not wait for them
            times_ns.append(times_ns[0] + int(MergeConfig().patience_seconds * 1e9))
        for now_ns in times_ns:
            while self._monitor.poll(now_ns=now_ns, running=(), owned={run.run_id}).has_more:
                pass

    def raise_alerts(self) -> None:
        """Update the alerts of runs in a directory before a query for them."""
        if self._engine is None:
            from vitals_collector.live.engine import build_alert_service

            self.update_findings("")
            self._monitor = None
            self._engine = build_alert_service(self.store, (), clock=self.clock).engine
        _poll_all_rows(self._engine)
        # This pass leaves new alerts firing, and its steps may be older than they are; the next
        # pass resolves those that are over.
        self._engine.poll()


def _poll_all_rows(engine: AlertEngine) -> None:
    """Poll until the fleet detectors have processed all rows of a directory."""
    engine.poll()
    while engine.has_more:
        engine.poll()
