"""Reports of the run owners to the pager: one row per owner and run.

With several collectors, each watches the runs that it owns and stores their findings. It reports
the rest that alerts depend on: the state of a run and its lasting conditions. The pager reads the
reports of all runs at once.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from trainvitals.errors import UNREADABLE
from vitals_collector.alerts.inbox import CurrentRunState
from vitals_collector.cluster.reports import delete_reports, write_reports
from vitals_collector.storage.store import OwnedElsewhere, Store

_LOG = logging.getLogger("vitals.collector.engine")


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a run by its owner."""

    epoch: int
    """The number of its lease."""
    num_told: int
    """Number of decisions and findings in this epoch that may raise alerts; they are in the
    database."""
    now: CurrentRunState

    @property
    def news(self) -> tuple[object, ...]:
        """Return the urgent part of a run's reported state: everything except the step."""
        now = self.now
        holds = (now.state, now.conditions, now.lasting, now.last_unhealthy_step)
        return (self.epoch, self.num_told, *holds)


_decode = msgspec.msgpack.Decoder(RunReport).decode


class RunReporter:
    """Writes reports of owned runs if they have changed. After a StorageError, call again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._num_told: Counter[str] = Counter()
        self._written: dict[str, RunReport] = {}

    def report(
        self,
        owned: Mapping[str, int],
        reported_runs: Iterable[str],
        present: Iterable[CurrentRunState],
        *,
        only_new: bool,
    ) -> None:
        """Report the runs that are owned; with ``only_new``, only what cannot wait.

        ``owned`` has the epoch of each run's lease. ``reported_runs`` has one entry for each new
        event that may raise alerts.
        """
        self._num_told.update(reported_runs)
        due: dict[str, RunReport] = {}
        for now in present:
            run_id, before = now.run_id, self._written.get(now.run_id)
            if run_id not in owned:
                continue
            num_told = self._num_told[run_id]
            report = RunReport(epoch=owned[run_id], num_told=num_told, now=now)
            is_known = before is not None and report.news == before.news
            if not is_known or (report != before and not only_new):
                due[run_id] = report
        if not due:
            return
        with self._store.write() as connection:
            claimed_runs = self._store.claims.hold(connection, due.keys())
            bodies = {run_id: msgspec.msgpack.encode(due[run_id]) for run_id in claimed_runs}
            write_reports(connection, bodies)
        self._written = {run_id: r for run_id, r in self._written.items() if run_id in owned} | due

    def withdraw(self, run_ids: Collection[str]) -> None:
        """Stop reporting states of owned runs: this collector raises their alerts itself."""
        with self._store.write() as connection:
            delete_reports(connection, run_ids)
        self._written.clear()


def report_of(run: OwnedElsewhere) -> RunReport | None:
    """Return the run state that its current owner reported, to raise alerts from it; or None."""
    if not run.report:
        return None
    try:
        report = _decode(run.report)
    except UNREADABLE as error:
        _LOG.warning("report_not_read run=%s: %s", run.run_id, error)
        return None
    return report if report.epoch == run.epoch else None
