"""Three real collectors on one PostgreSQL, killed again and again: each page comes, with one id.

A third of the runs go on again: their pages end, once, and no other does.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collector.alerting import started
from tests.collector.cluster.collectors import RealCollector, Receiver, pager_of
from tests.collector.rows import Writer
from tests.e2e.lab import until
from trainvitals.errors import TransportError
from vitals_collector.storage.store import Store

pytestmark = [
    pytest.mark.servers,
    pytest.mark.parametrize("store", ["postgresql"], indirect=True),
]

TOLD_SECONDS = 60.0
"""Enough on a busy machine, also where all three begin anew."""


class Pagers:
    """The collectors by their data folders, the receiver, and of which runs a page is due."""

    def __init__(self, store: Store, database: str, folder: Path, receiver: Receiver) -> None:
        self._store, self._database, self._folder = store, database, folder
        self.receiver = receiver
        self.due: list[str] = []
        self.resumed: list[str] = []
        self.all: dict[str, RealCollector] = {}
        for name in ("a", "b", "c"):
            self.start(name)

    def start(self, *names: str) -> None:
        for name in names:
            data = self._folder / name
            self.all[name] = RealCollector(data, self._database, self.receiver.url)
        for name in names:
            self.all[name].wait_until_it_answers()

    def kill(self, *names: str) -> None:
        for name in names:
            self.all.pop(name).end()

    def leader(self) -> str:
        until(lambda: pager_of(self._store, [*self.all.values()]), "one of them pages", 30.0)
        pager = pager_of(self._store, [*self.all.values()])
        return next(name for name, collector in self.all.items() if collector is pager)

    def halt_runs(self) -> None:
        """Have each collector take the halt of a run of its own."""
        self.due += [collector.take_decision("halt") for collector in self.all.values()]

    def resume(self, run_id: str) -> None:
        """Have a halted run go on, by a new process of rank 0: its page is over."""
        raw = Writer(run=run_id).events(started(), step=9)
        until(lambda: self._is_taken(raw), "its owner takes it, or nobody owns it", TOLD_SECONDS)
        self.resumed.append(run_id)

    def _is_taken(self, raw: bytes) -> bool:
        for collector in self.all.values():
            with contextlib.suppress(TransportError):
                collector.take(raw)
                return True
        return False

    def wait_until_all_is_told(self) -> None:
        posted = self.receiver.posted
        until(lambda: all(posted[run, "firing"] for run in self.due), "all is told", TOLD_SECONDS)
        over = self.resumed
        until(lambda: all(posted[run, "resolved"] for run in over), "what is over", TOLD_SECONDS)


@contextlib.contextmanager
def three(store: Store, database: str, folder: Path) -> Iterator[Pagers]:
    with Receiver().listening() as receiver:
        pagers = Pagers(store, database, folder, receiver)
        try:
            yield pagers
        finally:
            pagers.kill(*pagers.all)


@pytest.mark.timeout(2_400)
@pytest.mark.slow
@pytest.mark.parametrize("num_rounds", [30])
def test_each_page_is_delivered_with_one_id_whichever_collectors_are_killed(
    store: Store, postgres: str, tmp_path: Path, num_rounds: int
) -> None:
    chance = random.Random(num_rounds)
    with three(store, postgres, tmp_path) as pagers:
        for number in range(num_rounds):
            told = pagers.due[-6:]
            names, leader = list(pagers.all), pagers.leader()
            follower = chance.choice([name for name in names if name != leader])
            killed = ([leader], [leader], names, [follower])[number % 4]
            pagers.halt_runs()
            for run_id in told[::3]:
                pagers.resume(run_id)
            time.sleep(chance.uniform(0.0, 0.6))  # amid storing, telling, and noting that
            pagers.kill(*killed)
            if number % 4 != 0:
                pagers.start(*killed)
            pagers.halt_runs()
            pagers.wait_until_all_is_told()
            if number % 4 == 0:  # another one has taken the lead meanwhile
                assert pagers.leader() != leader
                pagers.start(*killed)
        time.sleep(5.0)  # for what would come twice
    receiver = pagers.receiver
    assert all(1 <= receiver.posted[run, "firing"] <= 2 for run in pagers.due)
    assert all(len(ids) == 1 for ids in receiver.ids.values())
    assert all(1 <= receiver.posted[run, "resolved"] <= 2 for run in pagers.resumed)
    fired = {(run, "firing") for run in pagers.due}
    assert set(receiver.ids) == fired | {(run, "resolved") for run in pagers.resumed}
    assert len(pagers.resumed) >= len(pagers.due) // 4
    num_twice = sum(num == 2 for num in receiver.posted.values())
    print(
        f"{len(pagers.due)} pages and {len(pagers.resumed)} ends in {num_rounds} rounds, "
        f"{num_twice} of them delivered twice"
    )
