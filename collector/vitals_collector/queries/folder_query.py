"""Answers from a store that no collector watches: alerts are raised when somebody asks for them."""

from typing import TypeVar

from trainvitals.clock import Clock
from trainvitals.question import Question
from trainvitals.views import AlertsQuestion, TableQuestion
from vitals_collector.live.engine import Engine, assemble
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store

A = TypeVar("A")


class FolderQuery(Query):
    """A ``Query`` that has the watchers look at every row before it tells of alerts.

    They do not look before: a run of a million steps takes them half a minute, and most questions
    are not about alerts. Nobody is notified.
    """

    def __init__(self, store: Store, *, clock: Clock) -> None:
        super().__init__(store, clock=clock)
        self._engine: Engine | None = None

    def ask(self, question: Question[A]) -> A:
        """Return the answer; to one about alerts, what the runs would have raised."""
        is_of_alerts = isinstance(question, TableQuestion) and question.table == "alerts"
        if is_of_alerts or isinstance(question, AlertsQuestion):
            self._look()
        return super().ask(question)

    def _look(self) -> None:
        if self._engine is None:
            self._engine = assemble(self.store, (), clock=self.clock).engine
        self._engine.poll()


__all__ = ["FolderQuery"]
