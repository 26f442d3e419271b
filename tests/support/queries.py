"""Queries of a store."""

import math

from tests.collector.rows import SECOND, START, Writer
from trainvitals.records import (
    AttemptStarted,
    Decision,
    DecisionMade,
    RunInfo,
    RunStarted,
)
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store


class At:
    """A clock that stands at a second after START."""

    def __init__(self, second: int) -> None:
        self.second = second

    def time_ns(self) -> int:
        return START + self.second * SECOND

    def monotonic_ns(self) -> int:
        return self.second * SECOND


def query(store: Store, second: int = 100) -> Query:
    return Query(store, clock=At(second))


def decision(**how: object) -> Decision:
    known: dict[str, object] = {
        "ledger_seq": 1,
        "action": "skip_step",
        "step": 4,
        "decided_at_step": 5,
        "attempt": 1,
        "reason": "the loss of step 4 is nan",
        "rule": "nonfinite",
        "cause": "nonfinite_loss",
    }
    return Decision(**(known | how))


def rolled_back_run(store: Store) -> None:
    """Store a run of two ranks: steps 0 to 9, back to 6, then to 12."""
    ranks = [Writer(f"rank:{rank}") for rank in range(2)]
    back = decision(
        ledger_seq=2,
        action="rollback",
        step=9,
        decided_at_step=9,
        rollback_to_step=6,
        new_attempt=2,
    )
    ingest(store, ranks[0].events(RunStarted(info=RunInfo(name="tiny", tags=("a", "b")))))
    ingest(store, ranks[0].events(AttemptStarted(id=1, parent=None, fork_step=0, reason="start")))
    for writer in ranks:
        loss = [math.nan if s == 4 else float(s) for s in range(10)]
        ingest(store, writer.steps(range(10), loss=loss, rank_loss=loss))
    ingest(store, ranks[0].events(DecisionMade(decision=decision())))
    ingest(store, ranks[0].events(DecisionMade(decision=back)))
    ingest(store, ranks[0].events(AttemptStarted(id=2, parent=1, fork_step=6, reason="rollback")))
    for writer in ranks:
        writer.started += 20 * SECOND
        ingest(store, writer.steps(range(6, 13), attempt=2, loss=100.0, rank_loss=100.0))
