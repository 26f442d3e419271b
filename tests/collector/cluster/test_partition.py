"""A real collector and its PostgreSQL are cut off from each other, and connected again.

The database is reached through a proxy. One in this process closes connections; one in a network
namespace of its own loses its address, so packets are dropped without a word.
"""

import contextlib
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import sqlalchemy

from tests.collector.cluster.collectors import RealCollector
from tests.collector.rows import RUN, Writer
from tests.e2e.lab import until
from trainvitals.errors import TransportError
from trainvitals.io.client import collector_on, open_collector_client
from trainvitals.views import RunQuestion
from vitals_collector.storage.store import libpq_conninfo

pytestmark = [pytest.mark.nightly, pytest.mark.servers]

PARTITION_SECONDS = 60.0
HEALED_SECONDS = 30.0
"""Less than what TCP takes to send again after that time, and far less than its two hours."""
PROXY = """
import socket, sys, threading
listening = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
def pump(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
while True:
    client, _ = listening.accept()
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[3])
    threading.Thread(target=pump, args=(client, server), daemon=True).start()
    threading.Thread(target=pump, args=(server, client), daemon=True).start()
"""


def through(database: str, host: str, port: int) -> tuple[str, str]:
    """Return the URL of a database behind a proxy, and the socket that the proxy connects to."""
    url = sqlalchemy.make_url(database)
    (path,) = (p for p in Path(str(url.query["host"])).glob(".s.PGSQL.*") if p.is_socket())
    proxied = url.set(host=host, port=port, query={})
    return proxied.render_as_string(hide_password=False), str(path)


class ClosingProxy:
    """Passes bytes to a Unix socket; while ``is_cut`` it closes each connection.

    While ``is_silent`` it accepts connections and passes nothing.
    """

    def __init__(self) -> None:
        self.is_cut = self.is_silent = False
        self.target = ""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(self.target)
            while not self.is_cut:
                if self.is_silent:
                    time.sleep(0.05)
                    continue
                for source in select.select([client, server], [], [], 0.05)[0]:
                    if not (data := source.recv(65536)):
                        return
                    (server if source is client else client).sendall(data)

    def close(self) -> None:
        self.is_cut = True
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


class Network:
    """A network namespace with one address, which can be taken from it and given back."""

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self._name, self._here, self._there = f"vitals-{tag}", f"va{tag}", f"vb{tag}"
        subnet = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
        self.address = f"{subnet}.2"
        pair = f"link add {self._here} type veth peer name {self._there} netns {self._name}"
        try:
            self._ip(f"netns add {self._name}")
            self._ip(pair)
            self._ip(f"addr add {subnet}.1/24 dev {self._here}")
            self._ip(f"link set {self._here} up")
            self._ip(f"link set {self._there} up", inside=True)
            self.heal()
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            self.close()
            pytest.skip(f"network namespaces are not permitted here: {error}")

    def _ip(self, words: str, *, inside: bool = False) -> None:
        command = ["ip", *(["-n", self._name] if inside else []), *words.split()]
        subprocess.run(command, check=True, capture_output=True)

    def cut(self) -> None:
        """Drop all packets, in both directions."""
        self._ip(f"addr del {self.address}/24 dev {self._there}", inside=True)

    def heal(self) -> None:
        """Let packets through again."""
        self._ip(f"addr add {self.address}/24 dev {self._there}", inside=True)

    def start(self, port: int, target: str) -> subprocess.Popen[str]:
        """Start a proxy inside."""
        words = (sys.executable, "-c", PROXY, self.address, str(port), target)
        command = ["ip", "netns", "exec", self._name, *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["ip", "netns", "del", self._name], capture_output=True, check=False)


@contextlib.contextmanager
def collecting(data: Path, database: str) -> Iterator[RealCollector]:
    """Give a collector on the database, which answers."""
    collector = RealCollector(data, database)
    try:
        collector.wait_until_it_answers()
        yield collector
    finally:
        collector.end()


def is_stored(data: Path, raw: bytes) -> bool:
    """Send a batch, as an agent does; return whether it was acknowledged."""
    collector = collector_on(data)
    assert collector is not None
    with open_collector_client(collector, "ingest", timeout=10.0) as client:
        try:
            client.ingest(raw)
        except TransportError:
            return False
    return True


def test_the_health_of_a_database_that_accepts_and_does_not_answer_is_reported_in_time(
    postgres: str, tmp_path: Path
) -> None:
    proxy = ClosingProxy()
    database, proxy.target = through(postgres, "127.0.0.1", proxy.port)
    try:
        with collecting(tmp_path / "a", database) as collector:
            assert health(collector) == 200
            proxy.is_silent = True
            # More at once than the collector has threads for requests.
            with ThreadPoolExecutor(64) as pool:
                assert [503] * 64 == list(pool.map(health, [collector] * 64))
            reason = httpx.get(f"{collector.url}/healthz", verify=False, timeout=15.0).json()
            assert {"status": "the database has not responded for 3 s"} == reason
            proxy.is_silent = False
            until(lambda: health(collector) == 200, "it is healthy", HEALED_SECONDS)
    finally:
        proxy.close()


def health(collector: RealCollector) -> int:
    try:
        url = f"{collector.url}/healthz"
        return httpx.get(url, verify=False, trust_env=False, timeout=15.0).status_code
    except httpx.TimeoutException:
        return 0


def check_rows(data: Path, num_rows: int) -> None:
    """Check that each row that was sent is stored once."""
    collector = collector_on(data)
    assert collector is not None
    with open_collector_client(collector, timeout=20.0) as client:
        (source,) = client.ask(RunQuestion(run_id=RUN)).sources
    assert (num_rows, 0) == (source.num_rows, source.num_lost_rows)


def test_connections_that_are_closed_are_opened_again_and_each_row_is_stored_once(
    postgres: str, tmp_path: Path
) -> None:
    proxy, writer = ClosingProxy(), Writer()
    database, proxy.target = through(postgres, "127.0.0.1", proxy.port)
    try:
        with collecting(tmp_path / "a", database) as collector:
            assert is_stored(tmp_path / "a", writer.steps(range(10), loss=1.0))
            proxy.is_cut = True
            waiting = writer.steps(range(10, 20), loss=1.0)
            for _ in range(2):
                assert not is_stored(tmp_path / "a", waiting)
            assert health(collector) == 503
            proxy.is_cut = False
            until(lambda: is_stored(tmp_path / "a", waiting), "it stores again", 60.0)
            assert health(collector) == 200
            check_rows(tmp_path / "a", 20)
    finally:
        proxy.close()


@pytest.mark.slow
def test_a_network_that_drops_packets_holds_nothing_up_once_it_is_healed(
    postgres: str, tmp_path: Path
) -> None:
    network, writer = Network(), Writer()
    database, target = through(postgres, network.address, 7001)
    proxy = network.start(7001, target)
    try:
        with collecting(tmp_path / "a", database) as collector:
            assert is_stored(tmp_path / "a", writer.steps(range(10), loss=1.0))
            network.cut()
            cut_at = time.monotonic()
            waiting = writer.steps(range(10, 20), loss=1.0)
            while time.monotonic() < cut_at + PARTITION_SECONDS:
                assert not is_stored(tmp_path / "a", waiting)
                time.sleep(1.0)
            network.heal()
            until(lambda: is_stored(tmp_path / "a", waiting), "it stores", HEALED_SECONDS)
            until(lambda: health(collector) == 200, "it is healthy", HEALED_SECONDS)
            check_rows(tmp_path / "a", 20)
    finally:
        proxy.kill()
        proxy.communicate()
        network.close()


@pytest.mark.parametrize(("query", "idle"), [("", "10"), ("?keepalives_idle=99", "99")])
def test_a_connection_ends_when_its_packets_are_dropped_as_long_as_its_url_says(
    query: str, idle: str
) -> None:
    words = libpq_conninfo(f"postgresql://ada@db/vitals{query}").split()
    assert {f"keepalives_idle={idle}", "tcp_user_timeout=25000"} <= set(words)
