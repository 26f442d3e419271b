"""Queries to a store without a collector: detectors and alerts run when findings are queried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainvitals.clock import Clock
from trainvitals.io.rundir import is_run_id
from trainvitals.views import RunSummary
from vitals_collector.live.overview import load_run_summaries
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store

if TYPE_CHECKING:
    from vitals_collector.live.engine import AlertEngine
    from vitals_collector.live.live_monitor import LiveMonitor
    from vitals_collector.queries.judgements import BackgroundJudge, JudgementCache

MANY_ROWS = 4_000
"""Unprocessed rows from which a cached result is used: fewer take less than half a second."""


class FolderQuery(Query):
    """A ``Query`` that runs the fleet detectors over a run's rows before it returns findings.

    A collector does so as rows arrive; without this, a directory would show less than its
    dashboard. Other queries do not wait: on a run of a million steps the detectors need more
    than a minute, so their result is cached. No notifications are sent.
    """

    newest_alerts_by = "started_unix_ns"
    """Alerts are updated when they are read, so their update time has no meaning."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        gpu_hour_price: float = 0.0,
        folder: Path | None = None,
        waits: bool = True,
    ) -> None:
        folders = () if folder is None else (folder,)
        super().__init__(store, clock=clock, gpu_hour_price=gpu_hour_price, folders=folders)
        self._folder = folder
        self._waits = waits
        self._engine: AlertEngine | None = None
        self._monitor: LiveMonitor | None = None
        self._cache: JudgementCache | None = None
        self._judge: BackgroundJudge | None = None
        self._judged_rows: dict[str, int] = {}
        """By run that no longer trains: ``num_rows`` of the store when its rows were processed."""
        self.unjudged: dict[str, str] = {}
        """By run that another process judges: how far it is."""

    def close(self) -> None:
        """End the process that judges a long run."""
        if self._judge is not None:
            self._judge.close()

    def run_dir(self, run_id: str) -> Path | None:
        """Return the directory of a queried run: the directory that is read, or one in it."""
        folder = self._folder
        return folder if folder is None or folder.name == run_id else folder / run_id

    def update_findings(self, run_id: str) -> None:
        """Run, before a query for findings, the fleet detectors over rows not processed yet."""
        from vitals_collector.live.live_monitor import count_unwatched_rows

        with self.read() as moment:
            runs = load_run_summaries(moment.sql, self.liveness(), run_id or None)
            num_rows = [count_unwatched_rows(moment.sql, run.run_id).num_rows for run in runs]
        long_runs = [run for run, num in zip(runs, num_rows, strict=True) if num >= MANY_ROWS]
        judged_apart = {run.run_id for run in long_runs if not self._can_judge(run)}
        for run in runs:
            if run.run_id not in judged_apart:
                self.unjudged.pop(run.run_id, None)
        if judged_apart:
            self._engine = None  # it would process all rows
        if self._engine is not None:  # it processes all runs
            _poll_all_rows(self._engine)
            return
        for run in runs:
            if run.run_id not in judged_apart:
                self._run_fleet_detectors(run)
        if self._cache is not None:
            for run in long_runs:
                if run.run_id not in judged_apart:
                    self._cache.save(self.store, run.run_id)

    def _can_judge(self, run: RunSummary) -> bool:
        """Return whether to judge a long run here; otherwise another process judges it."""
        if not is_run_id(run.run_id):
            return True
        # Here, as most directories have only short runs.
        from vitals_collector.live.live_monitor import count_unwatched_rows
        from vitals_collector.queries import judgements

        if self._folder is not None and self._cache is None:
            self._cache = judgements.open_judgement_cache()
        if self._cache is not None and self._cache.load(self.store, run.run_id):
            self._monitor = self._engine = None  # they have an earlier state
        run_dir = self.run_dir(run.run_id)
        if self._waits or run_dir is None or self._cache is None or not run_dir.is_dir():
            return True
        self._judge = judge = self._judge or judgements.BackgroundJudge()
        with self.read() as moment:
            unwatched = count_unwatched_rows(moment.sql, run.run_id)
        if unwatched.num_rows < MANY_ROWS or not judge.is_needed(run.run_id, unwatched.num_rows):
            return True
        judge.start(run_dir, run.run_id)
        error = judge.errors.get(run.run_id, "")
        self.unjudged[run.run_id] = (
            f"the fleet detectors have processed the steps to {max(unwatched.last_step, 0):,} of "
            f"{run.last_step:,}; findings about ranks, layers and speed of later steps are missing"
            + (f": {error}" if error else "")
        )
        return False

    def _run_fleet_detectors(self, run: RunSummary) -> None:
        """Run the fleet detectors over a run's rows, and store their findings."""
        # Here, as it would be a tenth of the start of a command that needs no findings.
        from vitals_collector.live.live_monitor import LiveMonitor, LiveMonitorConfig
        from vitals_collector.live.step_join import MergeConfig

        num_rows = self.store.counters.num_rows
        if self._monitor is not None and self._judged_rows.get(run.run_id) == num_rows:
            return
        if self._monitor is None:
            # Each poll stores the state: the next reader continues from it.
            config = LiveMonitorConfig(
                rows_at_once=20_000, save_seconds=0.0, save_bytes_a_second=1 << 62
            )
            self._monitor = LiveMonitor(self.store, config)
        self._monitor.note(run.run_id)
        times_ns = [self.clock.monotonic_ns()]
        if run.state != "running":  # rows that are missing will not arrive: do not wait for them
            times_ns.append(times_ns[0] + int(MergeConfig().patience_seconds * 1e9))
        for now_ns in times_ns:
            while self._monitor.poll(now_ns=now_ns, running=(), owned={run.run_id}).has_more:
                if self._cache is not None:
                    self._cache.save_progress(self.store, run.run_id)
        if run.state == "running":
            self._judged_rows.pop(run.run_id, None)
        else:
            self._judged_rows[run.run_id] = num_rows

    def raise_alerts(self) -> None:
        """Update the alerts of runs in a directory before a query for them."""
        self.update_findings("")
        if self.unjudged:
            return
        if self._engine is None:
            from vitals_collector.live.engine import build_alert_service

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
