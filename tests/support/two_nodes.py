"""A job on two nodes."""

from tests.collector.alerting import Place
from tests.collector.rows import RUN, SECOND, START, Writer
from trainvitals.views import RunQuestion
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store

AHEAD = 240 * SECOND
"""By how much the clock of node b is ahead of the collector's."""


class TwoNodes:
    """A job of two nodes of one rank; ``pass_time`` has everybody report who is not silent."""

    def __init__(self, store: Store) -> None:
        self.place = Place(store)
        self.ranks = [
            Writer("rank:0", node="node-a", started=START),
            Writer("rank:1", node="node-b", started=START + AHEAD),
        ]
        self.agents = [
            Writer("node:node-a", node="node-a", started=START),
            Writer("node:node-b", node="node-b", started=START + AHEAD),
        ]
        self.second = 0

    def pass_time(
        self,
        seconds: int,
        *,
        ranks: tuple[int, ...] = (0, 1),
        agents: tuple[int, ...] = (0, 1),
        every: int = 5,
    ) -> list[str]:
        for _ in range(seconds // every):
            self.second += every
            self.place.clock.advance(every)
            now = [self.second]
            self.place.send(
                *(self.ranks[number].steps(now, loss=2.0) for number in ranks),
                *(self.agents[number].node_rows(now) for number in agents),
            )
            self.place.look()
        return self.place.heard.words

    def summary(self):
        query = Query(self.place.store, clock=self.place.clock)
        return query.ask(RunQuestion(run_id=RUN)).summary
