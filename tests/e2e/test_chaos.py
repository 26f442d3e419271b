"""Fifty kills and stops of random parts: every row that a rank wrote is in the store, once.

The ranks are plain writers of journals, so that a round takes seconds; the agent, the collector,
shared memory, the spool and the database are the real ones. What was written is known from a
second link to every segment, which no part of ours knows of.
"""

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.builders import NODE, RUN
from tests.e2e.lab import Lab, RowKey, free_port, open_lab, stored_rows, until
from tests.e2e.mirror import Mirror
from trainvitals.io.private import private_base
from trainvitals.views import RunQuestion

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("VITALS_CHAOS_ROUNDS", "50"))
NUM_RANKS = 4
ROWS_OF_A_ROUND = 10
PARTS = ("collector", "agent", "both", "rank")


class Fleet:
    """Four writers, an agent and a collector; each can be killed or stopped, and comes back."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.port = free_port()
        self.base = private_base(lab.environ())
        self.mirror = Mirror(lab.shared)
        self._turn = threading.Lock()
        self._ended = threading.Event()
        # A part takes seconds to come back, and a segment may be written and freed in that time.
        self._looking = threading.Thread(target=self._look_on)
        self._looking.start()
        self.collector = lab.collector(self.port)
        self.agent = self.start_agent()
        self.ranks = [self.start_rank(rank) for rank in range(NUM_RANKS)]

    def start_agent(self) -> subprocess.Popen[bytes]:
        return self.lab.agent(self.port, "--node", NODE)

    def start_rank(self, rank: int) -> subprocess.Popen[bytes]:
        module = ("-m", "tests.agent.rank_main", str(self.base), str(self.lab.runs), str(rank))
        command = [sys.executable, *module, "--every", "0.02"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=self.lab.environ()
        )
        self.lab.processes.append(process)
        return process

    def written(self) -> int:
        with self._turn:
            self.mirror.look()
            return len(self.mirror.rows)

    def _look_on(self) -> None:
        while not self._ended.wait(0.05):
            self.written()

    def close(self) -> None:
        self._ended.set()
        self._looking.join()

    def stored(self) -> Counter[tuple[RowKey, bytes]]:
        """Return how often each of the ranks' rows and events is stored, with its values."""
        rows = stored_rows(self.lab.data)
        return Counter({row: n for row, n in rows.items() if row[0][0].startswith("rank:")})

    def trouble(self, part: str, number: signal.Signals, wait: Callable[[], None]) -> None:
        """Kill or stop a part, let the ranks go on, and bring it back."""
        agent, collector = part in ("agent", "both"), part in ("collector", "both")
        victims = [self.agent] * agent + [self.collector] * collector
        rank = random.randrange(NUM_RANKS)
        victims = victims or [self.ranks[rank]]
        for victim in victims:
            victim.send_signal(number)
        if number == signal.SIGKILL:
            for victim in victims:
                victim.wait()
                if victim.stdin is not None:
                    victim.stdin.close()
        wait()
        if number == signal.SIGSTOP:
            for victim in victims:
                victim.send_signal(signal.SIGCONT)
            return
        if collector:
            self.collector = self.lab.collector(self.port)
        if agent:
            self.agent = self.start_agent()
        if part == "rank":
            self.ranks[rank] = self.start_rank(rank)

    def finish(self) -> None:
        """Have the ranks say goodbye, and wait until the store has what they wrote."""
        for rank in self.ranks:
            rank.communicate(b"end\n")

        self.written()
        self.close()

        def complete() -> bool:
            return self.mirror.rows.keys() <= {key for key, _ in self.stored()}

        until(complete, "the store holds what the ranks wrote", seconds=120.0)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, request):
    seed = int(os.environ.get("VITALS_CHAOS_SEED", "7"))
    random.seed(seed)
    with open_lab(tmp_path_factory.mktemp("chaos")) as lab:
        lab.runs.mkdir(parents=True)
        fleet = Fleet(lab)
        request.addfinalizer(fleet.close)
        until(lambda: fleet.written() > NUM_RANKS, "all ranks write")
        for number in range(ROUNDS):
            part = PARTS[number % len(PARTS)] if number < len(PARTS) else random.choice(PARTS)
            how = random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            before = fleet.written()
            fleet.trouble(
                part,
                how,
                lambda before=before: until(
                    lambda: fleet.written() >= before + ROWS_OF_A_ROUND, "the ranks write on"
                ),
            )
        fleet.finish()
        yield fleet


@pytest.mark.timeout(1_200)
def test_every_row_is_in_the_store_exactly_once(fleet):
    assert 0 == fleet.mirror.num_lost
    assert len(fleet.mirror.rows) > ROUNDS * ROWS_OF_A_ROUND
    stored = fleet.stored()
    assert {1} == set(stored.values())
    keys = {key for key, _ in stored}
    assert len(stored) == len(keys)
    assert set() == set(fleet.mirror.rows) - keys
    # A segment may come and go before the ledger links it: then none of its rows are in it.
    linked = {key[:3] for key in fleet.mirror.rows}
    assert set() == {key for key in keys if key[:3] in linked} - set(fleet.mirror.rows)


def test_every_row_has_the_values_that_its_rank_wrote(fleet):
    stored = fleet.stored().keys()
    assert [] == [row for row in fleet.mirror.rows.items() if row not in stored]


def test_the_collector_says_that_nothing_was_lost(fleet):
    with fleet.lab.client(fleet.port) as client:
        detail = client.ask(RunQuestion(run_id=RUN))
    assert {0} == {source.num_lost_rows for source in detail.sources}
    assert NUM_RANKS < len({s.incarnation for s in detail.sources if s.source.startswith("rank:")})


def test_nothing_is_left_in_shared_memory(fleet):
    until(lambda: not list(Path(fleet.base).glob("*/rank-*")), "the journals are freed")
