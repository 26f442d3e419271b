"""What the pager knows of what other collectors did meanwhile."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from tests.collector.alerting import decision
from tests.collector.cluster.acting import Pair, opened_pair
from tests.collector.rows import RUN, Writer
from trainvitals.alerting import Alert
from trainvitals.views import AckRequest
from vitals_collector.alerts import inbox
from vitals_collector.alerts.inbox import AlertOccurrence, Inbox, InboxAlert, list_alerts
from vitals_collector.storage.schema import audit
from vitals_collector.storage.store import Store, open_store

pytestmark = [
    pytest.mark.servers,
    pytest.mark.parametrize("lake_store", ["postgresql"], indirect=True),
]


@pytest.fixture
def pair(lake_store: Store, postgres: str, tmp_path: Path) -> Iterator[Pair]:
    """Give a pager, and another collector that takes rows and silences past it."""
    with opened_pair(lake_store, postgres, tmp_path) as two:
        yield two


def roll_back(pair: Pair) -> None:
    pair.owner.send(Writer().events(decision(action="rollback")))


def test_what_another_collector_stored_is_told_and_told_again_while_it_fires(pair: Pair) -> None:
    roll_back(pair)
    assert pair.look() == ["TrainingRolledBack firing"]
    assert pair.pass_time(70).count("TrainingRolledBack firing") > 1


def test_what_was_silenced_at_another_collector_is_told_no_more(pair: Pair) -> None:
    roll_back(pair)
    pair.look()
    (alert,) = pair.pager.heard.alerts
    silence = AckRequest(by="ana", reason="I am on it", silence_seconds=600.0)
    pair.owner.acting.inbox.acknowledge(alert.fingerprint, silence)
    assert pair.pass_time(70).count("TrainingRolledBack firing") == 1


def test_an_acknowledgement_amid_another_collectors_write_is_not_lost(
    pair: Pair, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine writes an alert's row back whole; without the row's lock it would undo what came
    between its read and its write."""
    roll_back(pair)
    pair.look()
    (alert,) = pair.pager.heard.alerts
    was_read, is_acked = threading.Event(), threading.Event()
    raised = inbox._raise_point_alert

    def raise_slowly(entry: InboxAlert | None, occurrence: AlertOccurrence, now: int) -> InboxAlert:
        was_read.set()
        assert not is_acked.wait(1.0), "it waits for the row"
        return raised(entry, occurrence, now)

    def acknowledge(by: str) -> None:
        with contextlib.closing(open_store(postgres)) as elsewhere:
            was_read.wait(60.0)
            other = Inbox(elsewhere, clock=pair.clock, tell=print, hush=lambda *_, **__: None)
            other.acknowledge(alert.fingerprint, AckRequest(by=by))
            is_acked.set()

    threads = [threading.Thread(target=acknowledge, args=(by,)) for by in ("ana", "bob")]
    for thread in threads:
        thread.start()
    monkeypatch.setattr(inbox, "_raise_point_alert", raise_slowly)
    point = Alert(
        name=alert.name,
        severity=alert.severity,
        labels=alert.labels,
        summary="again",
        step=9,
        point=True,
    )
    pair.pager.acting.inbox.raise_alerts(
        [AlertOccurrence(RUN, pair.clock.time_ns(), point)], cursors={}
    )
    for thread in threads:
        thread.join()
    (view,) = list_alerts(pair.pager.store, now_unix_ns=pair.clock.time_ns())
    assert view.acknowledged_by in ("ana", "bob")
    assert (view.step, view.state) == (9, "firing")
    with pair.pager.store.read_transaction() as connection:
        actors = connection.execute(select(audit.c.actor)).scalars().all()
    assert sorted(actors) == ["ana", "bob"]


def test_who_holds_no_lease_tells_nothing(pair: Pair) -> None:
    roll_back(pair)
    assert pair.owner.look() == []
    assert pair.pager.look() == ["TrainingRolledBack firing"]
