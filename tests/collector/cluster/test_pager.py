"""What the pager knows of what other collectors did meanwhile."""

import contextlib
import threading
from typing import Any

import pytest
from sqlalchemy import select

from tests.collector.alerting import Heard, decision
from tests.collector.rows import RUN, Writer
from trainvitals.alerting import Alert
from trainvitals.testing import ManualClock
from trainvitals.views import AckRequest
from vitals_collector.alerts import inbox
from vitals_collector.alerts.inbox import Entry, Inbox, Occurrence, listed
from vitals_collector.ingest.ingest import ingest
from vitals_collector.live.engine import assemble
from vitals_collector.live.live_monitor import FollowedRun
from vitals_collector.storage.schema import audit
from vitals_collector.storage.store import Store, open_store

pytestmark = [
    pytest.mark.servers,
    pytest.mark.parametrize("store", ["postgresql"], indirect=True),
]


class Pager:
    """A collector's acting parts, and others that take rows and silences past it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock = ManualClock()
        self.heard = Heard(reposts=True)
        self.acting = assemble(store, [self.heard], clock=self.clock, is_shared=True)
        store.after_ingest.clear()  # what is stored, another collector stores

    def store_elsewhere(self) -> None:
        raw = Writer().events(decision(action="rollback"))
        ingest(self.store, raw, received_unix_ns=self.clock.time_ns())

    def pass_time(self, seconds: int) -> None:
        for _ in range(0, seconds, 5):
            self.acting.lease.look()
            self.acting.engine.poll()
            self.acting.dispatcher.pump()
            self.clock.advance(5)


def test_what_another_collector_stored_is_told_and_told_again_while_it_fires(store: Store) -> None:
    pager = Pager(store)
    pager.pass_time(5)
    pager.store_elsewhere()
    pager.pass_time(10)
    assert pager.heard.words == ["TrainingRolledBack firing"]
    pager.pass_time(70)
    assert pager.heard.words.count("TrainingRolledBack firing") > 1


def test_rows_that_this_collector_stored_are_not_read_from_the_store_at_each_look(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pager = Pager(store)
    store.after_ingest.append(pager.acting.engine.after_ingest)
    read, runs_read = FollowedRun.read, list[str]()

    def noted(followed: FollowedRun, *args: Any, **how: Any) -> int:
        runs_read.append(followed.run_id)
        return read(followed, *args, **how)

    monkeypatch.setattr(FollowedRun, "read", noted)
    writer = Writer()
    for first in range(0, 25, 5):
        raw = writer.steps(range(first, first + 5), loss=2.0)
        ingest(store, raw, received_unix_ns=pager.clock.time_ns())
        pager.pass_time(5)
    assert runs_read == [RUN, RUN], "when it was opened, and when others may have had it before"
    store.after_ingest.clear()  # another collector takes it over
    ingest(store, writer.steps(range(25, 30), loss=2.0), received_unix_ns=pager.clock.time_ns())
    pager.pass_time(5)
    assert runs_read[2:] == [RUN]


def test_what_was_silenced_at_another_collector_is_told_no_more(store: Store) -> None:
    pager = Pager(store)
    pager.store_elsewhere()
    pager.pass_time(5)
    (alert,) = pager.heard.alerts
    elsewhere = Inbox(store, clock=pager.clock)
    silence = AckRequest(by="ana", reason="I am on it", silence_seconds=600.0)
    elsewhere.acknowledge(alert.fingerprint, silence)
    pager.pass_time(70)
    assert pager.heard.words.count("TrainingRolledBack firing") == 1


def test_an_acknowledgement_amid_another_collectors_write_is_not_lost(
    store: Store, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine writes an alert's row back whole; without the row's lock it would undo what came
    between its read and its write."""
    pager = Pager(store)
    pager.store_elsewhere()
    pager.pass_time(5)
    (alert,) = pager.heard.alerts
    was_read, is_acked = threading.Event(), threading.Event()
    raised = inbox._raised

    def raise_slowly(entry: Entry | None, occurrence: Occurrence, now: int) -> Entry:
        was_read.set()
        assert not is_acked.wait(1.0), "it waits for the row"
        return raised(entry, occurrence, now)

    def acknowledge(by: str) -> None:
        with contextlib.closing(open_store(postgres)) as elsewhere:
            was_read.wait(10.0)
            Inbox(elsewhere, clock=pager.clock).acknowledge(alert.fingerprint, AckRequest(by=by))
            is_acked.set()

    threads = [threading.Thread(target=acknowledge, args=(by,)) for by in ("ana", "bob")]
    for thread in threads:
        thread.start()
    monkeypatch.setattr(inbox, "_raised", raise_slowly)
    point = Alert(
        name=alert.name,
        severity=alert.severity,
        labels=alert.labels,
        summary="again",
        step=9,
        point=True,
    )
    pager.acting.inbox.take([Occurrence(RUN, pager.clock.time_ns(), point)], cursors={})
    for thread in threads:
        thread.join()
    (view,) = listed(store, now_unix_ns=pager.clock.time_ns())
    assert view.acknowledged_by in ("ana", "bob")
    assert (view.step, view.state) == (9, "firing")
    with store.read() as connection:
        actors = connection.execute(select(audit.c.actor)).scalars().all()
    assert sorted(actors) == ["ana", "bob"]


def test_who_holds_no_lease_tells_nothing(store: Store) -> None:
    pager, other = Pager(store), Pager(store)
    pager.acting.lease.look()
    other.store_elsewhere()
    other.pass_time(10)
    assert other.heard.words == []
    pager.pass_time(5)
    assert pager.heard.words == ["TrainingRolledBack firing"]
