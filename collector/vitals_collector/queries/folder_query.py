"""Answers from a store that no collector watches: alerts are raised when somebody asks for them."""

from pathlib import Path

from trainvitals.clock import Clock
from vitals_collector.live.engine import AlertEngine, assemble
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store


class FolderQuery(Query):
    """A ``Query`` that has the watchers look at every row before it tells of alerts.

    They do not look before: a run of a million steps takes them half a minute, and most questions
    are not about alerts. Nobody is notified.
    """

    newest_alerts_by = "started_unix_ns"
    """They are updated when they are read: that says nothing about them."""

    def __init__(
        self, store: Store, *, clock: Clock, gpu_hour_price: float = 0.0, folder: Path | None = None
    ) -> None:
        super().__init__(store, clock=clock, gpu_hour_price=gpu_hour_price)
        self._folder = folder
        self._engine: AlertEngine | None = None

    def run_dir(self, run_id: str) -> Path | None:
        """Return the run's folder: the one that is read, or in it."""
        folder = self._folder
        return folder if folder is None or folder.name == run_id else folder / run_id

    def raise_alerts(self) -> None:
        """Bring the store's alerts up to date with its rows."""
        if self._engine is None:
            self._engine = assemble(self.store, (), clock=self.clock).engine
        self._engine.poll()
        # What is told now is left firing by that look, whose steps may be older than it; the next
        # one resolves what the run has got over since.
        self._engine.poll()


__all__ = ["FolderQuery"]
