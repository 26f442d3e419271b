"""Three real collectors on one PostgreSQL, killed and stopped while senders send: nothing is lost.

The senders are the agent's own: its spool, its shipper, its way to a collector.
"""

import contextlib
import json
import random
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.collector.cluster.collectors import RealCollector
from tests.collector.rows import Writer
from tests.e2e.lab import free_port
from trainvitals.identity import new_run_id
from trainvitals.io.client import read_tokens
from trainvitals.io.spool import Spool
from vitals_agent.backoff import Backoff
from vitals_agent.collector_endpoint import CollectorEndpoint, make_collector_finder
from vitals_agent.faults import Faults
from vitals_agent.shipper import Shipper
from vitals_collector.api.auth import load_or_create_tokens
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.storage.store import Store, open_data_store

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.servers,
    pytest.mark.parametrize("store", ["postgresql"], indirect=True),
]

NUM_SENDERS = 6


class Sender:
    """A run of one rank, sent from a spool in a thread until all of it is acknowledged."""

    def __init__(self, folder: Path, urls: str, tokens: Path, stop: threading.Event) -> None:
        self.run_id = new_run_id(time.time_ns())
        self.num_rows = 0
        self._writer = Writer(run=self.run_id)
        self._spool = Spool(folder / self.run_id, max_bytes=1 << 24, keep=False)
        self._endpoint = CollectorEndpoint(make_collector_finder(urls, tokens, {}))
        backoff = Backoff(max_seconds=2.0, rng=random.Random(len(urls)))
        self._shipper = Shipper(
            self._endpoint, backoff=backoff, faults=Faults(), budget_seconds=0.2
        )
        self._stop = stop
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            steps = range(self.num_rows, self.num_rows + 3)
            self._spool.append(self._writer.steps(steps, loss=[float(step) for step in steps]))
            self._spool.sync()
            self.num_rows += 3
            self._ship()
        deadline = time.monotonic() + 60
        while not self._shipper.drained(self.run_id) and time.monotonic() < deadline:
            self._ship()
        self._spool.close()
        self._endpoint.close()

    def _ship(self) -> None:
        now = time.monotonic()
        if self._endpoint.reachable(now):
            self._shipper.ship(self.run_id, self._spool, now)
        time.sleep(0.05)


class Three:
    """Three collectors, each at a port that it keeps; the same tokens open them all."""

    def __init__(self, database: str, folder: Path) -> None:
        self._database = database
        self._tokens = folder / "tokens.json"
        load_or_create_tokens(self._tokens)
        assert read_tokens(self._tokens).ingest
        self._places = [(folder / name, f"127.0.0.1:{free_port()}") for name in ("a", "b", "c")]
        for data, _ in self._places:
            data.mkdir(mode=0o700)
            shutil.copy(self._tokens, data)
        self.all = [RealCollector(data, database, listen=at) for data, at in self._places]

    @property
    def urls(self) -> list[str]:
        return [f"https://{at}" for _, at in self._places]

    def share_certificates(self) -> None:
        """Put the certificate of each into the one token file."""
        files = [json.loads((data / "tokens.json").read_text()) for data, _ in self._places]
        pems = [pem for file in files for pem in file["tls"]["certificates"]]
        assert len(pems) == 3
        self._tokens.write_text(json.dumps(files[0] | {"tls": {"certificates": pems}}))

    def kill(self, which: int) -> None:
        self.all[which].end()
        data, at = self._places[which]
        self.all[which] = RealCollector(data, self._database, listen=at)

    def pause(self, which: int, seconds: float) -> None:
        self.all[which].signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.all[which].signal(signal.SIGCONT)


def stored(store: Store, run_id: str) -> Counter[tuple[int, float]]:
    """Return how often each row of the run's steps is there: its number and its loss."""
    columns = store.numbers.scan(RowSpan(run_id, "steps"), ("seq", "loss"))
    return Counter(
        zip(columns["seq"].values.tolist(), columns["loss"].values.tolist(), strict=True)
    )


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("num_rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_every_row_is_stored_once_whichever_collectors_are_killed_and_stopped(
    store: Store, postgres: str, tmp_path: Path, num_rounds: int
) -> None:
    chance, stop = random.Random(num_rounds), threading.Event()
    three = Three(postgres, tmp_path)
    senders: list[Sender] = []
    try:
        for collector in three.all:
            collector.wait_until_it_answers()
        three.share_certificates()
        for number in range(NUM_SENDERS):
            urls = three.urls[number % 3 :] + three.urls[: number % 3]
            tokens = tmp_path / "tokens.json"
            senders.append(Sender(tmp_path / "spools", ",".join(urls), tokens, stop))
            senders[-1].thread.start()
        for number in range(num_rounds):
            if number % 2:
                three.pause(chance.randrange(3), chance.uniform(0.5, 6.0))
            else:
                three.kill(chance.randrange(3))
                time.sleep(chance.uniform(0.5, 4.0))
    finally:
        stop.set()
        for sender in senders:
            sender.thread.join()
        for collector in three.all:
            collector.end()
    with contextlib.closing(open_data_store(tmp_path / "reader", postgres)) as reader:
        for sender in senders:
            ledger = {(step, float(step)): 1 for step in range(sender.num_rows)}
            assert sender.num_rows > 3
            assert stored(reader, sender.run_id) == ledger
