"""The acting parts over a store, and what was heard of them."""

from collections.abc import Sequence
from typing import Any

from tests.collector.rows import RUN, SECOND, Writer
from trainvitals.catalog import GPU_SCHEMA, NODE_SCHEMA
from trainvitals.records import (
    Decision,
    DecisionMade,
    RunInfo,
    RunStarted,
)
from trainvitals.testing import ManualClock
from trainvitals.views import AlertView, FindingsQuestion
from vitals_collector.alerts.inbox import InboxConfig, list_alerts
from vitals_collector.alerts.notifiers import DELIVERED, DeliveryResult
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.live.engine import AlertService, EngineConfig, build_alert_service
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import SteadyClock, Store


class Heard:
    """A notifier that keeps what it was told, and answers as planned."""

    takes_log = True

    def __init__(
        self, *results: DeliveryResult, name: str = "heard", reposts: bool = False
    ) -> None:
        self.name = name
        self.reposts = reposts
        self.results = list(results)
        self.alerts: list[AlertView] = []

    def notify(self, alerts) -> DeliveryResult:
        result = self.results.pop(0) if self.results else DELIVERED
        if not result.error:
            self.alerts += alerts
        return result

    @property
    def words(self) -> list[str]:
        return [f"{a.name} {a.state}" for a in self.alerts]


class Place:
    """A store, a clock, and the acting parts over them; ``restart`` loses all memory."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock = ManualClock()
        self.heard = Heard()
        self.acting: AlertService
        self.restart()

    def restart(self) -> None:
        self.store.after_ingest.clear()
        self.arrivals = SteadyClock(self.clock)
        self.acting = build_alert_service(
            self.store,
            [self.heard],
            clock=self.clock,
            config=EngineConfig(lost_after_seconds=60.0),
            inbox_config=InboxConfig(healthy_steps=10, lost_hold_seconds=15.0),
            up_since_unix_ns=self.clock.time_ns(),
        )

    def alerts(self) -> tuple[AlertView, ...]:
        return list_alerts(self.store, now_unix_ns=self.clock.time_ns())

    def send(self, *raws: bytes) -> None:
        """Store the batches in one commit, as those of a moment are."""
        for reply in ingest_all(self.store, raws, self.arrivals.time_ns()) if raws else ():
            assert not reply.code, reply.text

    def look(self) -> list[str]:
        self.acting.engine.poll()
        self.acting.dispatcher.deliver_due()
        return self.heard.words

    def pass_time(self, seconds: int) -> list[str]:
        """Let time pass as it does for a collector that runs: with looks."""
        for _ in range(0, seconds, 5):
            self.clock.advance(5)
            self.look()
        return self.heard.words


class Job:
    """A place with a job of some ranks in it: rank 1 keeps the others waiting when told to."""

    def __init__(self, store: Store, world: int = 3) -> None:
        self.place = Place(store)
        self.ranks = [Writer(f"rank:{rank}", world_size=world) for rank in range(world)]

    def rows(self, rank: int, steps: Sequence[int], *, slow: bool = False, **how: Any) -> bytes:
        waits = 0.0 if slow and rank == 1 else 0.4 if slow else 0.01
        columns = {"step_duration_seconds": 1.0, "communication_seconds": waits, "loss": 2.0}
        return self.ranks[rank].steps(steps, **(columns | how))

    def train(self, steps: Sequence[int], *, slow: bool = False, **how: Any) -> None:
        ranks = range(len(self.ranks))
        self.place.send(*(self.rows(rank, steps, slow=slow, **how) for rank in ranks))

    def look(self) -> list[str]:
        return self.place.look()

    def found(self, run: str = RUN) -> list[tuple[str, int]]:
        query = Query(self.place.store, clock=self.place.clock)
        return [
            (one.finding.kind, one.finding.step) for one in query.ask(FindingsQuestion(run_id=run))
        ]


class Agent:
    """A node's agent: in each round a row of the node, then one of each GPU."""

    def __init__(self, gpus: Sequence[str] = ("GPU-a", "GPU-b")) -> None:
        self.node = Writer("node:node-a")
        self.gpus = {uuid: Writer(f"gpu:{uuid}") for uuid in gpus}
        self.second = 0

    def round(self, **of_gpus: int) -> list[bytes]:
        self.second += 2
        time = self.node.time_of(self.second)
        head = [-1, 0, time, self.second * SECOND]
        rest = [None] * (len(NODE_SCHEMA.columns) - 5)
        told = [self.node.batch(NODE_SCHEMA, [[*head, 0.5, *rest]])]
        for i, writer in enumerate(self.gpus.values(), start=1):
            values = {"utilization_ratio": 0.9, "ecc_uncorrected_errors": 0} | of_gpus
            row = [values.get(c.name) for c in GPU_SCHEMA.columns[4:]]
            told.append(writer.batch(GPU_SCHEMA, [[-1, 0, time + i, head[3] + i, *row]]))
        return told


class Asked(dict):  # type: ignore[type-arg]
    """Columns that remember which of them somebody looked at."""

    asked: set[str]

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)


def decision(seq: int = 1, action: str = "skip_step", step: int = 5, **fields) -> DecisionMade:
    given = {
        "ledger_seq": seq,
        "action": action,
        "step": step,
        "decided_at_step": step + 1,
        "attempt": 1,
        "reason": f"because of step {step}",
        "rule": "nonfinite",
        "cause": "nonfinite_loss",
    }
    return DecisionMade(decision=Decision(**{**given, **fields}))


def started(mode: str = "heal", lag: int = 1) -> RunStarted:
    return RunStarted(info=RunInfo(name="a run", mode=mode, readback_lag=lag))
