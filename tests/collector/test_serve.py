import contextlib
import random
import signal
import socket
import subprocess
import threading
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from tests.collector.conftest import grow
from tests.collector.rows import RUN, STEPS, Writer
from tests.support.collectors import COMMAND, collector, connected
from tests.support.forked import COMMANDS
from trainvitals.errors import TransportError, UsageError
from trainvitals.io.client import (
    COLLECTOR_FILE,
    CollectorClient,
    CollectorFile,
    discover_collector,
    open_collector_client,
)
from trainvitals.rows import Value, column_of, rows_of
from trainvitals.views import RunQuestion, RunsQuestion
from trainvitals.wire import decode_batch
from vitals_collector.api.serve import parse_listen
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.storage.store import open_data_store

AT_ONCE = 2_000
"""Rows, of which a small disk takes a few times as many."""


def run_once(data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--data", str(data), *options]
    return COMMANDS.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_what_was_acknowledged_is_there_once_after_kill_9_and_a_restart(tmp_path: Path):
    data, writer = tmp_path / "data", Writer()
    acknowledged, unsure = -1, b""
    sent: dict[int, bytes] = {}
    for killed_after in (3, 10):
        with collector(data) as process, connected(data, "ingest") as client:
            if unsure:
                acknowledged = client.ingest(unsure).durable_seq
            for num in range(10_000):
                unsure = writer.steps(range(num * 20, num * 20 + 20), loss=float(num))
                batch = decode_batch(unsure)
                sent[batch.header.first_seq] = batch.rows
                if num == killed_after:
                    process.send_signal(signal.SIGKILL)
                try:
                    acknowledged = client.ingest(unsure).durable_seq
                except TransportError:
                    break
    store = open_data_store(data)
    rows = store.numbers.scan(RowSpan(RUN, "steps"), ["seq", "loss"])
    store.close()
    losses = {
        first + i: loss
        for first, raw in sent.items()
        for i, loss in enumerate(column_of(STEPS, rows_of(STEPS, raw), "loss")[0].tolist())
    }
    seqs, kept = (rows[name].values.tolist() for name in ("seq", "loss"))
    assert [*range(len(seqs))] == sorted(seqs), "each row once, none missing"
    assert acknowledged < len(seqs) <= max(sent) + 20
    assert [losses[seq] for seq in seqs] == kept


def test_it_keeps_large_libraries_out_that_it_does_not_use(tmp_path: Path):
    assert find_spec("pandas") and find_spec("pyarrow.dataset"), "they could be imported"
    data = tmp_path / "data"
    # Not forked from one that has imported what other commands need.
    opened = collector(data, start=subprocess.Popen)
    with opened as process, connected(data, "ingest") as client:
        client.ingest(Writer().steps(range(20), loss=2.0))
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
    assert "/_duckdb." in mapped, "what it uses is seen there"
    assert "/pandas/" not in mapped
    assert "/pyarrow/_dataset." not in mapped


@pytest.mark.slow
def test_on_a_full_disk_it_is_read_scraped_and_started_again_and_says_so(small_disk: Path):
    data, writer = small_disk / "data", Writer()

    def answered() -> list[int]:
        with connected(data, "read") as client:
            assert [RUN] == [run.run_id for run in client.ask(RunsQuestion())]
            assert client.answers()
            paths = ("/healthz", "/metrics")
            return [client._http.get(path, headers=client._headers).status_code for path in paths]

    with collector(data) as process, connected(data, "ingest") as client:
        refused, num_sent = fill(client, writer)
        assert [503, 200] == answered()
        process.send_signal(signal.SIGKILL)
        process.wait()
    with (data / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
        while True:
            other.write(bytes(512))
    with collector(data) as process:
        grow(small_disk)
        while not (data / COLLECTOR_FILE).exists():  # written once there is room
            assert process.poll() is None
        with connected(data, "ingest") as client:
            assert num_sent + AT_ONCE - 1 == client.ingest(refused).durable_seq
        assert [200, 200] == answered()
        with connected(data, "read") as client:
            num_rows = client.ask(RunQuestion(run_id=RUN)).sources[0].num_rows
        assert num_sent + AT_ONCE == num_rows


def fill(client: CollectorClient, writer: Writer) -> tuple[bytes, int]:
    """Send until the disk is full; return what was refused, and how many rows were not."""
    num_sent = 0
    while True:
        loss: list[Value] = [random.random() for _ in range(AT_ONCE)]
        raw = writer.steps(range(num_sent, num_sent + AT_ONCE), loss=loss, grad_norm=loss)
        try:
            client.ingest(raw)
        except TransportError:
            return raw, num_sent
        num_sent += AT_ONCE


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_it_and_takes_the_address_away(tmp_path: Path, number, code):
    data = tmp_path / "data"
    with collector(data) as process:
        assert CollectorFile is type(
            msgspec.json.decode((data / COLLECTOR_FILE).read_bytes(), type=CollectorFile)
        )
        with connected(data, "read") as client:
            assert () == client.ask(RunsQuestion())  # leaves a kept-alive connection open
            process.send_signal(number)
            process.wait(timeout=60)
    assert code == process.returncode
    assert not (data / COLLECTOR_FILE).exists()


@pytest.mark.nightly
def test_a_second_collector_on_the_same_data_names_the_first(tmp_path: Path):
    data = tmp_path / "data"
    with collector(data):
        second = run_once(data)
    assert 1 == second.returncode
    assert "another collector runs on" in second.stderr
    assert "https://127.0.0.1:" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_taken_port_is_a_clear_error(tmp_path: Path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = run_once(tmp_path / "data", "--listen", f"127.0.0.1:{port}")
    assert 2 == result.returncode
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in result.stderr


def test_a_database_that_is_locked_at_the_start_is_a_clear_error(tmp_path: Path):
    data = tmp_path / "data"
    store = open_data_store(data)
    with store.write():
        result = run_once(data)
    store.close()
    assert 1 == result.returncode
    assert "is locked by another process" in result.stderr
    assert "Traceback" not in result.stderr


def test_it_listens_beyond_this_machine_only_when_told_to(tmp_path: Path):
    result = run_once(tmp_path / "data", "--listen", "0.0.0.0:0")
    assert 2 == result.returncode
    assert "--allow-remote" in result.stderr


@pytest.mark.nightly
def test_programs_of_the_same_user_find_it(tmp_path: Path):
    home = tmp_path / "share"
    with collector(home / "trainvitals"):
        found = discover_collector({"XDG_DATA_HOME": str(home)})
        assert found is not None
        with open_collector_client(found, "ingest") as client:
            assert 1 == client.ingest(Writer().steps([0])).num_new
        with open_collector_client(found) as client:
            assert [RUN] == [run.run_id for run in client.ask(RunsQuestion())]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:80", ("::1", 80)), ("host:1", ("host", 1))],
)
def test_listen_is_host_and_port(text: str, parsed: tuple[str, int]):
    assert parsed == parse_listen(text)


@pytest.mark.parametrize("text", ["", "8080", ":8080", "host:", "host:x", "host:70000"])
def test_a_wrong_listen_is_explained(text: str):
    with pytest.raises(UsageError, match="must be HOST:PORT"):
        parse_listen(text)


class Agent:
    """Ships bodies of several writers until its collector is gone; sends again what was unsure."""

    def __init__(self, number: int) -> None:
        self.writers = [Writer(f"rank:{2 * number + i}") for i in range(2)]
        self.acknowledged: dict[str, int] = {}
        self.unsure: list[bytes] = []
        self.num_sent = 0
        self.errors: list[BaseException] = []

    def ship(self, data: Path) -> None:
        try:
            with connected(data, "ingest") as client:
                while True:
                    self._ship(client)
        except TransportError:
            return
        except BaseException as error:
            self.errors.append(error)

    def _ship(self, client: CollectorClient) -> None:
        if not self.unsure:
            first = self.num_sent * 2
            self.num_sent += 1
            self.unsure = [writer.steps([first, first + 1]) for writer in self.writers] * 2
        replies = client.ingest_all(self.unsure)
        for writer, reply in zip(self.writers, replies, strict=False):
            self.acknowledged[writer.identity.incarnation] = reply.durable_seq
        self.unsure = []


@pytest.mark.nightly
def test_a_kill_in_the_middle_of_group_commits_loses_and_doubles_nothing(tmp_path: Path):
    data = tmp_path / "data"
    agents = [Agent(number) for number in range(6)]
    for num_bodies in (30, 60):
        with collector(data) as process:
            goal = sum(agent.num_sent for agent in agents) + num_bodies
            threads = [threading.Thread(target=agent.ship, args=(data,)) for agent in agents]
            for thread in threads:
                thread.start()
            while sum(agent.num_sent for agent in agents) < goal and threads[0].is_alive():
                threads[0].join(0.001)
            process.send_signal(signal.SIGKILL)
            for thread in threads:
                thread.join()
    assert [] == [error for agent in agents for error in agent.errors]
    store = open_data_store(data)
    rows = store.numbers.scan(RowSpan(RUN, "steps"), ["incarnation", "seq"])
    store.close()
    seqs: dict[str, list[int]] = defaultdict(list)
    for incarnation, seq in zip(*(column.values.tolist() for column in rows.values()), strict=True):
        seqs[incarnation].append(seq)
    kept = {incarnation: len(of_writer) for incarnation, of_writer in seqs.items()}
    for of_writer in seqs.values():
        assert [*range(len(of_writer))] == sorted(of_writer), "each row once, none missing"
    assert 12 == len(kept)
    for agent in agents:
        for incarnation, seq in agent.acknowledged.items():
            assert seq < kept[incarnation] <= agent.num_sent * 2
