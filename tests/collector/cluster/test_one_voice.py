"""Three real collectors on one PostgreSQL: one pages, and another does when it is gone."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from tests.collector.cluster.collectors import RealCollector, Receiver, num_settled, pager_of
from tests.e2e.lab import until
from vitals_collector.storage.schema import leases
from vitals_collector.storage.store import Store

pytestmark = [
    pytest.mark.servers,
    pytest.mark.parametrize("store", ["postgresql"], indirect=True),
]


class Voices:
    """The collectors, the receiver, and which runs an alert is due of."""

    def __init__(self, store: Store, database: str, folder: Path, receiver: Receiver) -> None:
        self.store = store
        self.receiver = receiver
        self.due: list[str] = []
        self.all = [
            RealCollector(folder / name, database, receiver.url) for name in ("a", "b", "c")
        ]
        self._started = tuple(self.all)

    def pager(self) -> RealCollector:
        until(lambda: pager_of(self.store, self.all), "one of them pages")
        pager = pager_of(self.store, self.all)
        assert pager is not None
        return pager

    def send_to(self, *collectors: RealCollector) -> None:
        self.due += [collector.take_decision() for collector in collectors]

    def wait_for_all(self, seconds: float = 60.0) -> None:
        posted = self.receiver.posted
        until(lambda: all(posted[run, "firing"] for run in self.due), "all is told", seconds)
        until(lambda: num_settled(self.store) == len(self.due), "what was told is noted", seconds)

    def end(self) -> None:
        for collector in self._started:
            collector.end()

    def others(self, pager: RealCollector) -> list[RealCollector]:
        return [collector for collector in self.all if collector is not pager]


@pytest.fixture
def voices(store: Store, postgres: str, tmp_path: Path) -> Iterator[Voices]:
    """Three collectors that post to one receiver."""
    with Receiver().listening() as receiver:
        place = Voices(store, postgres, tmp_path, receiver)
        try:
            for collector in place.all:
                collector.wait_until_it_answers()
            yield place
        finally:
            place.end()


@pytest.mark.nightly
def test_a_pager_that_is_gone_is_replaced_and_each_alert_is_told_once(voices: Voices) -> None:
    for how in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM):
        pager = voices.pager()
        voices.send_to(*voices.all)  # whoever took it, the pager tells of it
        voices.wait_for_all()
        pager.signal(how)
        voices.send_to(*voices.others(pager))
        voices.wait_for_all()
        assert voices.pager() is not pager
        if how == signal.SIGSTOP:
            pager.signal(signal.SIGCONT)  # what it had in hand, others have told
        else:
            voices.all.remove(pager)
    assert voices.receiver.posted == {(run, "firing"): 1 for run in voices.due}


@pytest.mark.nightly
def test_a_lone_collector_that_was_killed_pages_as_soon_as_it_is_back(
    store: Store, postgres: str, tmp_path: Path
) -> None:
    with Receiver().listening() as receiver:
        killed = RealCollector(tmp_path / "a", postgres, receiver.url)
        killed.wait_until_it_answers()
        until(lambda: pager_of(store, [killed]) is killed, "it pages")
        killed.end()
        with store.write() as connection:  # nobody could wait for its end
            connection.execute(update(leases).values(expires_unix_ns=2**62))
        back = RealCollector(tmp_path / "a", postgres, receiver.url)
        try:
            until(lambda: pager_of(store, [back]) is back, "it pages again", 60.0)
            back.wait_until_it_answers()
            run = back.take_decision()
            until(lambda: receiver.posted[run, "firing"] == 1, "it is told", 60.0)
        finally:
            back.end()
