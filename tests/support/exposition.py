"""A page of metrics."""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from trainvitals.testing import ManualClock
from vitals_collector.alerts.notifiers import LogNotifier
from vitals_collector.api.exposition import StoreCollector
from vitals_collector.ingest.ingest import ingest
from vitals_collector.live.engine import AlertService, build_alert_service
from vitals_collector.queries.goodput import GoodputCache, GoodputReader
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store


class Page:
    """A store and what ``/metrics`` says of it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock = ManualClock()
        self.acting: AlertService = build_alert_service(store, [LogNotifier()], clock=self.clock)
        self.registry = CollectorRegistry()
        self.registry.register(
            StoreCollector(
                store,
                acting=self.acting,
                liveness=Query(store, clock=self.clock).liveness,
                goodput=GoodputReader(store, GoodputCache()),
            )
        )

    def send(self, raw: bytes) -> None:
        ingest(self.store, raw, received_unix_ns=self.clock.time_ns())

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)
