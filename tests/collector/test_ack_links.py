from collections.abc import Iterator

import httpx
import pytest

from tests.collector.rows import RUN, Writer
from tests.support.receivers import ALERT
from tests.support.served import Served
from trainvitals.errors import UsageError
from trainvitals.testing import ManualClock
from trainvitals.views import AlertView
from vitals_collector.alerts.ack_links import AckLinks
from vitals_collector.alerts.inbox import AlertOccurrence, list_alerts
from vitals_collector.ingest.ingest import ingest
from vitals_collector.storage.store import Store


class Message:
    """A collector with a page, and the link in its message."""

    def __init__(self, served: Served) -> None:
        self.store: Store = served.app.state.store
        self.inbox = served.app.state.acting.inbox
        ingest(self.store, Writer().steps([0]))
        self.http = httpx.Client(base_url=served.plain)
        self.clock = ManualClock(time_ns=served.app.state.acting.inbox._clock.time_ns())
        self.links = AckLinks(self.store, clock=self.clock, collector_url="https://c.example")
        self.fire()

    def fire(self) -> None:
        self.inbox.raise_alerts([AlertOccurrence(RUN, self.clock.time_ns(), ALERT)], cursors={})

    @property
    def alert(self) -> AlertView:
        views = list_alerts(self.store, now_unix_ns=self.clock.time_ns())
        (view,) = [v for v in views if v.fingerprint == ALERT.fingerprint]
        return view

    @property
    def path(self) -> str:
        return self.links.link_of(self.alert).removeprefix("https://c.example")


@pytest.fixture
def message(served: Served) -> Iterator[Message]:
    made = Message(served)
    with made.http:
        yield made


def test_opening_the_link_changes_nothing_and_its_button_acknowledges_once(message: Message):
    page = message.http.get(message.path)
    assert (200, True) == (page.status_code, "<button>Acknowledge" in page.text)
    assert "" == message.alert.acknowledged_by
    path = message.path
    done = message.http.post(path, data={"by": "alice"})
    assert (200, "alice") == (done.status_code, message.alert.acknowledged_by)
    again = message.http.post(path, data={"by": "mallory"})
    assert ("alice", True) == (message.alert.acknowledged_by, "by alice" in again.text)
    assert "<button>" not in message.http.get(path).text


def test_a_link_that_was_changed_opens_nothing(message: Message):
    for path in (message.path[:-1] + "x", message.path.replace("/ack/", "/ack/a"), "/ack/x"):
        assert 400 == message.http.get(path).status_code
        assert 400 == message.http.post(path, data={"by": "mallory"}).status_code
    assert "" == message.alert.acknowledged_by


def test_nobody_acknowledges_without_a_name_or_from_a_foreign_page(message: Message):
    assert 400 == message.http.post(message.path).status_code
    headers = {"Origin": "https://evil.example"}
    answer = message.http.post(message.path, data={"by": "mallory"}, headers=headers)
    assert (403, "") == (answer.status_code, message.alert.acknowledged_by)


def test_a_link_expires_and_is_good_for_one_firing(message: Message):
    token = message.path.removeprefix("/ack/")
    assert ALERT.fingerprint == message.links.alert_of(token).fingerprint
    message.clock.advance(24 * 3600)
    with pytest.raises(UsageError, match="expired"):
        message.links.alert_of(token)


def test_any_collector_on_the_store_answers_the_link(message: Message):
    other = AckLinks(message.store, clock=message.clock)
    token = message.path.removeprefix("/ack/")
    assert message.alert == other.alert_of(token)
    assert "" == other.link_of(message.alert), "without an address there is no link"
