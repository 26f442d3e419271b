"""Answers from a store that no collector watches: alerts are raised when somebody asks for them."""

from trainvitals.clock import Clock
from trainvitals.views import AlertView, TableReply, TableRequest
from vitals_collector.live.engine import Engine, assemble
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store


class FolderQuery(Query):
    """A ``Query`` that has the watchers look at every row before it tells of alerts.

    They do not look before: a run of a million steps takes them half a minute, and most questions
    are not about alerts. Nobody is notified.
    """

    def __init__(self, store: Store, *, clock: Clock) -> None:
        super().__init__(store, clock=clock)
        self._engine: Engine | None = None

    def alerts(self, *, run_id: str = "", state: str = "") -> tuple[AlertView, ...]:
        """Return the alerts that the runs would have raised, the newest first."""
        self._look()
        return super().alerts(run_id=run_id, state=state)

    def table(self, request: TableRequest) -> TableReply:
        """Return the rows that meet the request's conditions."""
        if request.table == "alerts":
            self._look()
        return super().table(request)

    def _look(self) -> None:
        if self._engine is None:
            self._engine = assemble(self._store, (), clock=self._clock).engine
        self._engine.poll()


__all__ = ["FolderQuery"]
