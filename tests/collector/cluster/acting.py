"""What acts in each of several collectors on one PostgreSQL, in one process and by one clock."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, update

from tests.collector.alerting import Heard
from trainvitals.errors import StorageError
from trainvitals.testing import ManualClock
from vitals_collector.alerts.inbox import InboxConfig
from vitals_collector.cluster import leases, owners
from vitals_collector.cluster.owners import RunOwners
from vitals_collector.ingest.ingest import ingest
from vitals_collector.live.engine import EngineConfig, build_alert_service
from vitals_collector.numbers.lake import Lake
from vitals_collector.storage import schema
from vitals_collector.storage.store import Store, open_data_store


class ActingCollector:
    """What acts in one collector: it stores what it is sent, and looks when told to."""

    def __init__(self, store: Store, clock: ManualClock, url: str) -> None:
        self.store, self._clock, self.url = store, clock, url
        self.owners = store.claims = RunOwners(store, clock=clock, url=url)
        self.heard = Heard(reposts=True)
        self.acting = build_alert_service(
            store,
            [self.heard],
            clock=clock,
            config=EngineConfig(lost_after_seconds=60.0),
            inbox_config=InboxConfig(healthy_steps=10, lost_hold_seconds=15.0),
            is_shared=True,
        )
        self.is_alive = True

    def send(self, *raws: bytes) -> None:
        for raw in raws:
            now = self._clock.time_ns()
            _call_again(partial(ingest, self.store, raw, received_unix_ns=now))

    def look(self) -> list[str]:
        _call_again(self.acting.lease.renew_or_acquire)
        _call_again(self.owners.renew)
        _call_again(self.acting.engine.poll)
        self.acting.dispatcher.deliver_due()
        return self.heard.words

    def die(self) -> None:
        """Do nothing more; the leases end by the database's clock."""
        self.is_alive = False
        with self.store.write() as connection:
            holder = schema.leases.c.holder
            mine = holder.startswith(self.url) | (holder == self.acting.lease.holder)
            connection.execute(update(schema.leases).where(mine).values(expires_unix_ns=0))

    @contextlib.contextmanager
    def asking(self) -> Iterator[list[str]]:
        """Note what is asked of the database and of the lake."""
        asked: list[str] = []
        numbers = self.store.numbers
        assert isinstance(numbers, Lake)
        engine = numbers.engine
        told = {name: getattr(engine, name) for name in ("ask", "query_in_transaction", "execute")}

        def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            asked.append(statement)

        for name, call in told.items():
            setattr(
                engine,
                name,
                lambda sql, *args, call=call, **rows: (asked.append(sql), call(sql, *args, **rows))[
                    1
                ],
            )
        event.listen(self.store.engine, "before_cursor_execute", note)
        try:
            yield asked
        finally:
            event.remove(self.store.engine, "before_cursor_execute", note)
            for name, call in told.items():
                setattr(engine, name, call)


def _call_again(call: Callable[[], object]) -> None:
    """Call it, and again where it is to be called again: as on a machine that stood still."""
    for _ in range(3):
        with contextlib.suppress(StorageError):
            call()
            return
    call()


class Pair:
    """Two collectors on one database and lake; the first has the lease of the pager."""

    def __init__(self, pager: Store, owner: Store) -> None:
        self.clock = ManualClock()
        self.pager = ActingCollector(pager, self.clock, "http://pager:1")
        self.owner = ActingCollector(owner, self.clock, "http://owner:1")

    def look(self) -> list[str]:
        """Have each look once, the owner first; return what people were told, by either."""
        for collector in (self.owner, self.pager):
            if collector.is_alive:
                collector.look()
        return [*self.pager.heard.words, *self.owner.heard.words]

    def pass_time(self, seconds: int) -> list[str]:
        for _ in range(0, seconds, 5):
            self.clock.advance(5)
            told = self.look()
        return told


@contextlib.contextmanager
def opened_pair(store: Store, database: str, folder: Path) -> Iterator[Pair]:
    """Give two collectors, of which the one on ``store`` pages.

    Their leases last, by the database's clock, however busy the machine is.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.closing(open_data_store(folder / "owner", database)) as second,
    ):
        for module in (leases, owners):
            patch.setattr(module, "LEASE_SECONDS", 3_600.0)
        patch.setattr(leases, "IDLE_SECONDS", 60)
        pair = Pair(store, second)
        pair.pager.look()
        pair.look()
        yield pair
